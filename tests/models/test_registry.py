"""The facts that families state about themselves fit one another and the rest of the library."""

from __future__ import annotations

import ast
from typing import get_args

import pytest
from documents import ROOT

from shardzoo.data.objectives.pretraining import Format, find_objective
from shardzoo.data.tokenizers.training import TOKENIZER_KINDS
from shardzoo.finetuning.arguments import Task
from shardzoo.models import FAMILIES, family
from shardzoo.models.auto import build_on_meta

NOT_OF_THE_PACKAGE = {"tests", "benchmarks", "examples", "build", "models"}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_facts_of_a_family_fit(name):
    facts = family(name)
    assert facts.config.model_type == name
    assert find_objective(facts.objective).format in facts.pretrains
    assert set(facts.pretrains) <= set(get_args(Format))
    assert set(facts.pretrains.values()) <= facts.architectures.keys()
    assert facts.tokenizer in TOKENIZER_KINDS
    assert set(facts.tasks) <= set(get_args(Task))
    assert set(facts.tasks.values()) <= facts.architectures.keys()
    assert bool(facts.tasks) != bool(facts.no_tasks)
    assert all(isinstance(config, facts.config) for config in facts.presets.values())
    for config in facts.presets.values():
        paths = [stack.path for stack in facts.activations(config).stacks]
        names = [parameter for parameter, _ in build_on_meta(config, None).named_parameters()]
        assert all(any(parameter.startswith(path) for parameter in names) for path in paths)
    if facts.new_modules:
        configs = [next(iter(facts.presets.values())).with_changes(architecture=name) for name in facts.architectures]
        modules = {child for config in configs for child, _ in build_on_meta(config, None).named_children()}
        assert set(facts.new_modules) <= modules


def test_an_unknown_family_is_refused():
    with pytest.raises(ValueError, match="there is no model family 'gpt3'; use one of bert, "):
        family("gpt3")


def test_no_other_room_imports_from_a_familys_folder():
    """They ask the registry, or a model's class attribute `generates`."""
    for path in ROOT.rglob("*.py"):
        place = path.relative_to(ROOT)
        if place.parts[0] in NOT_OF_THE_PACKAGE or place.parts[0].startswith("."):
            continue
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom):
                parts = (node.module or "").split(".")
                assert "models" not in parts or not set(FAMILIES) & set(parts), f"{place} imports {node.module}"
