"""Implements the layers that are split over the tensor-parallel ranks: linear, embedding, output head, norms.

They follow Megatron-LM's tensor parallelism (Shoeybi et al. 2019, arXiv:1909.08053) and its sequence parallelism, which
also splits the sequence (Korthikanti et al. 2022, arXiv:2205.05198). With one rank, each layer is the plain operator
of `ops` or of PyTorch.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from itertools import accumulate
from typing import Any, ClassVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

from ..ops import (
    autocast_arguments,
    empty_pooled,
    in_inference_mode,
    library,
    linear,
    linear_cross_entropy,
    matmul,
)
from ..ops.autograd import Function, once_differentiable
from ..ops.library import OPS, may_decode
from .collectives import (
    SEQUENCE_DIM,
    copy_to_tp,
    gather_from_tp,
    reduce_from_tp,
    reduce_scatter_sequence,
    start_all_gather,
    start_all_reduce,
    start_reduce_scatter,
)
from .cross_entropy import head_losses
from .fused_products import gathered_product, scattered_product
from .mesh import ParallelMesh
from .parameter import SplitLayer, check_ids, split_parameter
from .shard import Shard


class ColumnParallelLinear(SplitLayer):
    """y = x Wᵀ + b with the output features split over the tensor-parallel ranks. Weight [out, in].

    Input [..., in], replicated. Output [..., out/tp], or [..., out] if gathered, in the input's dtype. Where tp does
    not divide the units, the ranks' parts differ by one.

    Args:
        groups: Sizes of the groups stacked along the output (fused Q, K, V; gate and up), each split separately.
        shared_kv_groups: Numbers of the groups, the last ones, that are key-value heads of grouped queries (see
            `AxisSplit`). Where ranks share them, a rank computes all heads that it needs; others lend it the rows.
        unit: Each rank's part of a block is a whole number of units, e.g. of head sizes.
        gather_output: Return all output features, in the unsplit order, on every rank.
        sequence_parallel: The input is this rank's part [B, S/tp, in] of the sequence.

    Raises:
        ValueError: The output features cannot be split over the ranks; the message names the sizes that work.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        gather_output: bool = False,
        groups: tuple[int, ...] | None = None,
        unit: int = 1,
        shared_kv_groups: tuple[int, ...] = (),
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.gather_output, self.sequence_parallel, self.mesh = (
            gather_output,
            sequence_parallel,
            mesh,
        )
        groups = tuple(groups or ())
        self.shard = Shard(
            (out_features, in_features), 0, groups, unit, shared_kv_groups=shared_kv_groups
        )
        bias_shard = Shard((out_features,), 0, groups, unit, shared_kv_groups=shared_kv_groups)
        self.weight = split_parameter(self.shard, mesh)  # [out/tp, in]
        self.bias = split_parameter(bias_shard, mesh) if bias else None  # [out/tp]

        self._lends = (
            mesh is not None
            and not gather_output
            and bool(self.shard.find_exchanged_groups(mesh.tp_size))
        )
        self._borrowed: list[tuple[Tensor, Tensor | None]] | None = None  # see `borrow_once`

    def forward(self, tensor: Tensor) -> Tensor:
        weight, bias = (
            self._needed_rows(self.mesh) if self._lends and self.mesh else (self.weight, self.bias)
        )
        output = column_parallel(
            tensor, weight, bias, sequence_parallel=self.sequence_parallel, mesh=self.mesh
        )
        if self.gather_output and self.mesh is not None and self.mesh.tp_size > 1:
            return torch.cat(
                _whole_blocks(output, self.shard, range(len(self.shard.groups)), self.mesh, -1), -1
            )
        return output

    def keep_borrowed(self, keep: bool) -> None:
        """Starts or ends keeping the rows that other ranks lend; see `borrow_once`."""
        self._borrowed = [] if keep else None

    def _needed_rows(self, mesh: ParallelMesh) -> tuple[Tensor, Tensor | None]:
        """Returns the rows of the weight and the bias that this rank computes with."""
        if self._borrowed and in_inference_mode():
            return self._borrowed[0]
        rows = _borrow_rows(self.weight, self.bias, self.shard, mesh)
        if self._borrowed is not None and in_inference_mode():
            self._borrowed.append(rows)
        return rows


