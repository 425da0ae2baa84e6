"""A split model with several adapters computes, trains and writes what peft does with transformers' model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from every_case import by_turns, every_day
from safetensors.torch import load_file
from tiny_models import hf_model

from shardzoo.models import from_pretrained
from shardzoo.models.for_peft import get_peft_model
from shardzoo.models.split_peft import SplitPeftModel

IDS = torch.randint(2, 90, (2, 9), generator=torch.Generator().manual_seed(0))
MASK = torch.tensor([[1] * 9, [1] * 6 + [0] * 3])
# (architecture, the settings of two adapters, changes of the configuration)
CASES: dict[str, tuple[str, tuple[dict[str, Any], dict[str, Any]], dict[str, Any]]] = {
    "llama": (
        "LlamaForCausalLM",
        (
            {"target_modules": ["q_proj", "down_proj"]},
            {"target_modules": ["k_proj", "q_proj"], "modules_to_save": ["lm_head"]},
        ),
        {"tie_word_embeddings": False},
    ),
    "gpt2": ("GPT2LMHeadModel", ({"target_modules": ["c_attn"]}, {"target_modules": ["c_fc", "c_proj"]}), {}),
    "t5": ("T5ForConditionalGeneration", ({"target_modules": ["q", "wo"]}, {"target_modules": ["wi", "v"]}), {}),
    "bert": (
        "BertForSequenceClassification",
        ({"target_modules": ["query"], "modules_to_save": ["classifier"]}, {"target_modules": ["value"]}),
        {},
    ),
}  # fmt: skip


def compute(model: Any) -> torch.Tensor:
    """Returns the whole logits of the tokens that are no padding."""
    more = {"decoder_input_ids": IDS.flip(1)} if model.config.is_encoder_decoder else {}
    logits = model(input_ids=IDS, attention_mask=MASK, **more).logits
    base = model.get_base_model()
    if hasattr(base, "gather_logits"):
        logits = base.gather_logits(logits)
    return logits[MASK.bool()] if logits.dim() == 3 else logits


@pytest.fixture(scope="module")
def adapted(tmp_path_factory):
    """`adapted(case)`: a folder with base/ and peft's first/ and second/, and what peft computes with them."""
    made: dict[str, tuple[Path, dict[str, Any]]] = {}

    def make(case: str) -> tuple[Path, dict[str, Any]]:
        if case in made:
            return made[case]
        architecture, (first, second), changes = CASES[case]
        folder = tmp_path_factory.mktemp(case)
        base = hf_model(architecture, 0.0, **changes).eval()
        base.save_pretrained(folder / "base")
        model = peft.get_peft_model(base, peft.LoraConfig(r=3, lora_alpha=7, **first), "first")
        model.add_adapter("second", peft.LoraConfig(r=2, lora_alpha=5, use_rslora=True, **second))
        generator = torch.Generator().manual_seed(1)
        for name, parameter in sorted(model.named_parameters()):
            if "lora_" in name or "modules_to_save" in name:
                parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator)
        model.eval()
        model.save_pretrained(folder)
        expected = {}
        for name in ("first", "second"):
            model.set_adapter(name)
            model.zero_grad()
            logits = compute(model)
            logits.square().mean().backward()
            norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
            expected[name] = logits.detach(), torch.stack(norms).norm()
        with model.disable_adapter(), torch.no_grad():
            expected["disabled"] = compute(model)
        made[case] = folder, expected
        return made[case]

    return make


def visit_adapters(mesh: Any, folder: Path) -> dict[str, Any]:
    """Returns what a split model computes with each of two adapters, and writes them again."""
    from shardzoo.mpu import grad_norm

    base = from_pretrained(folder / "base", mesh)
    model = SplitPeftModel.from_pretrained(base, folder / "first", "first")
    assert not any(parameter.requires_grad for parameter in model.parameters())
    model.load_adapter(folder / "second", "second", is_trainable=True)
    assert model.active_adapters == ["first"]
    found: dict[str, Any] = {}
    for name in ("second", "first", "second"):  # Going back and forth changes nothing.
        model.set_adapter(name)
        model.zero_grad()
        logits = compute(model)
        logits.square().mean().backward()
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        assert all(parameter.grad is not None for parameter in trained)
        found[name] = logits.detach(), torch.as_tensor(grad_norm(trained, mesh))
    with model.disable_adapter(), torch.no_grad():
        found["disabled"] = compute(model)
    assert torch.equal(compute(model).detach(), found["second"][0])
    found["counts"] = model.get_nb_trainable_parameters()
    model.save_pretrained(folder / f"again{mesh.tp_size}")
    assert model.active_adapter == "second"
    assert model.get_nb_trainable_parameters() == found["counts"]  # It is trained on.
    model.delete_adapter("second")
    assert model.active_adapter == "first"
    merged = model.merge_and_unload()
    assert merged is base
    more = {"decoder_input_ids": IDS.flip(1)} if base.config.is_encoder_decoder else {}
    logits = base.gather_logits(base(input_ids=IDS, attention_mask=MASK, **more).logits)
    found["merged"] = (logits[MASK.bool()] if logits.dim() == 3 else logits).detach()
    return found


