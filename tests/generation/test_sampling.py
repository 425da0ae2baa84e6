"""Sampling: the same tokens on any number of ranks, from the right distribution, after transformers' processors."""

from __future__ import annotations

import pytest
import torch
import transformers
from every_case import EVERY_CASE, every_day

import shardzoo
from shardzoo.models.generation.generation_config import resolve_settings
from shardzoo.models.generation.logits_processors import LogitsProcessors
from shardzoo.models.generation.vocabulary import gather_rows
from shardzoo.mpu import tp_rank, tp_size

CASES = {
    "plain": {"top_k": 0},
    "default": {},
    "two for each": {"num_return_sequences": 2, "temperature": 1.4},
    "cut": {"top_p": 0.8, "top_k": 20, "repetition_penalty": 1.2},
    "beams": {"num_beams": 3, "top_k": 12},
}
WARPERS = [
    {"temperature": 0.6, "top_k": 7},
    {"top_k": 0, "top_p": 0.7},
    {"min_p": 0.05},
    {"typical_p": 0.4},
    {"top_h": 0.5},
    {"epsilon_cutoff": 0.003, "eta_cutoff": 0.002},
    {"temperature": 1.7, "top_k": 30, "top_p": 0.9, "min_p": 0.01, "renormalize_logits": True},
    {"num_beams": 2, "top_k": 2, "top_p": 0.1},
    # So that no beam is left without a token, beams keep one more token than there are end tokens.
    {"num_beams": 3, "eos_token_id": [2, 7, 11], "top_k": 2},
    {"num_beams": 3, "eos_token_id": [2, 7, 11], "top_k": 0, "top_p": 0.01},
    {"num_beams": 3, "eos_token_id": [2, 7, 11], "top_k": 0, "min_p": 0.99},
    {"num_beams": 3, "eos_token_id": [2, 7, 11], "top_k": 0, "typical_p": 0.01},
    {"num_beams": 3, "eos_token_id": [2, 7, 11], "top_k": 0, "epsilon_cutoff": 0.9},
    {"num_beams": 3, "eos_token_id": [2, 7, 11], "top_k": 0, "eta_cutoff": 0.9},
]


def sample(mesh, folder, ids, mask, seed):
    model = shardzoo.from_pretrained(folder, mesh)
    torch.manual_seed(100 + tp_rank(mesh) if seed is None and tp_rank(mesh) else 100)
    options = {"do_sample": True, "max_new_tokens": 8, "seed": seed}
    return {name: model.generate(ids, mask, **options, **case) for name, case in CASES.items()}


@pytest.mark.parametrize("family", every_day(["t5"], more=["qwen3", "gpt2", "bart"]))
def test_a_seed_decides_the_tokens_whatever_the_ranks(family, saved, prompts, run_mesh):
    reference, folder = saved(family)
    ids, mask = prompts(16, padded_left=not reference.config.is_encoder_decoder)
    for seed in (7, None):  # None: the first rank's random state, although the others' differ
        sizes = (1, 2, 4) if EVERY_CASE else (1, 4 if seed else 2)
        runs = {size: run_mesh(size, sample, folder, ids, mask, seed) for size in sizes}
        for name in CASES:
            for ranks in runs.values():
                for rank in ranks:
                    assert torch.equal(rank[name], runs[1][0][name]), name
    other = run_mesh(1, sample, folder, ids, mask, 8)[0]
    assert not torch.equal(other["plain"], runs[1][0]["plain"])


def first_tokens(mesh, folder, ids, options):
    model = shardzoo.from_pretrained(folder, mesh)
    drawn = [
        model.generate(
            ids, do_sample=True, max_new_tokens=1, num_return_sequences=10_000, seed=seed, **options
        )[:, -1]
        for seed in range(10)
    ]
    return torch.cat(drawn).bincount(minlength=model.config.vocab_size)


@pytest.mark.parametrize(
    ("family", "options"), [("gpt2", {"top_k": 0}), ("qwen3", {"top_k": 25, "temperature": 2.0})]
)
def test_the_distribution_is_the_softmax(family, options, saved, prompts, run_mesh):
    reference, folder = saved(family)
    ids = prompts(1, padded_left=True)[0]
    with torch.no_grad():
        logits = reference(ids).logits[0, -1].double() / options.get("temperature", 1.0)
    if options["top_k"]:
        logits[logits < logits.topk(options["top_k"]).values[-1]] = float("-inf")
    expected = logits.softmax(-1) * 100_000
    for size in (1, 2) if EVERY_CASE else (2,):
        counts = run_mesh(size, first_tokens, folder, ids, options)[0].double()
        assert counts.sum() == 100_000
        assert not counts[expected == 0].any()
        often = expected > 10  # where a count is nearly normal
        deviations = (counts - expected)[often] / (expected * (1 - expected / 100_000))[
            often
        ].sqrt()
        # Of so many tokens 0.3 % may be beyond 3 sigma; their squares together must be within 3 sigma of their number.
        assert (deviations.abs() > 3).sum() <= 0.02 * often.sum() + 1
        assert abs(deviations.square().sum() - often.sum()) < 3 * (2 * often.sum()) ** 0.5


def processed(mesh, folder, logits, ids):
    model = shardzoo.from_pretrained(folder)
    config = model.config
    share = -(-config.vocab_size // tp_size(mesh))
    own = torch.full((len(logits), share), float("-inf"))
    part = logits[:, tp_rank(mesh) * share : (tp_rank(mesh) + 1) * share]
    own[:, : part.shape[1]] = part
    results = []
    for options in WARPERS:
        settings = resolve_settings(model, None, {"do_sample": True, **options})
        scores, over = LogitsProcessors(settings, config.vocab_size, mesh, prompt=ids, limit=20)(
            ids, own
        )
        results.append(gather_rows(scores, config.vocab_size, over))
    return results


def test_what_is_drawn_from_is_what_transformers_draws_from(saved, prompts, run_mesh):
    reference, folder = saved("gpt2")
    ids = prompts(4, padded_left=True)[0]
    logits = torch.randn(4, 261, generator=torch.Generator().manual_seed(2)) * 3
    expected = []
    for options in WARPERS:
        config = transformers.GenerationConfig(**{"do_sample": True, "eos_token_id": 2, **options})
        config, _ = reference._prepare_generation_config(config)
        reference._prepare_special_tokens(config, device="cpu")
        processors = reference._get_logits_processor(
            config, input_ids_seq_length=9, logits_processor=[], device="cpu"
        )
        expected.append(processors(ids, logits.clone()))
    for size in (1, 2, 4):
        for found in run_mesh(size, processed, folder, logits, ids):
            for one, other, options in zip(found, expected, WARPERS, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, msg=str(options))
