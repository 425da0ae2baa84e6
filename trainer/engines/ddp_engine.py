"""PyTorch's DistributedDataParallel: a replica of the model in each process."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ..arguments.training_arguments import TrainingArguments
from ..launch.ranks import Ranks
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
        self._trained = {parameter: name for name, parameter in model.named_parameters() if parameter.requires_grad}
        self._without_gradient: set[nn.Parameter] = set()
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._without_gradient.discard)  # type: ignore[arg-type]

    def begin_micro_batch(self, *, is_last: bool) -> None:
        self._without_gradient.update(self._trained)
        self.model.require_backward_grad_sync = is_last or self._exchange_always

    def backward(self, loss: Tensor) -> None:
        # DDP averages over the ranks; the shares of the loss already add up to the mean.
        super().backward(loss * self._replicas)
        if self.model.require_backward_grad_sync and self._without_gradient:
            # DDP itself would say so in the next step, after an update with gradients that were not exchanged.
            names = sorted(self._trained[parameter] for parameter in self._without_gradient)
            raise ValueError(
                f"no gradient came to {', '.join(names[:5])}{' and others' if len(names) > 5 else ''}, and "
                "env_type='pytorchDDP' exchanges them only if each trained parameter has one; freeze what the loss "
                "does not depend on, or use 'deepspeed'"
            )


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
