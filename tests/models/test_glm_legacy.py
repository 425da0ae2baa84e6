"""Checkpoint files of the original GLM's authors and of FlagAI."""

from __future__ import annotations

import argparse
import collections
import json
import random
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import shardzoo
from shardzoo.checkpoint.checkpoint import open_checkpoint
from shardzoo.models.auto import infer_config

GOLDEN = Path(__file__).parents[1] / "golden" / "glm_tiny.safetensors"
# How the authors split each tensor: the part of its name, the dimension, the number of stacked blocks.
SPLITS = (
    ("word_embeddings", 0, 1),
    ("attention.query_key_value", 0, 3),
    ("attention.dense.weight", 1, 1),
    ("mlp.dense_h_to_4h", 0, 1),
    ("mlp.dense_4h_to_h.weight", 1, 1),
)


@pytest.fixture(scope="module")
def golden():
    """config.json, weights, inputs and logits."""
    tensors = load_file(GOLDEN)
    with safe_open(GOLDEN, framework="pt") as file:
        sizes = json.loads(file.metadata()["config"])
    config = {"model_type": "glm", "block_position_encoding": True, **sizes}
    weights = {name[6:]: tensor for name, tensor in tensors.items() if name.startswith("param.")}
    inputs = {key: tensors[key] for key in ("input_ids", "position_ids")} | {
        "attention_mask": tensors["sep"]
    }
    return config, weights, inputs, tensors["logits"]


def part(name: str, tensor: torch.Tensor, rank: int, size: int) -> torch.Tensor:
    for piece, dim, blocks in SPLITS:
        if piece in name and "position_embeddings" not in name:
            return torch.cat(
                [block.chunk(size, dim)[rank] for block in tensor.chunk(blocks, dim)], dim
            ).clone()
    return tensor


def training_state(size: int) -> dict:
    """What stands beside the weights in files of the authors."""
    return {
        "mp_world_size": size,
        "iteration": 250000,
        "args": argparse.Namespace(hidden_size=64),
        "lr_scheduler": {"lr": np.float64(1e-4)},
        "random_rng_state": random.getstate(),
        "np_rng_state": np.random.get_state(),
        "torch_rng_state": torch.get_rng_state(),
        "rng_tracker_states": {"model-parallel-rng": torch.get_rng_state()},
        "optimizer": {"exp_avg": torch.randn(1000)},
    }


def write_authors(folder: Path, weights: dict, size: int, **options) -> None:
    folder.mkdir(exist_ok=True)
    for rank in range(size):
        module = {name: part(name, tensor, rank, size) for name, tensor in weights.items()}
        file = folder / f"mp_rank_{rank:02d}_model_states.pt"
        torch.save({"module": module, **training_state(size)}, file, **options)


def logits_of(mesh, folder, config, inputs):
    model = shardzoo.from_pretrained(folder, mesh, config=config)
    with torch.no_grad():
        return model.gather_logits(model(**inputs).logits)


def close(actual, expected):
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-5 * expected.abs().max().item())


@pytest.mark.parametrize("written", [1, 2, 4])
def test_files_of_any_number_of_ranks(written, tmp_path, run_mesh, golden):
    config, weights, inputs, logits = golden
    write_authors(tmp_path / "250000", weights, written)
    (tmp_path / "latest").write_text("250000\n")
    (tmp_path / "config.json").write_text(json.dumps(config))
    for tp in (1, 2, 4):
        for actual in run_mesh(tp, logits_of, tmp_path, None, inputs):
            close(actual, logits)
    (tmp_path / "latest").unlink()
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("250000")
    assert open_checkpoint(tmp_path).files == open_checkpoint(tmp_path / "250000").files
    close(logits_of(None, tmp_path / "250000", config, inputs), logits)


def test_files_from_before_torch_1_6(tmp_path, golden):
    config, weights, inputs, logits = golden
    write_authors(tmp_path, weights, 2, _use_new_zipfile_serialization=False)
    close(logits_of(None, tmp_path, config, inputs), logits)


@pytest.mark.parametrize("prefix", ["", "model.", "glm.", "module."])
@pytest.mark.parametrize("wrapped", [True, False])
def test_flagai_and_hub_bins(prefix, wrapped, tmp_path, golden):
    config, weights, inputs, logits = golden
    module = {prefix + name: tensor for name, tensor in weights.items()}
    torch.save({"module": module} if wrapped else module, tmp_path / "pytorch_model.bin")
    (tmp_path / "config.json").write_text(
        json.dumps({k: v for k, v in config.items() if k != "model_type"})
    )
    close(logits_of(None, tmp_path, None, inputs), logits)


