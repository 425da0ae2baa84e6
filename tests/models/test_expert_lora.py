"""LoRA weights of stacked experts are peft's, in files and in what they compute, in every layout.

Oracle: peft's `target_parameters` on transformers' model.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from every_case import by_turns
from tiny_models import hf_model

NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
FAMILIES = {
    "MixtralForCausalLM": {"num_local_experts": 5},
    "GptOssForCausalLM": {"num_local_experts": 5},
    "Qwen3MoeForCausalLM": {"num_experts": 5},
    "Glm4MoeForCausalLM": {},
}
IDS = torch.randint(3, 97, (2, 9), generator=torch.Generator().manual_seed(1))


def save(folder: Any, architecture: str, **settings: Any) -> None:
    """Writes transformers' model as `base`, and peft's adapter with random factors as `adapter`."""
    import peft

    model = hf_model(architecture, 0.0, layers=2, **FAMILIES[architecture])
    model.save_pretrained(folder / "base")
    config = peft.LoraConfig(**{"r": 3, "lora_alpha": 5, "target_modules": [], **settings})
    adapted = peft.get_peft_model(model, config)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 5)
    adapted.save_pretrained(folder / "adapter")


def compute_theirs(folder: Any, adapter: str = "adapter") -> tuple[Any, dict[str, Any]]:
    """peft's logits, and its gradients by the names in its file."""
    import peft
    import transformers

    base = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "base", dtype=torch.float64, experts_implementation="eager"
    )
    model = peft.PeftModel.from_pretrained(base, folder / adapter, is_trainable=True)
    logits = model(input_ids=IDS).logits
    logits.sin().sum().backward()
    grads = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            grads[name.replace(".default", "")] = parameter.grad
    return logits.detach(), grads


def compute_ours(mesh: Any, folder: Any, again: str) -> tuple[Any, dict[str, Any], Any]:
    """Logits, gradients by peft's names, and logits after merging; saves the factors as `again`."""
    import shardzoo
    from shardzoo.models import lora

    model = shardzoo.from_pretrained(
        str(folder / "base"), mesh=mesh, dtype=torch.float64, adapter=str(folder / "adapter")
    )
    lora.save_adapter(model, folder / again)
    logits = model.gather_logits(model(input_ids=IDS).logits)
    logits.sin().sum().backward()
    values = {name: parameter.data for name, parameter in model.named_parameters()}
    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.data = parameter.grad
    grads = lora.gather_weights(model)
    for name, parameter in model.named_parameters():
        parameter.data = values[name]
    lora.merge_lora(model)
    merged = model.gather_logits(model(input_ids=IDS).logits)
    return logits.detach(), grads, merged.detach()


def compute_dealt(folder: Any, tensor: int, expert: int) -> Any:
    from shardzoo.mpu import ParallelMesh

    mesh = ParallelMesh(tensor, expert_parallel_size=expert)
    return compute_ours(mesh, folder, "dealt")


def assert_theirs(found: Any, expected: Any) -> None:
    logits, grads, merged = found
    theirs, their_grads = expected
    # transformers computes norms in fp32.
    torch.testing.assert_close(logits, theirs, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(merged, theirs, rtol=1e-5, atol=1e-6)
    assert grads.keys() == their_grads.keys()
    for name, value in their_grads.items():
        largest = value.abs().max().item()
        torch.testing.assert_close(
            grads[name].double(), value.double(), rtol=1e-5, atol=1e-5 * largest
        )


def read(folder: Any) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "adapter_model.safetensors")


@pytest.mark.parametrize("architecture", by_turns(FAMILIES, 4))
def test_factors_of_experts_are_those_of_peft(tmp_path, architecture):
    save(tmp_path, architecture, target_parameters=NAMES)
    expected = compute_theirs(tmp_path)
    assert_theirs(compute_ours(None, tmp_path, "again"), expected)
    stored = read(tmp_path / "adapter")
    again = read(tmp_path / "again")
    assert stored.keys() == again.keys()
    for name, value in stored.items():
        assert torch.equal(again[name].to(value.dtype), value)
    assert torch.equal(compute_theirs(tmp_path, "again")[0], expected[0])


@pytest.mark.parametrize("layout", by_turns([(2, 2), (1, 2), (3, 1)], 3))
def test_factors_are_split_like_the_experts(tmp_path, run_ranks, layout):
    tensor, expert = layout
    settings = {"target_parameters": NAMES[1:], "target_modules": ["q_proj"]}
    save(tmp_path, "MixtralForCausalLM", **settings)
    expected = compute_theirs(tmp_path)
    for found in run_ranks(tensor * expert, compute_dealt, tmp_path, tensor, expert):
        logits, grads, merged = found
        # Each expert-parallel rank has computed the same samples, whose gradients experts add up.
        shared = {name: grad for name, grad in grads.items() if "experts" not in name}
        experts = {name: grad / expert for name, grad in grads.items() if "experts" in name}
        assert_theirs((logits, {**shared, **experts}, merged), expected)
    stored = read(tmp_path / "adapter")
    for name, value in read(tmp_path / "dealt").items():
        assert torch.equal(value.to(stored[name].dtype), stored[name])


@pytest.mark.parametrize(
    ("family", "settings", "message"),
    [
        ("mixtral", {"target_parameters": ["mlp.weight"]}, "match no stacked experts"),
        ("switch_transformers", {"target_parameters": NAMES}, "match no stacked experts"),
        (
            "mixtral",
            {"target_parameters": NAMES, "lora_dropout": 0.1},
            "does not work with target_parameters",
        ),
        ("mixtral", {"target_parameters": "down_proj"}, "must be a list of strings"),
    ],
)
def test_what_cannot_be_adapted_is_refused(family, settings, message):
    from tiny_models import tiny

    from shardzoo.models import from_config
    from shardzoo.models.lora import add_lora, lora_config

    with pytest.raises(ValueError, match=message):
        add_lora(from_config(tiny(family)), lora_config(r=2, **settings))
