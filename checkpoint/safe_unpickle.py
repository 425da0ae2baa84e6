"""What `torch.load(weights_only=True)` may meet in checkpoints of training frameworks, and builds nothing of."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

# Arguments, random states, loss scalers: what lies beside the weights.
INERT_TYPES = (
    "argparse.Namespace",
    "deepspeed.runtime.fp16.loss_scaler.DynamicLossScaler",
    "deepspeed.runtime.fp16.loss_scaler.LossScaler",
    "deepspeed.runtime.zero.config.ZeroStageEnum",
    "deepspeed.utils.tensor_fragment.fragment_address",
    "fp16.loss_scaler.DynamicLossScaler",
    "fp16.loss_scaler.LossScaler",
    "numpy._core.multiarray._reconstruct",
    "numpy._core.multiarray.scalar",
    "numpy.core.multiarray._reconstruct",
    "numpy.core.multiarray.scalar",
    "numpy.dtype",
    "numpy.ndarray",
)


class Inert:
    """Stands for an object that is of no interest here; takes and forgets what the original takes."""

    def __new__(cls, *args: object, **kwargs: object) -> Inert:
        return super().__new__(cls)

    def __init__(self, *args: object, **kwargs: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        pass


@contextmanager
def inert_types_alone() -> Iterator[None]:
    """Lets `torch.load` take those types as `Inert` and no others, whatever imported libraries have allowed."""
    allowed_by_others = torch.serialization.get_safe_globals()
    torch.serialization.clear_safe_globals()
    torch.serialization.add_safe_globals([(Inert, name) for name in INERT_TYPES])
    try:
        yield
    finally:
        torch.serialization.clear_safe_globals()
        torch.serialization.add_safe_globals(allowed_by_others)
