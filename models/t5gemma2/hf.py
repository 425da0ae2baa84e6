"""Maps each native parameter of T5Gemma 2 to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from ..name_map import NameEntry, NameMap
from ..t5gemma.hf import name_stack

_STACKS = {"encoder": "model.encoder.text_model", "decoder": "model.decoder"}
_TABLE = "model.encoder.text_model.embed_tokens"

NAME_MAP = NameMap(
    prefix="model.",
    entries=(
        NameEntry("word_embeddings.weight", f"{_TABLE}.weight"),
        NameEntry("word_embeddings.eoi_embedding", f"{_TABLE}.eoi_embedding"),
        *(entry for stack, stored in _STACKS.items() for entry in name_stack(stack, stored)),
        *(
            NameEntry(
                f"{stack}.blocks.{{i}}.attention.{x}_norm.weight",
                f"{stored}.layers.{{i}}.self_attn.{x}_norm.weight",
            )
            for stack, stored in _STACKS.items()
            for x in "qk"
        ),
        NameEntry("classifier.weight", "score.out_proj.weight"),
        NameEntry("classifier.bias", "score.out_proj.bias"),
    ),
    aliases=(
        ("lm_head.out_proj.weight", f"{_TABLE}.weight"),
        ("model.decoder.embed_tokens.weight", f"{_TABLE}.weight"),
        ("model.decoder.embed_tokens.eoi_embedding", f"{_TABLE}.eoi_embedding"),
    ),
    # Files from before transformers 5.3 have no `text_model`.
    renamed=((r"((?:model\.)?encoder)\.((?:embed_tokens|layers|norm)\..*)", r"\1.text_model.\2"),),
    ignored=(r"(model\.)?encoder\.(vision_tower|multi_modal_projector)\..*",),
)
