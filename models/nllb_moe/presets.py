"""Lists the released size of NLLB-MoE under Hugging Face's name."""

from __future__ import annotations

from .config import NllbMoeConfig

PRESETS: dict[str, NllbMoeConfig] = {
    "nllb-moe-54b": NllbMoeConfig(
        vocab_size=256206,
        d_model=2048,
        encoder_layers=24,
        encoder_ffn_dim=8192,
        decoder_layers=24,
        decoder_ffn_dim=8192,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    )
}
