"""Computes attention in which each head has a sink, forward and backward.

    p_j = exp(z_j) / (exp(sink) + sum(exp(z))),   out = dropout(p)·v,   z as in `attention`

A sink is a trained number that joins the softmax like the score of one more key, whose value is
zero: a query can attend to nothing (gpt-oss; Xiao et al. 2023, arXiv:2309.17453). All allowed keys
together are one part of the keys, and the sink is the other. So the output is that of attention
without sinks, times exp(lse of the keys - lse of all), and the backward pass is that of a part whose
output and lse are those of all (attention_parts.py): the kernels of attention serve.

Shapes are those of attention.py.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .attention import check_arguments, count_products, save_for_attention_backward
from .attention_parts import PartRules, attend_to_part, differentiate_part
from .dispatcher import flop_counters
from .matmul import autocast_arguments
from .registration import Op, compute_dtype


def attention_with_sinks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor,
    *,
    scale: float,
    mask: Tensor | None = None,
    causal: bool = False,
    prefix: Tensor | None = None,
    key_lengths: Tensor | None = None,
    dropout: float = 0.0,
    keys: Tensor | None = None,
    first_head: int = 0,
    first_row: int = 0,
) -> Tensor:
    """Computes attention with sinks; returns the output [B, N, Sq, D] in the dtype of q.

    Args:
        sinks: [N], floating point; they get a gradient. The other arguments are those of
            `attention`.

    Raises:
        ValueError: As `attention`, or the sinks are not one number for each head.
    """
    check_arguments(q, k, v, None, mask, causal, prefix, key_lengths, dropout, keys)
    if tuple(sinks.shape) != (q.shape[1],) or not sinks.is_floating_point():
        raise ValueError(
            f"sinks are one number for each of {q.shape[1]} heads, got {sinks.dtype} "
            f"{tuple(sinks.shape)}"
        )
    flops_before = [(counter, counter.get_total_flops()) for counter in flop_counters()]
    out = forward_op(
        *autocast_arguments(q, k, v),
        sinks,
        mask,
        prefix,
        key_lengths,
        keys if dropout else None,
        float(scale),
        causal,
        float(dropout),
        first_head,
        first_row,
    )[0]
    if flops_before:
        count_products(flops_before, q, k, v)
    return out


def _read_rules(
    mask: Tensor | None,
    prefix: Tensor | None,
    key_lengths: Tensor | None,
    keys: Tensor | None,
    scale: float,
    causal: bool,
    dropout: float,
    first_head: int,
    first_row: int,
) -> PartRules:
    """Returns the rules that the last arguments of the operators say."""
    return PartRules(
        scale,
        mask=mask,
        prefix=prefix,
        key_lengths=key_lengths,
        causal=causal,
        dropout=dropout,
        keys=keys,
        first_head=first_head,
        first_row=first_row,
    )


@torch.no_grad()
def _forward(q, k, v, sinks, *rules):
    """Returns the output [B, N, Sq, D], and lse [B, N, Sq] of the keys and the sink."""
    out, own = attend_to_part(q, k, v, _read_rules(*rules))
    lse = torch.logaddexp(own, sinks.to(own.dtype)[:, None])
    # A query without any allowed key has an lse of -inf: its output stays zero.
    return (out * (own - lse).exp()[..., None]).to(q.dtype), lse


@torch.no_grad()
def _differentiate(grad, out, lse, q, k, v, sinks, *rules):
    """Returns the gradients of q, k, v and the sinks.

    With p = exp(sink - lse), the sink's part of a query's probability, the derivative of the output
    by the sink is -p·out.
    """
    grad_q, grad_k, grad_v, _ = differentiate_part(grad, out, lse, q, k, v, _read_rules(*rules))
    products = (grad.to(lse.dtype) * out.to(lse.dtype)).sum(-1)  # [B, N, Sq]
    shares = (sinks.to(lse.dtype)[:, None] - lse).exp()
    grad_sinks = -(shares * products).sum((0, 2))
    return grad_q.to(q.dtype), grad_k.to(k.dtype), grad_v.to(v.dtype), grad_sinks.to(sinks.dtype)


# The gradient formula.


def _setup_context(ctx, inputs, output):
    # The first eight inputs are tensors: q, k, v, sinks, mask, prefix, key_lengths, keys.
    save_for_attention_backward(ctx, inputs, output, tensors=8)


def _backward(ctx, grad, _):
    return *backward_op(grad, *ctx.saved_tensors, *ctx.settings), *(None,) * 9


# The registration.

_ARGUMENTS = (
    "Tensor q, Tensor k, Tensor v, Tensor sinks, Tensor? mask, Tensor? prefix, Tensor? key_lengths, "
    "Tensor? keys, float scale, bool causal, float dropout, SymInt first_head, SymInt first_row"
)


def _allocate(q, *_):
    return torch.empty_like(q), q.new_empty(q.shape[:3], dtype=compute_dtype(q))


def _allocate_backward(grad, out, lse, q, k, v, sinks, *_):
    return tuple(torch.empty_like(x) for x in (q, k, v, sinks))


forward_op = Op(
    "attention_with_sinks",
    _ARGUMENTS,
    ("out", "lse"),
    allocate=_allocate,
    reference=_forward,
    prepare=None,
    compiled=(),
)

backward_op = Op(
    "attention_with_sinks_backward",
    "Tensor grad, Tensor out, Tensor lse, " + _ARGUMENTS,
    ("grad_q", "grad_k", "grad_v", "grad_sinks"),
    allocate=_allocate_backward,
    reference=_differentiate,
    prepare=None,
    compiled=(),
)

forward_op.autograd(_setup_context, _backward)
