"""PyTorch's DistributedDataParallel: a replica of the model in each process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from .arguments import TrainingArguments
from .ranks import Ranks
from .torch_engine import TorchEngine


class DDPEngine(TorchEngine):
    """See `Engine`. Gradients are exchanged while the backward pass of a step's last micro-batch runs.

    16-bit gradients are exchanged for every micro-batch, for it is their sum in fp32 that is kept.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, arguments: TrainingArguments, ranks: Ranks
    ) -> None:
        super().__init__(model, optimizer, arguments)
        self._replicas = ranks.dp_size
        self._exchange_always = arguments.precision != "fp32"
        self.model = _FixedBuckets(model)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        super().begin_micro_batch(is_last=is_last)
        self.model.require_backward_grad_sync = is_last or self._exchange_always

    def backward(self, loss: Tensor) -> None:
        # DDP averages over the ranks; the shares of the loss already add up to the mean.
        super().backward(loss * self._replicas)


class _FixedBuckets(DistributedDataParallel):
    """Exchanges gradients in buckets that stay what they are, the model's last parameters first.

    DDP makes others after its first backward pass, in the order in which gradients came. Where a gradient lies in a
    bucket decides in which order three ranks or more add it up, so that the first step of a run that goes on would
    differ in a last bit from the same step of a whole run.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__(model)
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self):
        parameters, expect_sparse_gradient = super()._build_params_for_reducer()
        return parameters[::-1], expect_sparse_gradient[::-1]
