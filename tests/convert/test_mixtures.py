"""No copy of a mixture of experts loses a byte: Hugging Face -> ranks -> other ranks -> Hugging Face."""

from __future__ import annotations

import pytest
from every_case import by_turns
from parity import randomize
from tiny_models import SPARSE, TINY, hf_model, tiny

from shardzoo.convert.operations import Options, merge, split
from shardzoo.models import FAMILIES, config_from_dict, family

# Odd numbers of heads, experts and inner features, which some of the sizes do not divide.
CHAIN = (2, 5, 3, 1, 4)
SIZES = {
    "hidden_size": 48,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "intermediate_size": 35,
}
CHANGES: dict[str, dict[str, int]] = {
    "mixtral": SIZES,
    "qwen2_moe": {**SIZES, "moe_intermediate_size": 13, "shared_expert_intermediate_size": 11},
    "qwen3_moe": {**SIZES, "moe_intermediate_size": 13},
    "olmoe": {"intermediate_size": 13},
    "gpt_oss": SIZES,
    "glm4_moe": {**SIZES, "moe_intermediate_size": 13},
    "deepseek_v3": {**SIZES, "num_key_value_heads": 6, "moe_intermediate_size": 13},
    "switch_transformers": {"d_ff": 35, "num_heads": 5},
    "nllb-moe": {"encoder_ffn_dim": 35, "decoder_ffn_dim": 35, "d_model": 30, "encoder_attention_heads": 5,
                 "decoder_attention_heads": 5},
}  # fmt: skip


def config_of(name: str):
    """The configuration of a tiny model, or of the family's first preset."""
    if name in TINY or name in SPARSE:
        return config_from_dict(tiny(name))
    return next(iter(family(name).presets.values()))


MIXTURES = [name for name in {**TINY, **SPARSE} if config_of(name).expert_count]


def test_no_mixture_is_left_out():
    assert set(MIXTURES) == {name for name in FAMILIES if config_of(name).expert_count}


@pytest.mark.parametrize("name", by_turns(MIXTURES, 3))
def test_a_chain_of_sizes_gives_back_the_bytes(name, hashes, tmp_path):
    facts = family(name)
    architecture = next(iter(facts.pretrains.values()))
    model = hf_model(architecture, **CHANGES.get(name, {}))
    randomize(model, 1)
    source = tmp_path / "hf"
    model.save_pretrained(source)
    wanted = hashes(source)
    before = source
    heads = config_from_dict(model.config.to_dict()).attention_heads
    for place, size in enumerate(CHAIN):
        if size > heads or (name == "olmoe" and heads % size):
            continue  # OLMoE's key-value heads are normalized together.
        after = tmp_path / f"{place}-of-{size}"
        split(before, after, size)
        # The way here does not matter.
        direct = tmp_path / f"{place}-direct"
        split(source, direct, size)
        assert hashes(after) == hashes(direct)
        before = after
    merge(before, tmp_path / "back", Options(largest_file=60_000))
    assert hashes(tmp_path / "back") == wanted
