"""Ranks and groups of the mesh against plain index arithmetic, and what DeepSpeed asks of it."""

from __future__ import annotations

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from shardzoo.mpu import ParallelMesh, tp_rank, tp_size, validate_layout


@given(st.integers(1, 64), st.integers(1, 9), st.integers(1, 9))
def test_validate_layout(world_size, tensor, pipeline):
    if world_size % (tensor * pipeline) == 0:
        assert validate_layout(world_size, tensor, pipeline) * tensor * pipeline == world_size
    else:
        with pytest.raises(ValueError, match=r"; use (tensor|pipeline)_parallel_size 1") as error:
            validate_layout(world_size, tensor, pipeline)
        name, listed = re.search(r"use (\w+)_parallel_size (.*)", str(error.value)).groups()
        for size in map(int, re.findall(r"\d+", listed)):
            if name == "tensor":
                validate_layout(world_size, size, pipeline)
            else:
                validate_layout(world_size, 1, size)


def test_layout_errors_read_well():
    with pytest.raises(ValueError, match="8 processes cannot be split into tensor-parallel groups of 3; use ") as e:
        validate_layout(8, 3)
    assert str(e.value).endswith("use tensor_parallel_size 1, 2, 4 or 8")
    with pytest.raises(ValueError, match="4 processes in each of 2 pipeline stages cannot be split"):
        validate_layout(8, 8, 2)
    with pytest.raises(ValueError, match="tensor_parallel_size must be at least 1, got 0"):
        validate_layout(8, 0)


def _describe(mesh):
    axes = {}
    for axis in ("tp", "dp", "pp"):
        group = getattr(mesh, f"{axis}_group")
        ranks = dist.get_process_group_ranks(group)
        axes[axis] = (getattr(mesh, f"{axis}_rank"), getattr(mesh, f"{axis}_size"), ranks)
        assert axes[axis][0] == dist.get_rank(group)
    model = dist.get_process_group_ranks(mesh.get_model_parallel_group())
    value = torch.tensor([mesh.rank])
    dist.all_reduce(value, group=mesh.get_model_parallel_group())
    return axes, model, mesh.get_model_parallel_rank(), int(value), mesh.get_tensor_model_parallel_src_rank()


@pytest.mark.parametrize(("tp", "dp", "pp"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 3, 1)])
def test_ranks_and_groups(tp, dp, pp, run_mesh):
    for rank, result in enumerate(run_mesh(tp, _describe, data=dp, pipeline=pp)):
        axes, model, model_rank, model_sum, source = result
        p, d, t = rank // (dp * tp), rank // tp % dp, rank % tp
        assert axes["tp"] == (t, tp, [(p * dp + d) * tp + i for i in range(tp)])
        assert axes["dp"] == (d, dp, [(p * dp + i) * tp + t for i in range(dp)])
        assert axes["pp"] == (p, pp, [(i * dp + d) * tp + t for i in range(pp)])
        assert model == [(i * dp + d) * tp + j for i in range(pp) for j in range(tp)]
        assert (model_rank, model_sum, source) == (p * tp + t, sum(model), (p * dp + d) * tp)


def test_every_method_that_deepspeed_calls_exists(run_ranks):
    """Collected from the installed DeepSpeed's own sources."""
    root = Path(find_spec("deepspeed").submodule_search_locations[0])
    files = ["runtime/engine.py", "utils/groups.py", "utils/bwc.py", "runtime/utils.py", "runtime/config.py"]
    files += ["runtime/base_optimizer.py", "runtime/bf16_optimizer.py", "runtime/pipe/engine.py"]
    files += [str(path.relative_to(root)) for path in (root / "runtime/zero").glob("*.py")]
    called = set()
    for file in files:
        called |= set(re.findall(r"\bmpu\.(get_\w+)\(", (root / file).read_text()))
    # Where these are missing, and only then, DeepSpeed leaves its own sequence parallelism off.
    ulysses = {name for name in called if "sequence" in name}
    assert len(called - ulysses) > 12

    def check(called, ulysses):
        mesh = ParallelMesh()
        for name in called - ulysses:
            getattr(mesh, name)()
        return [name for name in dir(mesh) if "sequence_parallel" in name or "sequence_data" in name]

    assert run_ranks(1, check, called, ulysses) == [[]]


def test_a_mesh_needs_torch_distributed():
    with pytest.raises(RuntimeError, match=r"init_process_group\(\) first, or pass mesh=None"):
        ParallelMesh()


def test_no_mesh_is_one_process():
    assert (tp_rank(None), tp_size(None)) == (0, 1)


def test_the_mesh_describes_itself(run_mesh):
    assert "rank 3 of 4: pipeline 0/1, data 1/2, tensor 1/2" in run_mesh(2, repr, data=2)[3]
