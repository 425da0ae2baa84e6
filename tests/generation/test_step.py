"""What a step of decoding does, which no token shows."""

from __future__ import annotations

import pytest

import shardzoo
from shardzoo.ops import library


@pytest.mark.skipif(library.unavailable("cpp", "cpu") is not None, reason="no compiled kernels")
@pytest.mark.parametrize(("family", "products"), [("gpt2", 4), ("t5", 6), ("mt5", 7)])
def test_every_product_is_one_of_few_rows(family, products, saved, prompts, monkeypatch):
    model = shardzoo.from_pretrained(saved(family)[1])
    layers = len(model.decoder.blocks if hasattr(model, "decoder") else model.blocks)
    counts, call = [], library.call_compiled

    def counted(name, *arguments):
        counts[-1] += name == "linear"
        return call(name, *arguments)

    monkeypatch.setattr(library, "call_compiled", counted)
    for new_tokens in (2, 5):
        counts.append(0)
        model.generate(*prompts(2, padded_left=family == "gpt2"), max_new_tokens=new_tokens, eos_token_id=[])
    assert counts[1] - counts[0] == 3 * (products * layers + 1)


@pytest.mark.skipif(library.unavailable("cpp", "cpu") is not None, reason="no compiled kernels")
@pytest.mark.parametrize(("family", "attentions"), [("gpt2", 1), ("t5", 2)])
@pytest.mark.parametrize("beams", [1, 3])
def test_attention_in_16_bits_is_one_kernel(family, attentions, beams, saved, prompts, monkeypatch):
    """With padded prompts, a relative bias, and beams that share a source."""
    model = shardzoo.from_pretrained(saved(family)[1]).bfloat16()
    layers = len(model.decoder.blocks if hasattr(model, "decoder") else model.blocks)
    counts, call = [], library.call_compiled

    def counted(name, *arguments):
        counts[-1] += name == "attention"
        return call(name, *arguments)

    monkeypatch.setattr(library, "call_compiled", counted)
    for new_tokens in (2, 5):
        counts.append(0)
        padded = prompts(2, padded_left=family == "gpt2")
        model.generate(*padded, max_new_tokens=new_tokens, num_beams=beams, eos_token_id=[])
    assert counts[1] - counts[0] == 3 * attentions * layers
