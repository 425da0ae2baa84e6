"""mp_rank_XX_model_states.pt files, in and out."""

from __future__ import annotations

import json
import zipfile
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file

from shardzoo.convert.operations import Options, merge, split
from shardzoo.models import from_pretrained

GOLDEN = Path(__file__).parent.parent / "golden" / "glm_tiny.safetensors"
QKV = "transformer.layers.1.attention.query_key_value.weight"


@pytest.fixture(scope="module")
def glm(zoo, tmp_path_factory):
    return zoo.make(tmp_path_factory.mktemp("glm") / "hf", "glm", vocabulary=104)


def reference_shard(name: str, full: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    """The rule of the original implementation, by name: columns in chunks, fused qkv in three, the rest whole."""
    if "query_key_value" in name:
        return torch.cat([third.chunk(size)[rank] for third in full.chunk(3)])
    if "dense_h_to_4h" in name or name == "word_embeddings.weight":
        return full.chunk(size)[rank]
    if name.endswith(("attention.dense.weight", "dense_4h_to_h.weight")):
        return full.chunk(size, dim=1)[rank]
    return full


@pytest.mark.parametrize("size", [1, 2, 4])
def test_written_files_hold_what_the_original_would(size, glm, hashes, tmp_path):
    split(glm, tmp_path / "legacy", size, style="legacy")
    full = load_file(glm / "model.safetensors")
    assert (tmp_path / "legacy" / "latest").read_text().strip() == "release"
    for rank in range(size):
        path = tmp_path / "legacy" / "release" / f"mp_rank_{rank:02d}_model_states.pt"
        assert zipfile.ZipFile(path).testzip() is None  # checksums are right
        for mmap in (False, True):
            state = torch.load(path, weights_only=True, mmap=mmap)
            assert state["mp_world_size"] == size
            assert state["module"].keys() == full.keys()
            for name, tensor in state["module"].items():
                wanted = reference_shard(name, full[name], rank, size).contiguous()
                assert torch.equal(tensor.view(torch.int32), wanted.view(torch.int32)), name
    merge(tmp_path / "legacy", tmp_path / "merged")
    assert hashes(tmp_path / "merged") == hashes(glm)


@pytest.mark.parametrize("extra", [False, True])
def test_files_of_the_original_training(extra, glm, hashes, tmp_path):
    """As DeepSpeed saves them, with random states and arguments beside the weights, and no config.json."""
    full = load_file(glm / "model.safetensors")
    folder = tmp_path / "checkpoint" / "12000"
    folder.mkdir(parents=True)
    (tmp_path / "checkpoint" / "latest").write_text("12000\n")
    for rank in range(2):
        state = {
            "module": {
                name: reference_shard(name, tensor, rank, 2).clone()
                for name, tensor in full.items()
            }
        }
        if extra:
            state |= {
                "mp_world_size": 2,
                "iteration": 12000,
                "np_rng_state": np.random.RandomState(0).get_state(),
                "torch_rng_state": torch.get_rng_state(),
                "args": Namespace(lr=1e-4),
                "optimizer": None,
            }
        torch.save(state, folder / f"mp_rank_{rank:02d}_model_states.pt")
    options = Options(config_file=glm)
    split(tmp_path / "checkpoint", tmp_path / "four", 4, options)
    merge(tmp_path / "four", tmp_path / "merged")
    assert hashes(tmp_path / "merged") == hashes(glm)
    assert json.loads((tmp_path / "merged" / "config.json").read_text()) == json.loads(
        (glm / "config.json").read_text()
    )


def test_a_folder_without_a_configuration(zoo, hashes, tmp_path):
    """The original's sizes can be told from its tensors, as its heads always have 64 elements."""
    source = zoo.make(tmp_path / "hf", "glm", heads=2, head_size=64, vocabulary=104)
    split(source, tmp_path / "legacy", 2, style="legacy")
    (tmp_path / "legacy" / "config.json").unlink()
    merge(tmp_path / "legacy", tmp_path / "merged")
    assert hashes(tmp_path / "merged") == hashes(source)
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert (config["num_attention_heads"], config["num_layers"], config["vocab_size"]) == (
        2,
        2,
        104,
    )


def test_other_families_keep_their_own_names(gpt2_folder, gpt2_shards, hashes, tmp_path):
    split(gpt2_folder, tmp_path / "legacy", 2, style="legacy")
    state = torch.load(
        tmp_path / "legacy" / "release" / "mp_rank_01_model_states.pt", weights_only=True
    )
    shard = load_file(gpt2_shards / "rank_01.safetensors")
    assert state["module"].keys() == shard.keys()
    assert all(
        torch.equal(shard[n].view(torch.int32), t.view(torch.int32))
        for n, t in state["module"].items()
    )
    merge(tmp_path / "legacy", tmp_path / "merged")
    assert hashes(tmp_path / "merged") == hashes(gpt2_folder)


def test_the_golden_model_through_every_format(tmp_path):
    """Weights of the reference implementation still give its logits after a journey through all formats."""
    with safe_open(GOLDEN, framework="pt") as file:
        config = json.loads(file.metadata()["config"])
        values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dictionary
    module = {
        name.removeprefix("param."): value
        for name, value in values.items()
        if name.startswith("param.")
    }
    start = tmp_path / "start"
    start.mkdir()
    torch.save({"module": module}, start / "mp_rank_00_model_states.pt")
    (start / "config.json").write_text(
        json.dumps({"model_type": "glm", "block_position_encoding": True, **config})
    )
    split(start, tmp_path / "two", 2)
    split(tmp_path / "two", tmp_path / "legacy", 4, style="legacy")
    merge(tmp_path / "legacy", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    assert merged.keys() == module.keys()
    assert all(torch.equal(merged[name], tensor) for name, tensor in module.items())
    model = from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        logits = model(
            values["input_ids"], position_ids=values["position_ids"], attention_mask=values["sep"]
        ).logits
    assert torch.allclose(model.gather_logits(logits), values["logits"], rtol=1e-5, atol=1e-5)


def test_types_without_a_storage_class_are_refused(zoo, tmp_path):
    source = zoo.make(tmp_path / "hf", "glm", vocabulary=104)
    with pytest.raises(ValueError, match="cannot hold F8_E5M2"):
        split(source, tmp_path / "legacy", 2, Options(dtype="F8_E5M2"), style="legacy")