def test_flagai_bins_of_two_ranks(tmp_path, golden):
    config, weights, inputs, logits = golden
    for rank in range(2):
        module = {name: part(name, tensor, rank, 2) for name, tensor in weights.items()}
        torch.save(
            {"module": module, "np_rng_state": None}, tmp_path / f"pytorch_model_{rank:02d}.bin"
        )
    (tmp_path / "config.json").write_text(json.dumps(config))
    close(logits_of(None, tmp_path, None, inputs), logits)


@pytest.mark.parametrize("prefix", ["", "glm."])
def test_hub_folders_of_safetensors(prefix, tmp_path, golden):
    config, weights, inputs, logits = golden
    save_file(
        {prefix + name: tensor for name, tensor in weights.items()}, tmp_path / "model.safetensors"
    )
    (tmp_path / "config.json").write_text(json.dumps({**config, "architectures": ["GLMModel"]}))
    close(logits_of(None, tmp_path, None, inputs), logits)


def test_a_hugging_face_folder_is_read_as_one_whatever_a_trainer_left_in_it(tmp_path, golden):
    config, weights, inputs, logits = golden
    write_authors(tmp_path / "global_step1", {"other": torch.ones(2)}, 1)
    (tmp_path / "latest").write_text("global_step1")
    save_file(weights, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    close(logits_of(None, tmp_path, None, inputs), logits)


def test_sizes_told_by_the_tensors(tmp_path, golden):
    _, weights, _, _ = golden
    write_authors(tmp_path, weights, 2)
    config = infer_config(open_checkpoint(tmp_path).ranks)
    sizes = (config.vocab_size, config.num_layers, config.hidden_size, config.max_sequence_length)
    assert sizes == (160, 3, 64, 48)
    assert config.num_attention_heads == 1  # heads of 64, as in every release


class Opener:
    """Unpickled without care, it writes a file."""

    def __init__(self, path: Path) -> None:
        self.path = str(path)

    def __reduce__(self):
        return open, (self.path, "w")


def test_no_code_of_a_file_runs(tmp_path, golden):
    config, weights, _, _ = golden
    marker = tmp_path / "marker"
    for hostile, name in (
        (Opener(marker), "open"),
        (collections.deque([1]), "collections.deque"),
        (sys.exit, "exit"),
    ):
        torch.save({"module": weights, "state": hostile}, tmp_path / "mp_rank_00_model_states.pt")
        with pytest.raises(ValueError, match=rf"is refused: .* holds a \S*{name}"):
            shardzoo.from_pretrained(tmp_path, config=config)
    assert not marker.exists()
    # An allowed name builds an inert object, never the real one.
    torch.save(
        {"module": weights, "args": argparse.Namespace(a=1)},
        tmp_path / "mp_rank_00_model_states.pt",
    )
    shardzoo.from_pretrained(tmp_path, config=config)


def test_what_is_wrong_is_named(tmp_path, golden):
    config, weights, _, _ = golden

    def refused(match: str, change=None):
        if change is not None:
            write_authors(tmp_path, change, 2)
        with pytest.raises(ValueError, match=match):
            shardzoo.from_pretrained(tmp_path, config=config)

    final = "transformer.final_layernorm.weight"
    refused(f"lacks {final}", {name: tensor for name, tensor in weights.items() if name != final})
    refused("has prompt_spell.weight, which", {**weights, "prompt_spell.weight": torch.ones(2)})
    refused(rf"{final} in .* has shape \[63\]", {**weights, final: torch.ones(63)})
    write_authors(tmp_path, weights, 2)
    (tmp_path / "mp_rank_00_model_states.pt").rename(tmp_path / "mp_rank_02_model_states.pt")
    refused("must have one for each rank, numbered from 0 without gaps")
    (tmp_path / "mp_rank_02_model_states.pt").unlink()
    (tmp_path / "mp_rank_01_model_states.pt").rename(tmp_path / "mp_rank_00_model_states.pt")
    refused("was written by 2 tensor-parallel ranks, but the number of rank files is 1")
    (tmp_path / "mp_rank_00_model_states.pt").write_bytes(b"PK\x03\x04 and no more")
    refused("mp_rank_00_model_states.pt is not in a format of torch.save|is damaged")
    (tmp_path / "mp_rank_00_model_states.pt").unlink()
    (tmp_path / "latest").write_text("../elsewhere")
    refused("names '../elsewhere', which is not the name of a folder beside it")
