"""What fine-tuning is told: the trainer's arguments, and t2t's for model, files, lengths and evaluation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from ..trainer.arguments.aliases import with_argument_aliases
from ..trainer.arguments.training_arguments import EnvType, Schedule, TrainingArguments
from ..trainer.launch.rank_info import RankInfo

Task = Literal["text2text-generation", "text-generation", "text-classification"]
MetricName = Literal["sacrebleu", "rouge", "accuracy"]


@with_argument_aliases
@dataclass(frozen=True)
class FinetuningArguments(TrainingArguments):
    """How a model is fine-tuned. Takes FlagAI's and transformers' names of the training arguments too.

    All values are checked when it is made: `ValueError` says what would work.
    """

    env_type: EnvType | None = None  # type: ignore[assignment]
    """By default pytorch in one process, and deepspeed+mpu in several."""
    pytorch_device: str = "auto"
    """Where one process computes; by default on a GPU if there is one."""
    epochs: int = 3
    micro_batch_size: int = 8
    lr: float = 5e-5
    lr_schedule: Schedule = "linear"
    warmup_ratio: float = 0.0
    weight_decay: float = 0.0
    log_interval: int = 10

    model_name_or_path: str = ""
    """A Hugging Face folder or a shardzoo folder with its tokenizer, or a name on the Hugging Face Hub."""
    task: Task | None = None
    """By default what the model's kind and the training file suggest: pairs teach text2text-generation, or an encoder
    text-classification; plain text teaches text-generation."""
    native: bool | None = None
    """Train the zoo's model, whose layers can be split, or transformers'; by default the zoo's where it has one."""

    train_file: str | None = None
    """JSON lines {"translation": {"s": source, "t": target}} or with the two keys at the top, NAME.source beside
    NAME.target, parquet, or a datasets folder; for text-generation text files, folders, or JSON lines with `text`."""
    validation_file: str | None = None
    test_file: str | None = None
    validation_split: int = 5
    """Percent of the training data that validates, where there is no validation_file."""
    source_id: str = "s"
    """Key of the source texts."""
    target_id: str = "t"
    """Key of the target texts, or of the labels."""
    prefix: str = ""
    """Put before every source."""
    separator: str = "\n"
    """Between source and target, where a decoder learns pairs."""
    max_source_length: int = 128
    """Tokens, the end included; longer sources are cut."""
    max_target_length: int = 128
    block_size: int | None = None
    """Tokens of a sample of plain text; by default what the model reads, up to 1024."""
    max_train_samples: int | None = None
    """The first so many; by default all."""
    max_eval_samples: int | None = None
    ignore_pad_token_for_loss: bool = True
    """Off: an encoder-decoder also learns to predict the padding behind a target."""

    predict_with_generate: bool = False
    """Generate in evaluations, and compare with the targets by `metric`."""
    generation_num_beams: int = 4
    generation_max_length: int | None = None
    """New tokens in evaluations and answers; by default max_target_length."""
    metric: MetricName = "sacrebleu"
    """Of generated texts (accuracy: equal to the target). Of plain text, accuracy adds that of the next token; a
    classifier is always measured by its accuracy."""

    gradient_checkpointing: bool = False
    """The same as recompute="full"."""
    torch_compile: bool = False
    """Compile the model with torch.compile."""
    torch_compile_backend: str = "inductor"
    output_dir: str | None = None
    """Folder of the run; by default a new one under runs/."""
    overwrite: bool = False
    """Delete the run in output_dir first."""

    def __post_init__(self) -> None:
        chosen = self.env_type
        object.__setattr__(self, "env_type", self._environment())  # what the checks are about
        super().__post_init__()
        object.__setattr__(self, "env_type", chosen)
        for name, least in (("max_source_length", 2), ("max_target_length", 2), ("block_size", 2),
                            ("generation_num_beams", 1), ("generation_max_length", 1), ("max_train_samples", 1),
                            ("max_eval_samples", 1)):  # fmt: skip
            value = getattr(self, name)
            if value is not None and value < least:
                raise ValueError(f"{name} must be at least {least}, not {value}")
        if not 0 <= self.validation_split < 100:
            raise ValueError(f"validation_split is a percentage from 0 to 99, and not {self.validation_split}")
        if self.native is False and self.model_parallel_size > 1:
            raise ValueError(
                f"model_parallel_size={self.model_parallel_size} splits layers, which only the zoo's models do; use "
                "native=True, or model_parallel_size=1"
            )
        if self.resume and self.output_dir is None:
            raise ValueError("resume goes on with the run in output_dir: name that folder too")
        if self.resume and self.overwrite:
            raise ValueError("resume goes on with a run and overwrite deletes it: use one of them")
        for name in ("save_dir", "experiment_name"):
            if getattr(self, name) != getattr(type(self), name):
                raise ValueError(
                    f"{name}={getattr(self, name)!r}: a fine-tuning run lies in --output-dir; use that one"
                )
        self._check_compiler()
        if self.predict_with_generate and self.zero_stage == 3:
            raise ValueError("predict_with_generate needs whole parameters, which ZeRO stage 3 splits; use stage 2")

    def _check_compiler(self) -> None:
        if self.torch_compile_backend == type(self).torch_compile_backend:
            return
        from torch._dynamo import list_backends  # takes seconds to import

        if self.torch_compile_backend not in list_backends(()):
            raise ValueError(
                f"torch_compile_backend {self.torch_compile_backend!r} is none of {', '.join(list_backends())}"
            )

    def _environment(self) -> EnvType:
        if self.env_type is not None:
            return self.env_type
        several = (
            max(self.num_gpus, self.model_parallel_size, self.num_nodes, RankInfo.from_environment().world_size) > 1
        )
        if self.zero_stage == 3:
            return "deepspeed"
        zero = self.zero_stage is not None or self.offload_optimizer or self.deepspeed_config is not None
        return "deepspeed+mpu" if several or zero else "pytorch"

    def resolved(self) -> FinetuningArguments:
        """With what is left open decided for this machine and these processes."""
        import torch

        device = "cuda" if torch.cuda.is_available() else "cpu"
        return replace(
            self,
            env_type=self._environment(),
            pytorch_device=device if self.pytorch_device == "auto" else self.pytorch_device,
            recompute="full" if self.gradient_checkpointing else self.recompute,
        )

    def check_files(self) -> None:
        """ValueError for a file that is named and not there. NAME stands for NAME.source with NAME.target."""
        for name in ("train_file", "validation_file", "test_file"):
            path = getattr(self, name)
            if path is not None and not Path(path).exists() and not Path(f"{path}.source").exists():
                raise ValueError(f"{name} {path} does not exist")
