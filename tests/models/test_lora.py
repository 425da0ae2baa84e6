"""LoRA on split models computes what peft computes on transformers' models: outputs, gradients, and files."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from every_case import by_turns
from safetensors.torch import load_file
from tiny_models import hf_model
from transformers import AutoModelForCausalLM

from shardzoo.models import ParallelConfig, from_pretrained
from shardzoo.models.lora import (
    SUPPORTED,
    check_same_lora,
    gather_weights,
    load_adapter,
    lora_config,
    merge_lora,
)
from shardzoo.mpu import grad_norm

IDS = torch.randint(2, 90, (2, 12), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 12, [1] * 7 + [0] * 5])
UNTIED = {"tie_word_embeddings": False}
# (architecture, peft's settings, changes of the configuration)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"target_modules": ["c_attn", "c_proj", "c_fc"]}, {"n_embd": 40, "n_head": 5}),
    "gpt2-attention": ("GPT2LMHeadModel", {"target_modules": ["c_attn"], "alpha_pattern": {"h.1.attn.c_attn": 9}}, {}),
    # Of two key-value heads three ranks share one, and 43 inner features are split unequally.
    "llama": ("LlamaForCausalLM", {"target_modules": "all-linear"}, {"intermediate_size": 43}),
    "llama-heads": (
        "LlamaForCausalLM",
        {"target_modules": ["q_proj", "v_proj"], "modules_to_save": ["lm_head", "embed_tokens"]},
        {**UNTIED, "num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 48},
    ),
    "qwen2": ("Qwen2ForCausalLM", {"target_modules": r".*layers\.1\..*\.(k|v|up)_proj"}, {}),
    "glm4": ("Glm4ForCausalLM", {"target_modules": ["gate_up_proj", "k_proj", "o_proj"]}, {}),
    "t5": ("T5ForConditionalGeneration", {"target_modules": ["q", "v", "wi", "wo"], "rank_pattern": {"q": 5}}, {}),
    "mt5": ("MT5ForConditionalGeneration", {"target_modules": "all-linear"}, UNTIED),
    "bart": ("BartForConditionalGeneration", {"target_modules": ["q_proj", "k_proj", "out_proj", "fc1"]}, {}),
    "bert": ("BertForMaskedLM", {"target_modules": ["query", "dense"]}, {}),
    "roberta": ("RobertaForSequenceClassification", {"modules_to_save": ["classifier"]}, {}),
    "modernbert": ("ModernBertForMaskedLM", {"target_modules": ["Wqkv", "Wi", "Wo"]}, {}),
}  # fmt: skip


def inputs(model: Any) -> dict[str, torch.Tensor]:
    decoder = (
        {"decoder_input_ids": IDS.flip(1)}
        if getattr(model.config, "is_encoder_decoder", False)
        else {}
    )
    return {"input_ids": IDS, "attention_mask": MASK, **decoder}


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """`adapted(case)`: a folder with base/ and peft's adapter/, and what peft computes with them."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def make(case: str) -> tuple[Path, dict[str, Any]]:
        if case in made:
            return made[case]
        architecture, settings, changes = CASES[case]
        folder, base = tmp_path_factory.mktemp(case), hf_model(architecture, 0.0, **changes).eval()
        base.save_pretrained(folder / "base")
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = peft.get_peft_model(
                base, peft.LoraConfig(r=3, lora_alpha=7, use_rslora=case != "t5", **settings)
            )
        generator = torch.Generator().manual_seed(1)
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        model.save_pretrained(folder / "adapter")
        logits = model(**inputs(base)).logits
        loss = (
            logits[MASK[:, : logits.shape[1]].bool()].square().mean()
            if logits.dim() == 3
            else logits.square().mean()
        )
        with torch.no_grad():
            merged = copy.deepcopy(model).merge_and_unload()(**inputs(base)).logits
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.grad is not None]
        )
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.grad
        gradients = peft.get_peft_model_state_dict(model)
        # What rounding the merged weights changes in peft's own model is what it may change in ours.
        rounding = (merged - logits).abs().max().item()
        expected = {
            "logits": logits.detach(),
            "rounding": rounding,
            "norm": norm.item(),
            "grads": gradients,
        }
        made[case] = folder, expected
        return made[case]

    return make