@pytest.mark.parametrize("tp", every_day([3], more=[2]))
@pytest.mark.parametrize("case", by_turns(CASES, 2))
def test_adapters_take_turns_as_in_peft(run_mesh, adapted, case, tp):
    folder, expected = adapted(case)
    for found in run_mesh(tp, visit_adapters, folder):
        for name in ("first", "second"):
            torch.testing.assert_close(found[name][0], expected[name][0], atol=2e-6, rtol=1e-5)
            torch.testing.assert_close(found[name][1], expected[name][1], atol=1e-6, rtol=1e-5)
        torch.testing.assert_close(found["disabled"], expected["disabled"], atol=2e-6, rtol=1e-5)
        torch.testing.assert_close(found["merged"], expected["first"][0], atol=2e-5, rtol=1e-4)
    base = hf_model(CASES[case][0], 0.0, **CASES[case][2])
    read = peft.PeftModel.from_pretrained(base, folder / f"again{tp}" / "first", "first")
    read.load_adapter(folder / f"again{tp}" / "second", "second")
    read.set_adapter("second")
    assert read.get_nb_trainable_parameters() == found["counts"]
    for name in ("first", "second"):
        ours = load_file(folder / f"again{tp}" / name / "adapter_model.safetensors")
        theirs = load_file(folder / name / "adapter_model.safetensors")
        assert ours.keys() == theirs.keys()
        assert all(torch.equal(ours[key], theirs[key]) for key in ours)


def train_both(mesh: Any, folder: Path) -> dict[str, Any]:
    """Trains two new adapters in turns with one optimizer, with dropout, in a plain loop."""
    torch.manual_seed(7 if mesh.rank == 0 else 8)  # The first rank's generator counts.
    base = from_pretrained(folder / "base", mesh)
    config = peft.LoraConfig(r=3, target_modules=["q_proj", "o_proj"], lora_dropout=0.2)
    model = get_peft_model(base, config)
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules="all-linear"))
    # Adding another adapter leaves the first one active and trained.
    assert model.active_adapter == "default"
    assert any(parameter.requires_grad for parameter in base.parameters())
    base_weight = base.get_input_embeddings().weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    model.train()
    losses = []
    for step in range(6):
        model.set_adapter(("default", "other")[step % 2])
        loss = model(input_ids=IDS, attention_mask=MASK, labels=IDS).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    assert torch.equal(base_weight, base.get_input_embeddings().weight)
    model.eval()
    with torch.no_grad():
        last = [compute(model)]
        model.set_adapter("default", inference_mode=True)
        last.append(compute(model))
    assert model.get_nb_trainable_parameters()[0] == 0
    tokens = model.generate(IDS, attention_mask=torch.ones_like(IDS), max_new_tokens=5)
    return {"losses": losses, "last": last, "tokens": tokens}


def test_adapters_are_trained_in_turns(run_mesh, adapted):
    folder, _ = adapted("llama")
    expected = run_mesh(1, train_both, folder)[0]
    assert expected["losses"][4] < expected["losses"][0]
    for found in run_mesh(2, train_both, folder):
        assert found["losses"] == pytest.approx(expected["losses"], abs=1e-5)
        torch.testing.assert_close(found["last"], expected["last"], atol=1e-5, rtol=1e-4)
        assert torch.equal(found["tokens"], expected["tokens"])


def meet_mistakes(mesh: Any, folder: Path) -> None:
    """Meets refusals, after each of which the model computes as before."""
    base = from_pretrained(folder / "base", mesh)
    model = get_peft_model(base, peft.LoraConfig(r=3, target_modules=["q_proj"]))
    before = compute(model)
    target: dict[str, Any] = {"target_modules": ["q_proj"]}
    tall = peft.LoraConfig(r=900, target_modules=["v_proj", "q_proj"])
    nothing = peft.LoraConfig(target_modules=["nothing"])
    refused = [
        ("use_dora", lambda: model.add_adapter("x", peft.LoraConfig(use_dora=True, **target))),
        ("'nothing'", lambda: model.add_adapter("x", nothing)),
        ("900", lambda: model.add_adapter("x", tall)),
        ("IA3Config", lambda: model.add_adapter("x", peft.IA3Config())),
        ("already", lambda: model.add_adapter("default", peft.LoraConfig(**target))),
        ("'a.b'", lambda: model.add_adapter("a.b", peft.LoraConfig(**target))),
        ("holds no adapter", lambda: model.load_adapter(folder / "base", "x")),
        ("no adapter 'x'; there are: default", lambda: model.set_adapter("x")),
        ("no adapter 'x'", lambda: model.delete_adapter("x")),
        ("no adapter 'x'", lambda: model.save_pretrained(folder / "x", ["x"])),
        ("safetensors", lambda: model.save_pretrained(folder / "x", safe_serialization=False)),
        ("merges one", lambda: model.merge_and_unload(adapter_names=["default", "x"])),
        ("LoRA weights already", lambda: get_peft_model(base, peft.LoraConfig(**target))),
    ]
    for message, call in refused:
        with pytest.raises(ValueError, match=message):
            call()
        assert torch.equal(compute(model), before)
        assert list(model.peft_config) == [model.active_adapter] == ["default"]
    assert model.unload() is base
    assert not any(parameter.requires_grad for parameter in base.parameters())
    with pytest.raises(ValueError, match="takes no mixed"):
        get_peft_model(base, peft.LoraConfig(**target), mixed=True)


def test_mistakes_change_nothing(run_mesh, adapted):
    folder, _ = adapted("llama")
    run_mesh(2, meet_mistakes, folder)
