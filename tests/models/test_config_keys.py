"""A `config.json` means to the zoo what it means to transformers, whose configuration classes are the oracle."""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from tiny_models import tiny
from transformers import CONFIG_MAPPING, PreTrainedConfig

import shardzoo
from shardzoo.models import FAMILIES, config_from_dict, family

THEIRS = {name: CONFIG_MAPPING[name] for name in FAMILIES if family(name).in_transformers}
COMMON = [
    (name, common, own)
    for name, theirs in THEIRS.items()
    for common, own in theirs.attribute_map.items()
    if not own.endswith("token_index")  # of images, which the files keep as they have it
]


def assert_same(values: dict[str, Any], *names: str) -> None:
    """Compares all sizes, and what the names say, of both configurations of a `config.json`."""
    theirs = THEIRS[values["model_type"]].from_dict(dict(values))
    ours = config_from_dict(dict(values)).to_dict()
    for name in (*tiny(values["model_type"]), *names):
        wanted = (
            theirs.num_decoder_layers if name == "num_decoder_layers" else getattr(theirs, name)
        )
        if isinstance(wanted, PreTrainedConfig):  # of a stack, whose defaults ours leaves out
            continue
        if name == "num_decoder_layers" and ours[name] is None:
            assert ours["num_layers"] == wanted
        else:
            assert ours[name] == wanted, name


@pytest.mark.parametrize(("name", "common", "own"), COMMON)
def test_common_names_are_read_as_transformers_reads_them(name, common, own):
    beside = tiny(name)
    beside[own] = beside.get(own, 32)
    other = 2 * beside[own]
    assert_same({**beside, common: other}, own)
    instead = {
        key: value for key, value in beside.items() if key not in (own, "num_decoder_layers")
    }
    assert_same({**instead, common: other}, own)


def test_keys_that_distilbert_does_not_have_change_nothing():
    values = tiny("distilbert", activation="relu", dropout=0.3)
    foreign = {
        "intermediate_size": 7, "hidden_act": "silu", "hidden_dropout_prob": 0.2, "layer_norm_eps": 0.5,
        "is_decoder": True, "position_embedding_type": "relative_key",
    }  # fmt: skip
    assert config_from_dict({**values, **foreign}) == config_from_dict(values)
    assert_same({**values, **foreign}, "activation", "dropout", "hidden_dim")


SCALED = {"rope_type": "linear", "rope_theta": 5000.0, "factor": 8.0}
PLAIN = {"rope_type": "default", "rope_theta": 300.0}
BY_LAYER = {"full_attention": SCALED, "sliding_attention": PLAIN}
ROTATIONS = [
    ("gemma3_text", BY_LAYER),
    ("gemma3_text", {"full_attention": PLAIN, "sliding_attention": {**PLAIN, "rope_theta": 70.0}}),
    ("modernbert-decoder", BY_LAYER),
    ("modernbert", BY_LAYER),
    ("gemma2", SCALED),
    ("gemma2", PLAIN),
    ("olmo2", SCALED),
    ("olmo3", BY_LAYER),
    ("olmo3", {"full_attention": PLAIN, "sliding_attention": PLAIN}),
]


@pytest.mark.parametrize(("name", "rotation"), ROTATIONS)
def test_transformers_reads_the_rotations_that_are_written(name, rotation):
    values = config_from_dict(tiny(name, rope_parameters=rotation)).to_dict()
    assert THEIRS[name].from_dict(copy.deepcopy(values)).rope_parameters == rotation
    assert config_from_dict(values).to_dict() == values


def test_modernberts_window_has_two_names():
    assert_same(tiny("modernbert", sliding_window=6), "local_attention")


FEED_FORWARD = [
    ("gated-gelu", {"dense_act_fn": "gelu", "is_gated_act": True}),
    ("gated-gelu", {"dense_act_fn": "silu"}),
    ("relu", {"dense_act_fn": "gelu_new", "is_gated_act": False}),
    ("gelu", {"is_gated_act": True}),  # Flan-T5's first files
    ("gated-silu", {"is_gated_act": False}),
    ("gated-gelu", {"dense_act_fn": "gelu_new", "is_gated_act": True}),
    ("relu", {}),
]


@pytest.mark.parametrize("name", ["t5", "mt5", "umt5"])
def test_t5s_activation_and_gate_override_feed_forward_proj(name):
    for stored, keys in FEED_FORWARD:
        values = tiny(name, feed_forward_proj=stored, **keys)
        theirs = THEIRS[name].from_dict(dict(values))
        ours = config_from_dict(values)
        again = config_from_dict(ours.to_dict())
        for config in (ours, again):
            assert config.activation == theirs.dense_act_fn
            assert config.is_gated == theirs.is_gated_act
        said = {"dense_act_fn", "is_gated_act"} & ours.to_dict().keys()
        differs = (theirs.dense_act_fn, theirs.is_gated_act) != _read(THEIRS[name], stored)
        assert bool(said) == differs


def _read(theirs: Any, feed_forward_proj: str) -> tuple[str, bool]:
    config = theirs(feed_forward_proj=feed_forward_proj)
    return config.dense_act_fn, config.is_gated_act


@pytest.mark.parametrize(
    ("name", "keys", "message"),
    [
        ("gpt2", {"is_causal": False}, "is_causal=false"),
        ("llama", {"is_causal": False}, "is_causal=false"),
        ("t5", {"is_causal": False}, "is_causal=false"),
        ("bart", {"is_causal": False}, "is_causal=false"),
        ("qwen3", {"per_layer_config": {"0": {"intermediate_size": 16}}}, "per_layer_config"),
    ],
)
def test_keys_that_ask_for_another_model_are_refused(name, keys, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        config_from_dict(tiny(name, **keys))
    config_from_dict(tiny(name, is_causal=True, per_layer_config=None))


@pytest.mark.parametrize("name", ["bert", "roberta", "llama", "bart", "gpt2"])
def test_no_padding_token_may_be_minus_one(name):
    with pytest.warns(UserWarning, match="pad_token_id is -1"):
        model = shardzoo.from_config(
            tiny(name, 0.0, pad_token_id=-1) if name != "llama" else tiny(name, pad_token_id=-1)
        )
    assert model.config.to_dict()["pad_token_id"] == -1
    ids = torch.arange(3, 12)[None]
    assert (
        model.eval()(
            ids, attention_mask=torch.ones_like(ids), **({"labels": ids} if name == "bart" else {})
        )
        .logits.isfinite()
        .all()
    )


def test_labels_may_have_gaps_and_numbers_as_text():
    values = tiny("bert", id2label={"0": "no", "2": "yes"}, label2id={"no": "0", "yes": "2"})
    theirs = THEIRS["bert"].from_dict(dict(values))
    with pytest.warns(UserWarning, match="id2label does not name the labels 0 to 1"):
        ours = config_from_dict(values)
    assert ours.num_labels == theirs.num_labels == 2
    assert ours.label2id == {"no": 0, "yes": 2}


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen2", "qwen3", "modernbert"])
def test_families_that_rotate_whole_heads_do_so_whatever_a_file_says(name):
    values = tiny(name)
    rope = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
    if name == "modernbert":
        rope = {"full_attention": {**rope, "rope_theta": 160000.0}, "sliding_attention": rope}
    assert config_from_dict({**values, "rope_parameters": rope}) == config_from_dict(values)
