"""Lists the released sizes of Phi-3 and Phi-4 under Hugging Face's names.

Those with LongRoPE have a list of factors in their files, and are no presets.
"""

from __future__ import annotations

from .config import Phi3Config

PRESETS: dict[str, Phi3Config] = {
    "phi-3-mini-4k-instruct": Phi3Config(sliding_window=2047),
    "phi-3-medium-4k-instruct": Phi3Config(
        hidden_size=5120,
        intermediate_size=17920,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=10,
        sliding_window=2047,
    ),
    "phi-4": Phi3Config(
        vocab_size=100352,
        hidden_size=5120,
        intermediate_size=17920,
        num_hidden_layers=40,
        num_attention_heads=40,
        num_key_value_heads=10,
        max_position_embeddings=16384,
        original_max_position_embeddings=16384,
        rope_parameters={"rope_theta": 250000.0},
        pad_token_id=100349,
        bos_token_id=100257,
        eos_token_id=100257,
    ),
}
