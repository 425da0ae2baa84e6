"""Configurations and constructors take what transformers' do."""

from __future__ import annotations

import copy
import json
import pickle

import pytest
import torch
import transformers
from tiny_models import tiny

import shardzoo.models as zoo
from shardzoo.models import BertConfig, GPT2Config, T5Config


def test_common_names_read_and_write():
    config = GPT2Config(hidden_size=32, num_attention_heads=4, my_setting=[1])
    theirs = transformers.GPT2Config(hidden_size=32, num_attention_heads=4, my_setting=[1])
    config.num_hidden_layers = 3
    theirs.num_hidden_layers = 3
    for name in ("n_embd", "hidden_size", "n_layer", "my_setting", "use_cache", "return_dict",
                 "is_encoder_decoder", "output_hidden_states", "num_labels", "id2label",
                 "label2id"):  # fmt: skip
        assert getattr(config, name) == getattr(theirs, name), name
    with pytest.raises(AttributeError, match="no attribute 'hiddensize'"):
        config.hiddensize  # noqa: B018
    with pytest.raises(ValueError, match="n_head must be an integer, not 'x'"):
        config.num_attention_heads = "x"
    with pytest.raises(ValueError, match="is_encoder_decoder must be False"):
        config.is_encoder_decoder = True
    assert T5Config().is_encoder_decoder


def test_labels_follow_their_number():
    config = BertConfig(num_labels=3)
    theirs = transformers.BertConfig(num_labels=3)
    for ours in (config, theirs):
        ours.num_labels = 4
    assert (config.id2label, config.label2id) == (theirs.id2label, theirs.label2id)
    named = {0: "no", 1: "yes", 2: "perhaps"}
    assert BertConfig(id2label=named).num_labels == 3
    config.id2label = named
    assert config.num_labels == 3
    assert config.id2label[1] == "yes"


def test_saved_and_loaded(tmp_path):
    config = T5Config(d_model=32, num_heads=4, foo={"a": 1}, use_cache=False)
    config.save_pretrained(tmp_path)
    again = zoo.find_config(str(tmp_path))
    assert again == config
    assert again.foo == {"a": 1}
    assert again.use_cache is False
    theirs = transformers.AutoConfig.from_pretrained(tmp_path)
    assert theirs.foo == {"a": 1}
    changed = json.loads(config.to_json_string())
    assert changed == {
        "architectures": ["T5ForConditionalGeneration"], "model_type": "t5", "d_model": 32,
        "num_heads": 4, "foo": {"a": 1}, "use_cache": False,
    }  # fmt: skip


def test_a_model_refuses_what_its_modules_would_not_follow():
    config = BertConfig(**without_type(tiny("bert")))
    model = zoo.BertForSequenceClassification(config)
    config.hidden_size = 64  # The model has a copy.
    assert model.config.hidden_size == 32
    model.config.pad_token_id = 5
    model.config.problem_type = "regression"
    model.config.use_cache = False
    model.config.anything = 3
    for name, value in (("hidden_size", 64), ("hidden_dropout_prob", 0.5), ("num_labels", 7)):
        with pytest.raises(ValueError, match=f"{name}={value} cannot be set"):
            setattr(model.config, name, value)
    free = copy.deepcopy(model.config)
    free.hidden_size = 64
    pickle.loads(pickle.dumps(model.config)).hidden_size = 64
    with pytest.raises(ValueError, match="cannot be set"):
        copy.deepcopy(model).config.hidden_size = 64


def without_type(values):
    return {name: value for name, value in values.items() if name != "model_type"}


@pytest.mark.parametrize("name", ["T5ForConditionalGeneration", "GPT2ForTokenClassification"])
def test_models_are_constructed_from_any_configuration(name):
    family = "t5" if name.startswith("T5") else "gpt2"
    values = without_type(tiny(family, num_labels=3))
    theirs = getattr(transformers, name)
    config_class = getattr(zoo, f"{family.upper()}Config")
    forms = (config_class(**values), theirs.config_class(**values), values)
    models = []
    for form in forms:
        torch.manual_seed(3)
        models.append(getattr(zoo, name)(form))
    for model in models:
        assert model.training
        assert model.config.architecture == name
        assert model.config.num_labels == 3
        for mine, first in zip(model.parameters(), models[0].parameters(), strict=True):
            assert mine.isfinite().all()
            assert torch.equal(mine, first)
    other = getattr(zoo, name)(forms[0])  # The generator has moved on.
    first = next(models[0].parameters())
    assert not torch.equal(next(other.parameters()), first)
    with pytest.raises(ValueError, match="is built from a"):
        getattr(zoo, name)(BertConfig())


def construct(mesh, values):
    """The sum over the ranks of each parameter's squares, of models with other generators' states."""
    torch.manual_seed(3 + mesh.rank)
    model = zoo.T5ForConditionalGeneration(values, mesh=mesh)
    total = 0.0
    for parameter in model.parameters():
        own = parameter.detach().double().square().sum()
        shard = getattr(parameter, "shard", None)
        if shard is not None and mesh.tp_size > 1:
            torch.distributed.all_reduce(own, group=mesh.tp_group)
        total += float(own)
    return total


def test_a_split_model_is_constructed_as_the_whole(run_mesh):
    values = without_type(tiny("t5"))
    torch.manual_seed(3)
    whole = zoo.T5ForConditionalGeneration(values)
    expected = sum(float(p.detach().double().square().sum()) for p in whole.parameters())
    assert run_mesh(2, construct, values) == [pytest.approx(expected)] * 2
