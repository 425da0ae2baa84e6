"""GGUF files become Hugging Face folders whose weights are those that transformers dequantizes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from parity import randomize
from safetensors.torch import load_file

import shardzoo
from shardzoo.checkpoint.formats.gguf_file import open_gguf
from shardzoo.cli.main import main
from shardzoo.convert import Options, merge, split
from shardzoo.models.family_table import list_gguf

gguf = pytest.importorskip("gguf")

SIZES = {
    "vocab_size": 97, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 64, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
    "rms_norm_eps": 1e-5,
}  # fmt: skip
GPT2 = {"vocab_size": 97, "n_embd": 256, "n_layer": 2, "n_head": 4, "n_positions": 1024}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {**SIZES, "rope_parameters": {"rope_theta": 5000.0}}),
    "qwen2": ("Qwen2ForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3ForCausalLM", {**SIZES, "head_dim": 128}),
    "phi3": ("Phi3ForCausalLM", SIZES),
    "gpt2": ("GPT2LMHeadModel", GPT2),
}
KINDS = ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_K", "Q6_K", "Q5_0", "Q5_K", "Q2_K", "Q3_K")


def random_blocks(rows: int, columns: int, kind: Any, seed: int) -> Any:
    """Rows of a type that the package does not encode: random bits, with scales that are finite."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    scales = {"Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "Q2_K": (80, 82), "Q3_K": (108,)}
    generator = torch.Generator().manual_seed(seed)
    shape = rows, columns // block, size
    bits = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
    for at in scales[kind.name]:
        scale = torch.rand(rows, columns // block, 1, generator=generator).half() * 5e-4
        bits[..., at : at + 2] = scale.view(torch.uint8)
    return bits.reshape(rows, -1).numpy()


def write(folder: Path, name: str, model: Any, edit: Any = None) -> Path:
    """Writes a model's weights as llama.cpp does, the matrices in the types of `KINDS` in turn."""
    config = model.config
    folder.mkdir()
    path = folder / "model.gguf"
    writer = gguf.GGUFWriter(path, name)
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", heads)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_head_count(heads)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_vocab_size(config.vocab_size)
    writer.add_token_list([f"t{number}" for number in range(config.vocab_size)])
    if name == "gpt2":
        writer.add_feed_forward_length(4 * config.hidden_size)
        writer.add_layer_norm_eps(config.layer_norm_epsilon)
    else:
        writer.add_feed_forward_length(config.intermediate_size)
        writer.add_head_count_kv(groups)
        writer.add_layer_norm_rms_eps(config.rms_norm_eps)
        writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
        writer.add_rope_dimension_count(config.hidden_size // heads)
    if name == "qwen3":
        writer.add_key_length(config.head_dim)
    names = gguf.get_tensor_name_map(
        {text: number for number, text in gguf.MODEL_ARCH_NAMES.items()}[name],
        config.num_hidden_layers,
    )
    weights = dict(model.state_dict())
    if config.tie_word_embeddings:
        del weights["lm_head.weight"]
    for number, (hf_name, weight) in enumerate(weights.items()):
        stem, _, kind = hf_name.rpartition(".")
        stored = names.get_name(stem)
        assert stored, hf_name
        if weight.dim() == 2 and name == "gpt2" and ".h." in hf_name:
            weight = weight.t()
        if name == "llama" and re.search(r"\.[qk]_proj\.", hf_name):
            count = heads if ".q_proj" in hf_name else groups
            halves = weight.view(count, 2, -1, *weight.shape[1:])
            weight = halves.transpose(1, 2).reshape(weight.shape)
        values = weight.contiguous().numpy()
        if weight.dim() == 1:
            writer.add_tensor(f"{stored}.{kind}", values)
            continue
        qtype = gguf.GGMLQuantizationType[KINDS[number % len(KINDS)]]
        if qtype.name.endswith("_K"):
            blocks = random_blocks(*weight.shape, qtype, number)
        else:
            blocks = gguf.quants.quantize(values, qtype)
        writer.add_tensor(f"{stored}.{kind}", blocks, raw_dtype=qtype)
    if edit is not None:
        edit(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def make(name: str) -> Any:
    architecture, changes = CASES[name]
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**changes))
    randomize(model, 1)
    return model


@pytest.mark.parametrize("name", CASES)
def test_weights_and_logits_are_those_of_transformers(name, tmp_path):
    path = write(tmp_path / "source", name, make(name))
    model_class = getattr(transformers, CASES[name][0])
    theirs = model_class.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
    theirs.eval()
    outcome = merge(path, tmp_path / "hf", Options(dequantize="F32"))
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert outcome.tensors == len(found)
    expected = theirs.state_dict()
    assert found.keys() | {"lm_head.weight"} == expected.keys() | {"lm_head.weight"}
    for key, tensor in found.items():
        assert tensor.equal(expected[key]), key
    ids = torch.randint(3, 97, (2, 9))
    with torch.no_grad():
        mine = shardzoo.from_pretrained(tmp_path / "hf").eval()(input_ids=ids).logits
        wanted = theirs(input_ids=ids).logits
    assert ((mine - wanted).abs().max() / wanted.abs().max()) < 1e-5

    # A folder that holds the file, rounded to bf16, and split by way of the full weights.
    merge(path.parent, tmp_path / "bf16", Options(dequantize="BF16"))
    for key, tensor in load_file(tmp_path / "bf16" / "model.safetensors").items():
        assert tensor.equal(expected[key].bfloat16()), key
    split(path, tmp_path / "two", 2, Options(dequantize="BF16"))
    assert main(["convert", "verify", str(tmp_path / "two"), str(tmp_path / "bf16")]) == 0


def test_scaled_rotations(tmp_path):
    """Those of Llama 3.1 lie in the file as factors alone; others are keys."""
    model = make("llama")

    def add_llama3(writer: Any) -> None:
        scaled = {**SIZES, "rope_parameters": {
            "rope_type": "llama3", "rope_theta": 5000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        }}  # fmt: skip
        from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

        scaled_config = transformers.LlamaConfig(**scaled)
        frequencies = ROPE_INIT_FUNCTIONS["llama3"](scaled_config, "cpu")[0]
        plain = 1 / 5000.0 ** (torch.arange(0, 64, 2) / 64)
        writer.add_tensor("rope_freqs.weight", (plain / frequencies).float().numpy())

    def add_linear(writer: Any) -> None:
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(4.0)

    def add_other(writer: Any) -> None:
        writer.add_tensor("rope_freqs.weight", torch.linspace(1, 5, 32).numpy())

    path = write(tmp_path / "llama3", "llama", model, add_llama3)
    scaling = open_gguf(path, list_gguf()).config["rope_scaling"]
    assert scaling == {
        "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }  # fmt: skip
    path = write(tmp_path / "linear", "llama", model, add_linear)
    assert open_gguf(path, list_gguf()).config["rope_scaling"] == {
        "rope_type": "linear",
        "factor": 4.0,
    }
    path = write(tmp_path / "other", "llama", model, add_other)
    with pytest.raises(ValueError, match=r"factors that are not Llama 3.1's; name .* --config"):
        open_gguf(path, list_gguf())


def test_one_line_for_what_is_not_read(tmp_path, capsys):
    path = write(tmp_path / "source", "llama", make("llama"))
    for place in (path, path.parent):
        assert main(["convert", "split", str(place), str(tmp_path / "out"), "--tp", "2"]) == 2
        assert "GGUF file: convert it with --dequantize bf16 first" in capsys.readouterr().err

    content = path.read_bytes()
    for number, (at, end) in enumerate(((0, 3), (0, 400), (0, len(content) // 2))):
        cut = tmp_path / f"cut{number}.gguf"
        cut.write_bytes(content[at:end])
        command = ["convert", "merge", str(cut), str(tmp_path / "out"), "--dequantize", "bf16"]
        assert main(command) == 2
        assert f"{cut.name} is damaged, or no GGUF file" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()

    for at, damage, reason in (
        (4, b"\x09", "it has version 9"), (14, b"\x01", "it has 281,474,976,710,"), (30, b"\x01", "within its header"),
    ):  # fmt: skip
        (tmp_path / "damaged.gguf").write_bytes(content[:at] + damage + content[at + 1 :])
        with pytest.raises(ValueError, match=f"is damaged, or no GGUF file: .*{reason}"):
            open_gguf(tmp_path / "damaged.gguf", list_gguf())

    (tmp_path / "mamba.gguf").write_bytes(content.replace(b"llama", b"mamba"))
    with pytest.raises(
        ValueError,
        match=r"architecture 'mamba'; those that are read are gpt2, llama, phi3, qwen2, qwen3",
    ):
        merge(tmp_path / "mamba.gguf", tmp_path / "out", Options(dequantize="F32"))
    path.with_name("second.gguf").write_bytes(content)
    with pytest.raises(ValueError, match=r"2 GGUF files: name one of model.gguf, second.gguf"):
        merge(path.parent, tmp_path / "out", Options(dequantize="F32"))


def test_a_config_of_ones_own(tmp_path):
    path = write(tmp_path / "source", "qwen2", make("qwen2"))
    own = {**open_gguf(path, list_gguf()).config, "sliding_window": 17}
    (tmp_path / "config.json").write_text(json.dumps(own))
    options = Options(dequantize="F16", config_file=tmp_path / "config.json")
    merge(path, tmp_path / "hf", options)
    written = json.loads((tmp_path / "hf" / "config.json").read_text())
    assert written == {**own, "dtype": "float16"}
