"""Runs transformers' own tests of model families on the zoo's classes, and counts what passes.

    git clone --branch v5.16.0 https://github.com/huggingface/transformers
    python benchmarks/transformers_tests.py transformers gpt2 llama t5

The tests are those of tests/models/FAMILY/test_modeling_FAMILY.py in the checkout. They run once on transformers'
classes and once with the zoo's classes under the same names. A row of the table has the number of tests that pass on
transformers' classes, and how many of these pass on ours; a test with a failing subtest does not pass. Then follow the
tests that pass on transformers' classes alone.

The checkout's version must be that of the installed transformers. `pip install parameterized timeout-decorator
pytest-timeout` first. The results are kept in the folder --results, so that a run goes on where the last one ended;
give another folder with other --tests. A family without a test that passes on transformers' classes, such as
xlm_roberta, all of whose tests are slow, has a row of zeros.

In the processes that run tests, this module is the plugin of pytest that puts the zoo's classes into transformers.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro

SIDE = "SHARDZOO_TESTED_CLASSES"
PASSED = re.compile(r"PASSED \S+?::(\S+)")
FAILED = re.compile(r"(?:FAILED|ERROR|SUBFAILED.*?) tests/\S+?::(\S+)")


@dataclass(frozen=True)
class Arguments:
    """What is tested, and how long it may take."""

    checkout: Annotated[Path, tyro.conf.Positional]
    """A clone of transformers."""
    families: Annotated[tuple[str, ...], tyro.conf.Positional]
    """Names of folders in tests/models."""
    results: Path = Path("transformers_tests")
    """Where the outputs of pytest are kept."""
    tests: str | None = None
    """Which tests run, as pytest's -k selects them; by default all."""
    minutes: float = 30.0
    """How long one family may take on one side."""
    seconds: int = 300
    """How long one test may take."""


def pytest_configure(config: Any) -> None:
    """Puts the zoo's classes into transformers before the tests are imported."""
    import torch
    import transformers

    import shardzoo.models as zoo

    torch.set_num_threads(1)
    # The tests of pipelines import the package a second time, as another module, which would have other classes.
    for module in (transformers.utils, transformers.utils.import_utils):
        vars(module)["direct_transformers_import"] = lambda *_, **__: sys.modules["transformers"]
    if os.environ.get(SIDE) != "zoo":
        return
    for name in zoo.__all__:
        ours = getattr(zoo, name)
        is_model = isinstance(ours, type) and issubclass(ours, torch.nn.Module)
        if is_model and hasattr(transformers, name):
            setattr(sys.modules["transformers"], name, ours)
    use_zoo_in_decoder_tests(zoo)


def use_zoo_in_decoder_tests(zoo: Any) -> None:
    """Lets the tests that all decoders share find the zoo's classes, by their names.

    Their own way looks for `PreTrainedModel` among the bases of a class. Configurations are transformers', as in the
    tests of other families, which import them.
    """
    import transformers
    from tests.causal_lm_tester import _COMMON_MODEL_NAMES_MAP, CausalLMModelTester

    def find_classes(tester: Any) -> None:
        family = tester.base_model_class.__name__.removesuffix("Model")
        for attribute, ending in _COMMON_MODEL_NAMES_MAP.items():
            if getattr(tester, attribute) is None:
                classes = transformers if ending == "Config" else zoo
                setattr(tester, attribute, getattr(classes, family + ending, None))

    CausalLMModelTester._verify_and_infer_model_attributes = classmethod(find_classes)


def run_family(arguments: Arguments, family: str, side: str) -> Path:
    """Runs the tests of a family, unless an earlier call has, and returns the file with the results."""
    path = (arguments.results / f"{family}.{side}").absolute()
    if path.exists():
        return path
    own = [str(Path(__file__).parent.absolute()), str((arguments.checkout / "utils").absolute())]
    paths = [*own, os.environ.get("PYTHONPATH", "")]
    environment = os.environ | {
        SIDE: side,
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "HF_HUB_OFFLINE": "1",
        "TRANSFORMERS_TEST_DEVICE": "cpu",
        "TOKENIZERS_PARALLELISM": "false",
        "OMP_NUM_THREADS": "1",
    }
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "transformers_tests",
        "-p",
        "no:cacheprovider",
        "--assert=plain",
        "-q",
        "-rA",
        "--tb=line",
        "-W",
        "ignore",
        "-o",
        "addopts=",
        f"--timeout={arguments.seconds}",
        f"tests/models/{family}/test_modeling_{family}.py",
    ]
    if arguments.tests is not None:
        command += ["-k", arguments.tests]
    unfinished = path.with_suffix(f".{side}.unfinished")
    with unfinished.open("w") as output:
        try:
            subprocess.run(
                command,
                cwd=arguments.checkout,
                env=environment,
                stdout=output,
                stderr=subprocess.STDOUT,
                timeout=60 * arguments.minutes,
                check=False,
            )
        except subprocess.TimeoutExpired:
            raise SystemExit(
                f"{family} on the classes of {side} took more than {arguments.minutes:g} minutes; see {unfinished}, "
                "and give it more --minutes"
            ) from None
    unfinished.rename(path)
    return path


def read_passed(path: Path) -> set[str]:
    """Returns the names of the tests that passed, with all their subtests."""
    passed: set[str] = set()
    failed: set[str] = set()
    for line in path.read_text(errors="replace").splitlines():
        if found := PASSED.match(line):
            passed.add(found[1])
        elif found := FAILED.match(line):
            failed.add(found[1])
    text = path.read_text(errors="replace")
    if not (passed or failed) and "skipped in " not in text:
        raise SystemExit(f"{path}: no test ran; see the end of the file")
    return passed - failed


def main(arguments: Arguments) -> None:
    """Prints a row for each family, and then what passes on transformers' classes alone."""
    arguments.results.mkdir(parents=True, exist_ok=True)
    lost: dict[str, list[str]] = {}
    print("| family | transformers' classes | the zoo's | |\n|---|---|---|---|")
    for family in arguments.families:
        expected = read_passed(run_family(arguments, family, "transformers"))
        found = read_passed(run_family(arguments, family, "zoo")) & expected
        share = 100 * len(found) / max(1, len(expected))
        print(f"| {family} | {len(expected)} | {len(found)} | {share:.1f} % |", flush=True)
        for name in sorted(expected - found):
            lost.setdefault(name.rpartition("::")[2], []).append(family)
    print()
    for name, families in sorted(lost.items(), key=lambda item: -len(item[1])):
        print(f"{name}: {', '.join(families)}")


if __name__ == "__main__":
    main(tyro.cli(Arguments, description=__doc__))
