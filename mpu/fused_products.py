"""Multiplies what a collective brings or takes away, so that the product hides the collective
(sequence parallelism).

A product of a gathered tensor needs the whole tensor only in the end: each row of the result needs
one row. There are
two ways to begin earlier, and the layers use the plain collective where neither applies:

- In pieces: the tensor is gathered in up to four pieces, all started at once, and a piece is
  multiplied while the next ones are on their way. Only the first piece is waited for. On GPUs,
  where a piece has at least 4 MiB; a smaller one would cost more in launches than it hides. A CPU
  has no engine that would carry the pieces beside the product.
- Symmetric memory: torch's fused operators copy each rank's part out of its GPU's memory while the
  part before it is multiplied, and begin with the rank's own part. They can also hide the sum of
  the ranks' products, which is then added in fp32 and rounded once. `use_symmetric_memory` turns
  them on.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

import torch
import torch.distributed as dist
from torch import Tensor

from ..ops.device import overlaps_communication, records_graph
from .collectives import SEQUENCE_DIM, equal_share, gather_bytes, start_all_gather

MOST_PIECES = 4
PIECE_BYTES = 4 << 20
_symmetric: WeakSet[dist.ProcessGroup] = WeakSet()


def use_symmetric_memory(group: dist.ProcessGroup) -> None:
    """Fuses the group's products with their collectives by torch's symmetric memory. Every rank
    must call it.

    Raises:
        ValueError: The ranks' GPUs cannot reach one another's memory; raised on every rank, with
            the reason.
    """
    for find_problem in (_find_missing_gpu, _find_several_hosts, _find_missing_access):
        _agree_on_problem(find_problem, group)
    _symmetric.add(group)


def gathered_product(
    tensor: Tensor, matrix: Tensor, bias: Tensor | None, group: dist.ProcessGroup
) -> tuple[Tensor, Tensor] | None:
    """Returns the product of the gathered sequence with `matrix`, and the gathered sequence;
    outside autograd.

    Args:
        tensor: This rank's part [B, S/tp, K] of the sequence.
        matrix: [K, N], in the dtype of `tensor`.
        bias: [N], added to the product. Symmetric memory rounds a 16-bit product before it adds the
            bias.

    Returns:
        [B, S, N] and [B, S, K], both contiguous; None where the product can hide nothing.
    """
    if records_graph() or tensor.dim() != 3 or not tensor.numel():
        return None
    if group in _symmetric:
        _operators()
        whole, [product] = torch.ops.symm_mem.fused_all_gather_matmul(
            tensor.contiguous(), [matrix], SEQUENCE_DIM, group.group_name, return_A=True
        )
        product = product.contiguous()
        return product if bias is None else product.add_(bias), whole.contiguous()
    pieces = _count_pieces(tensor, group)
    if pieces <= 1:
        return None
    return _multiply_in_pieces(tensor, matrix, bias, group, pieces)


def scattered_product(
    tensor: Tensor, matrix: Tensor, bias: Tensor | None, group: dist.ProcessGroup
) -> Tensor | None:
    """Returns this rank's part of the sequence of the sum of all ranks' `tensor @ matrix`, plus
    `bias` on every rank.

    Args:
        tensor: [B, S, K].
        matrix: [K, N], in the dtype of `tensor`.
        bias: [N]; a 16-bit sum is rounded before it is added.

    Returns:
        [B, S/tp, N]; None where symmetric memory is not used.

    Raises:
        ValueError: The ranks cannot have equal parts of the sequence.
    """
    if records_graph() or tensor.dim() != 3 or not tensor.numel() or group not in _symmetric:
        return None
    equal_share(tensor, SEQUENCE_DIM, group.size())
    _operators()
    summed = torch.ops.symm_mem.fused_matmul_reduce_scatter(
        tensor.contiguous(), matrix, "sum", SEQUENCE_DIM, group.group_name
    ).contiguous()
    return summed if bias is None else summed.add_(bias)


def _count_pieces(tensor: Tensor, group: dist.ProcessGroup) -> int:
    """Returns in how many pieces to gather a tensor, of which this is a rank's part."""
    if not overlaps_communication(tensor):
        return 1
    return min(MOST_PIECES, tensor.nbytes * group.size() // PIECE_BYTES)


def _multiply_in_pieces(
    tensor: Tensor, matrix: Tensor, bias: Tensor | None, group: dist.ProcessGroup, pieces: int
) -> tuple[Tensor, Tensor]:
    """Implements `gathered_product` with a gather in pieces: of samples, or of the sequence of a
    single sample.

    A product writes the rows of its piece, so rows are neither joined nor rounded differently.
    """
    size = group.size()
    batch, share, width = tensor.shape
    by_sample = batch > 1
    whole = tensor.new_empty(batch, size, share, width)
    product = tensor.new_empty(batch, size, share, matrix.shape[1])
    parts = tensor.chunk(pieces, 0 if by_sample else 1)
    arrivals = [start_all_gather(part[None], 0, group) for part in parts]
    start = 0
    for part in parts:
        arrived = arrivals.pop(0)  # so that the piece is freed when it has been copied
        dim = 0 if by_sample else 2
        length = part.shape[0] if by_sample else part.shape[1]
        source = whole.narrow(dim, start, length)  # [samples, tp, rows, K]
        result = product.narrow(dim, start, length)
        source.copy_(arrived().movedim(0, 1))
        if by_sample:  # contiguous: one product of all rows
            source = source.view(1, -1, width)
            result = result.view(1, -1, matrix.shape[1])
        else:  # one for the rows of each rank, which have a stride
            source = source[0]
            result = result[0]
        factor = matrix.expand(len(source), -1, -1)
        if bias is None:
            torch.bmm(source, factor, out=result)
        else:
            torch.baddbmm(bias, source, factor, out=result)
        start += length
    return product.flatten(1, 2), whole.flatten(1, 2)


def _operators() -> Any:
    """Imports the module that defines `torch.ops.symm_mem`, which takes a fifth of a second."""
    import torch.distributed._symmetric_memory as symmetric_memory

    return symmetric_memory


def _agree_on_problem(find: Callable[[dist.ProcessGroup], str], group: dist.ProcessGroup) -> None:
    """Raises ValueError on every rank if one of them finds a problem, so that none waits in a
    collective alone.
    """
    found = [text.decode() for text in gather_bytes(find(group).encode(), group)]
    problem = next(filter(None, found), None)
    if problem:
        raise ValueError(
            "symmetric memory needs the GPUs of one host, each with peer access to the others (NVLink, or PCIe), but "
            f"{problem}; use symmetric_memory=False, with which the collectives are the backend's own"
        )


def _find_missing_gpu(group: dist.ProcessGroup) -> str:
    """Returns that the ranks have no GPUs; "" if they have."""
    if torch.cuda.is_available() and "nccl" in dist.get_backend(group):
        return ""
    return "the ranks compute on CPUs"


def _find_several_hosts(group: dist.ProcessGroup) -> str:
    """Returns that the ranks are on several hosts; "" if they are on one."""
    hosts = {text.decode() for text in gather_bytes(socket.gethostname().encode(), group)}
    if len(hosts) == 1:
        return ""
    return f"the tensor-parallel ranks are on {len(hosts)} hosts: {', '.join(sorted(hosts))}"


def _find_missing_access(group: dist.ProcessGroup) -> str:
    """Returns why the ranks cannot share a first piece of memory, in torch's words; "" if they can."""
    try:
        module = _operators()
        module.rendezvous(module.empty(1, dtype=torch.uint8, device="cuda"), group.group_name)
    except (AttributeError, ImportError, RuntimeError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    return ""
