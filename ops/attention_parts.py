"""Computes attention to a part of the keys, and merges such parts.

Of each query, a part has its own output and lse = log(sum(exp(z))) over its own keys. The output for
all keys is the mean of the parts' outputs, weighted by exp(lse of the part - lse of all): see
`merge_part`. The backward pass of a part takes the output and the lse of all keys, with which
exp(z - lse) is the probability among all keys (Liu et al., 2023, arXiv:2310.01889).

The kernels of attention compute a part, unless it has dropout, whose mask depends on the keys' places,
and begins behind the first key. Then, and where no kernel is built, a block of queries at a time is
computed here.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from .attention import backward_op, cap_scores, choose_block_rows, find_obstacle, forward_op
from .dropout_mask import attention_rows, kept_elements, keys_from_row, row_keys
from .matmul import matmul
from .registration import compute_dtype
from .softmax import lay_out_diagonals, sum_diagonals


class PartRules(NamedTuple):
    """What applies to the scores of some queries and keys besides q and k.

    The fields are those of `attention`, for these queries and keys, and:

    Attributes:
        first_row, first_key: The places of the first query and key, on which dropout depends.
    """

    scale: float
    relative_bias: Tensor | None = None
    mask: Tensor | None = None
    prefix: Tensor | None = None
    key_lengths: Tensor | None = None
    causal: bool = False
    dropout: float = 0.0
    keys: Tensor | None = None
    first_head: int = 0
    first_row: int = 0
    first_key: int = 0
    softcap: float | None = None


def attend_to_part(q: Tensor, k: Tensor, v: Tensor, rules: PartRules) -> tuple[Tensor, Tensor]:
    """Returns the output [B, N, Sq, D], and lse [B, N, Sq] in fp32 (fp64 for fp64)."""
    if _has_kernel(q, k, v, rules):
        return forward_op(q, k, v, *_list_tensors(rules), *_list_settings(rules))
    outputs: list[Tensor] = []
    every_lse: list[Tensor] = []
    for start, end in _split_rows(q, k):
        products = _compute_products(q, k, rules, start, end)
        z = _apply_rules(products, k, rules, q.shape[2], start)
        lse = z.logsumexp(-1)
        weights = _drop(_compute_probabilities(z, lse), rules, start)
        outputs.append(
            matmul(_fold(weights.to(v.dtype), v), v.flatten(0, 1)).view(q[:, :, start:end].shape)
        )
        every_lse.append(lse)
    return torch.cat(outputs, 2), torch.cat(every_lse, 2)


def differentiate_part(
    grad: Tensor, out: Tensor, lse: Tensor, q: Tensor, k: Tensor, v: Tensor, rules: PartRules
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Returns what a part adds to the gradients of q, k, v and of the relative bias.

    Args:
        grad: The gradient of the output for all keys.
        out, lse: The output, and lse, for all keys.
    """
    if _has_kernel(q, k, v, rules):
        arguments = (grad, out, lse, q, k, v, *_list_tensors(rules), *_list_settings(rules))
        grad_q, grad_k, grad_v, grad_bias = backward_op(*arguments)
        return grad_q, grad_k, grad_v, None if rules.relative_bias is None else grad_bias
    wide = compute_dtype(q)
    grad_q = torch.empty(q.shape, dtype=wide, device=q.device)
    grad_k = torch.zeros(k.shape, dtype=wide, device=q.device)
    grad_v = torch.zeros(k.shape, dtype=wide, device=q.device)
    grad_bias: Tensor | None = None
    if rules.relative_bias is not None:
        grad_bias = torch.zeros(rules.relative_bias.shape, dtype=wide, device=q.device)
    products = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)  # [B, N, Sq, 1]
    flat_k = k.flatten(0, 1)
    for start, end in _split_rows(q, k):
        rows = slice(start, end)
        capped = _compute_products(q, k, rules, start, end)
        z = _apply_rules(capped, k, rules, q.shape[2], start)
        probs = _compute_probabilities(z, lse[:, :, rows])
        own_grad = _fold(grad[:, :, rows], k)  # [B K, N / K R, D]
        weights = _fold(_drop(probs, rules, start).to(grad.dtype), k)
        grad_v.flatten(0, 1).add_(matmul(weights.mT, own_grad))
        grad_probs = matmul(own_grad, v.flatten(0, 1).mT).view(probs.shape).to(wide)
        grad_scores = probs * (_drop(grad_probs, rules, start) - products[:, :, rows])
        if grad_bias is not None:
            sums = sum_diagonals(grad_scores.sum(0))
            first = q.shape[2] - end
            grad_bias[:, first : first + sums.shape[1]] += sums
        if rules.softcap:
            grad_scores = grad_scores * (1 - (capped / rules.softcap).square())
        folded = _fold((grad_scores * rules.scale).to(q.dtype), k)
        grad_q[:, :, rows] = matmul(folded, flat_k).view(q[:, :, rows].shape)
        grad_k.flatten(0, 1).add_(matmul(folded.mT, _fold(q[:, :, rows], k)))
    return grad_q, grad_k, grad_v, grad_bias


