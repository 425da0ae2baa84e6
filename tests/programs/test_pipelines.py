"""transformers' pipelines run the zoo's models."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers
from tiny_models import save_model

import shardzoo

TEXT = "the old house by the sea"
CASES = {
    "text-generation": ("GPT2LMHeadModel", "gpt2"),
    "feature-extraction": ("BertModel", "bert"),
    "text-classification": ("BertForSequenceClassification", "bert"),
    "token-classification": ("BertForTokenClassification", "bert"),
    "fill-mask": ("BertForMaskedLM", "bert"),
}


def run(task: str, model: Any, tokenizer: Any) -> Any:
    run_pipeline = transformers.pipeline(task, model=model, tokenizer=tokenizer)
    if task == "text-generation":
        return run_pipeline([TEXT, "a"], max_new_tokens=5, do_sample=False)
    if task == "fill-mask":
        return run_pipeline(f"{TEXT} {tokenizer.mask_token}")
    return run_pipeline([TEXT, "a"])


def numbers(result: Any) -> list[float]:
    """Returns all numbers of a nested result in order."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, list | tuple):
        return [number for entry in result for number in numbers(entry)]
    if isinstance(result, torch.Tensor):
        return result.flatten().tolist()
    return [] if isinstance(result, str) or result is None else [float(result)]


def words(result: Any) -> list[str]:
    """Returns all texts of a nested result in order."""
    if isinstance(result, dict):
        result = list(result.values())
    if isinstance(result, list | tuple):
        return [word for entry in result for word in words(entry)]
    return [result] if isinstance(result, str) else []


@pytest.mark.parametrize("task", CASES)
def test_a_pipeline_returns_what_it_returns_with_transformers_model(tmp_path, task):
    architecture, family = CASES[task]
    folder = save_model(tmp_path, architecture, family, seed=1)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    oracle = run(task, getattr(transformers, architecture).from_pretrained(folder), tokenizer)
    found = run(task, shardzoo.from_pretrained(folder), tokenizer)
    assert words(found) == words(oracle)
    assert numbers(found) == pytest.approx(numbers(oracle), rel=1e-4, abs=1e-5)
