"""Everything at once: the same model, split in different ways, trains along the same curve."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from every_case import EVERY_CASE, every_day
from small_transformer import build_transformer

from shardzoo import mpu

STEPS, ACCUMULATION, MICRO_BATCH, POSITIONS, VOCABULARY = 50 if EVERY_CASE else 30, 3, 4, 16, 1009
SEED, MAX_NORM = 17, 1.0


def sample(index):
    """[S + 1] tokens of a random walk over 16 tokens from all over the vocabulary: something to learn."""
    steps = torch.randint(1, 4, (POSITIONS + 1,), generator=torch.Generator().manual_seed(index))
    return 67 * ((steps.cumsum(0) + index) % 16)


def sum_over_data_ranks(tensors, mesh):
    """In one all-reduce, as an engine would."""
    flat = torch.cat([tensor.flatten() for tensor in tensors])
    dist.all_reduce(flat, group=mesh.dp_group)
    for tensor, summed in zip(
        tensors, flat.split([tensor.numel() for tensor in tensors]), strict=True
    ):
        tensor.copy_(summed.view_as(tensor))


def train(mesh, build, sequence_parallel, recompute):
    """The loss of every step, and each parameter before and after with its declaration."""
    model = build(mesh, sequence_parallel=sequence_parallel, recompute=recompute)
    state = [
        {
            name: (p.detach().clone(), getattr(p, "shard", None))
            for name, p in model.named_parameters()
        }
    ]
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    data_size, data_rank = (mesh.dp_size, mesh.dp_rank) if mesh is not None else (1, 0)
    rows = MICRO_BATCH // data_size
    tokens = ACCUMULATION * MICRO_BATCH * POSITIONS  # of the global batch
    curve, first = [], 0
    for _ in range(STEPS):
        total = torch.zeros(())
        for _ in range(ACCUMULATION):
            mine = first + data_rank * rows
            batch = torch.stack([sample(index) for index in range(mine, mine + rows)])
            mpu.dropout_state.set(SEED, mine)
            loss = model(batch[:, :-1], batch[:, 1:]) / tokens
            loss.backward()
            total += loss.detach()
            first += MICRO_BATCH
        if data_size > 1:
            sum_over_data_ranks(
                [total, *(parameter.grad for parameter in model.parameters())], mesh
            )
        norm = mpu.clip_grad_norm_(model.parameters(), MAX_NORM, mesh)
        optimizer.step()
        optimizer.zero_grad()
        curve.append((float(total), float(norm)))
    state.append(
        {name: (p.detach(), getattr(p, "shard", None)) for name, p in model.named_parameters()}
    )
    return curve, state


@pytest.fixture(scope="module")
def single():
    """Trained by one process without any mode."""
    return train(None, build_transformer, False, "none")


@pytest.mark.before_release
@pytest.mark.parametrize(
    ("tp", "data", "recompute"),
    every_day([(2, 2, "selective")], more=[(2, 1, "full"), (4, 1, "selective")]),
)
def test_every_layout_trains_the_same_curve(tp, data, recompute, single, run_mesh):
    expected_curve, (expected_start, expected_end) = single
    results = run_mesh(tp, train, build_transformer, True, recompute, data=data)
    expected = torch.tensor(expected_curve)  # [steps, (loss, norm)]
    assert expected[-5:, 0].mean() < 0.75 * expected[0, 0]  # it learns
    assert (expected[:, 1] > MAX_NORM).sum() > 5  # clipping is at work
    for curve, _ in results:
        relative = (torch.tensor(curve) / expected - 1).abs()
        assert relative[:, 0].max() < 1e-4
        assert relative[:, 1].max() < 1e-3
    for which, (whole, tolerance) in enumerate([(expected_start, 0.0), (expected_end, 2e-3)]):
        for name, (value, shard) in whole.items():
            parts = [state[which][name][0] for _, state in results]
            if shard is None:
                assert all(
                    torch.equal(part, parts[0]) for part in parts
                )  # replicas have not drifted apart
                merged = parts[-1]
            else:
                merged = shard.merge(parts[:tp])
            assert float((merged - value).norm()) <= tolerance * float(value.norm()), name