def _borrow_rows(
    weight: Tensor, bias: Tensor | None, shard: Shard, mesh: ParallelMesh
) -> tuple[Tensor, Tensor | None]:
    """Returns this rank's rows, with all rows of the shared blocks that it needs.

    The gradients of borrowed rows are summed and return to the ranks that hold them.
    """
    rank, size = mesh.tp_rank, mesh.tp_size
    shared, ranges = shard.find_exchanged_groups(size), shard.ranges(rank, size)
    first = sum(
        stop - start for start, stop in ranges[: shared[0]]
    )  # shared blocks are the last ones
    own = (
        weight[first:] if bias is None else torch.cat([weight[first:], bias[first:, None]], 1)
    )  # one exchange
    starts = list(accumulate(shard.groups, initial=0))
    rows = [
        block[start - starts[number] : stop - starts[number]]
        for number, block in zip(
            shared, _whole_blocks(own, shard, shared, mesh, 0, partial_grad=True), strict=True
        )
        for start, stop in [shard.compute_ranges(rank, size)[number]]
    ]
    if bias is None:
        return torch.cat([weight[:first], *rows]), None
    columns = weight.shape[1]
    return torch.cat([weight[:first], *(r[:, :columns] for r in rows)]), torch.cat(
        [bias[:first], *(r[:, columns] for r in rows)]
    )


def _whole_blocks(
    part: Tensor,
    shard: Shard,
    blocks: Sequence[int],
    mesh: ParallelMesh,
    dim: int,
    *,
    partial_grad: bool = False,
) -> list[Tensor]:
    """Gathers blocks of a shard, of which `part` holds this rank's rows along `dim`, one block after the other."""
    ranges = [shard.ranges(rank, mesh.tp_size) for rank in range(mesh.tp_size)]
    counts = [[own[block][1] - own[block][0] for block in blocks] for own in ranges]
    missing = sum(counts[0]) - part.shape[dim]  # the first rank has the most
    if missing:
        shape = [*part.shape]
        shape[dim] = missing
        part = torch.cat([part, part.new_zeros(shape)], dim)
    gathered = gather_from_tp(part, mesh, dim, partial_grad=partial_grad)
    sizes = [count for own in counts for count in (*own, sum(counts[0]) - sum(own))]
    pieces = torch.split(gathered, sizes, dim)
    return [torch.cat(pieces[block :: len(blocks) + 1], dim) for block in range(len(blocks))]


@contextmanager
def borrow_once(model: nn.Module) -> Generator[None]:
    """Within the context, a forward pass in inference mode reuses the rows that an earlier one borrowed.

    The weights must not change within it.
    """
    layers = [module for module in model.modules() if isinstance(module, ColumnParallelLinear)]
    for layer in layers:
        layer.keep_borrowed(True)
    try:
        yield
    finally:
        for layer in layers:
            layer.keep_borrowed(False)


class RowParallelLinear(SplitLayer):
    """y = x Wᵀ + b with the input features split over the tensor-parallel ranks. Weight [out, in].

    The bias is replicated and added once to the sum of the ranks' products. Input [..., in/tp]. Output [..., out], or
    [B, S/tp, out] under sequence parallelism.

    Args:
        unit: Each rank's part of the input is a whole number of units, e.g. of head sizes.
        input_is_parallel: The input holds only this rank's features; otherwise it is replicated and split here.
        sequence_parallel: The output is this rank's part [B, S/tp, out] of the sequence.

    Raises:
        ValueError: The input features, or under sequence parallelism the sequence, cannot be split over the ranks;
            the message names the sizes that work.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool = True,
        input_is_parallel: bool = True,
        unit: int = 1,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.input_is_parallel, self.sequence_parallel, self.mesh = (
            input_is_parallel,
            sequence_parallel,
            mesh,
        )
        self.shard = Shard((out_features, in_features), 1, unit=unit)
        self.weight = split_parameter(self.shard, mesh)  # [out, in/tp]
        self.bias = nn.Parameter(torch.full((out_features,), float("nan"))) if bias else None

    def forward(self, tensor: Tensor) -> Tensor:
        if not self.input_is_parallel and self.mesh is not None:
            [(start, stop)] = self.shard.ranges(self.mesh.tp_rank, self.mesh.tp_size)
            tensor = copy_to_tp(tensor, self.mesh)[..., start:stop]
        if self.mesh is None or self.mesh.tp_size == 1:
            return linear(tensor, self.weight, self.bias)
        arguments = autocast_arguments(tensor, self.weight, self.bias)
        return _RowParallel.apply(*arguments, self.mesh.tp_group, self.sequence_parallel)


def column_parallel(
    tensor: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    *,
    sequence_parallel: bool,
    mesh: ParallelMesh | None,
) -> Tensor:
    """Applies `linear` with this rank's rows of the weight: [..., in] or [B, S/tp, in] -> [..., out/tp]."""
    if mesh is None or mesh.tp_size == 1:
        return linear(tensor, weight, bias)
    return _ColumnParallel.apply(
        *autocast_arguments(tensor, weight, bias), mesh.tp_group, sequence_parallel
    )


