"""peft adapts an unsplit model of the zoo as it adapts transformers' model: outputs, gradients, files, merges."""

from __future__ import annotations

import copy
from typing import Any

import peft
import pytest
import torch
import transformers
from every_case import by_turns
from safetensors.torch import load_file
from tiny_models import hf_model

import shardzoo
from shardzoo.models.for_peft import ModelForPeft, get_peft_model

IDS = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
LORA = {"r": 3, "lora_alpha": 7, "lora_dropout": 0.0}
# (architecture, LoraConfig's arguments, changes of the configuration)
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", {"target_modules": ["c_attn", "c_fc", "c_proj"], "bias": "all"}, {}),
    "gpt2, tokens": ("GPT2LMHeadModel", {"trainable_token_indices": [3, 7], "lora_bias": True}, {}),
    "llama": ("LlamaForCausalLM", {"target_modules": ["q_proj", "up_proj", "down_proj"], "use_dora": True}, {}),
    "qwen2": (
        "Qwen2ForCausalLM",
        {"target_modules": "all-linear", "rank_pattern": {"k_proj": 5}, "alpha_pattern": {"v_proj": 3}},
        {},
    ),
    "glm4": ("Glm4ForCausalLM", {"target_modules": ["gate_up_proj", "k_proj"], "init_lora_weights": "pissa"}, {}),
    "t5": (
        "T5ForConditionalGeneration",
        {"target_modules": ["q", "wo"], "trainable_token_indices": [2, 5], "init_lora_weights": "olora"},
        {},
    ),
    "bart": ("BartForConditionalGeneration", {"target_modules": ["q_proj", "fc1"], "bias": "lora_only"}, {}),
    "bert": ("BertForSequenceClassification", {"target_modules": ["query"], "modules_to_save": ["classifier"]}, {}),
    "heads": (
        "MistralForCausalLM",
        {"target_modules": ["q_proj", "embed_tokens"], "modules_to_save": ["lm_head"]},
        {"tie_word_embeddings": False},
    ),
    "mixtral": (
        "MixtralForCausalLM",
        {
            "target_modules": ["q_proj", "o_proj"],
            "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj", "mlp.gate.weight"],
        },
        {},
    ),
    "gpt_oss": ("GptOssForCausalLM", {"target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]}, {}),
    "deepseek_v3": (
        "DeepseekV3ForCausalLM",
        {"target_modules": ["kv_b_proj", "o_proj"], "target_parameters": ["mlp.experts.gate_up_proj"]},
        {},
    ),
    "switch": ("SwitchTransformersForConditionalGeneration", {"target_modules": ["q", "wi"]}, {}),
    "llama, a weight": ("LlamaForCausalLM", {"target_modules": ["q_proj"], "target_parameters": ["v_proj.weight"]}, {}),
}  # fmt: skip


def inputs(model: Any) -> dict[str, torch.Tensor]:
    given = {"input_ids": IDS, "attention_mask": MASK}
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = IDS.flip(1)
    return given


def compute(model: Any) -> dict[str, Any]:
    """Returns what a model with adapters computes, and the gradients under peft's names."""
    model.eval()
    logits = model(**inputs(model)).logits
    wanted = MASK.bool() if logits.dim() == 3 else torch.ones(2, dtype=torch.bool)
    logits[wanted].square().mean().backward()
    gradients = {
        name: parameter.grad.clone()
        for name, parameter in model.named_parameters()
        if parameter.requires_grad and parameter.grad is not None
    }
    model.zero_grad()
    with model.disable_adapter(), torch.no_grad():
        base = model(**inputs(model)).logits[wanted]
    return {"logits": logits.detach()[wanted], "gradients": gradients, "base": base}


def disturb(model: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for name, parameter in sorted(model.named_parameters()):
        if parameter.requires_grad:
            parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        assert not parameter.is_meta, name


def test_modules_that_do_not_exist_are_answered_with_those_that_do(tmp_path):
    hf_model("GPT2LMHeadModel", 0.0).save_pretrained(tmp_path)
    model = shardzoo.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"'q_proj'.* linear modules are .*c_attn, c_proj, c_fc"):
        get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))