def merge_part(out: Tensor, lse: Tensor, part_out: Tensor, part_lse: Tensor) -> None:
    """Adds a part to the output and lse of others in place; they begin as zeros and -inf."""
    merged = torch.logaddexp(lse, part_lse)
    # A query that has seen no key keeps zeros.
    own = (lse - merged).exp().nan_to_num(0.0)
    new = (part_lse - merged).exp().nan_to_num(0.0)
    out.mul_(own[..., None]).addcmul_(part_out.to(out.dtype), new[..., None])
    lse.copy_(merged)


def _has_kernel(q: Tensor, k: Tensor, v: Tensor, rules: PartRules) -> bool:
    if rules.dropout and rules.first_key:
        return False
    if forward_op.choose_variant(q.device.type) == "reference":
        return False
    return not isinstance(
        find_obstacle(q, k, v, (*_list_tensors(rules), *_list_settings(rules))), str
    )


def _list_tensors(rules: PartRules) -> tuple[Tensor | None, ...]:
    keys = rules.keys if rules.dropout else None
    return rules.relative_bias, rules.mask, rules.prefix, rules.key_lengths, keys


def _list_settings(rules: PartRules) -> tuple[float | bool | int, ...]:
    settings = (rules.scale, rules.causal, rules.dropout, rules.first_head, rules.first_row)
    return *settings, rules.softcap or 0.0


def _split_rows(q: Tensor, k: Tensor) -> Iterator[tuple[int, int]]:
    """Yields ranges of queries whose scores exist at a time."""
    batch, heads, queries, _ = q.shape
    itemsize = torch.finfo(compute_dtype(q)).bits // 8
    rows = choose_block_rows(batch * heads * k.shape[2] * itemsize, q.device.type)
    for start in range(0, queries, rows):
        yield start, min(start + rows, queries)


def _compute_products(q: Tensor, k: Tensor, rules: PartRules, start: int, end: int) -> Tensor:
    """Returns the scaled and capped scores [B, N, R, Sk] of the queries [start, end)."""
    products = matmul(_fold(q[:, :, start:end], k), k.flatten(0, 1).mT)
    scores = products.view(*q.shape[:2], end - start, k.shape[2]).to(compute_dtype(q))
    if rules.softcap:
        return cap_scores(scores, rules.scale, rules.softcap)
    return scores * rules.scale


def _apply_rules(z: Tensor, k: Tensor, rules: PartRules, queries: int, start: int) -> Tensor:
    """Returns z [B, N, R, Sk] of the queries from `start` on with the bias and the mask, -inf where
    a key is not allowed.

    Args:
        queries: Sq.
    """
    size = z.shape[2]
    end = start + size
    keys = k.shape[2]
    if rules.relative_bias is not None:
        first = queries - end
        bias = rules.relative_bias[:, first : first + size + keys - 1]
        z = z + lay_out_diagonals(bias, size, keys)
    key = torch.arange(keys, device=z.device)
    if rules.causal:
        # The last query is at the last key.
        query = torch.arange(start, end, device=z.device)[:, None] + (keys - queries)
        visible = key <= query
        if rules.prefix is not None:
            visible = visible | (key < rules.prefix.reshape(-1, 1, 1, 1))
        z = z.masked_fill(~visible, float("-inf"))
    if rules.key_lengths is not None:
        z = z.masked_fill(key >= rules.key_lengths.reshape(-1, 1, 1, 1), float("-inf"))
    if rules.mask is not None:
        mask = rules.mask
        if mask.shape[2] > 1:
            mask = mask[:, :, start:end]
        z = z.masked_fill(~mask, float("-inf")) if mask.dtype == torch.bool else z + mask
    return z


def _compute_probabilities(z: Tensor, lse: Tensor) -> Tensor:
    """Returns exp(z - lse), 0 for queries without a key."""
    return (z - lse.masked_fill(lse.isinf(), 0.0)[..., None]).exp()


def _drop(x: Tensor, rules: PartRules, start: int) -> Tensor:
    """Returns probabilities [B, N, R, Sk], or their gradients, with dropout."""
    if not rules.dropout:
        return x
    assert rules.keys is not None
    keys = keys_from_row(rules.keys, rules.first_row + start)
    rows = attention_rows(rules.first_head, x.shape[1], x.shape[2], x.device)
    kept = kept_elements(row_keys(keys, rows), x.shape[3], rules.dropout, rules.first_key)
    return x * kept.view(x.shape) / (1 - rules.dropout)


def _fold(x: Tensor, k: Tensor) -> Tensor:
    """Returns x [B, N, R, C] as [B K, N / K R, C]: the rows that share a head of k [B, K, Sk, D]."""
    return x.reshape(k.shape[0] * k.shape[1], -1, x.shape[3])
