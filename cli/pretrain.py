"""Pretrain a model of the zoo under DeepSpeed, its layers split over several processes.

Without arguments a small GPT-2 learns the source of the Python standard library. `key=value` stands
for `--key value`.
"""

from __future__ import annotations

import os
import sys
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any, NoReturn, get_type_hints

# torch reads it at the first tensor. Huge pages speed up memory-bound work on a CPU.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import tyro

from ..data.objectives.objective import Objective
from ..data.objectives.registry import find_objective, objective_names
from ..files.verbosity import is_quiet, take_verbosity
from ..pretraining.arguments import DEFAULT_MODEL, FIXED, PretrainingArguments
from ..pretraining.inputs import check_sources, choose_inputs, default_objective
from ..pretraining.tables import run_plan
from ..trainer.arguments.value_types import checked_value
from ..trainer.launch.environment import end_process
from ..trainer.launch.launch import ensure_processes_for
from ..trainer.logging.console import make_console
from .arguments import given_value, list_given, overrides_as_options, parse, read_yaml
from .console import USAGE_ERROR
from .continued_runs import (
    add_restart_options,
    check_unchanged,
    naming_how_to_resume,
    read_saved_values,
)
from .help import HelpPage
from .help.training import COMMON_TRAINING, TRAINING_SECTIONS
from .namesakes import tell_of_namesake
from .parsing import list_fields
from .rank_errors import read_rank, run_and_report_once
from .spellings import SHORT_NAMES

RECIPES = Path(__file__).parents[1] / "recipes"
MODEL = ("model", "hidden_size", "num_hidden_layers", "num_attention_heads")
"""Arguments that say which model is trained."""
ALTERNATIVES = {
    "gradient_accumulation_steps": "global_batch_size",
    "global_batch_size": "gradient_accumulation_steps",
    "warmup_ratio": "warmup_steps",
}
"""An argument of the command line -> the default that it replaces, because both say the same."""
OBJECTIVE_OPTION = "--objective"
SETTING = f"{OBJECTIVE_OPTION}."


@dataclass(frozen=True)
class PretrainCommand(PretrainingArguments):
    """The arguments of `pretrain.py`."""

    objective: Annotated[Objective | None, tyro.conf.AvoidSubcommands] = None
    """What the model learns to predict:

    `--objective NAME`, by default the family's own. Its settings:
    """
    config: Path | None = None
    """YAML file with values for these arguments; the command line takes precedence. By default the
    recipe of the model, if recipes/ has one."""
    local_rank: Annotated[int, tyro.conf.arg(help="Set by launchers.")] = 0


