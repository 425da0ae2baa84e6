"""Fixtures shared by all tests: functions that run on several ranks."""

from __future__ import annotations

import gc
import importlib
import multiprocessing
import os
import signal
import sys
import zlib
from pathlib import Path

import hypothesis
import pytest

os.environ.setdefault("OMP_NUM_THREADS", "1")  # ranks share the cores; also the workers inherit it

import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read where Triton is first imported, by whichever test

# Workers import the harness by name, and so must this process; pytest's importlib mode adds no path by itself.
sys.path.insert(0, str(Path(__file__).parent / "harness"))
importlib.import_module("quick_disk")
EVERY_CASE = importlib.import_module("every_case").EVERY_CASE
# A change fails by what it does, not by luck: only the run before a release looks for new examples.
hypothesis.settings.register_profile("every_day", derandomize=not EVERY_CASE)
hypothesis.settings.load_profile("every_day")
gc.disable()  # until all tests are collected: imports make nothing but what stays


# Processes that are started in the background or under nohup ignore these signals, and so would all
# that the tests start.
for number, handler in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


def pytest_collection_modifyitems(config, items):
    """The longest files come first, so that no worker is left alone with one at the end."""
    long = (
        "test_docs.py",
        "test_pretrain.py",
        "test_pipeline.py",
        "test_matrix.py",
        "test_resume.py",
        "test_tasks.py",
        "test_whole_matrix.py",
    )
    items.sort(key=lambda item: item.path.name not in long)
    if not EVERY_CASE:
        config.hook.pytest_deselected(
            items=[item for item in items if item.get_closest_marker("before_release")]
        )
        items[:] = [item for item in items if not item.get_closest_marker("before_release")]


def pytest_collection_finish():
    """Full garbage collections need not visit what the test files have imported, nor the tests."""
    importlib.import_module("quick_collections").ignore_what_exists()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    """A test that sets no seed draws the same numbers each time, whichever tests ran before it."""
    importlib.import_module("fixed_draws").seed_all(zlib.crc32(item.nodeid.encode()))


@pytest.fixture(autouse=True)
def settings_come_back():
    """Rounding in 16 bits depends on the number of threads, and masks on the key of dropout.

    Code under test may set both.
    """
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)
    mpu = sys.modules.get("shardzoo.mpu")
    if mpu is not None:
        mpu.dropout_state.clear()


@pytest.fixture(autouse=True)
def no_process_group_is_left():
    """A trainer that is started here with `env_type="deepspeed"` or the like makes this process a rank.

    It would stay one for all later tests; such a test runs its trainer by `run_mesh`.
    """
    before = dict(os.environ)
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
        for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)
            if name in before:
                os.environ[name] = before[name]
        pytest.fail("the test has left a process group in this process; use run_mesh")


@pytest.fixture(scope="session")
def rank_pools():
    """The session's worker pools."""
    from rank_pool import RankPools

    pools = RankPools()
    yield pools
    pools.close()


@pytest.fixture(scope="session")
def fork_server(rank_pools):
    """The context of the pools, of which a session has one: its processes start with what ranks need imported."""
    return multiprocessing.get_context("forkserver")


@pytest.fixture(scope="session")
def run_ranks(rank_pools):
    """`run_ranks(n, function, *args)`: call a function in n processes of a gloo group, results in rank order."""
    return rank_pools.run_ranks


@pytest.fixture(scope="session")
def run_mesh(rank_pools):
    """`run_mesh(tp, function, *args, data=1, pipeline=1)`: call `function(mesh, *args)` on every rank of a mesh."""
    return rank_pools.run_mesh
