"""`shardzoo lm-eval`: lm-evaluation-harness's own command, in which `--model shardzoo` is a model
split over ranks.
"""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from ...evaluation import missing_packages
from ...evaluation.arguments import ModelArguments
from ...trainer.launch.launch import start_processes
from ...trainer.launch.rank_info import RankInfo
from ..console import USAGE_ERROR, run_and_report
from ..rank_errors import read_rank

MODEL = "shardzoo"
HELP = f"""\
usage: shardzoo lm-eval run --model_args ARGS --tasks TASKS [option ...]

Evaluates a model with lm-evaluation-harness, split over several processes.

required:
  --model_args ARGS     pretrained=FOLDER,tensor_parallel_size=N
  --tasks TASKS         tasks, with commas between them

options:
  --include_path PATH   a folder with tasks of your own
  --batch_size N        the number of sequences at a time
  --limit N             only the first N samples of each task
  --output_path PATH    where the results are written
  --model NAME          {MODEL}, or a model of the harness, such as hf

All options are the harness's: `shardzoo lm-eval run --help` shows them,
and `shardzoo lm-eval ls tasks` its tasks.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, 2 after a user's error, or the exit code of the process that
    failed first.
    """
    launch = read_rank()
    if launch is None:
        return USAGE_ERROR
    given = sys.argv[1:] if argv is None else list(argv)
    return run_and_report(lambda: start(given, launch), quiet=not launch.is_first)


def start(given: list[str], launch: RankInfo) -> int:
    """Runs the harness, after starting the processes that a split model needs."""
    if not given or given[0] in ("-h", "--help"):
        print(HELP)
        return 0
    missing = missing_packages()
    if missing:
        raise ValueError(missing)
    from lm_eval._cli import HarnessCLI

    harness = HarnessCLI()
    parsed = parse(harness, given)
    if parsed.command != "run":
        harness.execute(parsed)
        return 0
    model_args = choose_model(parsed)
    if model_args is None:
        harness.execute(parsed)
        return 0
    arguments = ModelArguments.from_given(model_args)
    size = arguments.tensor_parallel_size
    check(arguments, parsed)
    if launch.world_size < size:
        return start_processes(size)
    run(harness, parsed, model_args, launch)
    return 0


def parse(harness: Any, given: list[str]) -> Namespace:
    """Parses a command line as the harness does, which reads `sys.argv`."""
    before = sys.argv
    sys.argv = ["lm-eval", *given]
    try:
        return harness.parse_args()
    finally:
        sys.argv = before


def choose_model(parsed: Namespace) -> dict[str, Any] | None:
    """Returns the arguments of a model of ours, which is the default; None for another of the
    harness's models.
    """
    import lm_eval.models  # noqa: F401  (registers the harness's own models)
    from lm_eval.api.registry import model_registry
    from lm_eval.config.evaluate_config import EvaluatorConfig
    from lm_eval.utils import simple_parse_args_string

    stored = {}
    if parsed.config:
        stored = EvaluatorConfig.load_yaml_config(parsed.config)
    parsed.model = parsed.model or stored.get("model") or MODEL
    if parsed.model != MODEL:
        if parsed.model not in model_registry:
            raise ValueError(
                f"--model: there is no model {parsed.model!r}; "
                f"use {MODEL}, or one of the harness's, as hf"
            )
        return None
    given = parsed.model_args or stored.get("model_args") or {}
    if isinstance(given, str):
        given = simple_parse_args_string(given)
    return dict(given)


def check(arguments: ModelArguments, parsed: Namespace) -> None:
    """Raises ValueError for what cannot work, before processes are started."""
    from ...models import find_config
    from ...models.blocks.attention import check_heads

    folder, *_ = arguments.find_folders()
    if (folder / "config.json").exists():
        check_heads(find_config(str(folder)).attention_heads, arguments.tensor_parallel_size)
    batch_size = getattr(parsed, "batch_size", None)
    if batch_size is not None:
        replace(arguments, harness={**arguments.harness, "batch_size": batch_size})


def run(harness: Any, parsed: Namespace, model_args: dict[str, Any], launch: RankInfo) -> None:
    """Runs the harness on the first rank; the others compute what it asks for."""
    from lm_eval.utils import setup_logging

    from ...evaluation import ShardzooLM, leading

    if launch.is_first:
        setup_logging()
        with leading():
            harness.execute(parsed)
    else:
        ShardzooLM(**model_args, device=parsed.device).serve()
