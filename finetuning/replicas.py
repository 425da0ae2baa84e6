"""Shares the samples of an evaluation among data-parallel ranks, a loss among their rows, and the
results of the last pipeline stage with the others.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ..mpu import ParallelMesh, broadcast_from_stage
from ..mpu.mesh import SAMPLE_AXES
from ..trainer.batches.loss_normalization import to_device


def iterate_replica_batches(
    samples: Any,
    collate: Callable[[Sequence[Any]], dict[str, Tensor]],
    device: torch.device,
    batch_size: int,
    mesh: ParallelMesh | None,
) -> Generator[dict[str, Tensor]]:
    """Yields this data-parallel rank's batches of an evaluation.

    All ranks get equally many batches of `batch_size` samples. Their first batches together are the
    first samples, in the order of the ranks, and so on: what `gather_from_dp` makes of the batches'
    results is in the order of the samples. The last sample is repeated to fill the last batches, so
    the results are to be cut to `len(samples)`.
    """
    replicas = 1 if mesh is None else mesh.size(*SAMPLE_AXES)
    replica = 0 if mesh is None else mesh.rank_in(*SAMPLE_AXES)
    for start in range(0, len(samples), batch_size * replicas):
        first = start + replica * batch_size
        numbers = [min(first + row, len(samples) - 1) for row in range(batch_size)]
        yield to_device(collate([samples[number] for number in numbers]), device)


def scale_to_global_batch(rows: Tensor, data: Mapping[str, Any]) -> Tensor:
    """Returns the mean of a batch's losses [B], or their sum divided by the rows of the global
    batch, as a model's own loss is, if the trainer gives their number.
    """
    loss = rows.mean()
    items = data.get("num_items_in_batch")
    return loss if items is None else loss * (len(rows) / items)


def share_from_last_stage(found: Sequence[Tensor], mesh: ParallelMesh | None) -> Tensor:
    """Returns the rows of several batches, one after the other, on all pipeline stages. Collective.

    Args:
        found: The rows of each batch; the stages before the last one have none.
    """
    own = torch.cat(tuple(found)) if found else None
    if mesh is None or mesh.pp_size == 1:
        assert own is not None
        return own
    return broadcast_from_stage(own, mesh.pp_size - 1, mesh)
