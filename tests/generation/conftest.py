"""Tiny models of transformers with random weights, saved to disk, and runs of the native ones over ranks."""

from __future__ import annotations

import pytest
import torch
from parity import randomize
from tiny_models import hf_model

VOCABULARY = (
    261  # with 64-aligned shares, the last of four ranks has no token at all and the third a few
)

T5 = {"vocab_size": VOCABULARY, "layers": 2, "d_model": 24, "d_kv": 6, "d_ff": 32}
V1_1 = {
    "num_layers": 3,
    "num_decoder_layers": 2,
    "feed_forward_proj": "gated-gelu",
    "tie_word_embeddings": False,
}
GPT2 = {
    "vocab_size": VOCABULARY,
    "n_positions": 48,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
BART = {
    "vocab_size": VOCABULARY, "layers": 2, "pad_token_id": 0, "bos_token_id": 1, "decoder_start_token_id": 2,
    "forced_eos_token_id": None,
}  # fmt: skip
LLAMA = {
    "vocab_size": VOCABULARY,
    "layers": 2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS = {
    "gpt2": ("GPT2LMHeadModel", GPT2),
    "llama": ("LlamaForCausalLM", {**LLAMA, "num_attention_heads": 8}),
    # A window that ends within the prompts and slides over the new tokens; the first layer has none.
    "qwen2": (
        "Qwen2ForCausalLM",
        {**LLAMA, "use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1},
    ),
    "qwen3": ("Qwen3ForCausalLM", {**LLAMA, "tie_word_embeddings": True}),
    "t5": ("T5ForConditionalGeneration", T5),
    "t5 v1.1": ("T5ForConditionalGeneration", {**T5, **V1_1}),
    "umt5": ("UMT5ForConditionalGeneration", T5),
    "mt5": ("MT5ForConditionalGeneration", {**T5, "d_kv": 8, "d_ff": 40}),
    "bart": (
        "BartForConditionalGeneration",
        {**BART, "forced_eos_token_id": 2, "forced_bos_token_id": 11},
    ),
    "m2m_100": ("M2M100ForConditionalGeneration", BART),
}


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """`saved(family)`: (transformers' model, its folder)."""
    made = {}

    def get(family: str):
        if family not in made:
            architecture, sizes = MODELS[family]
            model = hf_model(architecture, **sizes).eval()
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
