"""Decoding gives transformers' tokens, on 1 and 2 ranks and for two families on 4, from batches with padding."""

from __future__ import annotations

import pytest
import torch
from every_case import EVERY_CASE, by_turns
from repetition import generate_as_newest

import shardzoo

ROWS = 50
# In a vocabulary of 261, so many that sequences of all lengths occur.
ENDS = [2, *range(7, 40)]
CASES = {
    "greedy": {},
    "greedy, many ends": {"eos_token_id": ENDS},
    "beams": {"num_beams": 4},
    "beams, many ends": {"num_beams": 4, "eos_token_id": ENDS, "num_return_sequences": 3},
    "beams, early": {"num_beams": 3, "eos_token_id": ENDS, "early_stopping": True, "length_penalty": 2.0},
    "beams, never early": {"num_beams": 3, "eos_token_id": ENDS, "early_stopping": "never", "length_penalty": 0.5},
    "beams, short is good": {"num_beams": 2, "eos_token_id": ENDS, "length_penalty": -1.0},
    "repetition_penalty": {"repetition_penalty": 1.7},
    "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.5},
    "no_repeat_ngram_size": {"no_repeat_ngram_size": 2, "num_beams": 3},
    "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 2},
    "bad_words_ids": {"bad_words_ids": [[5], [100, 101], [200]], "num_beams": 2},
    "sequence_bias": {"sequence_bias": [[[150], 3.0], [[151, 152], 9.0]]},
    "min_length": {"min_length": 14, "eos_token_id": ENDS},
    "min_new_tokens": {"min_new_tokens": 7, "eos_token_id": ENDS, "num_beams": 2},
    "forced ends": {"forced_bos_token_id": 60, "forced_eos_token_id": 61},
    "exponential_decay_length_penalty": {"exponential_decay_length_penalty": (4, 1.4), "eos_token_id": ENDS[:3]},
    "suppress_tokens": {"suppress_tokens": list(range(60, 190)), "begin_suppress_tokens": list(range(190, 240))},
    "renormalize_logits": {"renormalize_logits": True, "repetition_penalty": 0.8, "num_beams": 2},
    "remove_invalid_values": {"remove_invalid_values": True},
}  # fmt: skip
LENGTH = {"max_new_tokens": 9}
# The other families decode by the same code as these two.
SIZES = {"gpt2": (1, 2, 4) if EVERY_CASE else (1, 4), "t5": (1, 2, 4) if EVERY_CASE else (2, 4)}
FAMILIES = ["gpt2", "llama", "qwen2", "t5", "t5 v1.1", "mt5", "umt5", "bart", "m2m_100"]


def decode_all(mesh, folder, ids, mask, cases, **options):
    model = shardzoo.from_pretrained(folder, mesh)
    return {
        name: model.generate(ids, mask, **LENGTH, **case, **options) for name, case in cases.items()
    }


def shown(tokens: torch.Tensor, prompt: int, ends: list[int]) -> list[list[int]]:
    """Each sequence up to its first end. What transformers fills the rest of beams with is the first end where the
    padding token is 0 (`pad_token_id or eos_token_id[0]`), and here always the padding token."""
    rows = []
    for row in tokens.tolist():
        stop = next((i for i in range(prompt, len(row)) if row[i] in ends), len(row))
        rows.append(row[: stop + 1])
    return rows


def cases_of(family: str) -> dict[str, dict]:
    """All for GPT-2 and T5, and by turns a quarter of them for the others."""
    if EVERY_CASE or family in SIZES:
        return CASES
    chosen = list(CASES)[FAMILIES.index(family) % 4 :: 4]
    return {name: CASES[name] for name in chosen}


@pytest.mark.parametrize("family", by_turns(FAMILIES, 5))
def test_tokens_are_those_of_transformers(family, saved, prompts, run_mesh):
    reference, folder = saved(family)
    is_decoder = not reference.config.is_encoder_decoder
    ids, mask = prompts(ROWS, padded_left=is_decoder)
    prompt = ids.shape[1] if is_decoder else 1
    cases = cases_of(family)
    expected = {
        name: generate_as_newest(reference, ids, mask, **LENGTH, **case)
        for name, case in cases.items()
    }
    for size in SIZES.get(family, (1, 2) if EVERY_CASE else (2,)):
        ranks = run_mesh(size, decode_all, folder, ids, mask, cases)
        for name, case in cases.items():
            ends = case.get("eos_token_id", reference.generation_config.eos_token_id)
            ends = ends if isinstance(ends, list) else [ends]
            for rank in ranks:
                assert torch.equal(rank[name], ranks[0][name]), f"{name}: ranks disagree"
            found, wanted = (
                shown(tokens, prompt, ends) for tokens in (ranks[0][name], expected[name])
            )
            wrong = [
                row
                for row, pair in enumerate(zip(found, wanted, strict=True))
                if pair[0] != pair[1]
            ]
            assert not wrong, (
                f"{name} at TP {size}: row {wrong[0]} is {found[wrong[0]]}, not {wanted[wrong[0]]}"
            )


@pytest.mark.parametrize("family", by_turns(FAMILIES, 4))
def test_the_cache_changes_nothing(family, saved, prompts, run_mesh):
    reference, folder = saved(family)
    ids, mask = prompts(12, padded_left=not reference.config.is_encoder_decoder)
    cases = {
        name: CASES[name]
        for name in ("greedy, many ends", "beams, many ends", "repetition_penalty")
    }
    # Without padding among the tokens, which M2M100 does not count.
    cases["sampled"] = {
        "do_sample": True,
        "seed": 4,
        "num_return_sequences": 2,
        "suppress_tokens": [0],
    }
    for size in (1, 2) if EVERY_CASE else (2,):
        cached = run_mesh(size, decode_all, folder, ids, mask, cases)[0]
        again = run_mesh(size, with_options, folder, ids, mask, cases)[0]
        for name in cases:
            assert torch.equal(cached[name], again[name]), name


def with_options(mesh, folder, ids, mask, cases):
    return decode_all(mesh, folder, ids, mask, cases, use_cache=False)
