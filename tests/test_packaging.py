"""A wheel that is made from the source distribution holds the whole package, and works where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOT_PACKAGED = ("tests", "benchmarks", "examples", "docs")


def run(*command, cwd, **environment):
    """Runs a command where there is no compiler and no checkout on Python's path."""
    clean = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "SHARDZOO_BUILD", "CXX")}
    done = subprocess.run(command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    source = ["egg_info", "--egg-base", str(folder), "sdist", "--dist-dir", str(folder)]
    run(sys.executable, "setup.py", "-q", *source, cwd=ROOT)
    [archive] = folder.glob("*.tar.gz")
    shutil.unpack_archive(archive, folder)
    unpacked = folder / archive.name.removesuffix(".tar.gz")
    run(sys.executable, "setup.py", "-q", "bdist_wheel", "--dist-dir", str(folder), cwd=unpacked, PATH=str(folder))
    return next(folder.glob("*.whl"))


def test_the_wheel_holds_the_whole_package(wheel):
    listed = run("git", "ls-files", "*.py", "recipes/*.yaml", "cli/board/page/*", cwd=ROOT).split()
    wanted = {name for name in listed if name.partition("/")[0] not in NOT_PACKAGED}
    wanted -= {"setup.py", "csrc/build.py"}
    held = {name.removeprefix("shardzoo/") for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}
    assert held == wanted


def test_the_installed_package_runs(wheel, tmp_path):
    target = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(target)
    settings = {"cwd": tmp_path, "PYTHONPATH": str(target), "SHARDZOO_KERNELS": "reference"}
    assert run(sys.executable, "-m", "shardzoo.cli.main", "--version", **settings).startswith("shardzoo 0.")
    shown = run(sys.executable, "-m", "shardzoo.cli.main", "models", **settings)
    assert "t5-v1_1-base" in shown
