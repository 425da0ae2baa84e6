"""GGUF files become Hugging Face folders whose weights are those that transformers dequantizes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from every_case import by_turns
from gguf_files import write_gguf
from parity import randomize
from safetensors.torch import load_file, save_file

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
T5 = {
    "vocab_size": 97, "d_model": 256, "d_kv": 64, "d_ff": 256, "num_layers": 2, "num_decoder_layers": 3, "num_heads": 4,
    "decoder_start_token_id": 0, "relative_attention_num_buckets": 16,
}  # fmt: skip
WINDOWS = {"num_hidden_layers": 6, "sliding_window": 5, "head_dim": 64}
GEMMA = {**SIZES, **WINDOWS, "query_pre_attn_scalar": 64}
GATED = {**T5, "feed_forward_proj": "gated-gelu"}
UNTIED = {**GATED, "tie_word_embeddings": False}
CORRECTED = {
    "first_k_dense_replace": 1, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
    "routed_scaling_factor": 1.75,
}  # fmt: skip
THETA = {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
# Case -> GGUF's name of the architecture, the class of transformers, its configuration, and whether
# transformers reads such files, too.
CASES: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "llama": ("llama", "LlamaForCausalLM", {**SIZES, **THETA}, True),
    "qwen2": ("qwen2", "Qwen2ForCausalLM", {**SIZES, "tie_word_embeddings": True}, True),
    "qwen3": ("qwen3", "Qwen3ForCausalLM", {**SIZES, "head_dim": 128}, True),
    "phi3": ("phi3", "Phi3ForCausalLM", SIZES, True),
    "gpt2": ("gpt2", "GPT2LMHeadModel", GPT2, True),
    "gemma": ("gemma", "GemmaForCausalLM", {**SIZES, "head_dim": 128}, False),
    "gemma2": ("gemma2", "Gemma2ForCausalLM", GEMMA, False),
    "gemma3": ("gemma3", "Gemma3ForCausalLM", {**GEMMA, "rope_parameters": {
        "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
    }}, False),
    "olmo2": ("olmo2", "Olmo2ForCausalLM", SIZES, False),
    "olmo3": ("olmo2", "Olmo3ForCausalLM", {
        **SIZES, "num_hidden_layers": 3, "sliding_window": 5,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }, False),
    "granite": ("granite", "GraniteForCausalLM", {
        **SIZES, "embedding_multiplier": 12.0, "attention_multiplier": 0.125, "residual_multiplier": 0.25,
        "logits_scaling": 8.0, "attention_bias": True,
    }, False),
    "smollm3": ("smollm3", "SmolLM3ForCausalLM", {**SIZES, "num_hidden_layers": 5}, False),
    "mixtral": ("llama", "MixtralForCausalLM", {**SIZES, "num_local_experts": 3}, False),
    "qwen2_moe": ("qwen2moe", "Qwen2MoeForCausalLM", {
        **SIZES, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 256,
        "shared_expert_intermediate_size": 512,
    }, False),
    "qwen3_moe": ("qwen3moe", "Qwen3MoeForCausalLM", {
        **SIZES, "head_dim": 128, "num_experts": 3, "num_experts_per_tok": 2, "moe_intermediate_size": 768,
        "norm_topk_prob": True,
    }, True),
    "olmoe": ("olmoe", "OlmoeForCausalLM", {**SIZES, "num_experts": 3, "num_experts_per_tok": 2}, False),
    "gpt_oss": ("gpt-oss", "GptOssForCausalLM", {
        **SIZES, "head_dim": 64, "num_local_experts": 3, "num_experts_per_tok": 2, "sliding_window": 5,
        "max_position_embeddings": 256, "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 150000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        },
    }, False),
    "glm4_moe": ("glm4moe", "Glm4MoeForCausalLM", {
        **SIZES, **CORRECTED, "head_dim": 128, "attention_bias": True, "use_qk_norm": True,
    }, False),
    "deepseek_v3": ("deepseek2", "DeepseekV3ForCausalLM", {
        **SIZES, **CORRECTED, "num_key_value_heads": 4, "q_lora_rank": 256, "kv_lora_rank": 256, "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 32, "v_head_dim": 64, "n_group": 2, "topk_group": 1, "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 64,
            "mscale": 0.8, "mscale_all_dim": 0.8,
        },
    }, False),
    "glm4": ("glm4", "Glm4ForCausalLM", {**SIZES, "head_dim": 128, "attention_bias": True}, False),
    "t5 gated": ("t5", "T5ForConditionalGeneration", UNTIED, False),
    "t5 plain": ("t5", "T5ForConditionalGeneration", {**T5, "feed_forward_proj": "relu"}, False),
    "t5 encoder": ("t5encoder", "T5EncoderModel", GATED, False),
    "umt5": ("t5", "UMT5ForConditionalGeneration", UNTIED, False),
    "umt5 encoder": ("t5encoder", "UMT5EncoderModel", GATED, False),
}  # fmt: skip


def make(name: str) -> Any:
    _, architecture, changes, _ = CASES[name]
    model_class = getattr(transformers, architecture)
    model = model_class(model_class.config_class(**changes))
    if changes.get("tie_word_embeddings") is False:
        # transformers' T5 ties the head in any case.
        model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    randomize(model, 1)
    return model


def write(folder: Path, name: str, model: Any, edit: Any = None) -> Path:
    return write_gguf(folder, CASES[name][0], model, edit)[0]


def read_expected(name: str, model: Any, expected: dict[str, Any], folder: Path) -> Any:
    """transformers' model with the numbers of the file, and with the configuration that made it."""
    model.config.save_pretrained(folder)
    config = folder / "config.json"
    tied = not any(key.startswith("lm_head.") for key in expected)
    config.write_text(json.dumps({**json.loads(config.read_text()), "tie_word_embeddings": tied}))
    save_file(expected, folder / "model.safetensors", {"format": "pt"})
    model_class = getattr(transformers, CASES[name][1])
    read = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    if name == "umt5":
        # transformers 5 scales the input of every UMT5's head, also where the file says that it is untied.
        read.config.tie_word_embeddings = tied
    return read


