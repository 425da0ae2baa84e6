"""Attention whose keys pass around a ring is that of whole sequences, with gradients, and sends what the docs say.

Oracle: `ops.attention` on whole tensors, in fp64; its own tests compare it with PyTorch's operators.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import torch
from every_case import every_day

CHUNK = 5  # positions of a chunk, of which each rank has two
BATCH, HEADS, KV_HEADS, SIZE = 2, 4, 2, 8
KINDS = ["causal", "full", "prefix", "padded", "complete", "cross", "capped"]


def make_inputs(kind: str, ranks: int, dtype: torch.dtype) -> dict[str, Any]:
    """q, k, v, a bias, and the rules of whole sequences."""
    generator = torch.Generator().manual_seed(3)
    queries = 2 * CHUNK * ranks
    keys = 3 * ranks if kind == "cross" else queries

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype)

    made: dict[str, Any] = {
        "q": draw(BATCH, HEADS, queries, SIZE),
        "k": draw(BATCH, KV_HEADS, keys, SIZE),
        "v": draw(BATCH, KV_HEADS, keys, SIZE),
        "weights": draw(BATCH, HEADS, queries, SIZE),
        "bias": draw(HEADS, queries + keys - 1),
        "causal": kind in ("causal", "prefix", "capped"),
        "softcap": 0.7 if kind == "capped" else None,
        "prefix": None,
        "mask": None,
    }
    if kind == "prefix":
        made["prefix"] = torch.tensor([queries - 3, 2])
    if kind == "padded":
        made["mask"] = (torch.arange(keys) < torch.tensor([[keys - 4], [2]]))[:, None, None]
        made["causal"] = True
    if kind == "complete":
        distance = torch.arange(queries)[:, None] - torch.arange(keys)
        made["mask"] = (distance.abs() < 4)[None, None]
    return made


def measure_differences(
    mesh: Any, found: Any, expected: Any, weights: Any, own: list[Any], whole: list[Any]
) -> list[float]:
    """Returns the largest differences of this rank's output, and of each input's gradient summed over the ranks.

    Args:
        found: This rank's part of the output; `expected` is the whole one.
        weights: The gradient of the whole output.
        own: This rank's leaves; `whole` are those of the oracle, which have their gradients.
    """
    import torch.distributed as dist

    from shardzoo.mpu import cut_sequence

    (found * cut_sequence(weights, mesh, 2)).sum().backward()
    differences = [float((found - cut_sequence(expected, mesh, 2)).abs().max())]
    for mine, wanted in zip(own, whole, strict=True):
        dist.all_reduce(mine.grad, group=mesh.cp_group)
        differences.append(float((mine.grad - wanted.grad).abs().max()))
    return differences


def compare(
    mesh: Any, kind: str, dtype: torch.dtype, dropout: float, balanced: bool
) -> list[float]:
    """The largest differences of the output and of the gradients of q, k, v and the bias."""
    from shardzoo.mpu import cut_sequence
    from shardzoo.mpu.ring import RingRules, balance_chunks, restore_chunks, ring_attention
    from shardzoo.ops import attention, dropout_keys

    made = make_inputs(kind, mesh.cp_size, dtype)
    keys = dropout_keys(77, 0, BATCH) if dropout else None
    dropped = {"dropout": dropout, "keys": keys, "first_head": 1} if dropout else {}
    rules = {name: made[name] for name in ("causal", "prefix", "mask", "softcap")}
    names = ("q", "k", "v", "bias")
    whole = [made[name].double().requires_grad_() for name in names]
    expected = attention(*whole[:3], relative_bias=whole[3], scale=0.4, **rules, **dropped)
    (expected * made["weights"].double()).sum().backward()

    own = [made[name].requires_grad_() for name in names]
    q, k, v = (cut_sequence(x, mesh, 2) for x in own[:3])
    ring = RingRules(0.4, made["q"].shape[2], **rules, **dropped, is_balanced=balanced)
    if balanced:
        q, k, v = (balance_chunks(x, mesh) for x in (q, k, v))
    found = ring_attention(q, k, v, own[3], ring, mesh)
    if balanced:
        found = restore_chunks(found, mesh)
    return measure_differences(mesh, found, expected, made["weights"], own, whole)


def check_every_kind(mesh: Any) -> list[str]:
    wrong = []
    for kind in KINDS:
        for dtype, dropout in ((torch.float32, 0.0), (torch.float32, 0.3), (torch.float64, 0.2)):
            can_balance = kind in ("causal", "prefix", "padded", "capped")
            for balanced in (False, True) if can_balance else (False,):
                limit = 3e-5 if dtype == torch.float32 else 1e-12
                differences = compare(mesh, kind, dtype, dropout, balanced)
                if not max(differences) < limit:
                    wrong.append(f"{kind} {dtype} {dropout} {balanced}: {differences}")
    return wrong


def test_it_is_attention_of_whole_sequences(run_mesh):
    for ranks in every_day([3], more=[2, 4]):
        for wrong in run_mesh(1, check_every_kind, context=ranks):
            assert wrong == []


# The sample, the first token and the end of documents. Each of three ranks has ten tokens of a sample.
DOCUMENTS = {
    "two ranks": ((0, 0, 4), (0, 4, 17), (0, 17, 20), (1, 7, 12), (1, 12, 23), (1, 24, 30)),
    "all ranks": ((0, 3, 29), (1, 10, 30)),
}


def compare_documents(
    mesh: Any, spans: Any, causal: bool, reach: int | None, dtype: torch.dtype, dropout: float
) -> list[float]:
    """The same for documents, each of which `ops.attention` computes alone."""
    from shardzoo.mpu import cut_sequence
    from shardzoo.mpu.ring import RingRules, ring_attention
    from shardzoo.ops import attention, dropout_keys
    from shardzoo.ops.dropout_mask import keys_from_row

    made = make_inputs("full", mesh.cp_size, dtype)
    total = made["q"].shape[2]
    keys = dropout_keys(77, 0, BATCH) if dropout else None
    is_token = torch.arange(total).expand(BATCH, -1) % 7 != 5
    names = ("q", "k", "v", "bias")
    whole = [made[name].double().requires_grad_() for name in names]
    expected = torch.zeros_like(whole[0])
    for sample, start, end in spans:
        size = end - start
        own = [x[sample : sample + 1, :, start:end] for x in whole[:3]]
        mask = is_token[sample, start:end].expand(1, 1, size, size)
        if reach is not None:
            distance = torch.arange(size)[:, None] - torch.arange(size)
            mask = mask & (distance.abs() < reach)
        if causal:
            mask = mask.tril()
        bias = whole[3][:, total - size : total + size - 1]
        dropped: dict[str, Any] = {}
        if keys is not None:
            own_keys = keys_from_row(keys[sample : sample + 1], start)
            dropped = {"dropout": dropout, "keys": own_keys, "first_head": 1}
        found = attention(*own, relative_bias=bias, scale=0.4, mask=mask, **dropped)
        expected[sample, :, start:end] = expected[sample, :, start:end] + found[0]
    (expected * made["weights"].double()).sum().backward()

    own = [made[name].requires_grad_() for name in names]
    q, k, v = (cut_sequence(x, mesh, 2) for x in own[:3])
    dropped = {"dropout": dropout, "keys": keys, "first_head": 1} if dropout else {}
    rules = RingRules(
        0.4,
        total,
        causal=causal,
        mask=is_token[:, None, None],
        documents=spans,
        reach=reach,
        **dropped,
    )
    found = ring_attention(q, k, v, own[3], rules, mesh)
    return measure_differences(mesh, found, expected, made["weights"], own, whole)


def check_documents(mesh: Any) -> list[str]:
    wrong = []
    for name, spans in DOCUMENTS.items():
        for causal in (True, False):
            for reach in (None, 4, 12):
                for dtype, dropout in ((torch.float32, 0.0), (torch.float64, 0.2)):
                    limit = 3e-5 if dtype == torch.float32 else 1e-12
                    found = compare_documents(mesh, spans, causal, reach, dtype, dropout)
                    if not max(found) < limit:
                        wrong.append(f"{name} {causal} {reach} {dtype} {dropout}: {found}")
    return wrong


def test_documents_are_computed_as_if_each_were_alone(run_mesh):
    for wrong in run_mesh(1, check_documents, context=3):
        assert wrong == []


def test_keys_pass_only_as_far_as_a_document_reaches():
    from shardzoo.mpu.ring import RingRules

    def count(spans, **rules):
        return RingRules(1.0, 30, documents=spans, **rules).count_steps(3)

    assert count(DOCUMENTS["two ranks"], causal=True) == 2
    assert count(DOCUMENTS["all ranks"], causal=True) == 3
    assert count(DOCUMENTS["all ranks"], causal=True, reach=11) == 2
    # Earlier ranks need the keys of later ones, which come last.
    assert count(DOCUMENTS["two ranks"]) == 3
    assert count(((0, 0, 10), (1, 20, 30))) == 1


def count_sent(mesh: Any, balanced: bool) -> tuple[int, int]:
    """Bytes that a rank sends in the forward and in the backward pass."""
    from shardzoo.mpu import ring
    from shardzoo.mpu.ring import RingRules, balance_chunks, restore_chunks, ring_attention

    sent = [0]
    shift = ring.start_shift
    move = ring._move_chunks

    def count_shift(tensor, group, by=1):
        sent[0] += tensor.nbytes
        return shift(tensor, group, by)

    def count_move(x, group, restores):
        ranks, place = group.size(), group.rank()
        homes = [min(c, 2 * ranks - 1 - c) for c in (2 * place, 2 * place + 1)]
        targets = [place // 2, (2 * ranks - 1 - place) // 2] if restores else homes
        sent[0] += x.nbytes // 2 * sum(target != place for target in targets)
        return move(x, group, restores)

    length = 2 * CHUNK
    q = torch.randn(BATCH, HEADS, length, SIZE, requires_grad=True)
    k, v = (torch.randn(BATCH, KV_HEADS, length, SIZE, requires_grad=True) for _ in range(2))
    rules = RingRules(1.0, length * mesh.cp_size, causal=True, is_balanced=balanced)
    with (
        mock.patch("shardzoo.mpu.ring.start_shift", count_shift),
        mock.patch("shardzoo.mpu.ring._move_chunks", count_move),
    ):
        heads = (HEADS, KV_HEADS, KV_HEADS)
        parts = (q, k, v)
        if balanced:
            parts = balance_chunks(torch.cat(parts, 1), mesh).split(heads, 1)
        out = ring_attention(*parts, None, rules, mesh)
        if balanced:
            out = restore_chunks(out, mesh)
        forward = sent[0]
        out.sum().backward()
    return forward, sent[0] - forward


def test_the_bytes_sent_are_the_formula(run_mesh):
    ranks = 3
    keys = 4 * 2 * KV_HEADS * SIZE * BATCH * 2 * CHUNK
    moved = 4 * (2 * HEADS + 2 * KV_HEADS) * SIZE * BATCH * CHUNK
    for forward, backward in run_mesh(1, count_sent, False, context=ranks):
        assert (forward, backward) == (keys * (ranks - 1), keys * (ranks - 1) + keys * ranks)
    # Of six chunks, the third rank's fourth one and the first rank's first one stay.
    plain = (keys * (ranks - 1), keys * (2 * ranks - 1))
    for rank, (forward, backward) in enumerate(run_mesh(1, count_sent, True, context=ranks)):
        assert forward - plain[0] == backward - plain[1]
        assert 0 < forward - plain[0] <= 2 * moved, rank
