"""What is to be trained, and how."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ...models.activations import Batch, Layout
from ...models.common.parallel_config import ParallelConfig

ITEMSIZE = {"fp32": 4, "bf16": 2, "fp16": 2}
ELEMENTWISE = ("adamw", "lion")  # optimizers that may update any part of a parameter by itself


@dataclass(frozen=True)
class Job:
    """One process's share of a training run. ValueError for what the trainer would refuse.

    micro_batch_size: sequences in one forward pass of a rank. length: their tokens, of an encoder-decoder's source;
        target_length: of its target. padded: whether there is an attention mask.
    accumulation_steps: micro-batches for one optimizer step.
    tensor_parallel_size, data_parallel_size: ranks. zero_stage: DeepSpeed's; None: without DeepSpeed, and 1 under
        tensor parallelism, which needs it.
    precision: of parameters, activations and gradients; the optimizer keeps fp32 copies of 16-bit parameters.
    frozen: parts that are not trained: "embeddings", "encoder", "decoder".
    device: "cuda" or "cpu".
    """

    micro_batch_size: int = 1
    length: int = 512
    target_length: int | None = None
    padded: bool = True
    accumulation_steps: int = 1
    tensor_parallel_size: int = 1
    data_parallel_size: int = 1
    zero_stage: Literal[0, 1, 2, 3] | None = None
    sequence_parallel: bool = False
    recompute: Literal["none", "selective", "full"] = "none"
    precision: Literal["fp32", "bf16", "fp16"] = "bf16"
    optimizer: Literal["adamw", "adafactor", "lion", "lamb"] = "adamw"
    frozen: tuple[Literal["embeddings", "encoder", "decoder"], ...] = ()
    device: Literal["cuda", "cpu"] = "cuda"

    def __post_init__(self) -> None:
        for name in ("micro_batch_size", "length", "accumulation_steps", "tensor_parallel_size", "data_parallel_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, not {getattr(self, name)}")
        if self.stage == 3 and self.tensor_parallel_size > 1:
            raise ValueError("ZeRO stage 3 splits parameters that tensor parallelism has already split; use 0, 1 or 2")
        if self.optimizer not in ELEMENTWISE and (self.tensor_parallel_size > 1 or self.stage):
            raise ValueError(
                f"{self.optimizer} needs whole parameters, which tensor parallelism and ZeRO split; use "
                f"{' or '.join(ELEMENTWISE)}, or one rank for each layer and no ZeRO"
            )
        if self.stage == 0 and self.itemsize == 2:
            raise ValueError(
                f"{self.precision} under DeepSpeed keeps its fp32 master weights in the ZeRO optimizer: zero_stage=0 "
                "has none; use 1, 2 or 3"
            )

    @property
    def stage(self) -> int | None:
        """The ZeRO stage, or None without DeepSpeed."""
        return 1 if self.zero_stage is None and self.tensor_parallel_size > 1 else self.zero_stage

    @property
    def itemsize(self) -> int:
        """Bytes of a parameter, an activation and a gradient."""
        return ITEMSIZE[self.precision]

    @property
    def layout(self) -> Layout:
        parallel_config = ParallelConfig(self.sequence_parallel, self.recompute)
        return Layout(self.itemsize, self.tensor_parallel_size, parallel_config, self.device)

    def batch(self, *, has_target: bool) -> Batch:
        """target_length: by default as long as the source."""
        target = (self.target_length or self.length) if has_target else 0
        return Batch(self.micro_batch_size, self.length, target, self.padded)