class _ColumnParallel(Function):
    """Multiplies the whole input by this rank's rows of the weight.

    The backward pass overlaps communication with matrix products. Under sequence parallelism only this rank's part of
    the input is saved; it is gathered while the input gradient is computed. The input gradient is summed while the
    weight gradient is computed.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        if not sequence_parallel:
            return linear(tensor, weight, bias)
        if (fused := gathered_product(tensor, weight.t(), bias, group)) is not None:
            return fused[0]
        return linear(start_all_gather(tensor, SEQUENCE_DIM, group)(), weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (grad,) = grads
        tensor, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        gather = None
        if needs_weight and ctx.sequence_parallel:
            gather = start_all_gather(tensor, SEQUENCE_DIM, ctx.group)
        input_grad = reduction = weight_grad = None
        if needs_input:
            input_grad = _input_grad(grad, weight)
        whole = gather() if gather else tensor
        if input_grad is not None:
            if ctx.sequence_parallel:
                reduction = start_reduce_scatter(input_grad, SEQUENCE_DIM, ctx.group)
            else:
                reduction = start_all_reduce(input_grad, ctx.group)
        if needs_weight:
            weight_grad = _weight_grad(grad, whole)
        bias_grad = grad.flatten(0, -2).sum(0) if needs_bias else None
        return reduction() if reduction else None, weight_grad, bias_grad, None, None


class _RowParallel(Function):
    """Multiplies this rank's features by its columns of the weight, and sums the ranks' partial products in place.

    Only the first rank adds the bias. Its matrix product adds the bias before rounding, so the bias causes no extra
    rounding of a 16-bit result. In the backward pass every rank has the gradient of the whole sequence, so the bias
    gradient needs no communication.
    """

    @staticmethod
    def forward(
        ctx: Any,
        tensor: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        group: dist.ProcessGroup,
        sequence_parallel: bool,
    ) -> Tensor:
        ctx.save_for_backward(tensor, weight)
        ctx.group, ctx.sequence_parallel = group, sequence_parallel
        if (
            sequence_parallel
            and (fused := scattered_product(tensor, weight.t(), bias, group)) is not None
        ):
            return fused
        partial = linear(tensor, weight, bias if group.rank() == 0 else None)
        if sequence_parallel:
            return start_reduce_scatter(partial, SEQUENCE_DIM, group)()
        return start_all_reduce(partial, group)()

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        tensor, weight = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        grad, input_grad = grads[0], None
        if ctx.sequence_parallel:
            fused = gathered_product(grad, weight, None, ctx.group) if needs_input else None
            input_grad, grad = fused or (None, start_all_gather(grad, SEQUENCE_DIM, ctx.group)())
        if needs_input and input_grad is None:
            input_grad = _input_grad(grad, weight)
        weight_grad = _weight_grad(grad, tensor) if needs_weight else None
        bias_grad = grad.flatten(0, -2).sum(0) if needs_bias else None
        return input_grad, weight_grad, bias_grad, None, None


def _input_grad(grad: Tensor, weight: Tensor) -> Tensor:
    return torch.unflatten(matmul(grad.flatten(0, -2), weight), 0, grad.shape[:-1])  # [..., in]


def _weight_grad(grad: Tensor, tensor: Tensor) -> Tensor:
    return matmul(grad.flatten(0, -2).t(), tensor.flatten(0, -2))  # [out, in]


class VocabParallelEmbedding(SplitLayer):
    """An embedding whose table is split by rows over the tensor-parallel ranks and padded to equal numbers of rows.

    Input: integer ids [B, S]. Output [B, S, H], or [B, S/tp, H] under sequence parallelism.

    Args:
        padding_idx: The row of this id gets no gradient.
        pad_multiple: Each rank's number of rows is rounded up to a multiple of this number.
        sequence_parallel: Return this rank's part of the sequence.

    Raises:
        ValueError: An id is outside [0, num_embeddings), even if the table has a padding row for it.
    """

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        *,
        padding_idx: int | None = None,
        pad_multiple: int = 1,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.sequence_parallel, self.mesh = sequence_parallel, mesh
        if padding_idx is not None and not -num_embeddings <= padding_idx < num_embeddings:
            raise ValueError(
                f"padding_idx {padding_idx} is outside a vocabulary of {num_embeddings}"
            )
        self.padding_idx = None if padding_idx is None else padding_idx % num_embeddings
        self.shard = Shard((num_embeddings, embedding_dim), 0, pad_multiple=pad_multiple)
        self.weight = split_parameter(self.shard, mesh)  # [Vp, H]

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed(ids)[0]

    def embed(self, ids: Tensor, table: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Returns the output, and the table [Vp, H] for its next use in the same forward pass.

        The next use is another call or a tied head. The returned table has the values of the weight. If each use takes
        the `table` that the previous one returned, all uses share one gradient, which is as large as the table.
        """
        check_ids(ids, self.num_embeddings, "token id")
        table = self.weight if table is None else table
        if self.mesh is None or self.mesh.tp_size == 1:
            return embedding(ids, table, self.padding_idx)
        [(start, stop)] = self.shard.ranges(self.mesh.tp_rank, self.mesh.tp_size)
        elsewhere = (ids < start) | (ids >= stop)  # [B, S]
        padding_idx = self.padding_idx
        padding_idx = (
            padding_idx - start if padding_idx is not None and start <= padding_idx < stop else None
        )
        rows, table = embedding((ids - start).masked_fill(elsewhere, 0), table, padding_idx)
        rows = rows.masked_fill(elsewhere.unsqueeze(-1), 0)  # [B, S, H]
        if self.sequence_parallel:
            return reduce_scatter_sequence(rows, self.mesh), table
        return reduce_from_tp(rows, self.mesh), table


