"""Tokens of packed rows attend within their document: `blocks.documents` against each document alone, in fp64.

Its dropout, and its layouts, are tested in test_context_parallel.py; transformers' ways to say it in test_packing.py.
"""

from __future__ import annotations

import time

import pytest
import torch
from tiny_models import tiny

from shardzoo.models import ParallelConfig, from_config
from shardzoo.models.blocks.documents import Documents
from shardzoo.models.blocks.masks import lower_triangular_mask

LENGTHS = [[3, 1, 17, 8, 5, 11], [20, 2, 23]]
FAMILIES = {
    "gpt2": {},
    "llama": {},
    "mistral": {},
    "qwen3": {},
    "bert": {"architecture": "BertForMaskedLM"},
    "modernbert": {"architecture": "ModernBertForMaskedLM"},
    "t5": {"architecture": "T5EncoderModel"},
    "umt5": {"architecture": "UMT5EncoderModel"},
}


def compute_gradients(model, calls, weights):
    """The gradients of a weighted sum of the outputs of some calls."""
    model.zero_grad()
    total = torch.zeros((), dtype=torch.float64)
    for call, weight in zip(calls, weights, strict=True):
        output = model(**call)
        states = output.logits if hasattr(output, "logits") else output.last_hidden_state
        total = total + (states * weight[..., : states.shape[-1]]).sum()
    total.backward()
    return total.detach(), {
        name: value.grad for name, value in model.named_parameters() if value.grad is not None
    }


@pytest.mark.parametrize(
    ("family", "recompute"),
    [*((family, "none") for family in FAMILIES), ("mistral", "selective"), ("t5", "selective")],
)
def test_gradients_are_those_of_each_document_alone(family, recompute):
    config = tiny(family, 0.0, **FAMILIES[family])
    parallel = ParallelConfig(recompute=recompute)
    model = from_config(config, dtype=torch.float64, parallel_config=parallel, seed=1).train()
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(5, 90, (2, 45), generator=generator)
    weights = torch.randn(2, 45, 97, generator=generator, dtype=torch.float64)
    numbers = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    loss, packed = compute_gradients(model, [{"input_ids": ids, "seq_idx": numbers}], [weights])
    calls = []
    parts = []
    for row, lengths in enumerate(LENGTHS):
        calls += [{"input_ids": part[None]} for part in ids[row].split(lengths)]
        parts += [part[None] for part in weights[row].split(lengths)]
    wanted, alone = compute_gradients(model, calls, parts)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10)
    for name, gradient in alone.items():
        torch.testing.assert_close(packed[name], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("reach", [None, 4])
def test_plans_say_what_the_whole_mask_says(causal, reach):
    numbers = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    keys = torch.ones(2, 1, 1, 45, dtype=torch.bool)
    keys[1, ..., 40:] = False
    documents = Documents(numbers, keys, causal=causal, reach=reach)
    whole = documents.to_tensor()
    for first, end in ((0, 45), (0, 15), (15, 30), (30, 45)):
        plan = documents.plan(2, first, end)
        allowed = torch.zeros(2 * (end - first), 2 * 45, dtype=torch.bool)
        for part in plan.batches:
            count, queries = part.queries.shape
            mask = torch.ones(count, 1, queries, part.keys.shape[1], dtype=torch.bool)
            if part.mask is not None:
                mask = mask & part.mask
            if causal and (part.mask is None or part.mask.shape[2] == 1):
                mask = mask & lower_triangular_mask(queries, part.keys.shape[1], mask.device)
            for row in part.kept.tolist():
                document, query = divmod(row, queries)
                places = part.keys[document][mask[document, 0, query]]
                allowed[part.queries[document, query], places] = True
        for sample in range(2):
            own = allowed[sample * (end - first) :][: end - first, sample * 45 :][:, :45]
            assert torch.equal(own, whole[sample, 0, first:end])
        assert allowed.sum() == whole[:, :, first:end].sum()


def test_numbers_that_come_back_are_one_document():
    numbers = torch.tensor([[0, 0, 1, 0]])
    assert Documents(numbers, None, causal=False).find_spans(1) is None


@pytest.mark.before_release
def test_attention_costs_what_the_documents_cost():
    """Blocks of 2,048 positions with documents of 256, against one document: at most 0.6 of the time."""
    from shardzoo.models.blocks.attention import CoreAttention

    core = CoreAttention(
        4, 4, scale=0.125, dropout=0.0, mesh=None, parallel_config=ParallelConfig()
    )
    q, k, v = (torch.randn(1, 4, 2048, 64, requires_grad=True) for _ in range(3))
    numbers = torch.arange(2048)[None] // 256

    def measure(mask):
        best = float("inf")
        for _ in range(4):
            start = time.perf_counter()
            core(q, k, v, mask, None, True).sum().backward()
            best = min(best, time.perf_counter() - start)
        return best

    ratio = measure(Documents(numbers, None, causal=True)) / measure(None)
    print(f"documents: {ratio:.2f} of the time of one document")
    assert ratio <= 0.6
