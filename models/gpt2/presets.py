"""Lists the released GPT-2 sizes under Hugging Face's names, and the small model that `make
pretrain` trains.
"""

from __future__ import annotations

from .config import GPT2Config

PRESETS: dict[str, GPT2Config] = {
    "gpt2": GPT2Config(),
    "gpt2-medium": GPT2Config(n_embd=1024, n_layer=24, n_head=16),
    "gpt2-large": GPT2Config(n_embd=1280, n_layer=36, n_head=20),
    "gpt2-xl": GPT2Config(n_embd=1600, n_layer=48, n_head=25),
    "gpt2-quickstart": GPT2Config(
        vocab_size=2048,
        n_positions=256,
        n_embd=192,
        n_layer=3,
        n_head=12,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    ),
}
