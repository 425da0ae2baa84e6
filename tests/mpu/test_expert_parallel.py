"""Experts that are dealt over ranks compute what one process computes, and send what the formula says."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from shardzoo.mpu import AxisSplit, Shard

HIDDEN = 6
INNER = 5
EXPERTS = 5
TOP_K = 2

# (tensor-parallel ranks, expert-parallel ranks)
LAYOUTS = [(1, 2), (2, 2), (1, 3)]
ROUTES = ("mixed", "one expert", "empty experts", "one token", "no tokens on rank 0")


def activate(rows: torch.Tensor) -> torch.Tensor:
    gate, up = rows.chunk(2, dim=-1)
    return F.silu(gate) * up


def draw_tokens(routing: str, rank: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns a rank's tokens [1, S, H], weights [1, S, k] and experts [1, S, k]."""
    generator = torch.Generator().manual_seed(rank)
    length = 7 + rank
    if routing == "one token":
        length = 1
    if routing == "no tokens on rank 0" and rank == 0:
        length = 0
    draw = torch.rand(1, length, EXPERTS, generator=generator)
    experts = draw.argsort(-1)[..., :TOP_K]
    if routing == "one expert":
        experts = torch.tensor([4, 3]).expand(1, length, 2).clone()
    if routing == "empty experts":
        experts = experts % 2
    weights = torch.rand(1, length, TOP_K, generator=generator, dtype=torch.float64)
    x = torch.randn(1, length, HIDDEN, generator=generator, dtype=torch.float64)
    return x, weights, experts


def draw_matrices() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(99)
    gate_up = torch.randn(EXPERTS * 2 * INNER, HIDDEN, generator=generator, dtype=torch.float64)
    down = torch.randn(EXPERTS * INNER, HIDDEN, generator=generator, dtype=torch.float64)
    return gate_up, down


def compute_on_ranks(tensor: int, expert: int):
    """Returns, for each kind of routing, this rank's results, gradients and bytes sent."""
    from shardzoo.mpu import ParallelExperts, ParallelMesh, collectives
    from shardzoo.mpu.mesh import EXPERT_MODEL_AXES

    mesh = ParallelMesh(tensor, expert_parallel_size=expert)
    layer = ParallelExperts(HIDDEN, INNER, EXPERTS, activate, mesh=mesh).double()
    gate_up, down = draw_matrices()
    with torch.no_grad():
        layer.gate_up.copy_(layer.gate_up.shard.slice(gate_up, mesh.ranks, mesh.sizes))
        layer.down.copy_(layer.down.shard.slice(down, mesh.ranks, mesh.sizes))
    assert layer.gate_up.expert_parallel
    assert mesh.size(*EXPERT_MODEL_AXES) == tensor * expert
    travelled: list[int] = []
    exchange = collectives.all_to_all_rows

    def count(rows, sent, received, group, longest):
        travelled.append((sum(sent) - sent[group.rank()]) * rows[:1].numel() * rows.itemsize)
        return exchange(rows, sent, received, group, longest)

    collectives.all_to_all_rows = count
    results = {}
    try:
        for routing in ROUTES:
            x, weights, experts = draw_tokens(routing, mesh.rank_in("expert"))
            x.requires_grad_()
            weights.requires_grad_()
            layer.zero_grad()
            travelled.clear()
            y = layer(x, weights, experts)
            (y * torch.arange(1.0, HIDDEN + 1)).sum().backward()
            results[routing] = (
                y.detach(), x.grad, weights.grad, layer.gate_up.grad, layer.down.grad, sum(travelled)
            )  # fmt: skip
    finally:
        collectives.all_to_all_rows = exchange
    return results


