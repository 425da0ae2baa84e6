"""What a training run is told, as dataclasses; the command line is made from them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class TrainingArguments:
    """How a model is trained."""

    model_parallel_size: int = 1
    """Tensor-parallel size: over how many processes each layer is split."""
    sequence_parallel: bool = False
    """Also split norms, dropouts and residuals along the sequence."""
    recompute: Literal["none", "selective", "full"] = "none"
    """Recompute activations in the backward pass: those of attention, or of whole blocks."""

    train_steps: int = 1600
    """Optimizer steps."""
    micro_batch_size: int = 4
    """Sequences in one forward pass of one data-parallel rank."""
    global_batch_size: int | None = None
    """Sequences in one optimizer step over all ranks; by default one micro-batch a rank."""
    sequence_length: int | None = None
    """Tokens in a sequence; by default the model's longest."""

    lr: float = 3e-3
    """Peak learning rate; warm-up is linear, then a cosine down to a tenth."""
    warmup_steps: int = 100
    weight_decay: float = 0.1
    """On matrices only, never on biases and norms."""
    beta1: float = 0.9
    beta2: float = 0.95
    clip_grad: float = 1.0
    """Largest gradient norm; 0 turns clipping off."""

    precision: Literal["fp32", "bf16"] = "fp32"
    zero_stage: Literal[0, 1, 2] = 1
    """DeepSpeed ZeRO: 1 splits the optimizer's state over data-parallel ranks, 2 the gradients too."""
    deepspeed_config: str | None = None
    """A DeepSpeed JSON file whose keys are added; what the arguments above decide may not be contradicted."""

    eval_interval: int = 100
    """Steps between evaluations on held-out text."""
    eval_sequences: int = 64
    """Held-out sequences of an evaluation during training."""
    final_eval_sequences: int | None = None
    """Held-out sequences of the evaluation at the end, which the exported model is compared on; by default all."""
    save_interval: int = 500
    """Steps between checkpoints; the last step is always saved."""
    log_interval: int = 1
    """Steps between points in the logs."""
    seed: int = 1234

    def __post_init__(self) -> None:
        at_least_one = ("model_parallel_size", "train_steps", "micro_batch_size", "eval_interval",
                        "eval_sequences", "save_interval", "log_interval")  # fmt: skip
        for name in at_least_one:
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, not {self.lr}")
        if self.precision == "bf16" and self.zero_stage == 0:
            raise ValueError(
                "bf16 keeps its fp32 master weights in the ZeRO optimizer: zero_stage=0 has none; use 1 or 2"
            )

    def accumulation_steps(self, data_parallel_size: int) -> int:
        """Micro-batches that each rank accumulates for one optimizer step."""
        per_pass = self.micro_batch_size * data_parallel_size
        total = self.global_batch_size or per_pass
        if total % per_pass:
            raise ValueError(
                f"global_batch_size={total} is not a multiple of micro_batch_size={self.micro_batch_size} x "
                f"{data_parallel_size} data-parallel ranks; use a multiple of {per_pass}"
            )
        return total // per_pass
