"""The memory of conversions above that of `import torch`, which docs/performance.md bounds."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from math import prod

import pytest
from object_stores import needs_s3
from s3_server import BUCKET, serve

from shardzoo.checkpoint.safetensors_header import make_header

BOUND = 96  # MiB, of docs/performance.md
GROWTH = 24  # MiB, for four times the bytes

# One process: its peak after `import torch`, after the conversions of the small model, and after
# those of the large one.
PROGRAM = """
import os, sys
import torch

def print_peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            print(int(line.split()[1]) >> 10)

print_peak()
from shardzoo.cli.main import main
for name in sys.argv[1:]:
    for arguments in (
        ["split", name, f"{name}-2", "--tp", "2"],
        ["reshard", f"{name}-2", f"{name}-3", "--tp", "3"],
        ["merge", f"{name}-3", f"{name}-1"],
    ):
        assert main(["convert", *arguments]) == 0
    print_peak()
"""

# The same between folders of a store. The client is in memory from the first command on.
STORE_PROGRAM = """
import sys
import torch

def peak():
    for line in open("/proc/self/status"):
        if line.startswith("VmHWM"):
            return int(line.split()[1]) >> 10

bare = peak()
from shardzoo.cli.main import main
url, name = sys.argv[1:]
for arguments in (
    ["merge", name, f"{url}/{name}"],
    ["split", f"{url}/{name}", f"{url}/{name}-2", "--tp", "2"],
    ["reshard", f"{url}/{name}-2", f"{url}/{name}-3", "--tp", "3"],
    ["verify", f"{url}/{name}-3", f"{url}/{name}"],
    ["merge", f"{url}/{name}-3", f"{url}/{name}-1"],
):
    assert main(["convert", *arguments]) == 0
    print("above torch:", arguments[0], peak() - bare)
"""


def write_gpt2(folder, layers: int, hidden: int = 480) -> int:
    """Writes a GPT-2 of zeros, whose matrices are stored transposed; returns its bytes."""
    shapes = {"wte.weight": (8192, hidden), "wpe.weight": (64, hidden)}
    for layer in range(layers):
        for norm in ("ln_1", "ln_2"):
            shapes[f"h.{layer}.{norm}.weight"] = (hidden,)
            shapes[f"h.{layer}.{norm}.bias"] = (hidden,)
        for linear, rows, columns in (
            ("attn.c_attn", hidden, 3 * hidden),
            ("attn.c_proj", hidden, hidden),
            ("mlp.c_fc", hidden, 4 * hidden),
            ("mlp.c_proj", 4 * hidden, hidden),
        ):
            shapes[f"h.{layer}.{linear}.weight"] = (rows, columns)
            shapes[f"h.{layer}.{linear}.bias"] = (columns,)
    shapes |= {"ln_f.weight": (hidden,), "ln_f.bias": (hidden,)}
    named = {f"transformer.{name}": ("F32", shape) for name, shape in shapes.items()}
    header, _ = make_header(named, {"format": "pt"})
    size = len(header) + 4 * sum(prod(shape) for shape in shapes.values())
    config = {"model_type": "gpt2", "vocab_size": 8192, "n_positions": 64}
    config |= {"n_embd": hidden, "n_layer": layers, "n_head": 6}
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with (folder / "model.safetensors").open("wb") as file:
        file.write(header)
        file.truncate(size)
    return size


@pytest.mark.before_release
def test_the_peak_does_not_grow_with_the_model(tmp_path):
    small = write_gpt2(tmp_path / "small", 4)
    large = write_gpt2(tmp_path / "large", 19)
    assert large > 3.5 * small
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, "small", "large"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    bare, after_small, after_large = [
        int(line) for line in done.stdout.splitlines() if line.isdigit()
    ]
    assert after_small - bare <= BOUND
    assert after_large - bare <= BOUND
    assert after_large - after_small <= GROWTH


@needs_s3
@pytest.mark.before_release
def test_the_peak_between_two_folders_of_a_store(tmp_path):
    write_gpt2(tmp_path / "model", 3)
    with serve() as server:
        environment = {**os.environ, **server.variables}
        environment["SHARDZOO_OBJECTS"] = str(tmp_path / "objects")
        # Buckets outlive the servers of a process.
        make_bucket = f"import s3fs; s3fs.S3FileSystem().makedirs('{BUCKET}', exist_ok=True)"
        subprocess.run([sys.executable, "-c", make_bucket], env=environment, check=True)
        done = subprocess.run(
            [sys.executable, "-c", STORE_PROGRAM, f"s3://{BUCKET}", "model"],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=600,
        )
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith("above torch:")]
    peaks = {words[2]: int(words[3]) for words in lines}
    assert set(peaks) == {"merge", "split", "reshard", "verify"}
    assert max(peaks.values()) <= BOUND, peaks
