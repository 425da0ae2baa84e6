"""What loading reads and what memory it takes, on four ranks."""

from __future__ import annotations

import json
import os
import struct
from collections import Counter
from math import prod
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import load_file

import shardzoo
from shardzoo.models import find_config, from_config
from shardzoo.models.mapping import collect_parameter_specs
from shardzoo.models.t5.hf import NAME_MAP

RANKS = 4
MIB = 1 << 20


def reads_of_a_load(mesh, folder):
    """Every read of a file's tensors by this rank: (file, first byte, length)."""
    seen, preadv = [], os.preadv

    def spy(file, buffers, offset):
        count = preadv(file, buffers, offset)
        seen.append((os.readlink(f"/proc/self/fd/{file}"), offset, count))
        return count

    os.preadv = spy
    try:
        shardzoo.from_pretrained(folder, mesh)
    finally:
        os.preadv = preadv
    return seen


@pytest.mark.parametrize("model_type", ["gpt2", "t5"])
def test_four_ranks_together_read_each_byte_once(model_type, run_mesh, tmp_path):
    if model_type == "gpt2":
        config = transformers.GPT2Config(
            n_embd=24, n_head=4, n_layer=3, vocab_size=101, n_positions=21
        )
        model = transformers.GPT2LMHeadModel(config)
    else:
        config = transformers.T5Config(
            d_model=20, d_kv=7, num_heads=4, d_ff=36, num_layers=2, vocab_size=131, feed_forward_proj="gated-gelu",
            tie_word_embeddings=False, decoder_start_token_id=0,
        )  # fmt: skip
        model = transformers.T5ForConditionalGeneration(config)
        model.lm_head.weight = torch.nn.Parameter(torch.randn(131, 20))
    model.save_pretrained(tmp_path, max_shard_size="20KB")
    reads: Counter[tuple[str, int]] = Counter()
    per_rank = []
    for rank in run_mesh(RANKS, reads_of_a_load, tmp_path):
        per_rank.append(sum(length for _, _, length in rank))
        for file, start, length in rank:
            reads.update((file, byte) for byte in range(start, start + length))
    assert set(reads.values()) == {1}
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    expected = set()
    for path in files:
        (header,) = struct.unpack("<Q", path.read_bytes()[:8])
        expected |= {(str(path), byte) for byte in range(8 + header, path.stat().st_size)}
    assert reads.keys() == expected
    total = sum(tensor.nbytes for path in files for tensor in load_file(path).values())
    assert sum(per_rank) == total
    # Even but for the vocabulary, whose padding the last rank holds.
    assert max(per_rank) < 1.6 * total / RANKS


def write_huge(folder, config) -> None:
    """The preset's checkpoint in two files full of zeros, which take no room on disk."""
    tensors = {}
    model = from_config(config, device="meta")
    specs = collect_parameter_specs(model)
    for native, entry in zip(specs, NAME_MAP.resolve(specs), strict=True):
        shape, shard = specs[native].shape, specs[native].shard
        names = entry.stored_names()
        lengths = shard.groups if shard and len(names) > 1 else (shape[shard.dim if shard else 0],)
        for name, length in zip(names, lengths, strict=True):
            dim = shard.dim if shard else 0
            tensors[name] = [*shape[:dim], length, *shape[dim + 1 :]]
    names = sorted(tensors)
    files = {name: f"model-0000{1 + i % 2}-of-00002.safetensors" for i, name in enumerate(names)}
    for file in set(files.values()):
        header, offset = {}, 0
        for name in (name for name in names if files[name] == file):
            end = offset + 4 * prod(tensors[name])
            header[name] = {"dtype": "F32", "shape": tensors[name], "data_offsets": [offset, end]}
            offset = end
        text = json.dumps(header).encode()
        with (folder / file).open("wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            out.truncate(8 + len(text) + offset)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    config.save(folder)


def peak_of_a_load(mesh, folder):
    """(resident bytes at the peak beyond those before, bytes of the rank's parameters)"""

    def resident(field):
        lines = Path("/proc/self/status").read_text().splitlines()
        line = next(line for line in lines if line.startswith(field))
        return int(line.split()[1]) * 1024

    shardzoo.from_config("t5-small", device="meta")  # imports what a first model imports
    shardzoo.from_config({"model_type": "t5", "d_model": 8, "d_ff": 8, "num_layers": 1})
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts anew
    before = resident("VmRSS")
    model = shardzoo.from_pretrained(folder, mesh)
    return resident("VmHWM") - before, sum(p.nbytes for p in model.parameters())


@pytest.mark.before_release
def test_memory_peaks_at_the_ranks_parameters_and_little_more(run_mesh, tmp_path):
    config = find_config("t5-base")
    write_huge(tmp_path, config)
    for peak, own in run_mesh(RANKS, peak_of_a_load, tmp_path, isolated=True):
        assert own > 200 * MIB
        assert peak < own + 64 * MIB, f"{(peak - own) / MIB:.0f} MiB beyond the parameters"
        print(f"{peak / MIB:.1f} MiB for {own / MIB:.1f} MiB of parameters")
