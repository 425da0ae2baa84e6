"""Ranks and groups of the mesh against plain index arithmetic, and what DeepSpeed asks of it."""

from __future__ import annotations

import itertools
import math
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from commands import warm_environment
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


@given(*[st.sampled_from([1, 2, 3, 4, 6])] * 4, st.integers(1, 60))
def test_validate_layout_of_all_axes(tensor, pipeline, context, expert, world_size):
    product = tensor * pipeline * context * expert
    if world_size % product == 0:
        assert (
            validate_layout(world_size, tensor, pipeline, context, expert) == world_size // product
        )
    else:
        with pytest.raises(ValueError, match="_parallel_size 1"):
            validate_layout(world_size, tensor, pipeline, context, expert)


def test_layout_errors_read_well():
    with pytest.raises(ValueError, match="expert-parallel groups of 3") as e:
        validate_layout(16, 2, 2, expert_parallel_size=3)
    assert str(e.value) == (
        "4 replicas of the model cannot be split into expert-parallel groups of 3; "
        "use expert_parallel_size 1, 2 or 4"
    )
    with pytest.raises(ValueError, match="context_parallel_size must be at least 1, got -1"):
        validate_layout(8, 1, 1, -1)
    with pytest.raises(
        ValueError, match="8 processes cannot be split into tensor-parallel groups of 3; use "
    ) as e:
        validate_layout(8, 3)
    assert str(e.value).endswith("use tensor_parallel_size 1, 2, 4 or 8")
    with pytest.raises(
        ValueError, match="4 processes in each of 2 pipeline stages cannot be split"
    ):
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
    return (
        axes,
        model,
        mesh.get_model_parallel_rank(),
        int(value),
        mesh.get_tensor_model_parallel_src_rank(),
    )


@pytest.mark.parametrize(
    ("tp", "dp", "pp"), [(1, 1, 1), (2, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 2), (1, 3, 1)]
)
def test_ranks_and_groups(tp, dp, pp, run_mesh):
    for rank, result in enumerate(run_mesh(tp, _describe, data=dp, pipeline=pp)):
        axes, model, model_rank, model_sum, source = result
        p, d, t = rank // (dp * tp), rank // tp % dp, rank % tp
        assert axes["tp"] == (t, tp, [(p * dp + d) * tp + i for i in range(tp)])
        assert axes["dp"] == (d, dp, [(p * dp + i) * tp + t for i in range(dp)])
        assert axes["pp"] == (p, pp, [(i * dp + d) * tp + t for i in range(pp)])
        assert model == [(i * dp + d) * tp + j for i in range(pp) for j in range(tp)]
        assert (model_rank, model_sum, source) == (p * tp + t, sum(model), (p * dp + d) * tp)


AXES = ("pipeline", "data", "context", "expert", "tensor")
JOINED = [axes for count in (2, 3, 4, 5) for axes in itertools.combinations(AXES, count)]
FACTORIZATIONS = [
    sizes for sizes in itertools.product([1, 2, 4, 8], repeat=5) if math.prod(sizes) == 8
]


def _probe_every_factorization(factorizations, joined):
    """For each factorization of the world: what the mesh says on this rank, and its groups."""
    results = []
    for pipeline, _, context, expert, tensor in factorizations:
        before = len(dist.distributed_c10d._world.pg_map)
        mesh = ParallelMesh(tensor, pipeline, context, expert)
        made = len(dist.distributed_c10d._world.pg_map) - before
        asked = [*((axis,) for axis in AXES), *joined]
        groups = {axes: mesh.group(*axes) for axes in asked}
        sums = {}
        for axes, group in groups.items():
            value = torch.tensor([2.0**mesh.rank])
            dist.all_reduce(value, group=group)
            sums[axes] = value.item()
        deepspeed = {
            "model": (
                mesh.get_model_parallel_rank(),
                mesh.get_model_parallel_world_size(),
                dist.get_process_group_ranks(mesh.get_model_parallel_group()),
            ),
            "data": (
                mesh.get_data_parallel_rank(),
                mesh.get_data_parallel_world_size(),
                mesh.get_data_parallel_group_ranks(),
            ),
            "tensor": (
                mesh.get_slice_parallel_rank(),
                mesh.get_slice_parallel_world_size(),
                dist.get_process_group_ranks(mesh.get_slice_parallel_group()),
            ),
            "pipeline": (
                mesh.get_pipeline_model_parallel_rank(),
                mesh.get_pipeline_model_parallel_world_size(),
                dist.get_process_group_ranks(mesh.get_pipeline_model_parallel_group()),
            ),
            "source": mesh.get_tensor_model_parallel_src_rank(),
        }
        assert mesh.group("tensor") is mesh.tp_group
        results.append(
            {
                "sizes": mesh.sizes,
                "ranks": mesh.ranks,
                "members": {a: dist.get_process_group_ranks(g) for a, g in groups.items()},
                "rank_in": {a: (mesh.rank_in(*a), dist.get_rank(g)) for a, g in groups.items()},
                "size": {a: (mesh.size(*a), dist.get_world_size(g)) for a, g in groups.items()},
                "sums": sums,
                "made": made,
                "deepspeed": deepspeed,
            }
        )
    return results


