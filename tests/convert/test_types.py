"""Element types: opaque unless `--dtype` asks for another one."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from shardzoo.convert.operations import Options, merge, split

OPAQUE = ["float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2"]


@pytest.mark.parametrize("dtype", OPAQUE)
@pytest.mark.parametrize("variant", ["gpt2", "bert"])
def test_every_type_survives(dtype, variant, zoo, hashes, tmp_path):
    source = zoo.make(tmp_path / "hf", variant)
    path = source / "model.safetensors"
    noise = torch.Generator().manual_seed(0)
    tensors = {
        name: torch.randn(tensor.shape, generator=noise).to(getattr(torch, dtype))
        for name, tensor in load_file(path).items()
    }
    save_file(tensors, path)
    split(source, tmp_path / "two", 2)
    split(tmp_path / "two", tmp_path / "four", 4)
    merge(tmp_path / "four", tmp_path / "merged")
    assert hashes(tmp_path / "merged") == hashes(source)


def test_types_may_be_mixed(zoo, hashes, tmp_path):
    """As in T5 checkpoints whose `wo` stayed fp32; odd numbers of bytes leave nothing unaligned."""
    source = zoo.make(tmp_path / "hf", "t5")
    path = source / "model.safetensors"
    kinds = {"wo": torch.float32, ".o.": torch.float8_e4m3fn, "layer_norm": torch.float64}
    tensors = {
        name: tensor.nan_to_num().to(
            next((kind for key, kind in kinds.items() if key in name), torch.bfloat16)
        )
        for name, tensor in load_file(path).items()
    }
    tensors["encoder.final_layer_norm.weight"] = torch.ones(20).to(torch.float8_e5m2)
    save_file(tensors, path)
    split(source, tmp_path / "two", 2)
    rank = load_file(tmp_path / "two" / "rank_00.safetensors")  # refuses unaligned tensors
    assert {tensor.dtype for tensor in rank.values()} == {
        *kinds.values(),
        torch.bfloat16,
        torch.float8_e5m2,
    }
    merge(tmp_path / "two", tmp_path / "merged")
    assert hashes(tmp_path / "merged") == hashes(source)


@pytest.mark.parametrize(
    ("dtype", "name"), [("F16", "float16"), ("BF16", "bfloat16"), ("F64", "float64")]
)
@pytest.mark.parametrize("jobs", [1, 3])
def test_casts_are_torchs(dtype, name, jobs, zoo, tmp_path):
    source = zoo.make(tmp_path / "hf", "gpt2", vocabulary=130)
    path = source / "model.safetensors"
    original = {key: torch.randn(tensor.shape) for key, tensor in load_file(path).items()}
    original["transformer.h.0.attn.bias"] = torch.ones(1, 1, 40, 40)  # a buffer stays as it is
    save_file(original, path)
    split(source, tmp_path / "two", 2, Options(dtype=dtype, jobs=jobs))
    merge(tmp_path / "two", tmp_path / "merged")
    merged = load_file(tmp_path / "merged" / "model.safetensors")
    for key, tensor in original.items():
        expected = tensor if key.endswith(".attn.bias") else tensor.to(getattr(torch, name))
        assert torch.equal(merged[key], expected), key
    config = json.loads((tmp_path / "merged" / "config.json").read_text())
    assert config.get("dtype", config.get("torch_dtype")) == name


def test_a_cast_that_overflows_is_refused(zoo, tmp_path):
    source = zoo.make(tmp_path / "hf", "gpt2")
    path = source / "model.safetensors"
    tensors = {name: torch.zeros_like(tensor) for name, tensor in load_file(path).items()}
    tensors["transformer.h.0.mlp.c_fc.weight"][3, 4] = 1e6
    save_file(tensors, path)
    with pytest.raises(
        ValueError, match=r"mlp\.up\.weight has a value of 1e\+06, which does not fit float16"
    ):
        split(source, tmp_path / "two", 2, Options(dtype="F16"))
    assert [entry.name for entry in tmp_path.iterdir()] == ["hf"]


def test_infinities_and_nans_may_be_cast(zoo, tmp_path):
    source = zoo.make(tmp_path / "hf", "gpt2")
    path = source / "model.safetensors"
    tensors = {
        name: torch.full_like(tensor, float("inf")) for name, tensor in load_file(path).items()
    }
    tensors["transformer.ln_f.bias"][:] = float("nan")
    save_file(tensors, path)
    split(source, tmp_path / "two", 2, Options(dtype="BF16"))
    rank = load_file(tmp_path / "two" / "rank_00.safetensors")
    assert rank["final_norm.bias"].isnan().all()
    assert rank["final_norm.weight"].isinf().all()


def test_an_unknown_type(gpt2_folder, tmp_path):
    with pytest.raises(ValueError, match="cannot convert to I8; use one of"):
        split(gpt2_folder, tmp_path / "two", 2, Options(dtype="I8"))
