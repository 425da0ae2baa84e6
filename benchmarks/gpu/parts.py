"""The parts of the calls of benchmarks/gpu.sh: their commands, time limits and packages, and their dry runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from packages import BUILD, COMMANDS, missing

LONGEST_CALL = 9 * 60  # seconds
PREPARATION = 35  # of them: packages, and the machine's facts
# A GPU that is lent for 15 minutes in all is asked in one call, and then for what failed.
LONGEST_FIRST = 470
LONGEST_REPAIR = 180
WARM_PREPARATION = 20
MODELS = ("gpt2-medium", "bert-large", "t5-large", "gpt2-xl")
STEPS = (
    ("gpt2-medium", 23), ("bert-large", 14), ("t5-large", 24), ("gpt2-xl", 36), ("llama-1b", 14), ("libai", 11),
    ("nanot5", 25), ("t5-padded", 17), ("gpt2-64", 16), ("t5-64", 20), ("olmoe", 20),
)  # fmt: skip


@dataclass(frozen=True)
class Part:
    """One program of a call.

    Attributes:
        seconds: Its time limit.
        words: What follows the interpreter on its command line.
        dry: What follows instead in a dry run.
        needs: The import names of packages without which it is left out.
        environment: Variables that it is given, and `dry_environment` in a dry run.
    """

    name: str
    seconds: int
    words: Sequence[str]
    dry: Sequence[str]
    needs: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    dry_environment: Mapping[str, str] = field(default_factory=dict)


def script(
    name: str, seconds: int, out: Path, *words: str, file: str = "", needs: tuple[str, ...] = ()
) -> Part:
    """Returns a part that is a script of this folder. All of them take --device, --tiny and --json."""
    common = [f"benchmarks/gpu/{file or name}.py", *words, "--json", str(out / f"{name}.json")]
    return Part(
        name, seconds, [*common, "--device", "cuda"], [*common, "--device", "cpu", "--tiny"], needs
    )


def kernels(
    name: str,
    seconds: int,
    out: Path,
    words: Sequence[str],
    dry: Sequence[str],
    variant: str = "cuda",
) -> Part:
    """Returns a part of `shardzoo bench kernels` with the CUDA or the Triton kernels, or what training takes ("")."""
    common = ["-m", "shardzoo.cli.main", "bench", "kernels", "--json", str(out / f"{name}.json")]
    tiny = ["--device", "cpu", "--dtype", "float32", "--repetitions", "2", "--no-compile", *dry]
    return Part(
        name, seconds, [*common, "--device", "cuda", "--dtype", "bfloat16", *words], [*common, *tiny],
        tuple(COMMANDS), {"SHARDZOO_KERNELS": variant} if variant else {},
    )  # fmt: skip


def decoding(seconds: int, out: Path, words: Sequence[str]) -> Part:
    """Returns the part that decodes beside transformers; it refuses a speed if a side decodes other tokens."""
    common = ["benchmarks/generate.py", "--json", str(out / "decoding.json")]
    few = ["--batches", "1", "--prompt", "4", "--new-tokens", "3", "--rounds", "1"]
    dry = ["--models", "gpt2", "--tiny", *few]
    return Part(
        "decoding", seconds, [*common, "--device", "cuda", *words], [*common, *dry], tuple(COMMANDS)
    )


def prove(out: Path) -> list[Part]:
    """Returns the parts of the first call."""
    # Compiling Triton's kernels is most of the tests' time.
    workers = [] if missing(["xdist"]) else ["-n", "8"]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/ops/test_gpu.py"]
    doctor = ["-m", "shardzoo.cli.main", "doctor"]
    few = ["--prompt", "32", "--new-tokens", "32", "--rounds", "1"]
    return [
        script("build", 90, out, file="build_kernels", needs=tuple(BUILD)),
        Part("doctor", 20, doctor, doctor, tuple(COMMANDS)),
        Part(
            "kernels", 100, [*tests, *workers], [*tests, "-k", "fp64 and rms_norm and float32 and cpp"],
            dry_environment={"SHARDZOO_TEST_DEVICE": "cpu"},
        ),
        script("parity", 105, out, file="device_parity"),
        script("training", 80, out, file="device_training"),
        script("sharing", 75, out, file="shared_device"),
        decoding(30, out, ["--models", "gpt2", "t5-small", "--batches", "2", *few]),
    ]  # fmt: skip


def measure(out: Path) -> list[Part]:
    """Returns the parts of the second call."""
    rows = ["layer_norm", "rms_norm", "bias_gelu", "geglu", "swiglu", "bias_dropout_residual"]
    shapes = ["8192x768", "8192x1024", "8192x2048", "8192x4096", "65536x4096"]
    others = ["masked_softmax", "softmax_bias", "cross_entropy"]
    attended = ["--op", "attention", "attention_causal", "attention_bias"]
    return [
        kernels(
            "kernels", 50, out, ["--op", *rows, "--shape", *shapes, "--no-compile"],
            ["--op", "rms_norm", "--shape", "8x32", "16x32"],
        ),
        kernels("kernels_triton", 25, out, ["--op", *rows, "--shape", "8192x1024", "65536x4096", "--no-compile"],
                ["--op", "bias_gelu", "--shape", "8x32"], "triton"),
        kernels("kernels_compiled", 50, out, ["--op", *others, "layer_norm", "rms_norm", "--repetitions", "11"],
                ["--op", "cross_entropy", "--scale", "0.01"]),
        kernels("attention", 45, out, [*attended, "--length", "512", "2048", "--repetitions", "9", "--no-compile"],
                [*attended, "--length", "8", "--scale", "0.001"], ""),
        *(
            script(f"steps_{name}", seconds, out, "--model", name, file="steps")
            for name, seconds in zip(MODELS, (75, 50, 75, 60), strict=True)
        ),
        script("libai", 35, out, "--model", "libai", file="steps"),
        decoding(35, out, ["--models", "gpt2", "t5-small", "--batches", "1", "8", "--dtype", "bfloat16"]),
    ]  # fmt: skip


def first(out: Path) -> list[Part]:
    """Returns the parts of the one call that answers the most with the least time, in the order of their weight.

    Nothing is built: the library that was carried is used as it is. Each part is short enough that
    all of them end in time; what a part has measured is written after each of its rows.
    """
    workers = [] if missing(["xdist"]) else ["-n", "12"]
    tests = ["-m", "pytest", "-q", "-p", "no:cacheprovider", "-p", "benchmarks.gpu.operator_report"]
    tests += ["--tb=short", "tests/ops/test_gpu.py"]
    report = {"SHARDZOO_TEST_REPORT": str(out / "operators.json")}
    chosen = "cuda or attention or reproducible or (triton and (40x130 or 64x4096))"
    rows = [
        "layer_norm",
        "rms_norm",
        "bias_gelu",
        "swiglu",
        "bias_dropout_residual",
        "cross_entropy",
    ]
    attended = ["--op", "attention", "attention_causal", "attention_bias"]
    quick = ("--quick",)
    return [
        Part(
            "operators", 50, [*tests, *workers, "-k", chosen], [*tests, "-k", "fp64 and rms_norm and float32 and cpp"],
            environment=report, dry_environment={**report, "SHARDZOO_TEST_DEVICE": "cpu"},
        ),
        script("families", 55, out, *quick, file="device_parity"),
        script("training", 42, out, *quick, file="device_training"),
        kernels(
            "kernels", 12, out,
            ["--op", *rows, "--shape", "8192x768", "8192x4096", "--no-compile", "--repetitions", "7"],
            ["--op", "rms_norm", "--shape", "8x32"],
        ),
        kernels(
            "attention", 33, out, [*attended, "--length", "1024", "4096", "--repetitions", "5", "--no-compile"],
            [*attended, "--length", "8", "--scale", "0.001"], "",
        ),
        script("linear_cross_entropy", 7, out),
        script("optimizer", 5, out),
        *(
            script(f"steps_{name}", seconds, out, "--model", name, *quick, file="steps")
            for name, seconds in STEPS
        ),
        script("compiled_blocks", 24, out, "--model", "gpt2-medium", "--compiled", file="steps"),
    ]  # fmt: skip


CALLS = {"prove": prove, "measure": measure, "first": first}
WARM_CALLS = ("first", "repair")
LIMITS = {"first": LONGEST_FIRST, "repair": LONGEST_REPAIR}
