"""Lists the released ELECTRA sizes under Hugging Face's names.

A generator is the smaller model of a pair.
"""

from __future__ import annotations

from .config import ElectraConfig

_GENERATOR = ElectraConfig()
_DISCRIMINATOR = _GENERATOR.with_changes(architecture="ElectraForPreTraining")

PRESETS: dict[str, ElectraConfig] = {
    "electra-small-generator": _GENERATOR,
    "electra-small-discriminator": _DISCRIMINATOR,
    "electra-base-generator": _GENERATOR.with_changes(embedding_size=768),
    "electra-base-discriminator": _DISCRIMINATOR.with_changes(
        embedding_size=768, hidden_size=768, num_attention_heads=12, intermediate_size=3072
    ),
    "electra-large-generator": _GENERATOR.with_changes(embedding_size=1024, num_hidden_layers=24),
    "electra-large-discriminator": _DISCRIMINATOR.with_changes(
        embedding_size=1024,
        hidden_size=1024,
        num_hidden_layers=24,
        num_attention_heads=16,
        intermediate_size=4096,
    ),
}
