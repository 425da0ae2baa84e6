"""The build compiles what has changed. Without a compiler, or with one that fails, it succeeds and says so once."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from shardzoo.ops import library

ROOT = Path(__file__).parents[2]


def build(folder, **environment):
    """Run the extension build into a folder."""
    command = [
        sys.executable,
        "setup.py",
        "build_ext",
        "--build-lib",
        folder / "lib",
        "--build-temp",
        folder / "temp",
    ]
    cleared = {
        name: value
        for name, value in os.environ.items()
        if name not in ("CXX", "NVCC", "SHARDZOO_BUILD", "SHARDZOO_CUDA")
    }
    return subprocess.run(
        command, cwd=ROOT, env={**cleared, **environment}, capture_output=True, text=True
    )


@pytest.fixture(params=["none", "broken"])
def no_compiler(request, tmp_path):
    """(environment without a working compiler, what the build says about it)"""
    if request.param == "none":
        return {"PATH": str(tmp_path)}, "there is no C++ compiler"
    broken = tmp_path / "g++"
    broken.write_text("#!/bin/sh\necho 'fatal error: this compiler is broken' >&2\nexit 1\n")
    broken.chmod(0o755)
    return {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        "SHARDZOO_CUDA": "0",
    }, "g++ failed: fatal error: this compiler"


@pytest.mark.before_release
def test_install_succeeds_and_says_so_once(no_compiler, tmp_path):
    environment, reason = no_compiler
    done = build(tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("installed without some compiled parts") == 1
    assert f"shardzoo.ops._kernels: {reason}" in done.stderr
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.before_release
def test_a_failing_nvcc_costs_only_the_cuda_kernels(tmp_path):
    scripts = {
        "g++": 'while [ "$1" != -o ]; do shift; done; : >"$2"',
        "nvcc": "echo error: unsupported compiler >&2; exit 1",
    }
    for name, script in scripts.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{script}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    library = tmp_path / "lib" / "shardzoo" / "ops" / "_kernels.so"
    done = build(tmp_path, **environment)
    assert done.returncode == 0, done.stderr
    assert (
        "shardzoo.ops._kernels: without CUDA kernels: nvcc failed: error: unsupported compiler"
        in done.stderr
    )
    assert library.exists()
    done = build(tmp_path, **environment, SHARDZOO_CUDA="1")
    assert "shardzoo.ops._kernels: nvcc failed: error: unsupported compiler" in done.stderr
    assert not library.exists()


@pytest.fixture
def checkout(tmp_path):
    """A folder with the sources, and a compiler that only notes what it is asked to compile in `compiled`."""
    shutil.copytree(ROOT / "csrc", tmp_path / "csrc")
    for room in ("data", "mpu", "ops", "bin"):
        (tmp_path / room).mkdir()
    compiler = tmp_path / "bin" / "g++"
    compiler.write_text(
        "#!/bin/sh\n"
        f'echo "$@" >> "{tmp_path}/compiled"\n'
        'while [ "$1" != -o ]; do shift; done; : > "$2"\n'
    )
    compiler.chmod(0o755)
    return tmp_path


def compiled_sources(checkout):
    """Builds in a checkout. Returns the names of the sources that were compiled."""
    log = checkout / "compiled"
    log.unlink(missing_ok=True)
    environment = {
        **os.environ,
        "PATH": f"{checkout / 'bin'}:{os.environ['PATH']}",
        "SHARDZOO_BUILD": "required",
        "SHARDZOO_CUDA": "0",
        "CXX": "g++",
    }
    command = [sys.executable, checkout / "csrc" / "build.py"]
    subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    commands = [line.split() for line in log.read_text().splitlines()]
    return sorted(
        Path(words[words.index("-c") + 2]).name for words in commands if "-shared" not in words
    )


@pytest.mark.before_release
def test_only_what_has_changed_is_compiled_again(checkout):
    everything = compiled_sources(checkout)
    assert everything.count("norm.cpp") == everything.count("matrix_product.cpp") - 1
    assert {"ops.cpp", "dispatch.cpp", "index.cpp", "shared_memory.cpp"} < set(everything)
    assert compiled_sources(checkout) == []
    (checkout / "csrc" / "cpu" / "norm.cpp").touch()
    kernels_of_norm = compiled_sources(checkout)
    assert set(kernels_of_norm) == {"norm.cpp"}
    assert len(kernels_of_norm) == everything.count("norm.cpp")  # one for each instruction set


@pytest.mark.before_release
def test_required_build_fails(no_compiler, tmp_path):
    environment, reason = no_compiler
    done = build(tmp_path, **environment, SHARDZOO_BUILD="required")
    assert done.returncode != 0
    assert reason in done.stderr


@pytest.mark.before_release
def test_skipped_build(tmp_path):
    done = build(tmp_path, SHARDZOO_BUILD="skip")
    assert done.returncode == 0
    assert not list(tmp_path.rglob("*.so"))


@pytest.mark.before_release
def test_a_wrong_setting_is_named(tmp_path):
    done = build(tmp_path, SHARDZOO_BUILD="yes")
    assert done.returncode != 0
    assert "SHARDZOO_BUILD must be one of auto, required, skip; got 'yes'" in done.stderr


@pytest.mark.skipif(library.load_error() is not None, reason="calls compiled kernels")
def test_a_library_of_another_source_is_named():
    """An operator with another schema, and one that is not there."""
    advice = r"built from another version of the source: run `python csrc/build.py`"
    with pytest.raises(RuntimeError, match=rf"at most \d+ argument.*{advice}"):
        library.call_compiled("bias_gelu_backward", *[1] * 40)
    with pytest.raises(RuntimeError, match=f"has no kernel 'no_such_kernel': it was {advice}"):
        library.call_compiled("no_such_kernel")
