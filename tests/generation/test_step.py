"""What a step of decoding does, which no token shows."""

from __future__ import annotations

import pytest
import torch

import shardzoo
from shardzoo.ops import library, variants

pytestmark = pytest.mark.skipif(
    variants.unavailable("cpp", "cpu") is not None, reason="no compiled kernels"
)


@pytest.fixture
def kernel_calls(saved, prompts, monkeypatch):
    """`kernel_calls(family, name, …)`: how often three steps call a kernel, and the number of the decoder's layers."""

    def count(family, name, dtype=torch.float32, **settings):
        model = shardzoo.from_pretrained(saved(family)[1]).to(dtype)
        counts, call = [], library.call_compiled

        def counted(called, *arguments):
            result = call(called, *arguments)
            counts[-1] += called == name and result is not None
            return result

        monkeypatch.setattr(library, "call_compiled", counted)
        for new_tokens in (2, 5):
            counts.append(0)
            padded = prompts(2, padded_left=family == "gpt2")
            model.generate(*padded, max_new_tokens=new_tokens, eos_token_id=[], **settings)
        return counts[1] - counts[0], len(
            model.decoder.blocks if hasattr(model, "decoder") else model.blocks
        )

    return count


@pytest.mark.parametrize(("family", "products"), [("gpt2", 4), ("t5", 6), ("mt5", 7)])
def test_every_product_is_one_of_few_rows(family, products, kernel_calls):
    calls, layers = kernel_calls(family, "linear_of_few_rows")
    assert calls == 3 * (products * layers + 1)


@pytest.mark.parametrize(("family", "attentions"), [("gpt2", 1), ("t5", 2)])
@pytest.mark.parametrize("beams", [1, 3])
def test_attention_in_16_bits_is_one_kernel(family, attentions, beams, kernel_calls):
    """With padded prompts, a relative bias, and beams that share a source."""
    calls, layers = kernel_calls(
        family, "attention_of_few_queries", torch.bfloat16, num_beams=beams
    )
    assert calls == 3 * attentions * layers
