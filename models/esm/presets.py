"""Lists the released sizes of ESM-2 under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from .config import EsmConfig

_esm2 = partial(
    EsmConfig,
    num_attention_heads=20,
    position_embedding_type="rotary",
    layer_norm_eps=1e-5,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
    token_dropout=True,
    mask_token_id=32,
    bos_token_id=None,
    emb_layer_norm_before=False,
)

PRESETS: dict[str, EsmConfig] = {
    "esm2_t6_8m_ur50d": _esm2(hidden_size=320, num_hidden_layers=6, intermediate_size=1280),
    "esm2_t12_35m_ur50d": _esm2(hidden_size=480, num_hidden_layers=12, intermediate_size=1920),
    "esm2_t30_150m_ur50d": _esm2(hidden_size=640, num_hidden_layers=30, intermediate_size=2560),
    "esm2_t33_650m_ur50d": _esm2(hidden_size=1280, num_hidden_layers=33, intermediate_size=5120),
    "esm2_t36_3b_ur50d": _esm2(
        hidden_size=2560, num_hidden_layers=36, num_attention_heads=40, intermediate_size=10240
    ),
    "esm2_t48_15b_ur50d": _esm2(
        hidden_size=5120, num_hidden_layers=48, num_attention_heads=40, intermediate_size=20480
    ),
}
