"""Gemma 2 at lengths whose capped scores the kernels of attention compute."""

from __future__ import annotations

import pytest
import torch
from parity import randomize
from tiny_models import tiny
from transformers import Gemma2Config, Gemma2ForCausalLM

import shardzoo
from shardzoo.ops.registration import OPS


@pytest.mark.parametrize("trains", [True, False], ids=["gradients", "inference"])
def test_long_texts_have_the_numbers_of_transformers(trains, tmp_path, monkeypatch):
    """With a window in one layer, and padding: a kernel computes both, which the reference need not do."""
    values = tiny("gemma2", 0.0)
    del values["model_type"]
    theirs = Gemma2ForCausalLM(Gemma2Config(**values, attn_implementation="eager"))
    randomize(theirs, 1)
    theirs.save_pretrained(tmp_path)
    ours = shardzoo.from_pretrained(tmp_path, dtype=torch.float32)
    for op in (OPS["attention"], OPS["attention_backward"]):
        monkeypatch.setattr(op, "reference", None)
    ids = torch.randint(5, 97, (2, 90), generator=torch.Generator().manual_seed(0))
    mask = (torch.arange(90) < torch.tensor([[90], [71]])).long()
    inputs = {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    with torch.inference_mode(not trains):
        expected = theirs.train(trains)(**inputs)
        actual = ours.train(trains)(**inputs)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=0)
    if not trains:
        return
    expected.loss.backward()
    actual.loss.backward()
    theirs_by_name = dict(theirs.named_parameters())
    ours_by_name = dict(ours.named_parameters())
    for layer in range(2):
        attention = f"model.layers.{layer}.self_attn"
        heads = [theirs_by_name[f"{attention}.{name}_proj.weight"].grad for name in "qkv"]
        output = theirs_by_name[f"{attention}.o_proj.weight"].grad
        for name, wanted in (("qkv", torch.cat(heads)), ("output", output)):
            grad = ours_by_name[f"blocks.{layer}.attention.{name}.weight"].grad
            assert (grad - wanted).abs().max() <= 1e-5 * wanted.abs().max()
