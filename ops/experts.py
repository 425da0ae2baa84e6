"""Routes tokens to experts, multiplies each expert's tokens by its matrices, and adds up the results.

A mixture of experts (Shazeer et al. 2017, arXiv:1701.06538) sends each of T tokens to k of E
experts. Tokens are sorted by their expert, so that the tokens of one expert are neighbors:

    weights, experts = route_tokens(logits, k)  # [T, k] each
    order, counts = sort_by_expert(experts, E)  # [T k], [E]
    rows = permute_tokens(x, order, k)  # [T k, H], sorted
    rows = grouped_linear(rows, matrices, counts)  # [T k, F], matrices [E, F, H]
    …
    y = combine_tokens(rows, weights, order)  # [T, H]

`mix_experts` is the naive reference of these steps together. An accelerator multiplies all experts
at once (`torch.nn.functional.grouped_mm`) and never waits for the counts. On a CPU our kernel of
large products computes all experts in one call where it is faster than PyTorch's products, which
are called for one expert after the other.

An expert with a limited capacity drops tokens (Fedus et al. 2022, arXiv:2101.03961). A dropped pair
has the number E instead of an expert's, so that it is sorted behind all others: the grouped products
leave out these rows, and set theirs to zero.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .autograd import Function, once_differentiable
from .cpu.pool import empty_pooled
from .cpu.products import multiply_groups, multiply_groups_outer
from .device import records_graph
from .matmul import autocast_arguments
from .registration import Op

# The rows of a grouped product on an accelerator begin at multiples of so many bytes.
_ALIGNMENT = 16


def mix_experts(
    x: Tensor,
    weights: Tensor,
    experts: Tensor,
    gate_up: Tensor,
    down: Tensor,
    activate: Callable[[Tensor], Tensor],
) -> Tensor:
    """Returns the weighted sum of each token's experts, [T, H]: the reference, in plain PyTorch.

    Args:
        x: [T, H].
        weights: [T, k], what each chosen expert's result is multiplied by.
        experts: int64 [T, k], the numbers of the chosen experts.
        gate_up: [E, 2F, H].
        down: [E, F, H].
        activate: Maps [n, 2F] to [n, F].
    """
    y = torch.zeros_like(x)
    for number, (first, second) in enumerate(zip(gate_up, down, strict=True)):
        token, choice = torch.where(experts == number)
        rows = activate(x[token] @ first.t()) @ second
        y = y.index_add(0, token, rows * weights[token, choice, None].to(rows.dtype))
    return y


def route_tokens(
    logits: Tensor, top_k: int, *, normalize: bool = True, softmax_first: bool = True
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token.

    Args:
        logits: The router's scores [..., E].
        top_k: The number of experts of a token.
        normalize: Whether a token's weights are divided by their sum. Only if softmax_first.
        softmax_first: Whether weights are probabilities over all experts (Mixtral, Qwen), or over
            the chosen ones (gpt-oss).

    Returns:
        The weights, [..., k] in fp32 or wider, and the numbers of the experts, int64 [..., k], from
        the most to the least probable.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    if not softmax_first:
        highest, experts = torch.topk(wide, top_k, dim=-1)
        return torch.softmax(highest, dim=-1), experts
    weights, experts = torch.topk(torch.softmax(wide, dim=-1), top_k, dim=-1)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, experts


def route_by_corrected_scores(
    logits: Tensor,
    correction: Tensor,
    top_k: int,
    *,
    groups: int = 1,
    top_groups: int = 1,
    normalize: bool = True,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Chooses the experts of each token as DeepSeek-V3 does (DeepSeek-AI 2024, arXiv:2412.19437,
    section 2.1.2).

    Scores are sigmoids. A correction is added to them when experts are chosen, and not to the
    weights. Neighboring experts are a group, and only the experts of the best groups, those with
    the largest sum of the two best scores, are chosen from.

    Args:
        logits: The router's outputs [..., E].
        correction: fp32 [E].
        top_k: The number of experts of a token.
        groups: The number of groups, which divides E into parts of at least 2 experts.
        top_groups: The number of groups that experts are chosen from.
        normalize: Whether a token's weights are divided by their sum.
        scale: What the weights are multiplied by.

    Returns:
        The weights, [..., k] in fp32 or wider, and the numbers of the experts, int64 [..., k], from
        the largest to the smallest corrected score.
    """
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    scores = torch.sigmoid(wide)
    with torch.no_grad():
        corrected = scores + correction
        if top_groups < groups:
            by_group = corrected.unflatten(-1, (groups, -1))  # [..., groups, E / groups]
            sums = by_group.topk(2, dim=-1).values.sum(-1)
            best = sums.topk(top_groups, dim=-1).indices
            is_open = torch.zeros_like(sums, dtype=torch.bool).scatter(-1, best, True)
            corrected = by_group.masked_fill(~is_open[..., None], float("-inf")).flatten(-2)
        experts = corrected.topk(top_k, dim=-1).indices
    weights = scores.gather(-1, experts)
    if normalize:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * scale, experts


