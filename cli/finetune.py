"""Fine-tune a model of the zoo or of transformers on pairs of texts, labelled texts or plain text.

The result is a Hugging Face folder, hf/ in the run's folder.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NoReturn

# torch reads it at the first tensor. Huge pages speed up memory-bound work on a CPU.
os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")

import tyro
from rich.text import Text

from ..files.verbosity import take_verbosity
from ..files.working_copies import name_urls
from ..finetuning.arguments import FinetuningArguments
from ..trainer.arguments.value_types import texts
from ..trainer.launch.environment import end_process
from .arguments import given_value, parse, read_yaml
from .console import USAGE_ERROR
from .continued_runs import (
    add_restart_options,
    check_unchanged,
    naming_how_to_resume,
    read_saved_values,
)
from .help import HelpPage
from .help.training import COMMON_TRAINING, TRAINING_SECTIONS
from .parsing import list_fields
from .rank_errors import read_rank, run_and_report_once
from .spellings import SHORT_NAMES

if TYPE_CHECKING:
    from ..finetuning.trainer import Trainer


FIXED = (
    "model_name_or_path",
    "native",
    "task",
    "train_file",
    "validation_split",
    "max_train_samples",
    "source_id",
    "target_id",
    "pair_id",
    "choices_id",
    "messages_id",
    "weight_id",
    "columns",
    "prefix",
    "separator",
    "max_source_length",
    "max_target_length",
    "block_size",
    "packing",
    "prompt_list",
    "lora_rank",
    "lora_target_modules",
    "lora_target_parameters",
    "base_precision",
    "freeze_encoder",
    "freeze_decoder",
    "freeze_embeddings",
    "seed",
)
"""Arguments that cannot change when a run is resumed: what is trained, and on which samples."""


@dataclass(frozen=True)
class FinetuneCommand(FinetuningArguments):
    """The arguments of `finetune.py`."""

    freeze_encoder: bool = False
    freeze_decoder: bool = False
    freeze_embeddings: bool = False
    prompt_list: tuple[str, ...] = ()
    """New tokens of a soft prompt before every source. Only their input vectors are trained."""
    merge_adapter: bool = False
    """Save the whole model with LoRA weights merged, instead of the LoRA weights alone."""

    config: Path | None = None
    """YAML file with values for these arguments; the command line takes precedence."""
    local_rank: Annotated[int, tyro.conf.arg(help="Set by launchers.")] = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "prompt_list", texts("prompt_list", self.prompt_list))
        if self.prompt_list and self.lora_rank:
            raise ValueError(
                "prompt_list and lora_rank both freeze the model to train other weights: "
                "use one of them"
            )
        if self.prompt_list and self.pipeline_parallel_size > 1:
            raise ValueError(
                "prompt_list needs the embedding on every process: use pipeline_parallel_size=1"
            )


def help_page() -> HelpPage:
    """Returns the help, under the name by which the command was started."""
    script = Path(sys.argv[0]).name
    return HelpPage(
        script if script == "finetune.py" else "shardzoo finetune",
        FinetuneCommand,
        usage="--model-name-or-path FOLDER --train-file FILE [options]",
        description=__doc__ or "",
        required=("model_name_or_path", "train_file"),
        sections={
            "model_name_or_path": "model and task",
            "validation_file": "data",
            **TRAINING_SECTIONS,
            "freeze_encoder": "LoRA and frozen parts",
            "predict_with_generate": "evaluation by generated texts",
            "label_smoothing": "loss and batches",
            "dropout_rate": "other",
            "columns": "embeddings",
            "preference_loss": "preferences and rewards",
            "teacher_model": "distillation",
            "cache_dir": "other",
            "overwrite": "run",
            "output_dir": "run",
            "config": "run",
        },
        common=(
            "task",
            "validation_file",
            "test_file",
            "source_id",
            "target_id",
            "max_source_length",
            "max_target_length",
            "predict_with_generate",
            "lora_rank",
            "epochs",
            *COMMON_TRAINING,
            "overwrite",
        ),
        names=SHORT_NAMES,
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
        trainer = make_trainer(read_arguments(given, quiet=not launch.is_first))
        with naming_how_to_resume(trainer):
            run(trainer)
        return 0

    return run_and_report_once(work, launch, list_fields(FinetuneCommand))


def run_script() -> NoReturn:
    """Runs `main`, and ends the process with its exit code."""
    end_process(main())


def read_arguments(argv: Sequence[str], *, quiet: bool) -> FinetuneCommand:
    """Returns the command line's arguments.

    Where it is silent, those of the file that `--config` names count, or of the run that continues.
    """
    config = given_value(argv, "config")
    values = read_yaml(FinetuneCommand, Path(config)) if config else {}
    argv = add_restart_options(argv, values)
    saved = read_saved_values(FinetuneCommand, argv, values)
    if saved is None:
        return parse(FinetuneCommand, help_page(), argv, values=values, quiet=quiet)
    arguments = parse(FinetuneCommand, help_page(), argv, values={**saved, **values}, quiet=quiet)
    check_unchanged(arguments, FinetuneCommand(**saved), FIXED, "--resume")
    return arguments


def make_trainer(arguments: FinetuneCommand) -> Trainer:
    """Returns a trainer whose files are read and whose model is ready.

    If the processes of the run do not exist yet, it starts them, and ends this process with their
    exit code.
    """
    if not arguments.model_name_or_path:
        raise ValueError("--model-name-or-path is missing: name the folder of a model")
    if (
        arguments.train_file is None
        and arguments.validation_file is None
        and arguments.test_file is None
    ):
        raise ValueError(
            "there is nothing to do: name a --train-file, --validation-file or --test-file"
        )
    from ..finetuning.trainer import Trainer  # It imports torch and transformers, for seconds.

    trainer = Trainer(arguments)
    adapts = (
        arguments.lora_rank > 0
        or arguments.adapter is not None
        or trainer.source.adapter is not None
    )
    # A run of an earlier release that was started so goes on.
    if arguments.merge_adapter and not adapts and not arguments.resume:
        raise ValueError(
            "merge_adapter merges LoRA weights, and there are none, so that the whole model would be "
            "trained: set lora_rank (or adapter), or leave it out"
        )
    # None leaves a part as it is; False would make it trainable.
    trainer.freeze(
        encoder=arguments.freeze_encoder or None,
        decoder=arguments.freeze_decoder or None,
        embeddings=arguments.freeze_embeddings or None,
    )
    if arguments.prompt_list:
        trainer.convert_to_prompt_tuning(arguments.prompt_list)
    if arguments.train_file is not None:
        trainer.load_data(valid=has_validation_data(arguments))
    return trainer


def has_validation_data(arguments: FinetuningArguments) -> bool:
    """Returns whether there is validation data: a file, or a part of the training file."""
    return arguments.validation_file is not None or arguments.validation_split > 0


def run(trainer: Trainer) -> None:
    """Trains, saves, validates and tests, each if the arguments name a file for it."""
    arguments = trainer.arguments
    assert isinstance(arguments, FinetuneCommand)
    console = trainer.console
    if arguments.train_file is not None:
        trainer.show_run()
        trainer.model_summary()
        trainer.train(valid=has_validation_data(arguments))
        folder = trainer.save_model(merge_adapter=arguments.merge_adapter)
        console.print(f"saved {name_urls(str(folder))}")
    elif arguments.validation_file is not None:
        console.print(describe("validation", trainer.evaluate()))
    if arguments.test_file is not None:
        console.print(describe("test", trainer.test()))


def describe(name: str, values: dict[str, float]) -> Text:
    """Returns a line of metrics."""
    return Text(f"{name}: " + ", ".join(f"{key} {value:.4g}" for key, value in values.items()))
