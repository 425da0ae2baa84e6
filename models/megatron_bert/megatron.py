"""Maps Megatron-BERT's parameters to those of Megatron-LM's BERT, before and in megatron-core.

Its layers normalize the inputs of attention and MLP. Those before megatron-core do so without
`--apply-residual-connection-post-layernorm`; megatron-core's always do, since 0.5.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from ..bert.megatron import bert_entries, check_bert, infer_bert, is_bert, list_bert_arguments
from ..megatron import EMBEDDING, POST_NORM, TIED_HEAD, MegatronMap, weight_and_bias
from ..name_map import NameEntry, NameMap
from .config import MegatronBertConfig


def _owns(names: Iterable[str], arguments: Mapping[str, Any]) -> bool:
    return is_bert(names) and not arguments.get(POST_NORM, True)


def _infer(
    arguments: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], layers: int
) -> MegatronBertConfig:
    return infer_bert(MegatronBertConfig, arguments, shapes, layers)


MEGATRON = MegatronMap(
    name_map=NameMap(
        entries=(
            *bert_entries(
                (
                    ("attention_norm", "encoder.layers.{i}.input_layernorm"),
                    ("mlp_norm", "encoder.layers.{i}.pre_mlp_layernorm"),
                )
            ),
            *weight_and_bias("encoder.final_norm", "encoder.final_layernorm"),
            NameEntry("head.decoder.weight", TIED_HEAD),
        ),
        aliases=((TIED_HEAD, EMBEDDING),),
    ),
    stacks=("encoder",),
    owns=_owns,
    infer=_infer,
    arguments=list_bert_arguments,
    check_config=check_bert,
    legacy_is_tied=True,
    ignored_by_core=(POST_NORM, "openai_gelu"),
)