def holder(number: int, ranks: int) -> int:
    """Returns the expert-parallel rank that holds an expert."""
    return next(r for r in reversed(range(ranks)) if -(-r * EXPERTS // ranks) <= number)


@pytest.mark.parametrize(("tensor", "expert"), LAYOUTS)
def test_dealt_experts_equal_the_reference(run_ranks, tensor, expert):
    from shardzoo.ops.experts import mix_experts

    by_rank = run_ranks(tensor * expert, compute_on_ranks, tensor, expert)
    for routing in ROUTES:
        matrices = [matrix.requires_grad_() for matrix in draw_matrices()]
        shaped = [matrix.view(EXPERTS, -1, HIDDEN) for matrix in matrices]
        inputs = []
        for rank in range(expert):
            x, weights, experts = draw_tokens(routing, rank)
            x.requires_grad_()
            weights.requires_grad_()
            y = mix_experts(x[0], weights[0], experts[0], *shaped, activate)
            (y * torch.arange(1.0, HIDDEN + 1)).sum().backward()
            inputs.append((x, weights, experts, y))
        parts = [[], []]
        for rank in range(tensor * expert):
            y, x_grad, weights_grad, *grads, travelled = by_rank[rank][routing]
            x, weights, experts, expected = inputs[rank // tensor]
            assert torch.allclose(y[0], expected, rtol=1e-12, atol=1e-12)
            assert torch.allclose(x_grad, x.grad, rtol=1e-12, atol=1e-12)
            assert torch.allclose(weights_grad, weights.grad, rtol=1e-12, atol=1e-12)
            for part, grad in zip(parts, grads, strict=True):
                part.append(grad)
            # docs/experts.md: two rows forward and two backward of each pair that leaves its rank.
            leaving = [0, 0]
            for source in range(expert):
                for number in inputs[source][2].flatten().tolist():
                    if holder(number, expert) == source:
                        continue
                    leaving[0] += source == rank // tensor
                    leaving[1] += holder(number, expert) == rank // tensor
            assert travelled == 2 * sum(leaving) * HIDDEN * 8
        sizes = {"expert": expert, "tensor": tensor}
        for part, matrix, rows in zip(parts, matrices, (2 * INNER, INNER), strict=True):
            groups = (INNER,) * (EXPERTS * rows // INNER)
            shard = Shard.from_splits(
                matrix.shape,
                AxisSplit(0, axis="expert", unit=rows),
                AxisSplit(0, axis="tensor", groups=groups),
            )
            assert torch.allclose(shard.merge(part, sizes), matrix.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("tensor", "expert"), [(1, 2), (2, 3), (3, 5)])
def test_a_nested_shard_deals_whole_experts_and_splits_each(tensor, expert):
    shard = Shard.from_splits(
        (EXPERTS * 10, 3),
        AxisSplit(0, axis="expert", unit=10),
        AxisSplit(0, axis="tensor", groups=(5, 5) * EXPERTS),
    )
    sizes = {"expert": expert, "tensor": tensor}
    full = torch.arange(EXPERTS * 30).view(EXPERTS * 10, 3)
    parts = []
    for rank in range(expert):
        for inner in range(tensor):
            ranks = {"expert": rank, "tensor": inner}
            part = shard.slice(full, ranks, sizes)
            assert tuple(part.shape) == shard.local_shape(ranks, sizes)
            experts = {start // 10 for start, _ in shard.ranges(ranks, sizes)}
            assert experts == {e for e in range(EXPERTS) if holder(e, expert) == rank}
            parts.append(part)
    assert torch.equal(shard.merge(parts, sizes), full)
    # Files know the tensor axis only, and their manifests say nothing else.
    alone = Shard((EXPERTS * 10, 3), 0, (5, 5) * EXPERTS)
    assert shard.to_record() == alone.to_record()
    assert shard.ranges(0, tensor) == alone.ranges(0, tensor)
    assert torch.equal(shard.slice(full, 0, tensor), alone.slice(full, 0, tensor))


def test_units_that_are_no_whole_groups_are_refused():
    for unit, groups in ((4, (5, 5)), (5, (10,))):
        with pytest.raises(ValueError, match="whole groups"):
            Shard.from_splits(
                (sum(groups), 3),
                AxisSplit(0, axis="expert", unit=unit if sum(groups) % unit == 0 else 1),
                AxisSplit(0, axis="tensor", groups=groups),
            )


def refuse_more_ranks_than_experts() -> str:
    from shardzoo.mpu import ParallelExperts, ParallelMesh

    mesh = ParallelMesh(expert_parallel_size=2)
    try:
        ParallelExperts(HIDDEN, INNER, 1, activate, mesh=mesh)
    except ValueError as error:
        return str(error)
    return ""


def test_more_ranks_than_experts_are_refused(run_ranks):
    [message, _] = run_ranks(2, refuse_more_ranks_than_experts)
    assert message == (
        "1 experts cannot be dealt over 2 expert-parallel ranks; use expert_parallel_size 1 to 1"
    )