class VocabParallelHead(SplitLayer):
    """Computes the logits of this rank's slice of the vocabulary from the hidden states; the logits are not gathered.

    Input [B, S, H], or [B, S/tp, H] under sequence parallelism. Output [B, S, Vp]. Column c of rank r is token
    r * Vp + c. Columns past the vocabulary are padding: pass `num_classes=` to `vocab_parallel_cross_entropy`.

    Args:
        tied: The embedding whose weight this head shares, as the same parameter.
        sequence_parallel: The input is this rank's part of the sequence; the logits are those of the whole sequence.
    """

    def __init__(
        self,
        hidden_size: int,
        num_embeddings: int,
        *,
        bias: bool = False,
        tied: VocabParallelEmbedding | None = None,
        pad_multiple: int = 1,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__()
        self.hidden_size, self.num_embeddings = hidden_size, num_embeddings
        self.sequence_parallel, self.mesh = sequence_parallel, mesh
        if tied is not None:
            if (tied.num_embeddings, tied.embedding_dim) != (num_embeddings, hidden_size):
                raise ValueError(
                    f"a head of {num_embeddings} x {hidden_size} cannot be tied to an embedding of "
                    f"{tied.num_embeddings} x {tied.embedding_dim}"
                )
            pad_multiple = tied.shard.pad_multiple
        self.shard = Shard((num_embeddings, hidden_size), 0, pad_multiple=pad_multiple)
        self.tied = tied is not None
        self.weight = (
            tied.weight if tied is not None else split_parameter(self.shard, mesh)
        )  # [Vp, H]
        bias_shard = Shard((num_embeddings,), 0, pad_multiple=pad_multiple)
        self.bias = split_parameter(bias_shard, mesh) if bias else None  # [Vp]

    def forward(self, hidden: Tensor, table: Tensor | None = None) -> Tensor:
        """Returns the logits [B, S, Vp].

        Args:
            hidden: [B, S, H], or [B, S/tp, H] under sequence parallelism.
            table: The table that the tied embedding's `embed` returned; an untied head ignores it.
        """
        weight = self.shared_weight(table)
        return column_parallel(
            hidden, weight, self.bias, sequence_parallel=self.sequence_parallel, mesh=self.mesh
        )

    def losses(
        self, hidden: Tensor, target: Tensor, table: Tensor | None = None, *, ignore_index: int
    ) -> Tensor:
        """Returns the cross-entropy losses [T].

        Args:
            hidden: [T, H], replicated under sequence parallelism too; there the caller sums its gradient over the
                ranks.
            target: int64 [T].
            table: As in `forward`.
            ignore_index: A target with this value has loss 0 and no gradient.
        """
        weight = self.shared_weight(table)
        if self.mesh is None or self.mesh.tp_size == 1:
            check_ids(target.masked_fill(target == ignore_index, 0), self.num_embeddings, "label")
            return linear_cross_entropy(
                hidden,
                weight,
                self.bias,
                target,
                num_classes=self.num_embeddings,
                ignore_index=ignore_index,
            )
        return head_losses(
            hidden,
            weight,
            self.bias,
            target,
            num_classes=self.num_embeddings,
            ignore_index=ignore_index,
            partial_grad=not self.sequence_parallel,
            mesh=self.mesh,
        )

    def shared_weight(self, table: Tensor | None) -> Tensor:
        return table if self.tied and table is not None else self.weight


def embedding(ids: Tensor, table: Tensor, padding_idx: int | None = None) -> tuple[Tensor, Tensor]:
    """Returns `F.embedding(ids, table, padding_idx)`, and the table for its next use in the same forward pass.

    The gradient of the next use arrives here, and the gradient of the rows is added to it in place. So the table's
    gradient, often the largest tensor of a step, is allocated once for all look-ups and products that share the table.
    The next use must therefore allocate its own gradient for the table, as matrix products do.

    Args:
        ids: Integers [...].
        table: [V, H].
        padding_idx: A row that gets no gradient.
    """
    if torch.compiler.is_compiling():  # a compiler cannot trace a gradient that is overwritten
        return F.embedding(ids, table, padding_idx), table
    return _Embedding.apply(ids, table, padding_idx)


class _Embedding(Function):
    """Implements `embedding`: returns the rows, and the table for its next use."""

    @staticmethod
    def forward(
        ctx: Any, ids: Tensor, table: Tensor, padding_idx: int | None
    ) -> tuple[Tensor, Tensor]:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_idx = table.shape, padding_idx
        ctx.set_materialize_grads(False)
        return F.embedding(ids, table), table.view_as(table)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None):
        (rows, total), (ids,) = grads, ctx.saved_tensors
        if rows is None:
            return None, total, None
        if not rows.is_cpu:  # an accelerator's own kernel sums in a fixed order
            padding_idx = -1 if ctx.padding_idx is None else ctx.padding_idx
            own = torch.ops.aten.embedding_dense_backward(
                rows, ids, ctx.shape[0], padding_idx, False
            )
            return None, own if total is None else total.add_(own), None
        if ctx.padding_idx is not None:
            rows = rows.masked_fill((ids == ctx.padding_idx).unsqueeze(-1), 0)
        total = empty_pooled(rows, *ctx.shape).zero_() if total is None else total.contiguous()
        return None, add_rows(total, ids.flatten(), rows.flatten(0, -2)), None


