"""The best tokens for masks are those of transformers' softmax."""

from __future__ import annotations

import pytest
import torch
from parity import randomize
from tiny_models import hf_model, tiny

import shardzoo
from shardzoo.generation import fill_mask


def best(mesh, folder, inputs):
    found = fill_mask(shardzoo.from_pretrained(folder, mesh), **inputs, mask_token_id=4, top_k=7)
    return found.places, found.tokens, found.scores


@pytest.mark.parametrize("family", ["Bert", "Roberta", "Electra", "ModernBert"])
def test_tokens_and_probabilities(family, tmp_path, run_mesh):
    reference = hf_model(f"{family}ForMaskedLM", vocab_size=261).eval()
    randomize(reference, 1)
    reference.save_pretrained(tmp_path)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(5, 261, (5, 9), generator=generator)
    ids[torch.rand(5, 9, generator=generator) < 0.3] = 4
    mask = torch.ones_like(ids)
    mask[1, 6:] = 0
    ids[1, 6:] = reference.config.pad_token_id
    inputs = {"input_ids": ids, "attention_mask": mask}
    with torch.no_grad():
        chances = reference(**inputs).logits.softmax(-1)[ids == 4]
    scores, tokens = chances.topk(7)
    for size in (1, 2, 4):
        for found in run_mesh(size, best, tmp_path, inputs):
            assert torch.equal(found[0], (ids == 4).nonzero())
            assert torch.equal(found[1], tokens)
            torch.testing.assert_close(found[2], scores, rtol=1e-5, atol=1e-7)


def test_mistakes(saved):
    bert = shardzoo.from_config(tiny("bert", vocab_size=261))
    with pytest.raises(ValueError, match=r"input_ids has no mask token \(4\)"):
        fill_mask(bert, torch.tensor([[5, 6]]), mask_token_id=4)
    with pytest.raises(ValueError, match="from 1 to the vocabulary's 261, not 300"):
        fill_mask(bert, torch.tensor([[5, 4]]), mask_token_id=4, top_k=300)
    with pytest.raises(ValueError, match="a GPT2LMHeadModel cannot fill masks"):
        fill_mask(
            shardzoo.from_pretrained(saved("gpt2")[1]), torch.tensor([[5, 4]]), mask_token_id=4
        )
