"""What transformers loads, the zoo loads with its logits; quantized folders are refused, and say why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from parity import randomize
from safetensors.torch import load_file, save_file
from tiny_models import hf_model

import shardzoo

WEIGHTS = "model.safetensors"


def make_folder(folder: Path, architecture: str, **changes: Any) -> Path:
    model = hf_model(architecture, 0.0 if architecture != "LlamaForCausalLM" else None, **changes)
    randomize(model, 1)
    model.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "gone"}))


def edit_tensors(folder: Path, change: Any) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})


def assert_same_logits(folder: Path, architecture: str) -> None:
    theirs = getattr(transformers, architecture).from_pretrained(folder)
    ours = shardzoo.from_pretrained(folder)
    ids = torch.arange(3, 12)[None]
    inputs = {"input_ids": ids}
    if theirs.config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :5]
    with torch.no_grad():
        torch.testing.assert_close(
            ours(**inputs).logits, theirs(**inputs).logits, rtol=1e-4, atol=1e-4
        )


def test_llamas_first_name_and_buffers(tmp_path):
    make_folder(tmp_path, "LlamaForCausalLM")
    edit_config(tmp_path, architectures=["LLaMAForCausalLM"], pad_token_id=-1)
    edit_tensors(tmp_path, lambda tensors: {**tensors, "model.rotary_emb.inv_freq": torch.ones(4)})
    with pytest.warns(UserWarning, match="pad_token_id is -1"):
        assert_same_logits(tmp_path, "LlamaForCausalLM")


def test_an_index_that_names_a_buffer_without_a_tensor(tmp_path):
    make_folder(tmp_path, "LlamaForCausalLM")
    names = [*load_file(tmp_path / WEIGHTS), "model.rotary_emb.inv_freq"]
    (tmp_path / WEIGHTS).rename(tmp_path / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (tmp_path / f"{WEIGHTS}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    assert_same_logits(tmp_path, "LlamaForCausalLM")


def test_nothing_among_the_tensors_of_a_torch_file(tmp_path):
    make_folder(tmp_path, "GPT2LMHeadModel")
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    torch.save({**tensors, "absent.bias": None}, tmp_path / "pytorch_model.bin")
    assert_same_logits(tmp_path, "GPT2LMHeadModel")


def test_a_t5_without_a_head_has_a_tied_one(tmp_path):
    make_folder(tmp_path, "T5ForConditionalGeneration")
    edit_tensors(
        tmp_path,
        lambda tensors: {name: x for name, x in tensors.items() if name != "lm_head.weight"},
    )
    edit_config(
        tmp_path,
        tie_word_embeddings=False,
        transformers_version="4.24.0",
        scale_decoder_outputs="gone",
    )
    assert_same_logits(tmp_path, "T5ForConditionalGeneration")


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def quantize(tensors: dict[str, torch.Tensor], scale: str | None) -> dict[str, torch.Tensor]:
    made = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            made[name] = tensor.to(torch.float8_e4m3fn)
            if scale is not None:
                made[name.removesuffix("weight") + scale] = torch.ones(1, 1)
    return made


@pytest.mark.parametrize(
    ("settings", "scale", "message"),
    [
        (FP8, "weight_scale_inv", r"is quantized: fp8, weight_block_size=\[128, 128\]; it has"),
        (None, "weight_scale_inv", "is quantized: fp8 in blocks; it has"),
        (None, "qweight", "is quantized: GPTQ or AWQ; it has"),
        (
            FP8,
            None,
            "is quantized: fp8.*has type F8_E4M3, and the scales of the weights are missing",
        ),
        ({"load_in_8bit": True}, None, "is quantized: by an unnamed method, load_in_8bit=True"),
    ],
)
def test_quantized_folders_say_how_they_are_quantized(tmp_path, settings, scale, message):
    make_folder(tmp_path, "LlamaForCausalLM")
    edit_tensors(tmp_path, lambda tensors: quantize(tensors, scale))
    edit_config(tmp_path, quantization_config=settings)
    with pytest.raises(ValueError, match=message):
        shardzoo.from_pretrained(tmp_path)


def test_whole_weights_load_whatever_they_once_were(tmp_path):
    make_folder(tmp_path, "LlamaForCausalLM")
    wanted = shardzoo.from_pretrained(tmp_path).state_dict()
    edit_config(
        tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
    )
    with pytest.warns(UserWarning, match="config.json says that the model is quantized"):
        found = shardzoo.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())
