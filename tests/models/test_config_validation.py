"""Every field of every family's configuration is validated when the configuration is made.

The cases are generated from the dataclasses' own annotations, read here by name and not by the code under test.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields
from math import inf, nan

import pytest
import torch
import transformers
from every_case import by_turns
from hypothesis import given, settings
from hypothesis import strategies as st

import shardzoo
from shardzoo.models import FAMILIES, config_from_dict, family, presets

CONFIGS = {name: family(name).config for name in FAMILIES}
FIELDS = [(name, field) for name, config in CONFIGS.items() for field in fields(config)]
IDS = [f"{name}-{field.name}" for name, field in FIELDS]
NUMBER_TYPES = {
    "Range", "LayerCount", "HeadCount", "HiddenSize", "InnerSize", "VocabSize", "PositionCount", "ClassCount",
    "TokenId", "Probability", "NormEpsilon", "InitializerScale",
}  # fmt: skip
SIZES = re.compile(
    "(?!max_window_layers)(?:vocab_size|n_embd|n_layer|n_head|n_positions|n_inner|d_model|d_kv|d_ff|num_.*|hidden_size|intermediate_size|max_.*)"
)
ELSEWHERE = {  # fields that `from_dict` takes from other keys of the file, or from none
    *((name, "architecture") for name in FAMILIES), ("mt5", "scale_decoder_outputs"),
    ("t5gemma", "vocab_size"), ("t5gemma2", "vocab_size"),  # which the stacks have
    ("switch_transformers", "scale_decoder_outputs"), ("switch_transformers", "feed_forward_proj"),
    # BERT's keys, which transformers' DistilBERT does not read
    *(("distilbert", key) for key in (
        "intermediate_size", "hidden_act", "hidden_dropout_prob", "attention_probs_dropout_prob", "type_vocab_size",
        "layer_norm_eps", "classifier_dropout", "is_decoder", "add_cross_attention", "add_pooling_layer",
        "position_embedding_type",
    )),
}  # fmt: skip
OBJECTS = (
    "encoder",
    "decoder",
    "encoder_settings",
)  # which may have keys that the zoo does not know
COUNTED_FROM_PADDING = ("roberta", "xlm-roberta", "xlm-roberta-xl", "camembert", "esm")
WITHOUT = ("position_buckets", "max_relative_positions")  # a DeBERTa with -1 has none of its own


def words(field) -> set[str]:
    return set(re.findall(r"\w+", field.type))


def is_number(field) -> bool:
    return bool(words(field) & NUMBER_TYPES)


def is_float(field) -> bool:
    return bool(words(field) & {"Probability", "NormEpsilon", "InitializerScale", "float"})


def is_optional(field) -> bool:
    return "None" in words(field)


def values_with(name: str, key: str, value: object) -> dict:
    needed = (
        {"num_layers": 2} if name == "glm" else {}
    )  # without it the file is taken for another architecture's
    return {"model_type": name, **needed, key: value}


def assert_refused(name: str, key: str, value: object) -> None:
    """By all ways of making a configuration, in one line that names the key."""
    config = CONFIGS[name]
    ways = [lambda: config(**{key: value}), lambda: config().with_changes(**{key: value})]
    if (name, key) not in ELSEWHERE:
        ways.append(lambda: config_from_dict(values_with(name, key, value)))
    for make in ways:
        with pytest.raises(ValueError, match=rf"{key}\b") as caught:
            make()
        assert "\n" not in str(caught.value)
        assert len(str(caught.value)) < 500


@pytest.mark.parametrize(("name", "field"), by_turns(FIELDS, 4), ids=by_turns(IDS, 4))
def test_wrong_types_are_refused(name, field):
    wrong: list[object] = [[["nested"]], b"bytes", object(), torch.tensor(3)]
    wrong += [] if field.name in OBJECTS else [{"key": {}}]
    if is_number(field):
        wrong += ["12", "", True, False, {}, nan, inf, -inf]
        wrong += [] if is_float(field) else [2.0, 2.5, 1e3]
    elif words(field) == {"bool"}:
        wrong += [0, 1, "true", 1.0, []]
    elif words(field) & {"str", "Activation"} and not words(field) & {"dict"}:
        wrong += [0, True, nan]
        wrong += [] if "list" in words(field) else [[]]
    for value in wrong:
        assert_refused(name, field.name, value)


@pytest.mark.parametrize(
    ("name", "field"), by_turns([(n, f) for n, f in FIELDS if is_number(f)], 4)
)
def test_numbers_out_of_range_are_refused(name, field):
    wrong = [-(10**12), 10**30, 10**400, -(10**400)]
    if field.name == "moe_eval_capacity_token_fraction":  # 0 or less means as in training
        for value in wrong:
            assert_refused(name, field.name, value)
        return
    wrong.append(-2)
    if field.name in WITHOUT:
        for value in wrong:
            assert_refused(name, field.name, value)
        return
    if "TokenId" not in words(field):  # published files say "no token" with -1
        wrong.append(-1)
    if is_float(field):
        wrong += [-1e-9, 1e30]
    if SIZES.fullmatch(field.name) and "sparse" not in field.name:  # none may be sparse
        wrong += [0, 10**12]
    for value in wrong:
        assert_refused(name, field.name, value)


@pytest.mark.parametrize(("name", "field"), by_turns(FIELDS, 4), ids=by_turns(IDS, 4))
def test_null_is_accepted_where_the_annotation_has_it(name, field):
    config = CONFIGS[name]
    if not is_optional(field):
        with pytest.raises(ValueError, match=f"{field.name} must be .*, not None"):
            config(**{field.name: None})
    elif name in COUNTED_FROM_PADDING and field.name == "pad_token_id":  # the positions are
        with pytest.raises(ValueError, match="pad_token_id must be an integer"):
            config(pad_token_id=None)
    elif name in ("m2m_100", "nllb-moe") and field.name == "pad_token_id":
        with pytest.raises(ValueError, match="pad_token_id must be a token of the vocabulary"):
            config(pad_token_id=None)
    elif name == "gpt_oss" and field.name == "head_dim":  # its heads would have 45 features
        with pytest.raises(ValueError, match="head size 45 must be from 1 to 44"):
            config(head_dim=None)
    else:
        config(**{field.name: None})


def test_layers_have_a_limit_that_is_named():
    for name, key in (
        ("gpt2", "n_layer"),
        ("t5", "num_layers"),
        ("t5", "num_decoder_layers"),
        ("glm", "num_layers"),
    ):
        with pytest.raises(
            ValueError, match=f"{key} must be at least 1 and at most 512.*, not 10000000"
        ):
            config_from_dict(values_with(name, key, 10**7))


@pytest.mark.parametrize(
    "values",
    [
        {"model_type": "gpt2", "n_embd": 2**20, "n_head": 2**16, "n_inner": 2**24, "vocab_size": 2**31 - 1,
         "n_positions": 2**31 - 1, "n_layer": 1},
        {"model_type": "t5", "d_model": 2**20, "num_heads": 2**16, "d_kv": 2**20, "d_ff": 2**24,
         "vocab_size": 2**31 - 1, "relative_attention_num_buckets": 2**16,
         "relative_attention_max_distance": 2**31 - 1, "num_layers": 1},
        {"model_type": "bert", "hidden_size": 2**20, "num_attention_heads": 2**16, "intermediate_size": 2**24,
         "vocab_size": 2**31 - 1, "max_position_embeddings": 2**31 - 1, "type_vocab_size": 2**20,
         "num_hidden_layers": 1},
        {"model_type": "glm", "hidden_size": 2**20, "num_attention_heads": 2**16, "vocab_size": 2**31 - 1,
         "max_sequence_length": 2**31 - 1, "num_layers": 1},
    ],
)  # fmt: skip
def test_the_largest_sizes_that_are_accepted_make_a_layout(values):
    assert all(
        parameter.is_meta for parameter in shardzoo.from_config(values, device="meta").parameters()
    )


@pytest.mark.parametrize(
    "values",
    [
        {"architectures": "BertForMaskedLM"},
        {"architectures": {"a": "b"}},
        {"architectures": [3]},
        {"architectures": [["BertForMaskedLM"]]},
        {"id2label": ["a", "b"]},
        {"id2label": "ab"},
        {"id2label": {}},
        {"id2label": {"0": ["a"], "1": "b"}},
        {"id2label": {"0": "a", "zero": "b"}},
        {"id2label": {"-1": "a", "0": "b"}},
        {"label2id": {"a": "zero"}},
        {"num_labels": 10**12},
        {"num_labels": "2"},
    ],
)
def test_hostile_labels_and_architectures(values):
    (key,) = values
    with pytest.raises(
        ValueError, match="num_labels" if values == {"id2label": {}} else key.removesuffix("s")
    ):
        config_from_dict({"model_type": "bert", **values})


def test_an_unknown_setting_names_the_known_ones():
    with pytest.raises(
        ValueError, match=r"gpt2 has no setting 'd_model'; use one of .*vocab_size, .*n_positions, "
    ):
        CONFIGS["gpt2"]().with_changes(d_model=64)


@pytest.mark.parametrize("name", [name for name, _ in presets()])
def test_presets_come_back_from_what_they_write(name):
    config = dict(presets())[name]
    assert config_from_dict(json.loads(json.dumps(config.to_dict()))) == config


THEIRS = {
    "gpt2": transformers.GPT2Config,
    "t5": transformers.T5Config,
    "mt5": transformers.MT5Config,
    "umt5": transformers.UMT5Config,
    "bert": transformers.BertConfig,
    "roberta": transformers.RobertaConfig,
}


@pytest.mark.parametrize("name", THEIRS)
def test_what_transformers_writes_is_accepted(name, tmp_path):
    config = THEIRS[name](architectures=None)
    for values in (config.to_dict(), json.loads(config.to_json_string(use_diff=False))):
        config_from_dict({**values, "a_key_of_tomorrow": {"nested": [None]}})
    shardzoo.models.auto.as_config(config)


@pytest.mark.parametrize("name", ["llama", "qwen3", "glm4"])
def test_heads_of_the_usual_size_keep_it_where_the_family_has_another(name):
    config = CONFIGS[name](
        hidden_size=256, num_attention_heads=8, num_key_value_heads=2, head_dim=None
    )
    assert config_from_dict(config.to_dict()).head_size == 32


def test_ends_may_be_several():
    assert CONFIGS["gpt2"](eos_token_id=[3, 4]).eos_token_id == [3, 4]
    labels = transformers.BertConfig(id2label={0: "no", 1: "yes", 2: "perhaps"})  # integers as keys
    assert shardzoo.models.auto.as_config(labels).num_labels == 3


def test_numbers_of_labels_stay_as_they_are_written():
    values = {"model_type": "bert", "architectures": ["BertForSequenceClassification"]}
    numbers = {"id2label": {"0": "LABEL_0", "1": "LABEL_1"}, "label2id": {"no": 0, "yes": 1}}
    config = config_from_dict({**values, **numbers})
    assert config.to_dict()["label2id"] == {"no": 0, "yes": 1}
    swapped = {"id2label": {"0": "LABEL_1", "1": "LABEL_0"}}
    config = config_from_dict({**values, **swapped})
    assert config.to_dict()["id2label"] == swapped["id2label"]


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3)
    ),
    max_leaves=6,
)


@settings(deadline=None)  # the first call imports the family
@given(st.sampled_from(FIELDS), anything)
def test_any_value_makes_a_configuration_or_one_message(choice, value):
    name, field = choice
    values = values_with(name, field.name, value)
    values |= {"architectures": value, "id2label": value} if field.name == "architecture" else {}
    message, config = "", None
    try:
        config = config_from_dict(values)
    except ValueError as error:
        message = str(error)
    assert "\n" not in message
    if config is not None:
        assert (
            config_from_dict(json.loads(json.dumps(config.to_dict()))).to_dict() == config.to_dict()
        )


@pytest.mark.parametrize(
    ("values", "scales"),
    [
        ({"tie_word_embeddings": False, "transformers_version": "4.31.0"}, False),  # as published
        (
            {"tie_word_embeddings": True, "transformers_version": "5.0.0"},
            True,
        ),  # what transformers 5 computes
        ({"tie_word_embeddings": True}, True),
    ],
)
def test_a_umt5_scales_its_heads_input_as_its_file_says(values, scales):
    published = config_from_dict(
        {"architectures": ["UMT5ForConditionalGeneration"], **values}
    )  # no model_type
    assert (published.model_type, published.scale_decoder_outputs) == ("umt5", scales)
