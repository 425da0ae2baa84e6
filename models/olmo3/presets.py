"""Lists the released sizes of OLMo 3 under Hugging Face's names: 7 and 32 billion parameters.

They are read from `config.json` of quantized copies of allenai/Olmo-3-1025-7B and Olmo-3-1125-32B, and fit
the shapes of allenai's weights, which do not tell how many heads there are: the 40 and 8 of the larger one
are also those of allenai/OLMo-2-0325-32B.
"""

from __future__ import annotations

from functools import partial

from .config import Olmo3Config

_olmo3 = partial(
    Olmo3Config,
    vocab_size=100278,
    max_position_embeddings=65536,
    rms_norm_eps=1e-6,
    rope_parameters={
        "rope_type": "yarn", "rope_theta": 500000.0, "factor": 8.0, "attention_factor": 1.2079441541679836,
        "beta_fast": 32.0, "beta_slow": 1.0, "original_max_position_embeddings": 8192,
    },
    pad_token_id=100277,
    eos_token_id=100257,
)  # fmt: skip

PRESETS: dict[str, Olmo3Config] = {
    "olmo-3-1025-7b": _olmo3(),
    "olmo-3-1125-32b": _olmo3(
        hidden_size=5120,
        intermediate_size=27648,
        num_hidden_layers=64,
        num_attention_heads=40,
        num_key_value_heads=8,
    ),
}
