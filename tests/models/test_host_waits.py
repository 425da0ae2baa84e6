"""Where a step's host would wait for an accelerator: nowhere in the forward and backward pass, in every family.

The meta device stands for the accelerator, of which the host cannot read anything. The trainer adds one wait a step,
for the loss of the step before (tests/trainer/test_host_reads.py).
"""

from __future__ import annotations

from collections import Counter
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from every_case import by_turns, every_day
from tiny_models import TINY, tiny
from torch.fx.experimental import _config
from torch.overrides import TorchFunctionMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import shardzoo
from shardzoo.mpu import ParallelMesh, assign_dropout_sites, dropout_state
from shardzoo.ops.dropout_mask import dropout_keys, send_use_keys, use_key

# The size or the value of the result must reach the host.
READS = (
    "aten::nonzero",
    "aten::_local_scalar_dense",
    "aten::equal",
    "aten::masked_select",
    "aten::_unique2",
    "aten::unique_dim",
    "aten::repeat_interleave",
)
# torch knows no autocast of the meta device, and raises instead of saying that it is off.
NO_AUTOCAST = mock.patch.multiple(
    "torch", is_autocast_enabled=lambda *_: False, get_autocast_dtype=lambda *_: torch.bfloat16
)
COPIES = ("aten::_to_copy", "aten::copy_")


class Waits(TorchDispatchMode):
    """Counts reads of the device, copies to and from it, and indexing by truth values."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        name = func._schema.name
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        devices = {leaf.device.type for leaf in (*given, *made)}
        by_truth = name.startswith("aten::index") and any(
            leaf.dtype == torch.bool and leaf.dim() for leaf in given[1:]
        )
        is_read = name in READS and not (name == READS[-1] and kwargs and "output_size" in kwargs)
        if is_read or by_truth or (name in COPIES and len(devices) > 1):
            self.counts[name] += 1
        return result


class Literals(TorchFunctionMode):
    """Counts tensors that are made on the device of numbers of the host, which are copied."""

    def __init__(self, waits):
        super().__init__()
        self.waits = waits

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func in (torch.tensor, torch.as_tensor, torch.asarray):
            result = func(*args, **kwargs)
            self.waits.counts[func.__name__] += result.device.type != "cpu"
            return result
        return func(*args, **kwargs)


def count_waits(model, batch, steps=3):
    """Returns the waits of the last of some steps."""
    for step in range(steps):
        model.zero_grad()
        dropout_state.set(0, step * len(batch["input_ids"]))
        with (
            NO_AUTOCAST,
            mock.patch.object(_config, "meta_nonzero_assume_all_nonzero", True),
            Waits() as waits,
            Literals(waits),
        ):
            model(**batch).loss.backward()
    return +waits.counts


@pytest.fixture
def two_ranks():
    """Has a mesh of two ranks, of which the other one does not exist."""
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    yield ParallelMesh(2)
    dist.destroy_process_group()


def count_waits_of_family(family, dropout, mesh):
    config = tiny(family, dropout, layers=2)
    dtype = torch.float32
    if "num_experts_per_tok" in config:
        # PyTorch's grouped product waits in fp32, and takes rows of whole 16 bytes.
        dtype = torch.bfloat16
        config |= {"intermediate_size": 32, "moe_intermediate_size": 32}
        config |= {"shared_expert_intermediate_size": 32} if family == "qwen2_moe" else {}
    model = shardzoo.from_config(config, mesh, device="meta").to(dtype).train()
    assign_dropout_sites(model)
    ids = torch.zeros(2, 9, dtype=torch.long, device="meta")
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    return count_waits(model, {**inputs, "labels": torch.zeros_like(ids)})


@pytest.mark.parametrize("dropout", every_day([0.1], more=[0.0]))
@pytest.mark.parametrize("family", by_turns(TINY, 3))
def test_a_step_waits_nowhere(family, dropout):
    assert not count_waits_of_family(family, dropout, None)


@pytest.mark.parametrize("dropout", every_day([0.1], more=[0.0]))
@pytest.mark.parametrize("family", every_day(["gpt2", "bert", "t5", "glm", "llama"], more=TINY))
def test_a_step_of_a_split_model_waits_nowhere(family, dropout, two_ranks):
    assert not count_waits_of_family(family, dropout, two_ranks)


def test_what_would_wait_is_counted():
    class Reader(torch.nn.Module):
        def forward(self, input_ids):
            chosen = input_ids[input_ids > 0]  # nonzero, whose result the index takes
            host = torch.zeros(3).to(input_ids.device)
            loss = torch.tensor([1.0], device="meta", requires_grad=True).sum() + host.sum()
            return mock.Mock(loss=loss + chosen.sum())

    counts = count_waits(
        Reader(), {"input_ids": torch.zeros(2, 3, dtype=torch.long, device="meta")}
    )
    assert counts["tensor"] == counts["aten::_to_copy"] == 1
    assert counts.total() >= 3


def test_keys_of_uses_that_were_sent_are_those_of_numbers():
    uses = [use_key(5, site, 0) for site in (1, 2, (1 << 64) - 1)]
    sent = send_use_keys(uses, "cpu")
    assert torch.equal(dropout_keys(sent, 7, 4), dropout_keys(uses, 7, 4))
    for number, row in zip(uses, dropout_keys(sent, 7, 4), strict=True):
        assert torch.equal(dropout_keys(number, 7, 4), row)