def help_page(objective: str) -> HelpPage:
    """Returns the help of the command when `objective` is chosen."""
    script = Path(sys.argv[0]).name
    return HelpPage(
        script if script == "pretrain.py" else "shardzoo pretrain",
        PretrainCommand,
        usage="[--model NAME] [--data PATH ...] [options] [name=value ...]",
        description=__doc__ or "",
        sections={
            "model": "model",
            "teacher_model": "distillation",
            "objective": "data",
            "sequence_length": "data",
            "resume": "run",
            "seed": "other",
            **TRAINING_SECTIONS,
            "output_dir": "run",
        },
        common=(
            "model",
            "init_from",
            "data",
            "objective",
            "sequence_length",
            "train_steps",
            *COMMON_TRAINING,
            "resume",
            "overwrite",
            "fast_dev_run",
            "dry_run",
        ),
        names=SHORT_NAMES,
        texts={
            "objective": f"What the model learns, here {objective}. "
            f"One of {', '.join(objective_names())}."
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command. Returns 0, 2 after a user's error, or the exit code of the process that
    failed first.
    """
    launch = read_rank()
    if launch is None:
        return USAGE_ERROR

    given = take_verbosity(sys.argv[1:] if argv is None else argv)

    def work() -> int:
        arguments = read_arguments(given, quiet=not launch.is_first)
        inputs = choose_inputs(arguments, launch)
        defaults = ""
        if launch.is_first and arguments.config and arguments.config.parent == RECIPES:
            defaults = f"defaults of recipes/{arguments.config.name}"
        if arguments.dry_run and launch.is_first:
            if not inputs.continues:
                check_sources(arguments)
            print(defaults)
            tell_of_namesake(arguments.model)
            make_console().print(run_plan(arguments, inputs))

        size = arguments.model_parallel_size
        stages = arguments.pipeline_parallel_size
        parts = arguments.context_parallel_size
        dealt = arguments.expert_parallel_size
        if (
            launch.world_size < arguments.processes_of_a_replica
            and not arguments.dry_run
            and not arguments.hostfile
            and not is_quiet()
        ):
            layout = f"--model-parallel-size {size}"
            if stages > 1:
                layout += f" x --pipeline-parallel-size {stages}"
            if parts > 1:
                layout += f" x --context-parallel-size {parts}"
            if dealt > 1:
                layout += f" x --expert-parallel-size {dealt}"
            print(
                f"{layout} needs {arguments.processes_of_a_replica} processes; starting them on "
                "this machine"
            )
        ensure_processes_for(arguments)
        if defaults and not is_quiet():
            print(defaults)
        if launch.is_first:
            tell_of_namesake(arguments.model)
        from ..pretraining.run import Pretraining  # It imports DeepSpeed, for seconds.

        pretraining = Pretraining(arguments, inputs, launch)
        with naming_how_to_resume(pretraining.trainer):
            pretraining.run()
        return 0

    return run_and_report_once(work, launch, list_fields(PretrainCommand))


def run_script() -> NoReturn:
    """Runs `main`, and ends the process with its exit code."""
    end_process(main())


def read_arguments(argv: Sequence[str], *, quiet: bool) -> PretrainCommand:
    """Returns the command line's arguments.

    Where it is silent, those of the file that `--config` names count, or else those of the model's
    recipe. If a run continues, its saved arguments are the defaults instead of a recipe's.
    """
    argv, name = _take_objective_name(overrides_as_options(argv, PretrainCommand))

    # The defaults: a file's values, under those of a run that continues.
    config = given_value(argv, "config")
    path = Path(config) if config else _find_recipe(argv)
    values: dict[str, Any] = {}
    if path is not None:
        values = {**read_yaml(PretrainCommand, path), "config": path}
    if given_value(argv, "init_from") and not given_value(argv, "model"):
        for chosen in MODEL:  # The weights bring their own model, in place of the file's.
            values.pop(chosen, None)
    for name_given in list_given(argv):
        other = ALTERNATIVES.get(name_given)
        if other is not None and given_value(argv, other) is None:
            values[other] = None
    argv = add_restart_options(argv, values)
    saved = read_saved_values(PretrainCommand, argv, values)
    if saved is not None:
        values = _merge_values(saved, values if config else {})

    objective = _build_objective(argv, name, values)
    values["objective"] = objective
    arguments = parse(PretrainCommand, help_page(objective.name), argv, values=values, quiet=quiet)
    if saved is not None:
        before = {**saved, "objective": _build_objective((), None, saved)}
        option = "--resume" if arguments.resume else "--eval-only"
        check_unchanged(arguments, PretrainCommand(**before), FIXED, option)
    if arguments.fast_dev_run:
        arguments = replace(arguments, train_steps=20, eval_interval=10)
    return arguments


def _find_recipe(argv: Sequence[str]) -> Path | None:
    """Returns the recipe with the name of the model, if there is one."""
    model = given_value(argv, "model")
    if not model and not given_value(argv, "init_from"):
        model = DEFAULT_MODEL
    recipes = {path.stem: path for path in RECIPES.glob("*.yaml")}
    return recipes.get(model or "")


def _take_objective_name(argv: Sequence[str]) -> tuple[list[str], str | None]:
    """Returns the command line without `--objective NAME`, and the name, or None."""
    rest: list[str] = []
    name = None
    words = deque(argv)
    while words:
        word = words.popleft()
        option, equals, value = word.partition("=")
        if option != OBJECTIVE_OPTION:
            rest.append(word)
            continue
        if not equals and words and not words[0].startswith("-"):
            value = words.popleft()
        name = value
        find_objective(name)
    return rest, name


def _build_objective(argv: Sequence[str], name: str | None, values: Mapping[str, Any]) -> Objective:
    """Returns the objective of the command line, with the settings of a file if it names the same.

    Args:
        name: The objective that the command line names.
        values: The arguments of the file. The objective in them is a name, or settings with or
            without a name.

    Raises ValueError if there is no such objective, or it lacks a setting of the command line or
    the file.
    """
    settings = _read_settings(values.get("objective"))
    model = given_value(argv, "model") or values.get("model")
    init_from = given_value(argv, "init_from") or values.get("init_from")
    in_file = settings.pop("name", None) or name or default_objective(model, init_from)
    chosen = name or in_file
    if chosen != in_file:  # The file's settings are of another objective.
        settings = {}
    kind = find_objective(chosen)

    known = [field.name for field in fields(kind)]
    given: list[str] = []
    for word in argv:
        if word.startswith(SETTING):
            option = word[len(SETTING) :].partition("=")[0]
            given.append(option.replace("-", "_").removeprefix("no_"))
    for setting in (*settings, *given):
        if setting not in known:
            raise ValueError(_explain_unknown_setting(chosen, setting, known))
    hints = get_type_hints(kind)
    checked: dict[str, Any] = {}
    for key, value in settings.items():
        checked[key] = checked_value(f"objective.{key}", hints[key], value)
    return kind(**checked)


def _explain_unknown_setting(name: str, setting: str, known: Sequence[str]) -> str:
    owners: list[str] = []
    for other in objective_names():
        if setting in (field.name for field in fields(find_objective(other))):
            owners.append(other)
    text = f"objective {name!r} has no setting {setting!r}"
    if owners:
        text += f" (a setting of {', '.join(owners)})"
    if known:
        return f"{text}; its settings are {', '.join(known)}"
    return f"{text}; it has no settings"


def _read_settings(value: Any) -> dict[str, Any]:
    """Returns an argument file's objective as settings, among them `name`."""
    if value is None or isinstance(value, str):
        return {"name": value} if value else {}
    if not isinstance(value, dict):
        raise ValueError(f"objective must be a name, or settings with a name, not {value!r}")
    return {str(key).replace("-", "_"): setting for key, setting in value.items()}


def _merge_values(low: Mapping[str, Any], high: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the values of two argument files.

    The second takes precedence; it may set a part of an objective.
    """
    before = _read_settings(low.get("objective"))
    objective = _read_settings(high.get("objective"))
    if objective.get("name", before.get("name")) == before.get("name"):
        objective = {**before, **objective}
    return {**low, **high, "objective": objective}