def _find_members(axes, rank, coordinates):
    """The ranks whose coordinates agree with those of `rank` on all other axes, by counting."""
    fixed = [number for number, axis in enumerate(AXES) if axis not in axes]
    return [
        other
        for other, place in enumerate(coordinates)
        if all(place[number] == coordinates[rank][number] for number in fixed)
    ]


@pytest.mark.before_release
def test_every_factorization_of_eight_ranks(run_ranks):
    """Each axis and each joint of axes has groups that partition the ranks, in the mesh's order."""
    assert len(FACTORIZATIONS) == 35
    by_rank = run_ranks(8, _probe_every_factorization, FACTORIZATIONS, JOINED, timeout=120)
    for number, sizes in enumerate(FACTORIZATIONS):
        coordinates = list(itertools.product(*map(range, sizes)))  # of rank 0, 1, …
        results = [results[number] for results in by_rank]
        for rank, result in enumerate(results):
            assert list(result["sizes"].items()) == list(zip(AXES, sizes, strict=True))
            assert tuple(result["ranks"].values()) == coordinates[rank]
            for axes, members in result["members"].items():
                assert members == _find_members(axes, rank, coordinates)
                assert result["sums"][axes] == sum(2**member for member in members)
                assert result["rank_in"][axes] == (members.index(rank), members.index(rank))
                assert result["size"][axes] == (len(members), len(members))
            # An axis of size 1 has made no group; one of size 8 takes that of all processes.
            parallel = [size for size in sizes if size > 1]
            made = [("data", "context", "expert"), ("pipeline", "tensor")]
            if result["sizes"]["expert"] > 1:
                made += [("data", "expert"), ("data", "context"), ("expert", "tensor")]
                made += [("pipeline", "expert", "tensor")]
            joint = {tuple(a for a in axes if result["sizes"][a] > 1) for axes in made}
            axes_made = len(parallel) if len(parallel) > 1 else 0
            assert result["made"] == axes_made + sum(len(axes) > 1 for axes in joint)
            questions = result["deepspeed"]
            for name, axes in (
                ("model", ("pipeline", "tensor")),
                ("data", ("data", "context", "expert")),
                ("tensor", ("tensor",)),
                ("pipeline", ("pipeline",)),
            ):
                members = _find_members(axes, rank, coordinates)
                assert questions[name] == (members.index(rank), len(members), members)
            assert questions["source"] == _find_members(("tensor",), rank, coordinates)[0]
        for axes in results[0]["members"]:
            parts = {tuple(result["members"][axes]) for result in results}
            assert sorted(rank for part in parts for rank in part) == list(range(8))


def test_the_group_of_one_process_is_made_once(run_ranks):
    """PyTorch would give a second one the first's name where a group was destroyed in between."""

    def find_groups():
        others = [dist.new_group() for _ in range(2)]
        first = ParallelMesh(tensor_parallel_size=2).group("data")
        members = dist.get_process_group_ranks(first)
        for group in others:
            dist.destroy_process_group(group)
        meshes = [ParallelMesh(tensor_parallel_size=2) for _ in range(3)]
        return members, all(mesh.group("data", "context") is first for mesh in meshes)

    assert run_ranks(2, find_groups, isolated=True) == [([0], True), ([1], True)]


def test_deepspeed_finds_the_ranks_of_experts_that_the_mesh_has(run_ranks):
    """DeepSpeed makes the groups of experts itself, from the mesh's data-parallel ranks."""

    def compare():
        import deepspeed
        from deepspeed.utils import groups

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # would be compiled
        deepspeed.init_distributed("gloo")
        mesh = ParallelMesh(expert_parallel_size=2)
        groups._create_expert_and_data_parallel(2)
        name = "ep_size_2"
        return (
            list(groups._EXPERT_PARALLEL_GROUP_RANKS[name])
            == dist.get_process_group_ranks(mesh.group("expert")),
            list(groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name])
            == dist.get_process_group_ranks(mesh.group("data", "context")),
        )

    assert run_ranks(4, compare, isolated=True) == [(True, True)] * 4


def test_every_method_that_deepspeed_calls_exists(run_ranks):
    """Collected from the installed DeepSpeed's own sources."""
    root = Path(find_spec("deepspeed").submodule_search_locations[0])
    files = [
        "runtime/engine.py",
        "utils/groups.py",
        "utils/bwc.py",
        "runtime/utils.py",
        "runtime/config.py",
    ]
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
        return [
            name for name in dir(mesh) if "sequence_parallel" in name or "sequence_data" in name
        ]

    assert run_ranks(1, check, called, ulysses) == [[]]


