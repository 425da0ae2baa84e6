"""The facts that families state about themselves fit one another and the rest of the library."""

from __future__ import annotations

import ast
from typing import get_args

import pytest
from documents import ROOT
from every_case import by_turns

from shardzoo.data.objectives.objective import Format
from shardzoo.data.objectives.registry import find_objective
from shardzoo.data.tokenizers.training import TOKENIZER_KINDS
from shardzoo.finetuning.arguments import Task
from shardzoo.models import FAMILIES, family
from shardzoo.models.auto import build_on_meta, config_from_dict
from shardzoo.models.nearest import MISSING

NOT_OF_THE_PACKAGE = {"tests", "benchmarks", "examples", "build", "models"}


@pytest.mark.parametrize("name", by_turns(FAMILIES, 3))
def test_the_facts_of_a_family_fit(name):
    facts = family(name)
    assert facts.config.model_type == name
    assert find_objective(facts.objective).format in facts.pretrains
    assert set(facts.pretrains) <= set(get_args(Format))
    assert set(facts.pretrains.values()) <= facts.architectures.keys()
    assert facts.tokenizer in TOKENIZER_KINDS
    assert set(facts.tasks) <= set(get_args(Task))
    assert set(facts.tasks.values()) <= facts.architectures.keys()
    assert facts.tasks
    assert all(isinstance(config, facts.config) for config in facts.presets.values())
    for config in facts.presets.values():
        paths = [stack.path for stack in facts.activations(config).stacks]
        names = [parameter for parameter, _ in build_on_meta(config, None).named_parameters()]
        assert all(any(parameter.startswith(path) for parameter in names) for path in paths)


UNKNOWN_FAMILIES = {  # model_type, architecture: the nearest model, and a word of what is missing
    ("deberta", "DebertaForMaskedLM"): ("DebertaV2ForMaskedLM (deberta-v2)", "norms, biases"),
    ("albert", "AlbertForMaskedLM"): ("BertForMaskedLM (bert)", "share their weights"),
    ("bloom", "BloomForCausalLM"): ("GPT2LMHeadModel (gpt2)", "ALiBi"),
    ("opt", "OPTForCausalLM"): ("GPT2LMHeadModel (gpt2)", "positions"),
    ("gpt_neox", "GPTNeoXForCausalLM"): ("LlamaForCausalLM (llama)", "side by side"),
    ("gemma3", "Gemma3ForConditionalGeneration"): ("(gemma3_text)", "reads images"),
    ("chatglm", "ChatGLMModel"): ("Glm4Model (glm4)", "norms after attention"),
    ("xlnet", ""): ("(bert)", "two streams"),
    ("gpt3", ""): ("GPT2LMHeadModel (gpt2)", "its blocks"),
    ("whisper", "WhisperForConditionalGeneration"): ("ForConditionalGeneration (", "its blocks"),
    ("robertta", "RobertaForMaskedLM"): ("RobertaForMaskedLM (roberta)", "nothing, if model_type becomes 'roberta'"),
}  # fmt: skip


@pytest.mark.parametrize("wanted", UNKNOWN_FAMILIES)
def test_an_unknown_family_names_the_nearest_model_and_what_is_missing(wanted):
    model_type, architecture = wanted
    names = [architecture] if architecture else None
    with pytest.raises(
        ValueError, match=f"there is no model family '{model_type}'.*; use one of bart, "
    ) as caught:
        config_from_dict({"model_type": model_type, "architectures": names})
    assert "\n" not in str(caught.value)
    nearest, missing = (
        str(caught.value).split("The nearest model that works is ")[1].split("; missing: ")
    )
    assert UNKNOWN_FAMILIES[wanted][0] in nearest
    assert UNKNOWN_FAMILIES[wanted][1] in missing
    found, owner = nearest.rstrip(")").split(" (")
    assert found in family(owner).architectures


UNKNOWN_ARCHITECTURES = {  # the nearest architecture, and what is missing
    ("distilbert", "DistilBertForCausalLM"): ("DistilBertFor", "the head ForCausalLM"),
    ("bert", "BertForCausalLM"): ("BertLMHeadModel", "a class called 'BertForCausalLM'"),
    ("bert", "BertForX"): ("BertFor", "the head ForX"),
    ("bert", "BertMaskedLM"): ("BertForMaskedLM", "a class called 'BertMaskedLM'"),
    ("gpt2", "GPT2ForMultipleChoice"): ("GPT2", "the head"),
    ("modernbert", "ModernBertForCausalLM"): ("ModernBertFor", "the head ForCausalLM"),
}


@pytest.mark.parametrize("wanted", UNKNOWN_ARCHITECTURES)
def test_an_unknown_architecture_names_the_nearest_one_and_what_is_missing(wanted):
    model_type, architecture = wanted
    start = f"architecture '{architecture}' is not supported; use one of {next(iter(family(model_type).architectures))}"
    with pytest.raises(ValueError, match=start) as caught:
        config_from_dict({"model_type": model_type, "architectures": [architecture]})
    nearest, missing = (
        str(caught.value).split("The nearest one that works is ")[1].split("; missing: ")
    )
    assert nearest.startswith(UNKNOWN_ARCHITECTURES[wanted][0])
    assert nearest in family(model_type).architectures
    assert missing.startswith(UNKNOWN_ARCHITECTURES[wanted][1])


def test_an_architecture_of_another_family_names_that_family():
    with pytest.raises(
        ValueError, match="or set model_type to 'roberta', whose architecture it is"
    ):
        config_from_dict({"model_type": "bert", "architectures": ["RobertaForMaskedLM"]})


@pytest.mark.parametrize("model_type", [None, 3, ["bert"], {}, "x" * 10_000])
def test_a_model_type_that_is_no_name_is_refused(model_type):
    with pytest.raises(ValueError, match="there is no model family") as caught:
        config_from_dict({"model_type": model_type, "architectures": [model_type]})
    assert len(str(caught.value)) < 1000


def test_the_nearest_families_are_in_the_zoo_and_the_missing_are_not():
    assert not MISSING.keys() & set(FAMILIES)
    assert {nearest for nearest, _ in MISSING.values()} <= set(FAMILIES)


def test_no_other_room_imports_from_a_familys_folder():
    """They ask the registry, or a model's class attribute `generates`."""
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT)
        if place.parts[0] in NOT_OF_THE_PACKAGE or place.parts[0].startswith("."):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                parts = (node.module or "").split(".")
                assert "models" not in parts or not set(FAMILIES) & set(parts), (
                    f"{place} imports {node.module}"
                )
