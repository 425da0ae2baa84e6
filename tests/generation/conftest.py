"""Tiny models of transformers with random weights, saved to disk, and runs of the native ones over ranks."""

from __future__ import annotations

import pytest
import torch
import transformers
from parity import randomize

VOCABULARY = 261  # with 64-aligned shares, the last of four ranks has no token at all and the third a few

CONFIGS = {
    "gpt2": transformers.GPT2Config(
        n_embd=32, n_head=4, n_layer=2, vocab_size=VOCABULARY, n_positions=48,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    ),
    "t5": transformers.T5Config(
        d_model=24, d_kv=6, d_ff=32, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0
    ),
    "t5 v1.1": transformers.T5Config(
        d_model=24, d_kv=6, d_ff=32, num_layers=3, num_decoder_layers=2, num_heads=4, vocab_size=VOCABULARY,
        decoder_start_token_id=0, feed_forward_proj="gated-gelu", tie_word_embeddings=False,
    ),
    "mt5": transformers.MT5Config(
        d_model=24, d_kv=8, d_ff=40, num_layers=2, num_heads=4, vocab_size=VOCABULARY, decoder_start_token_id=0
    ),
}  # fmt: skip
CLASSES = {
    "gpt2": transformers.GPT2LMHeadModel,
    "t5": transformers.T5ForConditionalGeneration,
    "t5 v1.1": transformers.T5ForConditionalGeneration,
    "mt5": transformers.MT5ForConditionalGeneration,
}


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """`saved(family)`: (transformers' model, its folder)."""
    made = {}

    def get(family: str):
        if family not in made:
            model = CLASSES[family](CONFIGS[family]).eval()
            randomize(model, 0)
            folder = tmp_path_factory.mktemp("model")
            model.save_pretrained(folder)
            made[family] = model, folder
        return made[family]

    return get


@pytest.fixture(scope="session")
def prompts():
    """`prompts(rows, padded_left)`: ids [rows, 9] with up to five tokens of padding, and their mask."""

    def make(rows: int, padded_left: bool):
        ids = torch.randint(3, VOCABULARY, (rows, 9), generator=torch.Generator().manual_seed(1))
        padding = torch.arange(rows)[:, None] % 6
        place = torch.arange(9)[None] if padded_left else torch.arange(8, -1, -1)[None]
        mask = (place >= padding).long()
        return ids * mask, mask

    return make
