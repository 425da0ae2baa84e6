"""Lists the released sizes of DeBERTa-v3 under Hugging Face's names."""

from __future__ import annotations

from functools import partial

from .config import DebertaV2Config

_v3 = partial(
    DebertaV2Config,
    hidden_size=768,
    num_hidden_layers=12,
    num_attention_heads=12,
    intermediate_size=3072,
    relative_attention=True,
    position_buckets=256,
    norm_rel_ebd="layer_norm",
    share_att_key=True,
    pos_att_type="p2c|c2p",
    position_biased_input=False,
)

PRESETS: dict[str, DebertaV2Config] = {
    "deberta-v3-xsmall": _v3(hidden_size=384, num_attention_heads=6, intermediate_size=1536),
    "deberta-v3-small": _v3(num_hidden_layers=6),
    "deberta-v3-base": _v3(),
    "deberta-v3-large": _v3(
        hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096
    ),
    "mdeberta-v3-base": _v3(vocab_size=251000),
}