@pytest.mark.parametrize("case", by_turns(CASES, 3))
@pytest.mark.filterwarnings("ignore")
def test_peft_computes_what_it_computes_on_transformers(case, tmp_path):
    architecture, settings, changes = CASES[case]
    base = hf_model(architecture, 0.0, **changes).eval()
    base.save_pretrained(tmp_path / "base")
    with torch.random.fork_rng():
        torch.manual_seed(0)
        theirs = peft.get_peft_model(base, peft.LoraConfig(**LORA, **settings))
        torch.manual_seed(0)
        ours = get_peft_model(
            shardzoo.from_pretrained(tmp_path / "base"), peft.LoraConfig(**LORA, **settings)
        )
    ours.eval()
    theirs.eval()
    own = dict(ours.named_parameters())
    assert own.keys() == dict(theirs.named_parameters()).keys()
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(own[name], parameter, rtol=1e-5, atol=1e-6)
        assert own[name].requires_grad == parameter.requires_grad, name
    for model in (ours, theirs):
        disturb(model)
    if "pissa" in settings.values() or "olora" in settings.values():
        # These change the base model, which the sign of a singular vector may decide.
        ours.load_state_dict(theirs.state_dict())
    found, wanted = compute(ours), compute(theirs)
    for name in ("logits", "base"):
        torch.testing.assert_close(found[name], wanted[name], rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found["logits"], found["base"], atol=1e-2)
    assert found["gradients"].keys() == wanted["gradients"].keys()
    for name, gradient in wanted["gradients"].items():
        torch.testing.assert_close(found["gradients"][name], gradient, rtol=1e-3, atol=1e-4)

    # The files are those of peft, and either reads the other's.
    ours.save_pretrained(tmp_path / "ours")
    theirs.save_pretrained(tmp_path / "theirs")
    files = [load_file(tmp_path / who / "adapter_model.safetensors") for who in ("ours", "theirs")]
    assert files[0].keys() == files[1].keys()
    for name, tensor in files[1].items():
        torch.testing.assert_close(files[0][name], tensor, rtol=1e-5, atol=1e-6)
    if settings.get("bias", "none") == "none" and "init_lora_weights" not in settings:
        again = peft.PeftModel.from_pretrained(
            ModelForPeft.from_pretrained(tmp_path / "base"), tmp_path / "theirs"
        ).eval()
        with torch.no_grad():
            logits = again(**inputs(again)).logits
        torch.testing.assert_close(
            logits[MASK.bool()] if logits.dim() == 3 else logits,
            wanted["logits"],
            rtol=1e-4,
            atol=1e-4,
        )

    # A copy is a model of its own, and merged weights are the zoo's.
    merged = copy.deepcopy(ours).merge_and_unload(safe_merge=case == "qwen2")
    with torch.no_grad():
        logits = merged(**inputs(merged)).logits
    logits = logits[MASK.bool()] if logits.dim() == 3 else logits
    torch.testing.assert_close(logits, wanted["logits"], rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(compute(ours)["base"], wanted["base"], rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    stored = getattr(transformers, architecture).from_pretrained(tmp_path / "merged").eval()
    with torch.no_grad():
        wanted_logits = stored(**inputs(stored)).logits
    wanted_logits = wanted_logits[MASK.bool()] if wanted_logits.dim() == 3 else wanted_logits
    torch.testing.assert_close(wanted_logits, logits, rtol=1e-4, atol=1e-4)


def refuse_a_split_model(mesh):
    model = shardzoo.from_config(
        {"model_type": "gpt2", "vocab_size": 50, "n_embd": 8, "n_head": 2, "n_layer": 1}, mesh=mesh
    )
    with pytest.raises(ValueError, match=r"adapt a split model with get_peft_model"):
        ModelForPeft(model)


@pytest.mark.filterwarnings("ignore")
def test_several_adapters_generate_and_train(run_mesh):
    run_mesh(2, refuse_a_split_model)
    base = hf_model("GPT2LMHeadModel", 0.1).eval()
    native = shardzoo.from_config({**base.config.to_dict(), "architectures": ["GPT2LMHeadModel"]})
    model = get_peft_model(
        native,
        peft.LoraConfig(
            r=2, target_modules=["c_attn"], modules_to_save=["ln_f"], task_type="CAUSAL_LM"
        ),
    )
    model.add_adapter(
        "second", peft.LoraConfig(r=3, target_modules=["c_fc"], task_type="CAUSAL_LM")
    )
    disturb(model)
    model.eval()
    options = {"attention_mask": MASK.flip(1), "max_new_tokens": 4, "pad_token_id": 0}
    logits, tokens = {}, {}
    for name in ("default", "second"):
        model.set_adapter(name)
        with torch.no_grad():
            logits[name] = model(input_ids=IDS).logits
        tokens[name] = model.generate(input_ids=IDS, **options)
    assert not torch.allclose(logits["default"], logits["second"], atol=1e-3)
    # What is generated is what the logits of the adapted model say.
    with torch.no_grad():
        again = model(
            input_ids=tokens["second"][:, :-1],
            attention_mask=torch.cat([MASK.flip(1), MASK[:, :3] * 0 + 1], 1),
        ).logits
    assert torch.equal(again[0, -1].argmax(), tokens["second"][0, -1])
    with model.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(input_ids=IDS).logits, native(IDS).logits)
    # The factors train with dropout, and with recomputed activations.
    torch.manual_seed(0)
    model.set_adapter("second")
    model.train()
    model.gradient_checkpointing_enable()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.5)
    losses = []
    for _ in range(3):
        loss = model(input_ids=IDS, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert losses[2] < losses[0]
    model.set_adapter("default")
    lora = {"target_modules": ["lm_head"], "lora_dropout": 0.1}
    with pytest.raises(
        ValueError, match=r"one of lm_head and transformer\.wte, which share their weight"
    ):
        get_peft_model(native, peft.LoraConfig(**lora)).eval()(input_ids=IDS)
    untied = shardzoo.from_config({**native.config.to_dict(), "tie_word_embeddings": False})
    with pytest.raises(ValueError, match="output head needs lora_dropout=0"):
        get_peft_model(untied, peft.LoraConfig(**lora)).train()(input_ids=IDS)
    llama = shardzoo.from_config({"model_type": "llama", "vocab_size": 99, "hidden_size": 16, "num_attention_heads": 2,
                                  "num_hidden_layers": 2, "intermediate_size": 16})  # fmt: skip
    with pytest.raises(
        ValueError, match="has 3 blocks instead of 2: a model of the zoo does not repeat blocks"
    ):
        get_peft_model(llama, peft.LoraConfig(layer_replication=[[0, 2], [1, 2]]))(input_ids=IDS)
