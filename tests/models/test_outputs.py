"""Outputs in one process have transformers' shapes."""

from __future__ import annotations

import pytest
import torch

from shardzoo.models import from_config

TINY = {
    "gpt2": {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 8},
    "bert": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    "roberta": {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16},
    "t5": {"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2},
    "glm": {
        "hidden_size": 16,
        "num_layers": 1,
        "num_attention_heads": 2,
        "max_sequence_length": 8,
        "block_position_encoding": True,
    },
}


@pytest.mark.parametrize("model_type", TINY)
def test_logits_have_the_vocabulary_without_padding(model_type):
    model = from_config({"model_type": model_type, "vocab_size": 37, **TINY[model_type]}).eval()
    ids = torch.arange(10).view(2, 5) + 3
    extra = {"decoder_input_ids": ids} if model_type == "t5" else {}
    logits = model(input_ids=ids, **extra).logits
    assert logits.shape == (2, 5, 37)
    assert torch.equal(model.gather_logits(logits), logits)