def compute(mesh: Any, folder: Path, parallel: dict[str, Any]) -> dict[str, Any]:
    model: Any = from_pretrained(folder / "base", mesh, parallel_config=ParallelConfig(**parallel))
    load_adapter(model, folder / "adapter")
    weights = gather_weights(model)
    logits = model.gather_logits(model(**inputs(model)).logits)
    loss = (
        logits[MASK[:, : logits.shape[1]].bool()].square().mean()
        if logits.dim() == 3
        else logits.square().mean()
    )
    loss.backward()
    trained = [p for p in model.parameters() if p.requires_grad]
    assert all(p.grad is None for p in model.parameters() if not p.requires_grad)
    norm = grad_norm(trained, mesh).item()
    for parameter in trained:
        parameter.data = parameter.grad
    grads = gather_weights(model)
    again: Any = from_pretrained(folder / "base", mesh, parallel_config=ParallelConfig(**parallel))
    load_adapter(again, folder / "adapter")
    merge_lora(again)
    merged = again.gather_logits(again(**inputs(again)).logits)
    return {
        "logits": logits.detach(),
        "merged": merged.detach(),
        "norm": norm,
        "grads": grads,
        "weights": weights,
    }


SIZES = [
    *((case, 3) for case in CASES),
    ("gpt2", 1),
    ("llama-heads", 1),
    ("mt5", 4),
    ("bert", 4),
    ("qwen2", 2),
]


@pytest.mark.parametrize(("case", "size"), by_turns(SIZES, 4))
def test_a_split_model_computes_what_peft_computes(adapted, run_mesh, case, size):
    folder, expected = adapted(case)
    stored = load_file(folder / "adapter" / "adapter_model.safetensors")
    modes: list[dict[str, Any]] = [{}, {"sequence_parallel": True, "recompute": "full"}]
    for mode in modes[: 1 if size == 1 else 2]:
        results = run_mesh(size, compute, folder, mode)
        for found in results:
            largest = expected["logits"].abs().max().item()
            torch.testing.assert_close(
                found["logits"], expected["logits"], rtol=0, atol=1e-6 * max(1, largest)
            )
            torch.testing.assert_close(
                found["merged"], found["logits"], rtol=0, atol=3 * expected["rounding"]
            )
            assert found["norm"] == pytest.approx(expected["norm"], rel=1e-5)
            assert found["grads"].keys() == expected["grads"].keys() == stored.keys()
            for name, grad in expected["grads"].items():
                torch.testing.assert_close(
                    found["grads"][name], grad, rtol=1e-4, atol=1e-6 * expected["norm"]
                )
                assert torch.equal(found["weights"][name], stored[name]), name
                assert torch.equal(found["grads"][name], results[0]["grads"][name]), name


NUMBER = "must be a finite number above 0, not"
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"r": "8"}, "r must be a whole number of at least 1, not '8'"),
    (
        {"r": 10**12},
        r"the rank 1000000000000 is above both sizes of transformer.h.0.attn.c_attn, 96 x 32",
    ),
    *(({"lora_alpha": value}, f"lora_alpha {NUMBER}") for value in ("16", None, [1], 0, -2)),
    *(
        ({"lora_dropout": value}, "lora_dropout must be at least 0 and below 1")
        for value in ("0.1", None, -1, 1)
    ),
    ({"use_rslora": "yes"}, "use_rslora must be True or False, not 'yes'"),
    *(
        ({"target_modules": value}, "target_modules must be names")
        for value in (5, ["c_attn", None])
    ),
    ({"exclude_modules": 5}, "exclude_modules must be names"),
    *(
        ({name: "("}, f"{name}: '\\(' is no regular expression")
        for name in ("target_modules", "exclude_modules")
    ),
    *(
        ({"modules_to_save": value}, "modules_to_save must be a list")
        for value in (5, "lm_head", [1])
    ),
    *(
        ({"rank_pattern": value}, "rank_pattern must be a dict of regular expressions and ranks")
        for value in ({"c_attn": "x"}, {"c_attn": 0}, {"c_attn": 2.5}, {"c_attn": True}, [1], "x")
    ),
    ({"rank_pattern": {"(": 3}}, "rank_pattern: .* is no regular expression"),
    ({"rank_pattern": {"c_attn": 10**12}}, "the rank 1000000000000 is above both sizes"),
    *(
        ({"alpha_pattern": value}, "alpha_pattern must be a dict")
        for value in ({"c_attn": "x"}, {"c_attn": None}, [1])
    ),
    *(
        ({"layers_to_transform": value}, "layers_to_transform must be a number or a list")
        for value in ("x", [None])
    ),
    ({"base_model_name_or_path": 5}, "base_model_name_or_path must be a name or a folder, not 5"),
]


