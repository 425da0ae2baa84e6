"""Lists the released size of NLLB-MoE under Hugging Face's name, and a size for a first run.

The size is that of config.json in facebook/nllb-moe-54b.
"""

from __future__ import annotations

from .config import NllbMoeConfig

PRESETS: dict[str, NllbMoeConfig] = {
    "nllb_moe-quickstart": NllbMoeConfig(
        vocab_size=2048,
        d_model=128,
        encoder_layers=2,
        encoder_attention_heads=4,
        encoder_ffn_dim=256,
        encoder_layerdrop=0.0,
        encoder_sparse_step=2,
        decoder_layers=2,
        decoder_attention_heads=4,
        decoder_ffn_dim=256,
        decoder_layerdrop=0.0,
        decoder_sparse_step=2,
        max_position_embeddings=512,
        dropout=0.0,
        attention_dropout=0.0,
        num_experts=8,
        # Twice the tokens of a rank's 24 samples of 64 for each of the experts, as in the paper.
        expert_capacity=384,
        moe_token_dropout=0.0,
        output_router_logits=True,
        router_aux_loss_coef=0.01,
    ),
    "nllb-moe-54b": NllbMoeConfig(
        vocab_size=256206,
        d_model=2048,
        encoder_layers=24,
        encoder_ffn_dim=8192,
        decoder_layers=24,
        decoder_ffn_dim=8192,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
    ),
}
