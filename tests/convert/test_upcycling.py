"""A dense model becomes a mixture whose first forward pass equals its own."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file
from tiny_models import save_model

import shardzoo
from shardzoo.cli.convert import main

CASES = {
    "LlamaForCausalLM": {"num_experts": 3, "experts_per_token": 2},
    "MistralForCausalLM": {"num_experts": 4, "experts_per_token": 1},
    "Qwen3ForCausalLM": {"num_experts": 5, "experts_per_token": 3},
}


@pytest.mark.parametrize("architecture", CASES)
def test_the_first_forward_pass_equals_the_dense_one(architecture, tmp_path):
    import transformers

    dense = save_model(tmp_path / "dense", architecture, "gpt2", seed=1)
    mixture = tmp_path / "mixture"
    options = [f"--{k.replace('_', '-')}={v}" for k, v in CASES[architecture].items()]
    assert main(["upcycle", str(dense), str(mixture), *options]) == 0
    ids = torch.arange(4, 24).view(2, 10)
    with torch.no_grad():
        before = shardzoo.from_pretrained(dense)(input_ids=ids, labels=ids)
        after = shardzoo.from_pretrained(mixture)(input_ids=ids, labels=ids)
        theirs = transformers.AutoModelForCausalLM.from_pretrained(mixture)(
            input_ids=ids, labels=ids
        )
    assert after.loss.item() == pytest.approx(before.loss.item(), rel=1e-6)
    assert torch.allclose(after.logits, before.logits, rtol=1e-5, atol=1e-5)
    assert theirs.loss.item() == pytest.approx(before.loss.item(), rel=1e-6)
    assert (mixture / "tokenizer.json").read_bytes() == (dense / "tokenizer.json").read_bytes()
    # The routers are drawn, and those of two layers differ.
    routers = [v for k, v in load_file(mixture / "model.safetensors").items() if "gate.weight" in k]
    assert len(routers) == 2
    assert not torch.equal(*routers)
    assert routers[0].std().item() == pytest.approx(0.02, rel=0.3)
    # An expert trains, and no two of them alike.
    model = shardzoo.from_pretrained(mixture).train()
    model(input_ids=ids, labels=ids).loss.backward()
    grad = model.blocks[0].mlp.experts.down.grad.view(CASES[architecture]["num_experts"], -1)
    assert not torch.allclose(grad[0], grad[1])


def test_what_cannot_be_upcycled_is_refused_in_one_line(tmp_path, capsys):
    dense = save_model(tmp_path / "dense", "LlamaForCausalLM", "gpt2")
    other = save_model(tmp_path / "t5", "T5ForConditionalGeneration", "t5")
    biased = save_model(tmp_path / "biased", "LlamaForCausalLM", "gpt2", attention_bias=True)
    to = str(tmp_path / "mixture")
    capsys.readouterr()
    for arguments, message in (
        ([str(other), to], "t5 has no family of mixtures"),
        ([str(biased), to], "attention_bias=true is not supported in a mixture"),
        ([str(dense), to, "--num-experts", "2", "--experts-per-token", "3"], "must be at most"),
        ([str(dense), to, "--num-experts", "0"], "num_local_experts"),
        ([str(dense), str(dense)], "must be two folders"),
    ):
        assert main(["upcycle", *arguments]) == 2
        [line] = capsys.readouterr().err.strip().splitlines()
        assert message in line
        assert not (tmp_path / "mixture").exists()
