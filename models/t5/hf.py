"""Maps each native parameter of T5, mT5 and UMT5 to its tensors in Hugging Face's checkpoints."""

from __future__ import annotations

from ..name_map import NameEntry, NameMap


def _self_attention(stack: str, shares_bias: bool) -> tuple[NameEntry, ...]:
    native = f"{stack}.blocks.{{i}}"
    stored = f"{stack}.block.{{i}}.layer.0"
    bias = f"{stored}.SelfAttention.relative_attention_bias.weight"
    if shares_bias:
        # A bias that all blocks of the stack use is stored in the first.
        relative_bias = NameEntry(f"{stack}.relative_bias.weight", bias.replace("{i}", "0"))
    else:
        relative_bias = NameEntry(f"{native}.relative_bias.weight", bias)
    return (
        NameEntry(f"{native}.attention_norm.weight", f"{stored}.layer_norm.weight"),
        NameEntry(
            f"{native}.attention.qkv.weight",
            tuple(f"{stored}.SelfAttention.{x}.weight" for x in "qkv"),
        ),
        NameEntry(f"{native}.attention.output.weight", f"{stored}.SelfAttention.o.weight"),
        relative_bias,
    )


def _feed_forward(stack: str, layer: int) -> tuple[NameEntry, ...]:
    native = f"{stack}.blocks.{{i}}"
    stored = f"{stack}.block.{{i}}.layer.{layer}"
    dense = f"{stored}.DenseReluDense"
    return (
        NameEntry(f"{native}.mlp_norm.weight", f"{stored}.layer_norm.weight"),
        NameEntry(f"{native}.mlp.up.weight", f"{dense}.wi.weight"),
        NameEntry(f"{native}.mlp.gate_up.gate", f"{dense}.wi_0.weight"),
        NameEntry(f"{native}.mlp.gate_up.up", f"{dense}.wi_1.weight"),
        NameEntry(f"{native}.mlp.down.weight", f"{dense}.wo.weight"),
        NameEntry(f"{stack}.final_norm.weight", f"{stack}.final_layer_norm.weight"),
    )


def _linear(native: str, stored: str) -> tuple[NameEntry, ...]:
    return tuple(NameEntry(f"{native}.{part}", f"{stored}.{part}") for part in ("weight", "bias"))


_CROSS = "decoder.block.{i}.layer.1"


def name_map(shares_bias: bool) -> NameMap:
    """Returns the names of a family whose stacks share a relative bias, or whose layers have one
    each.
    """
    return NameMap(
        entries=(
            NameEntry("word_embeddings.weight", "shared.weight"),
            *_self_attention("encoder", shares_bias),
            *_feed_forward("encoder", 1),
            *_self_attention("decoder", shares_bias),
            NameEntry(
                "decoder.blocks.{i}.cross_attention_norm.weight", f"{_CROSS}.layer_norm.weight"
            ),
            NameEntry(
                "decoder.blocks.{i}.cross_attention.query.weight",
                f"{_CROSS}.EncDecAttention.q.weight",
            ),
            NameEntry(
                "decoder.blocks.{i}.cross_attention.key_value.weight",
                (f"{_CROSS}.EncDecAttention.k.weight", f"{_CROSS}.EncDecAttention.v.weight"),
            ),
            NameEntry(
                "decoder.blocks.{i}.cross_attention.output.weight",
                f"{_CROSS}.EncDecAttention.o.weight",
            ),
            *_feed_forward("decoder", 2),
            NameEntry("head.weight", "lm_head.weight"),
            *_linear("pooler", "classification_head.dense"),
            *_linear("classifier", "classification_head.out_proj"),
            *_linear("token_classifier", "classifier"),
            *_linear("qa_outputs", "qa_outputs"),
        ),
        aliases=(
            ("encoder.embed_tokens.weight", "shared.weight"),
            ("decoder.embed_tokens.weight", "shared.weight"),
            ("lm_head.weight", "shared.weight"),
        ),
        renamed=((r"transformer\.(.+)", r"\1"),),  # in classifiers
        spelled=(
            (
                r".*For(Sequence|Token)Classification",
                r"((shared|encoder|decoder)\..+)",
                r"transformer.\1",
            ),
        ),
        # A bias that the first releases stored and never used.
        ignored=(r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",),
    )


NAME_MAP = name_map(shares_bias=True)