def add_rows(total: Tensor, ids: Tensor, rows: Tensor) -> Tensor:
    """Adds rows[i] of [T, H] to total[ids[i]] of [V, H] in place, and rounds the sum of each id once."""
    if rows.dtype.itemsize >= 4:
        return total.index_add_(0, ids, rows)
    distinct, place = cast(tuple[Tensor, Tensor], cast(Any, ids).unique(return_inverse=True))
    sums = total[distinct].float().index_add_(0, place, rows.float())
    return total.index_copy_(0, distinct, sums.to(total.dtype))


class _Norm(nn.Module):
    """What the norms share. A subclass names its operator."""

    operator: ClassVar[str]

    def __init__(
        self, hidden_size: int, eps: float, sequence_parallel: bool, mesh: ParallelMesh | None
    ):
        super().__init__()
        self.hidden_size, self.eps = hidden_size, eps
        self.sequence_parallel, self.mesh = sequence_parallel, mesh
        self.weight = nn.Parameter(torch.ones(hidden_size))

    def affine(self) -> tuple[Tensor | None, ...]:
        """Returns the parameters that the operator takes."""
        return (self.weight,)

    def forward(
        self, tensor: Tensor, residual: Tensor | None = None, *, return_residual: bool = False
    ) -> Any:
        """Returns norm(h) with h = tensor + residual in one pass over memory, or h = tensor; or (norm(h), h).

        The gradient of the returned h is added within the norm's own backward pass.

        Args:
            tensor: [..., H].
            residual: In the shape of tensor.
            return_residual: Return h too, for the next residual addition.
        """
        if tensor.shape[-1] != self.hidden_size or (
            residual is not None and residual.shape != tensor.shape
        ):
            got = (
                tuple(tensor.shape)
                if residual is None
                else f"{tuple(tensor.shape)} and {tuple(residual.shape)}"
            )
            raise ValueError(
                f"a norm of {self.hidden_size} features needs equal shapes [..., {self.hidden_size}]; got {got}"
            )
        if residual is not None and residual.dtype != tensor.dtype:  # under autocast
            tensor, residual = residual + tensor, None
        split = self.sequence_parallel and self.mesh is not None and self.mesh.tp_size > 1
        forked = return_residual and residual is None
        # A compiler fuses the sum of the two gradients itself, and cannot trace an output that is the input.
        compiling = torch.compiler.is_compiling()
        by_hand = forked and not compiling and torch.is_grad_enabled()
        if split or by_hand:
            group = self.mesh.tp_group if split and self.mesh is not None else None
            output, h = _NormWithResidual.apply(
                self.operator, group, self.eps, by_hand, tensor, residual, *self.affine()
            )
        else:
            arguments, output, h = (tensor, residual, *self.affine()), None, None
            if not compiling and torch.is_inference_mode_enabled() and may_decode(*arguments):
                given, centered = (*arguments, None)[:4], self.operator == "layer_norm"
                output, h = library.call_compiled("norm_of_few_rows", *given, self.eps, centered)
            if output is None:
                output, h = OPS[self.operator](*arguments, self.eps)[:2]
        if not return_residual:
            return output
        return output, tensor if forked and not by_hand else h

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, sequence_parallel={self.sequence_parallel}"


