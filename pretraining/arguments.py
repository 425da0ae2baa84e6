"""Defines the arguments of a pretraining run, and the checks before its processes are joined."""

from __future__ import annotations

from dataclasses import asdict, dataclass

from ..models import family, find_config, presets
from ..models.common.config import ModelConfig
from ..models.common.transformer import check_heads
from ..mpu import validate_layout
from ..trainer.arguments.training_arguments import EnvType, TrainingArguments
from ..trainer.engines.deepspeed_config import zero_stage
from ..trainer.launch.launch import processes_of
from ..trainer.launch.rank_info import RankInfo


@dataclass(frozen=True)
class PretrainingArguments(TrainingArguments):
    """Arguments of pretraining: the trainer's arguments, the model, the corpus and the run's folder."""

    env_type: EnvType = "deepspeed+mpu"
    train_steps: int | None = 1600
    """Optimizer steps."""
    micro_batch_size: int = 4
    """Sequences in one forward pass of one data-parallel rank."""
    lr: float = 3e-3
    """Peak learning rate; linear warm-up, then cosine decay to a tenth."""
    warmup_steps: int | None = 100
    beta2: float = 0.95
    save_interval: int = 500
    """Steps between checkpoints; the last step is always saved."""
    log_interval: int = 1
    """Steps between points in the logs."""
    sequence_length: int | None = None
    """Tokens in a sequence; by default the model's maximum."""
    eval_sequences: int = 64
    """Held-out sequences for each evaluation during training."""
    final_eval_sequences: int | None = None
    """Held-out sequences for the final evaluation and the comparison with the exported model; by default all."""

    model: str = "gpt2-quickstart"
    """A preset, or a folder or file with a Hugging Face config.json. The tokenizer determines the vocabulary size."""
    hidden_size: int | None = None
    """Overrides the model's."""
    num_hidden_layers: int | None = None
    """Overrides the model's."""
    num_attention_heads: int | None = None
    """Overrides the model's."""

    data: str | None = None
    """A text file, a folder of text, JSON lines with a `text` key, or the prefix of a prepared .bin/.idx pair; by
    default the source of the Python standard library."""
    vocab_size: int = 2048
    """Size of the byte-level BPE vocabulary that is trained on the corpus."""
    held_out_fraction: float = 0.05
    """Share of the documents that is not used for training."""

    output_dir: str | None = None
    """Folder of the run; by default a new one under runs/."""
    resume: bool = False
    """Resume the run in output_dir, with its arguments except those given now."""
    overwrite: bool = False
    """Delete the run in output_dir first."""
    sample_prompt: str = "def __init__(self"
    """Prompt of the text sample at the end."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.eval_sequences < 1:
            raise ValueError(f"eval_sequences must be at least 1, not {self.eval_sequences}")
        if self.train_steps is None:
            raise ValueError("the corpus is repeated endlessly: set train_steps to the number of steps")

    def of_the_run(self) -> dict[str, object]:
        """Returns the arguments that describe the run, without those of one invocation, as `--config` reads them."""
        return {name: value for name, value in asdict(self).items() if name not in INVOCATION}


OBJECTIVE = "gpt"
INVOCATION = ("resume", "overwrite", "config", "local_rank")
# Arguments that cannot change when a run is resumed.
FIXED = (
    "model",
    "hidden_size",
    "num_hidden_layers",
    "num_attention_heads",
    "data",
    "vocab_size",
    "held_out_fraction",
    "sequence_length",
    "seed",
)


def check_run(arguments: PretrainingArguments, launch: RankInfo) -> ModelConfig:
    """Checks everything that can be checked before the processes are joined, and returns the model's configuration."""
    config = find_config(arguments.model)
    if family(config.model_type).objective != OBJECTIVE:
        able = [name for name, other in presets() if family(other.model_type).objective == OBJECTIVE]
        raise ValueError(
            f"model {arguments.model} is a {config.architecture}, and pretrain.py trains causal language models; "
            f"use a preset such as {', '.join(able)}"
        )
    changes = {name: getattr(arguments, name) for name in ("hidden_size", "num_hidden_layers", "num_attention_heads")}
    config = config.with_changes(**{name: value for name, value in changes.items() if value is not None})
    size = arguments.model_parallel_size
    check_heads(config.num_attention_heads, size)
    data_parallel_size = validate_layout(launch.world_size if launch.world_size > 1 else processes_of(arguments), size)
    arguments.accumulation_steps(data_parallel_size)
    longest, length = config.max_sequence_length, arguments.sequence_length
    if length is not None and not 2 <= length <= longest:
        raise ValueError(f"sequence_length must be from 2 to the model's {longest} positions, not {length}")
    zero_stage(arguments)
    return config