def in_a_process(code: str, *launcher: str, **environment: str) -> subprocess.CompletedProcess:
    """Runs Python code in a process of its own, or in those of a launcher."""
    command = (
        [*launcher, "-c", code]
        if not launcher
        else [*launcher, "--no-python", sys.executable, "-c", code]
    )
    return subprocess.run(
        ["python", *command],
        env=warm_environment(**environment),
        capture_output=True,
        text=True,
        timeout=120,
    )


LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
USE = """
import shardzoo, torch
from shardzoo.models import config_from_dict
from shardzoo.mpu import ParallelMesh

mesh = ParallelMesh(tensor_parallel_size={size})
config = config_from_dict({{
    "model_type": "gpt2", "vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 1, "n_head": 2,
    "embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0,
}})
ids = torch.arange(16)[None]
loss = float(shardzoo.from_config(config, mesh)(input_ids=ids, labels=ids).loss)
print(f"{{mesh}} loss {{loss:.4f}}\\n", end="", flush=True)  # one write: two ranks share the pipe
"""


def test_a_launcher_needs_no_process_group_to_be_made():
    """What the README shows works under torchrun, and gives what one process gives."""
    alone = in_a_process(USE.format(size=1))
    assert alone.returncode == 0, alone.stderr[-2000:]
    assert "rank 0 of 1" in alone.stdout
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    both = in_a_process(USE.format(size=2), *torchrun)
    assert both.returncode == 0, both.stderr[-2000:]
    loss = alone.stdout.split("loss ")[1].strip()
    assert both.stdout.count(f"loss {loss}\n") == 2
    assert all(f"rank {rank} of 2" in both.stdout for rank in (0, 1))


def test_one_process_cannot_be_split(monkeypatch):
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    # accelerate makes a process group in tests of transformers' Trainer.
    monkeypatch.setattr(dist, "is_initialized", lambda: False)
    mesh = ParallelMesh()
    assert (mesh.tp_size, mesh.dp_size, mesh.world_size, mesh.get_model_parallel_rank()) == (
        1,
        1,
        1,
        0,
    )
    with pytest.raises(RuntimeError, match="has no process groups"):
        _ = mesh.tp_group
    with pytest.raises(
        ValueError, match=r"need a multiple of 4 processes.*torchrun --nproc-per-node 4"
    ):
        ParallelMesh(2, 2)
    with pytest.raises(ValueError, match="tensor_parallel_size must be at least 1, got 0"):
        ParallelMesh(0)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    with pytest.raises(ValueError, match="MASTER_PORT is not set"):
        ParallelMesh(2)
    for port in ("x", "65536", ""):
        monkeypatch.setenv("MASTER_PORT", port)
        with pytest.raises(ValueError, match="MASTER_PORT"):
            ParallelMesh(2)
    monkeypatch.setenv("MASTER_PORT", "29500")
    for name in ("RANK", "WORLD_SIZE"):
        with monkeypatch.context() as changed:
            changed.setenv(name, "x")
            with pytest.raises(ValueError, match=f"{name}='x', which a launcher sets, is not"):
                ParallelMesh(2)


def refused_mesh(size: int) -> tuple[str, str, bool]:
    """The refusal of a mesh, and what Python prints if it, or another error, ends the script."""
    import io
    import sys
    from contextlib import redirect_stderr

    from shardzoo.mpu import ParallelMesh

    before = sys.excepthook
    others = []
    sys.excepthook = lambda *error: others.append(error)
    try:
        ParallelMesh(tensor_parallel_size=size)
    except ValueError as error:
        with redirect_stderr(io.StringIO()) as shown:
            sys.excepthook(type(error), error, error.__traceback__)
        untouched = not others
        sys.excepthook(KeyError, KeyError(), None)
        return str(error), shown.getvalue(), untouched and len(others) == 1
    finally:
        sys.excepthook = before
    raise AssertionError("it is a mesh")


def test_a_script_that_asks_for_a_wrong_mesh_ends_with_one_line(run_ranks):
    (first, shown, own), (other, silent, others_own) = run_ranks(2, refused_mesh, 3)
    assert first == other
    assert shown == f"error: {first}\n"
    assert silent == ""
    assert own
    assert others_own


def test_no_mesh_is_one_process():
    assert (tp_rank(None), tp_size(None)) == (0, 1)


def test_the_mesh_describes_itself(run_mesh):
    assert "rank 3 of 4: pipeline 0/1, data 1/2, tensor 1/2" in run_mesh(2, repr, data=2)[3]


def test_an_axis_has_one_spelling():
    mesh = ParallelMesh()
    with pytest.raises(KeyError):
        mesh.size("experts")