class LayerNorm(_Norm):
    """Layer normalization over the last dimension (Ba et al. 2016, arXiv:1607.06450). Input and output [..., H].

    Args:
        sequence_parallel: The input is this rank's part of the sequence, so the parameters' gradients are summed over
            the tensor-parallel ranks. Autograd does this, so it works with every training engine.
    """

    operator = "layer_norm"

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__(hidden_size, eps, sequence_parallel, mesh)
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def affine(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.bias


class RMSNorm(_Norm):
    """Root-mean-square normalization over the last dimension (Zhang & Sennrich 2019, arXiv:1910.07467).

    It rounds in the same order as transformers: it normalizes in fp32, casts to the input's dtype, then multiplies by
    the weight. Input and output [..., H].

    Args:
        sequence_parallel: See `LayerNorm`.
    """

    operator = "rms_norm"

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__(hidden_size, eps, sequence_parallel, mesh)


class _NormWithResidual(Function):
    """Returns the norm of h and h itself, whose gradient the norm's backward operator adds to its own.

    With a group, the input is this rank's part of the sequence. The ranks' gradients of the weight and the bias, if
    there is one, are summed in fp32 (fp64 for fp64) and rounded once. If they were rounded before the sum too, 16-bit
    gradients would have one and a half times the error.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operator: str,
        group: dist.ProcessGroup | None,
        eps: float,
        forked: bool,
        tensor: Tensor,
        residual: Tensor | None,
        *parameters: Tensor | None,
    ):
        output, summed, *statistics = OPS[operator](tensor, residual, *parameters, eps)
        ctx.save_for_backward(tensor if residual is None else summed, parameters[0], *statistics)
        ctx.operator, ctx.group, ctx.has_residual = (
            OPS[f"{operator}_backward"],
            group,
            residual is not None,
        )
        ctx.has_bias = [parameter is not None for parameter in parameters[1:]]
        ctx.returns_h = (
            forked or residual is not None
        )  # without h, a compiler still passes zeros as its gradient
        ctx.set_materialize_grads(False)  # h may have no gradient
        return output, tensor.view_as(tensor) if forked else summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None):
        h, weight, *statistics = ctx.saved_tensors
        grad = torch.zeros_like(h) if grads[0] is None else grads[0]
        grad_h = grads[1] if ctx.returns_h else None
        own, *parts = ctx.operator(grad, grad_h, h, weight, *statistics, *ctx.has_bias)
        parts = parts[: 1 + sum(ctx.has_bias)]
        if ctx.group is not None:
            parts = start_all_reduce(torch.stack(parts), ctx.group)()  # one all-reduce for both
        parts = [part.to(weight.dtype) for part in parts]
        missing = [None] * ctx.has_bias.count(False)
        return *(None,) * 4, own, own if ctx.has_residual else None, *parts, *missing
