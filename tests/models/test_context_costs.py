"""What context parallelism sends is docs/long-context.md's formula, and what a rank keeps is what `estimate` says.

Oracles: buffers counted below the exchanges; the tensors that autograd saves.
"""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
from memory import kept_bytes
from tiny_models import tiny

LENGTH = 256
BATCH = 2


def measure(mesh: Any, family: str, exchange: str, length: int) -> tuple[int, int, int]:
    """Bytes that a rank sends in the forward and in the backward pass of attention, and that it keeps."""
    import torch.distributed as dist

    from shardzoo.models import ParallelConfig, from_config
    from shardzoo.mpu import context

    sent = [0]
    ranks = mesh.cp_size
    exchange_tensors = dist.all_to_all_single
    gather = context.start_all_gather
    scatter = context.start_reduce_scatter

    def count_exchange(received, pieces, **options):
        sent[0] += pieces.nbytes * (ranks - 1) // ranks
        return exchange_tensors(received, pieces, **options)

    def count_gather(tensor, dim, group):
        sent[0] += tensor.nbytes * (ranks - 1)
        return gather(tensor, dim, group)

    def count_scatter(tensor, dim, group):
        sent[0] += tensor.nbytes * (ranks - 1) // ranks
        return scatter(tensor, dim, group)

    config = tiny(family, 0.0, **({"max_position_embeddings": 512} if family == "llama" else {}))
    model = from_config(
        config, mesh, parallel_config=ParallelConfig(context_exchange=exchange), seed=1
    )
    ids = torch.arange(3, 3 + BATCH * length).view(BATCH, length) % 90
    outputs = []
    with (
        mock.patch("torch.distributed.all_to_all_single", count_exchange),
        mock.patch("shardzoo.mpu.context.start_all_gather", count_gather),
        mock.patch("shardzoo.mpu.context.start_reduce_scatter", count_scatter),
    ):
        kept = kept_bytes(lambda: outputs.append(model(ids, labels=ids)), model.parameters())
        forward = sent[0]
        outputs[0].loss.backward()
    return forward, sent[0] - forward, kept


def every_case(mesh: Any) -> dict[tuple[str, str], tuple[tuple[int, int, int], int]]:
    """The costs of each family and exchange, and what is kept of a sequence of half the length on one rank."""
    from shardzoo.mpu import ParallelMesh

    whole = ParallelMesh()  # the same processes, as data-parallel ranks
    found = {}
    for family in ("llama", "t5"):
        for exchange in ("heads", "keys"):
            kept = measure(whole, family, exchange, LENGTH)[2]
            found[family, exchange] = (measure(mesh, family, exchange, LENGTH), kept)
    return found


@pytest.fixture(scope="module")
def costs(run_mesh):
    return run_mesh(1, every_case, context=2)


def test_the_bytes_sent_are_the_formula(costs):
    ranks = 2
    positions = BATCH * LENGTH // ranks
    # Query heads, key-value heads, the size of a head, and the number of attentions.
    sizes = {"llama": (4, 2, 8, 2), "t5": (4, 4, 8, 3 + 2)}
    for found in costs:
        for (family, exchange), ((forward, backward, _), _) in found.items():
            heads, kv_heads, size, layers = sizes[family]
            if exchange == "heads":
                elements = (2 * heads + 2 * kv_heads) * size * positions * (ranks - 1) / ranks
            else:
                elements = 2 * kv_heads * size * positions * (ranks - 1)
            assert (family, exchange, forward, backward) == (
                family,
                exchange,
                *[4 * layers * elements] * 2,
            )


def test_a_rank_keeps_its_part_of_what_one_process_keeps(costs):
    for found in costs:
        for family in ("llama", "t5"):
            (_, _, kept), whole = found[family, "heads"]
            # Tables of positions and of biases do not become shorter.
            assert kept / whole == pytest.approx(1 / 2, rel=0.12)
            # Causal ranks drop the keys after their last query.
            assert kept <= found[family, "keys"][0][2] < whole


def test_the_estimate_knows_the_axis():
    from shardzoo.models.auto import as_config
    from shardzoo.trainer.estimate import Job, estimate

    config = as_config(tiny("llama", 0.0, max_position_embeddings=1024))
    shared = {"length": 1024, "precision": "fp32", "device": "cpu", "zero_stage": 1}
    whole = estimate(config, Job(**shared))
    split = estimate(config, Job(**shared, context_parallel_size=4))
    keys = estimate(config, Job(**shared, context_parallel_size=4, context_exchange="keys"))
    activations = [
        max(moment.lines["activations"] for moment in found.moments)
        for found in (whole, split, keys)
    ]
    assert activations[1] == pytest.approx(activations[0] / 4, rel=0.05)
    # Two layers with keys and values of two heads of 8, of three other ranks.
    assert activations[2] - activations[1] == 2 * 2 * 1024 * 3 // 4 * 2 * 8 * 4
    assert split.peak.lines["optimizer state"] < whole.peak.lines["optimizer state"] / 3
    with pytest.raises(ValueError, match="1023 tokens cannot be split over 4"):
        Job(length=1023, context_parallel_size=4)