def test_wrong_values_of_a_stored_configuration_are_named(adapted, tmp_path):
    folder, _ = adapted("gpt2-attention")
    stored = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.safetensors").write_bytes(
        (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    )
    plain: dict[str, Any] = {"rank_pattern": {}, "alpha_pattern": {}}
    model: Any = from_pretrained(folder / "base")
    for change, message in WRONG:
        (tmp_path / "adapter_config.json").write_text(json.dumps({**stored, **plain, **change}))
        with pytest.raises(ValueError, match=f"LoRA: {message}"):
            load_adapter(model, tmp_path)
        assert getattr(model, "lora", None) is None


# These say which modules have weights, whose names are compared when they are read.
CHOOSING = {
    "target_modules", "target_parameters", "exclude_modules", "layers_to_transform", "layers_pattern",
    "modules_to_save", "fan_in_fan_out",
}  # fmt: skip
# Another value of every other field. The adapter has r=3, lora_alpha=7, rank-stabilized scaling, and
# alpha_pattern={"h.1.attn.c_attn": 9}.
VARIED: dict[str, list[Any]] = {
    "r": [2, 4],
    "lora_alpha": [8, 7.5],
    "use_rslora": [False],
    "rank_pattern": [{"h.0.attn.c_attn": 4}],
    "alpha_pattern": [{}, {"h.1.attn.c_attn": 8}, {"h.0.attn.c_attn": 9}],
    "lora_dropout": [0.25],
    "init_lora_weights": ["gaussian"],
    "inference_mode": [False],
    "base_model_name_or_path": ["elsewhere"],
    "revision": ["main"],
    "task_type": ["CAUSAL_LM"],
    "peft_version": ["0.1"],
}


def peft_logits(folder: Path, adapter: Path) -> torch.Tensor | None:
    """What peft computes with an adapter; None if its weights are not those of its configuration."""
    base = AutoModelForCausalLM.from_pretrained(folder / "base").eval()
    with torch.no_grad():
        try:
            return peft.PeftModel.from_pretrained(base, adapter)(**inputs(base)).logits
        except RuntimeError as error:
            if "size mismatch" not in str(error):
                raise
            return None


def test_every_field_of_the_configuration_is_varied():
    settled = {"peft_type", "auto_mapping", "runtime_config", "megatron_core"}
    assert VARIED.keys() == SUPPORTED - CHOOSING - settled


@pytest.mark.parametrize("name", VARIED)
def test_a_run_goes_on_with_the_same_products_only(name, adapted, tmp_path):
    """A changed field of the configuration is refused exactly where peft computes something else with it."""
    folder, expected = adapted("gpt2-attention")
    stored = json.loads((folder / "adapter" / "adapter_config.json").read_text())
    (tmp_path / "adapter_model.safetensors").write_bytes(
        (folder / "adapter" / "adapter_model.safetensors").read_bytes()
    )
    model: Any = from_pretrained(folder / "base")
    load_adapter(model, folder / "adapter")
    check_same_lora(model, folder / "adapter")
    for value in VARIED[name]:
        assert stored[name] != value
        (tmp_path / "adapter_config.json").write_text(json.dumps({**stored, name: value}))
        logits = peft_logits(folder, tmp_path)
        if logits is not None and torch.allclose(logits, expected["logits"], rtol=0, atol=1e-6):
            check_same_lora(model, tmp_path)
            continue
        with pytest.raises(ValueError, match=rf"was trained with {name}=.* cannot go on with"):
            check_same_lora(model, tmp_path)


def test_empty_selections_of_peft_are_none():
    settings = {"target_parameters": [], "layer_replication": []}
    assert lora_config(r=2, **settings).r == 2
    with pytest.raises(ValueError, match="do not support layer_replication"):
        lora_config(r=2, layer_replication=[(0, 1)])
