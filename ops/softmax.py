"""Computes the scaled, masked, biased softmax of attention scores, with dropout.

    z = scale * scores + bias + mask,   probs = softmax(z, last dimension)

A query attends to a key if the boolean mask allows it and the causal rule, which the prefix (GLM's
`sep`) widens, does too. A row without any allowed key, or with only -inf, is 0 everywhere (as in
scaled_dot_product_attention). A NaN at an allowed key makes its row NaN. The softmax is computed in
fp32 (fp64 for fp64 scores) and rounded once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .autograd import Function, once_differentiable
from .cpu.pool import empty_pooled
from .dropout_mask import attention_rows, kept_elements, row_keys
from .registration import Op, compute_dtype, empty_placeholder, same_dtype

# Rows of a relative bias whose gradients are summed in one operation.
ROWS_AT_ONCE = 64


def masked_softmax(
    scores: torch.Tensor,
    mask: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    prefix: torch.Tensor | None = None,
    dropout: float = 0.0,
    keys: torch.Tensor | None = None,
    first_head: int = 0,
) -> torch.Tensor:
    """Returns the attention probabilities, with dropout applied: [B, N, Sq, Sk] in the dtype of the
    scores.

    Args:
        scores: [B, N, Sq, Sk], fp32, bf16, fp16 or fp64.
        mask: Broadcastable to the scores. Boolean: True allows a key. Floating point: it is added.
        bias: [1 or B, 1 or N, 1 or Sq, 1 or Sk], trained (T5's relative positions); it gets a
            gradient.
        scale: Multiplies the scores, in the precision of the computation.
        causal: Query i attends to the keys j <= i + Sk - Sq, so the last query attends to every
            key.
        prefix: int64 [B], only with `causal`: every query of sample b also attends to the keys j <
            prefix[b].
        dropout: The probability of dropping an attention probability; requires `keys`.
        keys: int64 [B] from `dropout_keys`.
        first_head: The head of the unsplit sample [N of all ranks, Sq, Sk] where this tensor
            begins.

    Raises:
        ValueError: The shapes do not match, a prefix is passed without `causal`, or dropout without
            keys.
    """
    if scores.dim() != 4:
        raise ValueError(
            f"attention scores must be [B, N, Sq, Sk], got shape {tuple(scores.shape)}"
        )
    if prefix is not None and (not causal or tuple(prefix.shape) != (scores.shape[0],)):
        raise ValueError(
            f"a prefix needs causal=True and one length per sample, shape ({scores.shape[0]},); "
            f"got causal={causal} and shape {tuple(prefix.shape)}"
        )
    if dropout and (keys is None or keys.dtype != torch.int64):
        raise ValueError("dropout needs int64 `keys`, one per sample (see dropout_keys)")
    if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
        raise ValueError(
            f"a mask must be boolean (True allows a key) or floating point (added), not {mask.dtype}"
        )
    for name, tensor in (("mask", mask), ("bias", bias)):
        if tensor is None:
            continue
        # Dimensions that are missing in front count as 1.
        sizes = zip(tensor.shape[::-1], scores.shape[::-1], strict=False)
        if any(size not in (1, full) for size, full in sizes):
            raise ValueError(
                f"{name} {tuple(tensor.shape)} does not broadcast to the scores {tuple(scores.shape)}"
            )
    if bias is not None and bias.dim() != 4:
        bias = bias.reshape((1,) * (4 - bias.dim()) + tuple(bias.shape))
    probs, dropped = forward_op(
        scores, mask, bias, prefix, keys, float(scale), causal, float(dropout), first_head
    )
    return dropped if dropout else probs


# The definition, which the kernels are compared with.


def reference(scores, mask, bias, prefix, keys, scale, causal, dropout, first_head):
    """Computes the definition; the arguments are those of `masked_softmax`.

    Returns:
        probs: [B, N, Sq, Sk], the probabilities before dropout, in the dtype of the scores.
        dropped: [B, N, Sq, Sk], the probabilities after it; without dropout a tensor of size 0.
    """
    dtype = compute_dtype(scores)
    z = scores.to(dtype) * scale  # [B, N, Sq, Sk]
    if bias is not None:
        z = z + bias.to(dtype)
    if mask is not None and mask.dtype != torch.bool:
        z = z + mask.to(dtype)
    visible = visible_keys(scores, mask, prefix, causal)
    if visible is not None:
        z = z.masked_fill(~visible, float("-inf"))

    # A row without any allowed key would be NaN; it is 0 instead.
    empty = (z == float("-inf")).all(-1, keepdim=True)  # [B, N, Sq, 1]
    probs = z.masked_fill(empty, 0.0).softmax(-1).masked_fill(empty, 0.0)

    if dropout == 0.0:
        return probs.to(scores.dtype), empty_placeholder(scores)
    keep = _find_kept(scores, keys, dropout, first_head)
    dropped = torch.where(keep, probs / (1.0 - dropout), 0.0)
    return probs.to(scores.dtype), dropped.to(scores.dtype)


def backward_reference(grad, probs, keys, scale, dropout, first_head, bias_batch):
    """Returns the gradients of the scores and of the bias.

    With g the gradient of the probabilities before dropout, the gradient of z is
    probs * (g - sum(g * probs)).

    Args:
        grad: [B, N, Sq, Sk], the gradient of the probabilities after dropout.
        probs: [B, N, Sq, Sk], the probabilities before it.
        bias_batch: The first size of the bias, 1 or B; 0 for no bias.

    Returns:
        grad_scores: [B, N, Sq, Sk], in the dtype of probs.
        grad_bias: [bias_batch, N, Sq, Sk], in the dtype of probs; of size 0 for no bias.
    """
    dtype = compute_dtype(probs)
    grad = grad.to(dtype)
    p = probs.to(dtype)
    if dropout:
        keep = _find_kept(probs, keys, dropout, first_head)
        grad = torch.where(keep, grad / (1.0 - dropout), 0.0)
    grad_z = p * (grad - (grad * p).sum(-1, keepdim=True))
    if not bias_batch:
        grad_bias = empty_placeholder(probs)
    elif bias_batch == probs.shape[0]:
        grad_bias = grad_z.to(probs.dtype)
    else:
        grad_bias = grad_z.sum(0, keepdim=True).to(probs.dtype)
    return (grad_z * scale).to(probs.dtype), grad_bias


def visible_keys(scores, mask, prefix, causal):
    """Returns which keys are allowed: bool, broadcastable to the scores, or None if all keys are."""
    visible = mask if mask is not None and mask.dtype == torch.bool else None
    if not causal:
        return visible
    queries, columns = scores.shape[-2:]
    key = torch.arange(columns, device=scores.device)
    last = torch.arange(queries, device=scores.device)[:, None] + (columns - queries)  # [Sq, 1]
    rule = key <= last  # [Sq, Sk]
    if prefix is not None:
        rule = rule | (key < prefix.reshape(-1, 1, 1, 1))  # [B, 1, Sq, Sk]
    return rule if visible is None else visible & rule


def _find_kept(scores, keys, dropout, first_head):
    """Returns which probabilities dropout keeps, bool in the shape of the scores."""
    _, heads, queries, columns = scores.shape
    rows = attention_rows(first_head, heads, queries, scores.device)
    return kept_elements(row_keys(keys, rows), columns, dropout).reshape(scores.shape)


# The gradient formula.


def _setup_context(ctx, inputs, output):
    _, _, bias, _, keys, ctx.scale, _, ctx.dropout, ctx.first_head = inputs
    ctx.bias_shape = None if bias is None or not bias.requires_grad else bias.shape
    ctx.save_for_backward(output[0], keys)
    # One of the two outputs is not used; its gradient is then None instead of zeros.
    ctx.set_materialize_grads(False)


def _backward(ctx, grad_probs, grad_dropped):
    probs, keys = ctx.saved_tensors
    shape = ctx.bias_shape
    bias_batch = 0 if shape is None else shape[0]
    grad = grad_dropped if ctx.dropout else grad_probs
    if grad is None:
        return (None,) * 9
    grad_scores, grad_bias = backward_op(
        grad, probs, keys, ctx.scale, ctx.dropout, ctx.first_head, bias_batch
    )
    grad_bias = None if shape is None else grad_bias.sum_to_size(shape)
    return grad_scores, None, grad_bias, None, None, None, None, None, None


# The registration.


def _allocate(scores, mask, bias, prefix, keys, scale, causal, dropout, first_head):
    dropped = empty_pooled(scores) if dropout else empty_placeholder(scores)
    return empty_pooled(scores), dropped


def _allocate_backward(grad, probs, keys, scale, dropout, first_head, bias_batch):
    if bias_batch:
        grad_bias = empty_pooled(probs, bias_batch, *probs.shape[1:])
    else:
        grad_bias = empty_placeholder(probs)
    return empty_pooled(probs), grad_bias


def _prepare(scores, mask, bias, prefix, keys, scale, causal, dropout, first_head):
    additive = mask if mask is not None and mask.dtype != torch.bool else None
    return same_dtype(scores, bias, additive) or (
        scores.contiguous(),
        _expand(mask, scores),
        _expand(bias, scores),
        None if prefix is None else prefix.to(torch.int64).contiguous(),
        None if keys is None else keys.contiguous(),
        scale,
        causal,
        dropout,
        first_head,
    )


def _prepare_backward(grad, probs, keys, scale, dropout, first_head, bias_batch):
    keys = None if keys is None else keys.contiguous()
    return same_dtype(grad, probs) or (
        grad.contiguous(),
        probs.contiguous(),
        keys,
        scale,
        dropout,
        first_head,
        bias_batch,
    )


def _expand(tensor, like):
    """Returns `tensor` expanded to the scores' shape with unit stride along the keys; usual masks
    need no copy.
    """
    if tensor is None:
        return None
    tensor = tensor.expand(like.shape)
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _launch_triton(*arguments):
    from .triton_kernels.softmax import launch_forward

    launch_forward(*arguments)


def _launch_triton_backward(*arguments):
    from .triton_kernels.softmax import launch_backward

    launch_backward(*arguments)


forward_op = Op(
    "masked_softmax",
    "Tensor scores, Tensor? mask, Tensor? bias, Tensor? prefix, Tensor? keys, float scale, bool causal, "
    "float dropout, SymInt first_head",
    ("probs", "dropped"),
    allocate=_allocate,
    reference=reference,
    prepare=_prepare,
    triton=_launch_triton,
)

backward_op = Op(
    "masked_softmax_backward",
    "Tensor grad, Tensor probs, Tensor? keys, float scale, float dropout, SymInt first_head, SymInt bias_batch",
    ("grad_scores", "grad_bias"),
    allocate=_allocate_backward,
    reference=backward_reference,
    prepare=_prepare_backward,
    triton=_launch_triton_backward,
)

forward_op.autograd(_setup_context, _backward)


# A bias that has one value for each distance between query and key.


def lay_out_diagonals(values: Tensor, queries: int, keys: int) -> Tensor:
    """Copies one value per distance along the diagonals of a bias on scores.

    Args:
        values: [N, Sq + Sk - 1], the values of the distances key - query in ascending order. The
            last query stands at the last key, so element (i, j) has distance j - i - (Sk - Sq).
        queries: Sq.
        keys: Sk.

    Returns:
        [N, Sq, Sk], contiguous.
    """
    return _LayOutDiagonals.apply(values, queries, keys)


class _LayOutDiagonals(Function):
    """Implements `lay_out_diagonals`.

    The gradient sums the diagonals, in fp32 for 16-bit types.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, queries: int, keys: int) -> Tensor:
        # Row i begins at Sq - 1 - i. The result is contiguous; otherwise the softmax of each layer
        # would copy it.
        return values.contiguous().unfold(1, keys, 1).flip(1)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None, None]:
        return sum_diagonals(grads[0]).to(grads[0].dtype), None, None


def sum_diagonals(grad: Tensor) -> Tensor:
    """Returns the sums of the diagonals of [N, Sq, Sk], [N, Sq + Sk - 1], in fp32 for 16-bit types.

    The order is that of `lay_out_diagonals`. A block of rows is summed at a time. To align the
    diagonals as columns, the rows are padded with zeros and viewed with rows that are one element
    longer, which shifts each row by one more than the row before.
    """
    heads, queries, keys = grad.shape
    dtype = torch.promote_types(grad.dtype, torch.float32)
    total = grad.new_zeros(heads, queries + keys - 1, dtype=dtype)
    for first in range(0, queries, ROWS_AT_ONCE):
        rows = grad[:, first : first + ROWS_AT_ONCE]
        size = rows.shape[1]
        width = keys + size - 1
        shifted = grad.new_zeros(heads, size * (width + 1))
        shifted[:, size - 1 :][:, : size * width].unflatten(1, (size, width))[..., :keys] = rows
        sums = torch.sum(shifted.view(-1, size, width + 1), 1, dtype=dtype)
        total[:, queries - first - size :][:, :width] += sums[:, :width]
    return total
