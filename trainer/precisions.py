"""Lists the precisions of parameters, activations and gradients.

Importing this file does not import torch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal


@dataclass(frozen=True)
class Precision:
    """A precision of the forward and backward passes.

    Attributes:
        name: Its name in the arguments.
        dtype: The name of torch's data type.
        itemsize: Bytes of a number.
        scales_loss: Whether the loss is scaled, because small gradients would become 0.
    """

    name: str
    dtype: str
    itemsize: int
    scales_loss: bool = False

    @property
    def needs_master_weights(self) -> bool:
        """Whether the optimizer updates fp32 copies, since rounding would lose small updates."""
        return self.itemsize < 4


PRECISIONS = {
    precision.name: precision
    for precision in (
        Precision("fp32", "float32", itemsize=4),
        Precision("bf16", "bfloat16", itemsize=2),
        Precision("fp16", "float16", itemsize=2, scales_loss=True),
    )
}

if TYPE_CHECKING:
    PrecisionName = str
else:
    # For the command line and its help, and for the checks of values.
    PrecisionName = Literal[tuple(PRECISIONS)]
