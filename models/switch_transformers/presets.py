"""Lists the released sizes of Switch Transformers under Hugging Face's names, and a size for a first
run.
"""

from __future__ import annotations

from functools import partial

from .config import SwitchTransformersConfig

# Every second layer has a mixture. The released files say 0.01, which training would refuse.
_switch = partial(
    SwitchTransformersConfig,
    num_sparse_encoder_layers=6,
    num_sparse_decoder_layers=6,
    d_ff=3072,
    router_jitter_noise=0.0,
)
_large = partial(
    _switch,
    d_model=1024,
    d_ff=4096,
    num_layers=24,
    num_decoder_layers=24,
    num_heads=16,
    num_sparse_encoder_layers=12,
    num_sparse_decoder_layers=12,
)

PRESETS: dict[str, SwitchTransformersConfig] = {
    "switch_transformers-quickstart": SwitchTransformersConfig(
        vocab_size=2048,
        d_model=128,
        d_kv=32,
        d_ff=256,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        router_aux_loss_coef=0.01,
        output_router_logits=True,
    ),
    **{f"switch-base-{count}": _switch(num_experts=count) for count in (8, 16, 32, 64, 128, 256)},
    "switch-large-128": _large(num_experts=128),
}
