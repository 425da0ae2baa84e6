"""Trains with PyTorch's DistributedDataParallel: a replica of the model in each process."""

from __future__ import annotations

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ...mpu import ParallelMesh, shared_memory
from ...mpu.collectives import start_all_reduce
from ...mpu.mesh import EXPERT_REPLICA_AXES
from ..arguments.training_arguments import TrainingArguments
from ..launch.ranks import Ranks
from ..optimizers.adamw import clip_gradients
from .buckets import SMALLEST, bucket_elements
from .master_weights import MasterWeights
from .torch_engine import TorchEngine

MOST_NAMES = 5  # of parameters in a message


class DDPEngine(TorchEngine):
    """An `Engine` that exchanges gradients in the backward pass of a step's last micro-batch, which
    DDP learns of from the parameters themselves.
    """

    fuses_last_gradients = False

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        arguments: TrainingArguments,
        ranks: Ranks,
    ) -> None:
        super().__init__(model, optimizer, arguments)
        self._experts_mesh = ranks.mesh if ranks.ep_size > 1 else None
        experts = {
            name
            for name, parameter in model.named_parameters()
            if getattr(parameter, "expert_parallel", False)
        }
        large = _list_large(model, experts) if arguments.precision == "fp32" else []
        self._large = [parameter for _, parameter in large]
        # What DDP does not exchange: `_sum_experts` does so among fewer ranks, and `_sum_large` in
        # place.
        left_out = experts | {name for name, _ in large}
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, left_out)
        for parameter in self._large:
            cast(Any, dist).broadcast(parameter.detach(), 0)  # as DDP does with all others
        self.model = _FixedBuckets(model, ranks.replica_size)
        # DDP itself averages gradients over the ranks, but the ranks' losses already add up to the
        # mean. torch reads the annotations of a hook, and knows them only as types: a lambda has
        # none.
        if arguments.precision == "fp32":
            self.model.register_comm_hook(None, lambda _, bucket: _sum_bucket(bucket))
        else:
            self.model.register_comm_hook(
                self._masters, lambda masters, bucket: _sum_in_fp32(masters, bucket)
            )
        self._trained: dict[Tensor, str] = {
            parameter: name
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in experts
        }
        self._without_gradient: set[Tensor] = set()
        for parameter in self._trained:
            parameter.register_post_accumulate_grad_hook(self._without_gradient.discard)

    def begin_micro_batch(self, *, is_last: bool) -> None:
        self._without_gradient.update(self._trained)
        self.model.require_backward_grad_sync = is_last

    def backward(self, loss: Tensor) -> None:
        super().backward(loss)
        if self.model.require_backward_grad_sync:
            if self._experts_mesh is not None:
                self._sum_experts(self._experts_mesh)
            self._sum_large()
        if self.model.require_backward_grad_sync and self._without_gradient:
            # DDP reports this only in the next step, after an update with gradients that were not
            # exchanged.
            names = sorted(self._trained[parameter] for parameter in self._without_gradient)
            shown = ", ".join(names[:MOST_NAMES])
            if len(names) > MOST_NAMES:
                shown += " and others"
            raise ValueError(
                f"the backward pass gave no gradient to {shown}, and env_type='pytorchDDP' needs "
                "one for each trained parameter; freeze the parameters that the loss does not "
                "depend on, or use 'deepspeed'"
            )

    def _sum_experts(self, mesh: ParallelMesh) -> None:
        """Adds up the gradients of experts over the ranks that hold the same ones.

        What a rank has of them is the sum over the samples of all ranks along the expert axis.
        """
        for updated in self._names:
            if getattr(updated, "expert_parallel", False) and updated.grad is not None:
                cast(Any, dist).all_reduce(updated.grad, group=mesh.group(*EXPERT_REPLICA_AXES))

    def _sum_large(self) -> None:
        """Adds up the gradients of large parameters through shared memory."""
        for parameter in self._large:
            if parameter.grad is not None:
                parameter.grad = start_all_reduce(parameter.grad, _all_ranks())()

    def clip(self) -> Tensor:
        return clip_gradients(
            list(self._names), self._clip_grad, self.optimizer, self._experts_mesh
        )


def _list_large(model: nn.Module, experts: set[str]) -> list[tuple[str, nn.Parameter]]:
    """Returns the parameters of at least a bucket's size, with their names, if the ranks share
    memory, through which they add up a gradient where it is.

    DDP copies it into a bucket and back, and gloo's thread takes the processor from the backward
    pass. Collective over all ranks.
    """
    trained = [
        (name, parameter)
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and name not in experts
    ]
    large = [pair for pair in trained if pair[1].numel() >= SMALLEST]
    # DDP needs one that is its own.
    if not large or len(large) == len(trained):
        return []
    first = large[0][1]
    of_its_kind = torch.empty(0, dtype=first.dtype, device=first.device)
    return large if shared_memory.find(of_its_kind, _all_ranks()) else []


def _all_ranks() -> dist.ProcessGroup:
    group = dist.group.WORLD
    assert group is not None
    return group


def _sum_bucket(bucket: Any) -> torch.futures.Future[Tensor]:
    """Adds up the ranks' gradients of a bucket, in place."""
    work = cast(Any, dist).all_reduce(bucket.buffer(), async_op=True)
    return work.get_future().then(lambda done: done.value()[0])


def _sum_in_fp32(masters: MasterWeights, bucket: Any) -> torch.futures.Future[Tensor]:
    """Adds the ranks' gradients of a bucket, with what earlier micro-batches have left, into the
    master weights' own.

    So 16-bit gradients are exchanged once in a step, and their sum is rounded as rarely as under
    ZeRO.
    """
    sums = masters.accumulate_in_one_tensor(bucket.parameters(), bucket.gradients())
    buffer = bucket.buffer()
    work = cast(Any, dist).all_reduce(sums, async_op=True)
    return work.get_future().then(lambda _: buffer)


class _FixedBuckets(DistributedDataParallel):
    """DistributedDataParallel whose gradient buckets never change. The model's last parameters come
    first in them.

    DDP itself rebuilds the buckets after its first backward pass, in the order in which gradients
    arrived. A gradient's place in a bucket determines the order in which three or more ranks add it
    up. The first step of a resumed run would therefore differ in the last bit from the same step of
    an uninterrupted run.
    """

    def __init__(self, model: nn.Module, replicas: int = 1) -> None:
        left_out: set[str] = getattr(model, "_ddp_params_and_buffers_to_ignore", set())
        trained = [
            parameter
            for name, parameter in model.named_parameters()
            if parameter.requires_grad and name not in left_out
        ]
        elements = bucket_elements(sum(parameter.numel() for parameter in trained), replicas)
        itemsize = max((parameter.element_size() for parameter in trained), default=4)
        super().__init__(model, bucket_cap_mb=cast(Any, elements * itemsize / 2**20))
        self.reducer._push_all_rebuilt_params()
        self.reducer._rebuild_buckets()

    def _build_params_for_reducer(self):
        parameters, expect_sparse_gradient = super()._build_params_for_reducer()
        return parameters[::-1], expect_sparse_gradient[::-1]
