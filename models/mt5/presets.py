"""Lists the released mT5 and mT0 sizes under Hugging Face's names, LiBai's benchmark, and one for
two CPU cores.
"""

from __future__ import annotations

from .config import MT5Config

_SIZES = {
    "small": MT5Config(),
    "base": MT5Config(d_model=768, d_ff=2048, num_layers=12, num_heads=12),
    "large": MT5Config(d_model=1024, d_ff=2816, num_layers=24, num_heads=16),
    "xl": MT5Config(d_model=2048, d_ff=5120, num_layers=24, num_heads=32),
    "xxl": MT5Config(d_model=4096, d_ff=10240, num_layers=24, num_heads=64),
}

PRESETS: dict[str, MT5Config] = {
    **{f"mt5-{size}": config for size, config in _SIZES.items()},
    **{
        f"mt0-{size}": config for size, config in _SIZES.items()
    },  # Muennighoff et al., 2022, arXiv:2211.01786
    "mt5-quickstart": MT5Config(
        vocab_size=1100,
        d_model=128,
        d_kv=32,
        d_ff=384,
        num_layers=2,
        num_heads=4,
        dropout_rate=0.0,  # the text is read about once, so the model cannot learn it by heart
    ),
    "mt5-libai": MT5Config(
        vocab_size=21248, d_model=768, d_ff=2048, num_layers=12, num_heads=12, dropout_rate=0.0
    ),
}