def route_within_capacity(
    logits: Tensor, capacity: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Chooses one expert for each token, which computes the first tokens of a row alone (Switch
    Transformers).

    Args:
        logits: The router's scores [B, S, E], in fp32 or wider.
        capacity: The number of tokens of a row that an expert computes at most.
        dtype: Of the model. Probabilities are rounded to it before they are compared, as
            transformers does.

    Returns:
        The probability of each token's expert, [B, S], and the expert, int64 [B, S]. A token behind
        an expert's capacity has the probability 0 and the number E.
    """
    weights, experts = torch.softmax(logits, dim=-1).to(dtype).max(-1)
    count = logits.shape[-1]
    is_dropped = count_places(experts, count) >= capacity
    return weights.masked_fill(is_dropped, 0), experts.masked_fill(is_dropped, count)


def route_twice_within_capacity(
    logits: Tensor,
    capacity: int,
    dtype: torch.dtype,
    is_token: Tensor | None = None,
    *,
    normalize_first: bool = False,
    prioritize: bool = False,
) -> tuple[Tensor, Tensor]:
    """Chooses two experts for each token, which compute the first tokens of a batch alone (NLLB).

    All first choices have their places before all second ones.

    Args:
        logits: The router's scores [T, E], in fp32 or wider.
        capacity: The number of tokens of the batch that an expert computes at most.
        dtype: As for `route_within_capacity`.
        is_token: bool [T], False for tokens that get no expert; None if all get some.
        normalize_first: Whether the probabilities of both choices are divided by their sum before
            the capacity is applied; otherwise by the sum of those that are within it.
        prioritize: Whether the places are in the order of the highest probabilities, instead of the
            order of the tokens.

    Returns:
        The weights, [T, 2], and the experts, int64 [T, 2]. A choice that an expert does not compute
        has the weight 0 and the number E.
    """
    count = logits.shape[-1]
    probabilities = torch.softmax(logits, dim=-1).to(dtype)
    highest, first = probabilities.max(-1)
    others = logits.scatter(-1, first[:, None], float("-inf"))
    second = others.argmax(-1)
    experts = torch.stack([first, second], dim=-1)  # [T, 2]
    weights = probabilities.gather(-1, experts)
    smallest = torch.finfo(dtype).eps
    if normalize_first:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=smallest)
    if is_token is not None:
        experts = experts.masked_fill(~is_token[:, None], count)

    # The place of each choice among those of its expert.
    queue = experts
    order = None
    if prioritize:
        order = (-highest).argsort()
        queue = experts[order]
    places = count_places(queue.t(), count).t()  # [T, 2]
    if order is not None:
        places = places[order.argsort()]
    chosen = experts.new_zeros(count + 1)
    chosen = chosen.scatter_add(0, experts[:, 0], torch.ones_like(first))
    behind = torch.stack([torch.zeros_like(first), chosen[experts[:, 1]]], dim=-1)

    is_dropped = (places + behind >= capacity) | (experts == count)
    weights = weights.masked_fill(is_dropped, 0)
    if not normalize_first:
        weights = weights / weights.sum(-1, keepdim=True).clamp(min=smallest)
    return weights, experts.masked_fill(is_dropped, count)


def count_places(experts: Tensor, count: int) -> Tensor:
    """Returns how many of the pairs before each one have the same expert, int64 [..., T].

    Args:
        experts: int64 [..., T]. A number that is not below `count` stands for no expert.
        count: The number E of experts.
    """
    numbers = torch.arange(count, device=experts.device)
    chosen = (experts[..., None] == numbers).to(torch.int64)  # [..., T, E]
    places = chosen.cumsum(-2) - 1
    own = experts.clamp(max=count - 1)[..., None]
    return places.gather(-1, own)[..., 0]


def sort_by_expert(experts: Tensor, count: int, *, drops: bool = False) -> tuple[Tensor, Tensor]:
    """Sorts the pairs of a token and one of its experts by the expert, and by the token second.

    Args:
        experts: int64 [T, k].
        count: The number E of experts.
        drops: Whether some pairs may be dropped; they have the number E, and are the last ones.

    Returns:
        order: int64 [T k], the pair (number t k + choice) at each place of the sorted order.
        counts: int64 [E], the number of pairs of each expert.
    """
    numbers = experts.reshape(-1)
    order = numbers.argsort(stable=True)
    length = count + 1 if drops else count
    counts = numbers.new_zeros(length).scatter_add_(0, numbers, torch.ones_like(numbers))
    return order, counts[:count] if drops else counts


def permute_tokens(x: Tensor, order: Tensor, top_k: int) -> Tensor:
    """Returns the token of each sorted pair, [T k, H], of x [T, H]."""
    return _Permute.apply(x, order, top_k)


def permute_rows(rows: Tensor, order: Tensor) -> Tensor:
    """Returns the rows [M, H] in another order, int64 [M], which has each number once."""
    return _Permute.apply(rows, order, 1)


def combine_tokens(rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
    """Returns each token's weighted sum of its experts' results, [T, H].

    It is added up in fp32 or wider, and rounded once.

    Args:
        rows: The results of the sorted pairs, [T k, H].
        weights: [T, k].
        order: int64 [T k].
    """
    return _Combine.apply(rows, weights, order)


def grouped_linear(x: Tensor, weight: Tensor, counts: Tensor, *, drops: bool = False) -> Tensor:
    """Returns x Wᵀ with each row's own matrix, [M, F].

    Args:
        x: [M, C], sorted by expert.
        weight: The matrices [E, F, C].
        counts: int64 [E], the number of rows of each expert.
        drops: Whether there may be rows behind those of the experts. Their results are zeros.
    """
    x, weight = _cast(x, weight)
    if x.is_cpu or not _takes_grouped_product(x, weight):
        return _multiply_by_expert(x, weight, counts, True)
    return _grouped_mm(x, weight.transpose(-1, -2), counts, drops)


def grouped_product(x: Tensor, weight: Tensor, counts: Tensor, *, drops: bool = False) -> Tensor:
    """Returns x W with each row's own matrix, [M, F], of matrices [E, C, F]; see `grouped_linear`."""
    x, weight = _cast(x, weight)
    if x.is_cpu or not _takes_grouped_product(x, weight):
        return _multiply_by_expert(x, weight, counts, False)
    return _grouped_mm(x, weight, counts, drops)


def add_expert_bias(rows: Tensor, bias: Tensor, counts: Tensor) -> Tensor:
    """Adds each row's own bias.

    Args:
        rows: [M, F], sorted by expert. Rows behind those of the experts get the last one's.
        bias: [E, F].
        counts: int64 [E], the number of rows of each expert.
    """
    places = torch.arange(len(rows), device=rows.device)
    numbers = torch.searchsorted(counts.cumsum(0), places, right=True)
    numbers = numbers.clamp(max=len(bias) - 1)
    return rows + bias.index_select(0, numbers).to(rows.dtype)


def _cast(x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    first, second = autocast_arguments(x, weight)
    assert first is not None
    assert second is not None
    return first, second


def _takes_grouped_product(x: Tensor, weight: Tensor) -> bool:
    """Returns whether PyTorch's grouped product takes these tensors on an accelerator."""
    if x.dtype not in (torch.bfloat16, torch.float16, torch.float32) or not len(x):
        return False
    return all(size * x.dtype.itemsize % _ALIGNMENT == 0 for size in weight.shape[1:])


def _grouped_mm(x: Tensor, weight: Tensor, counts: Tensor, drops: bool) -> Tensor:
    ends = counts.cumsum(0).to(torch.int32)
    if not drops:
        return F.grouped_mm(x.contiguous(), weight, offs=ends)
    # PyTorch leaves the rows behind the last end unwritten, in the gradient of x too.
    unused = (torch.arange(len(x), device=x.device) >= ends[-1])[:, None]
    x = x.masked_fill(unused, 0)
    return F.grouped_mm(x.contiguous(), weight, offs=ends).masked_fill(unused, 0)


def _multiply_by_expert(x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
    """Multiplies the rows of each expert where the host must know the counts.

    A compiler, which cannot trace what depends on them, records one operator.
    """
    if records_graph():
        return expert_products_op(x, weight, counts, transposed)
    return _GroupedProduct.apply(x, weight, counts, transposed)


class _GroupedProduct(Function):
    """Implements `_multiply_by_expert`; the backward pass need not read the counts again."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: Tensor, transposed: bool) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.counts = counts.tolist()
        ctx.transposed = transposed
        return _multiply_groups(x, weight, ctx.counts, transposed)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        x, weight = ctx.saved_tensors
        grad = grads[0]
        input_grad = None
        weight_grad = None
        if ctx.needs_input_grad[0]:
            input_grad = _multiply_groups(grad, weight, ctx.counts, not ctx.transposed)
        if ctx.needs_input_grad[1]:
            weight_grad = _multiply_weight_grad(grad, x, ctx.counts, ctx.transposed)
        return input_grad, weight_grad, None, None


def _multiply_groups(x: Tensor, weight: Tensor, counts: list[int], transposed: bool) -> Tensor:
    """Returns each expert's rows times its matrix of [E, C, F], or of [E, F, C] transposed, [M, F].

    Rows behind those of the experts give zeros.
    """
    width = weight.shape[1] if transposed else weight.shape[2]
    out = empty_pooled(x, len(x), width)
    used = sum(counts)
    if used < len(x):
        out[used:].zero_()
    if multiply_groups(x, weight, counts, transposed, out):
        return out
    for number, start, stop in _list_spans(counts):
        matrix = weight[number].t() if transposed else weight[number]
        torch.mm(x[start:stop], matrix, out=out[start:stop])
    return out


def _multiply_weight_grad(grad: Tensor, x: Tensor, counts: list[int], transposed: bool) -> Tensor:
    """Returns the gradient of the matrices, [E, C, F], or [E, F, C] of transposed ones."""
    first = grad if transposed else x
    second = x if transposed else grad
    products = empty_pooled(x, len(counts), first.shape[1], second.shape[1])
    if multiply_groups_outer(first, second, counts, products):
        return products
    for number, count in enumerate(counts):
        if not count:
            products[number].zero_()
    for number, start, stop in _list_spans(counts):
        torch.mm(first[start:stop].t(), second[start:stop], out=products[number])
    return products


def _list_spans(counts: list[int]) -> list[tuple[int, int, int]]:
    """Returns (expert, start, stop) of the rows of each expert that has any."""
    spans: list[tuple[int, int, int]] = []
    start = 0
    for number, count in enumerate(counts):
        if count:
            spans.append((number, start, start + count))
        start += count
    return spans


# The operator that a compiler records.


def _products(x, weight, counts, transposed):
    return (_multiply_groups(x, weight, counts.tolist(), transposed),)


def _products_backward(grad, x, weight, counts, transposed):
    numbers = counts.tolist()
    return (
        _multiply_groups(grad, weight, numbers, not transposed),
        _multiply_weight_grad(grad, x, numbers, transposed),
    )


def _allocate_products(x, weight, counts, transposed):
    return (x.new_empty(x.shape[0], weight.shape[1] if transposed else weight.shape[2]),)


def _allocate_products_backward(grad, x, weight, counts, transposed):
    return torch.empty_like(x), torch.empty_like(weight)


def _setup_context(ctx, inputs, output):
    *tensors, ctx.transposed = inputs
    ctx.save_for_backward(*tensors)


def _backward(ctx, grad):
    grads = expert_products_backward_op(grad, *ctx.saved_tensors, ctx.transposed)
    return *grads, None, None


expert_products_op = Op(
    "expert_products",
    "Tensor x, Tensor weight, Tensor counts, bool transposed",
    ("y",),
    allocate=_allocate_products,
    reference=_products,
    prepare=None,
    compiled=(),
)

expert_products_backward_op = Op(
    "expert_products_backward",
    "Tensor grad, Tensor x, Tensor weight, Tensor counts, bool transposed",
    ("grad_x", "grad_weight"),
    allocate=_allocate_products_backward,
    reference=_products_backward,
    prepare=None,
    compiled=(),
)

expert_products_op.autograd(_setup_context, _backward)


class _Permute(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, top_k: int) -> Tensor:
        ctx.save_for_backward(order)
        ctx.top_k = top_k
        return x.index_select(0, order // top_k)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        (order,) = ctx.saved_tensors
        grad = grads[0]
        # Each token's gradients are put side by side and summed, in the same order on every device.
        by_pair = torch.empty_like(grad).index_copy_(0, order, grad)
        if ctx.top_k == 1:
            return by_pair, None, None
        by_token = by_pair.view(-1, ctx.top_k, grad.shape[-1])
        wide = torch.promote_types(grad.dtype, torch.float32)
        return by_token.sum(1, dtype=wide).to(grad.dtype), None, None


class _Combine(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weights: Tensor, order: Tensor) -> Tensor:
        ctx.save_for_backward(rows, weights, order)
        by_pair = torch.empty_like(rows).index_copy_(0, order, rows)
        by_token = by_pair.view(*weights.shape, rows.shape[-1])  # [T, k, H]
        return (by_token * weights[..., None]).sum(1).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor):
        rows, weights, order = ctx.saved_tensors
        own = grads[0].index_select(0, order // weights.shape[1])  # [T k, H]
        rows_grad = None
        weights_grad = None
        if ctx.needs_input_grad[0]:
            factors = weights.reshape(-1).index_select(0, order)
            rows_grad = (own * factors[:, None]).to(rows.dtype)
        if ctx.needs_input_grad[1]:
            wide = torch.promote_types(rows.dtype, weights.dtype)
            products = (rows.to(wide) * own).sum(-1).to(weights.dtype)
            by_pair = torch.empty_like(products).index_copy_(0, order, products)
            weights_grad = by_pair.view_as(weights)
        return rows_grad, weights_grad, None