@pytest.mark.parametrize("name", by_turns(CASES, 4))
def test_weights_and_outputs_are_those_of_the_file(name, tmp_path):
    """The tensors are those of `gguf`'s own functions; the configuration is the one that made the file."""
    arch, architecture, _, read_by_transformers = CASES[name]
    model = make(name)
    path, expected = write_gguf(tmp_path / "source", arch, model)
    (path.parent / "saved").rename(tmp_path / "saved")
    outcome = merge(path, tmp_path / "hf", Options(dequantize="F32"))
    found = load_file(tmp_path / "hf" / "model.safetensors")
    assert outcome.tensors == len(found)
    assert found.keys() == expected.keys()
    for key, tensor in found.items():
        assert tensor.equal(expected[key]), key

    theirs = read_expected(name, model, expected, tmp_path / "saved")
    inputs = {"input_ids": torch.randint(3, 97, (2, 9))}
    if "ForConditionalGeneration" in architecture:
        inputs["decoder_input_ids"] = torch.randint(3, 97, (2, 7))
    with torch.no_grad():
        mine = shardzoo.from_pretrained(tmp_path / "hf").eval()(**inputs)[0]
        wanted = theirs(**inputs)[0]
    assert ((mine - wanted).abs().max() / wanted.abs().max()) < 1e-5
    if read_by_transformers:
        model_class = getattr(transformers, architecture)
        again = model_class.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        for key, tensor in again.state_dict().items():
            assert tensor.equal(theirs.state_dict()[key]), key

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


def test_layers_that_predict_further_tokens_are_left_out(tmp_path):
    def add_last_layer(writer: Any) -> None:
        writer.add_nextn_predict_layers(1)
        writer.add_tensor("blk.1.nextn.eh_proj.weight", torch.zeros(256, 512).numpy())

    path = write(tmp_path / "source", "glm4_moe", make("glm4_moe"), add_last_layer)
    file = open_gguf(path, list_gguf())
    assert file.config["num_hidden_layers"] == 1
    assert not [name for name in file.found.weights if ".layers.1." in name]
    merge(path, tmp_path / "hf", Options(dequantize="BF16"))
    assert shardzoo.from_pretrained(tmp_path / "hf").config.num_hidden_layers == 1


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
        match=r"architecture 'mamba'; those that are read are deepseek2, gemma, .*, t5, t5encoder",
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
