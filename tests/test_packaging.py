"""A wheel that is made from the source distribution holds the whole package, and works where it is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from local_index import local_index

import shardzoo

ROOT = Path(__file__).parents[1]
NOT_PACKAGED = ("tests", "benchmarks", "examples", "docs")


def run(*command, cwd, **environment):
    """Runs a command where there is no compiler and no checkout on Python's path."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PYTHONPATH", "SHARDZOO_BUILD", "CXX")
    }
    done = subprocess.run(
        command, cwd=cwd, env={**clean, **environment}, capture_output=True, text=True
    )
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
    run(
        sys.executable,
        "setup.py",
        "-q",
        "bdist_wheel",
        "--dist-dir",
        str(folder),
        cwd=unpacked,
        PATH=str(folder),
    )
    return next(folder.glob("*.whl"))


@pytest.mark.before_release
def test_the_wheel_holds_the_whole_package(wheel):
    listed = run(
        "git", "ls-files", "*.py", "*.pyi", "recipes/*.yaml", "cli/board/page/*", cwd=ROOT
    ).split()
    wanted = {name for name in listed if name.partition("/")[0] not in NOT_PACKAGED}
    wanted -= {"setup.py", "csrc/backend.py", "csrc/build.py"}
    held = {
        name.removeprefix("shardzoo/")
        for name in zipfile.ZipFile(wheel).namelist()
        if ".dist-info/" not in name
    }
    assert held == wanted


@pytest.mark.before_release
def test_pip_finds_the_wheel_in_an_index(wheel, tmp_path):
    """A wheel for this version of Python; its metadata is whole."""
    python = f"cp{sys.version_info.major}{sys.version_info.minor}"
    assert wheel.name.startswith(f"shardzoo-{shardzoo.__version__}-{python}-{python}-linux_")
    (tmp_path / "index").mkdir()
    with local_index(wheel.parent, tmp_path / "index") as address:
        pip = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--quiet",
            "--target",
            str(tmp_path / "installed"),
        ]
        options = ["--index-url", address, "--only-binary", "shardzoo", "shardzoo"]
        run(*pip, *options, cwd=tmp_path, PIP_CONFIG_FILE=os.devnull)
    [metadata] = (tmp_path / "installed").glob("shardzoo-*.dist-info/METADATA")
    text = metadata.read_text()
    for line in (
        "Name: shardzoo",
        "License-Expression: Apache-2.0",
        "Description-Content-Type: text/markdown",
    ):
        assert f"\n{line}\n" in text
    assert len(list((tmp_path / "installed" / "shardzoo" / "recipes").glob("*.yaml"))) > 20


@pytest.mark.before_release
def test_the_installed_package_runs(wheel, tmp_path):
    target = tmp_path / "installed"
    zipfile.ZipFile(wheel).extractall(target)
    settings = {"cwd": tmp_path, "PYTHONPATH": str(target), "SHARDZOO_KERNELS": "reference"}
    assert run(sys.executable, "-m", "shardzoo.cli.main", "--version", **settings).startswith(
        "shardzoo 0."
    )
    shown = run(sys.executable, "-m", "shardzoo.cli.main", "models", **settings)
    assert "t5-v1_1-base" in shown
