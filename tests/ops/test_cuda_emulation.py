"""The CUDA kernels without a GPU: their cases on emulated threads, and broken kernels, which the cases must notice.

The everyday part runs every operator in every dtype in a random order of threads. SHARDZOO_TESTS=all runs more orders,
AddressSanitizer, the other tests of this folder, and every mutant.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from every_case import EVERY_CASE

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE / "cuda_emulation"))
import emulated_build  # noqa: E402

OBJECTS = HERE.parents[1] / "build" / "cuda_emulation"
# test_edges.py starts processes and maps memory of its own in the tests left out
MODULES = (
    ["test_variants.py", "test_operators.py", "test_edges.py"]
    if EVERY_CASE
    else ["test_variants.py"]
)
PARTS = 6  # of the mutants, each of which is compiled for some seconds; a part must end within the limit of a test
WHICH = "cuda" if EVERY_CASE else "cuda and (matches or runs_its)"


@pytest.fixture(scope="module")
def build():
    """Builds a library, or skips where there is no compiler."""

    def made(**options):
        try:
            return emulated_build.build(OBJECTS, **options)
        except emulated_build.library.CannotBuild as error:
            pytest.skip(str(error))

    return made


@pytest.mark.before_release
@pytest.mark.parametrize("order", ["forward", "reversed", "1", "2"] if EVERY_CASE else ["1"])
def test_every_operator(build, order):
    check(emulated_build.environment(build(), order))


@pytest.mark.before_release
@pytest.mark.parametrize("module", MODULES)
def test_no_access_out_of_bounds(build, module):
    check(emulated_build.environment(build(sanitize=True), "1", sanitize=True), [module])


def check(environment, modules=MODULES):
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-x",
        "-p",
        "no:cacheprovider",
        "-p",
        "emulated",
        "-k",
        WHICH,
    ]
    done = subprocess.run(
        [*command, *(str(HERE / name) for name in modules)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-2000:]


@pytest.mark.before_release
@pytest.mark.parametrize("part", range(PARTS))
def test_broken_kernels_fail(build, part):
    build()
    command = [
        sys.executable,
        str(HERE / "cuda_emulation" / "mutants.py"),
        str(OBJECTS),
        f"{part}/{PARTS}",
    ]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count(": caught") >= 48 // PARTS
