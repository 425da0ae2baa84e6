"""Tokens of packed rows attend within their document: `blocks.documents` against each document alone, in fp64.

Its dropout, and its layouts, are tested in test_context_parallel.py; transformers' ways to say it in test_packing.py.
"""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from every_case import every_day
from tiny_models import tiny

from shardzoo.models import ParallelConfig, from_config
from shardzoo.models.blocks import attention as attention_block
from shardzoo.models.blocks import relative_bias
from shardzoo.models.blocks.documents import CrossDocuments, Documents
from shardzoo.models.blocks.masks import AttentionMask
from shardzoo.mpu import dropout_state
from shardzoo.ops import varlen_attention

LENGTHS = [[3, 1, 17, 8, 5, 11], [20, 2, 23]]
FAMILIES = {
    "gpt2": {},
    "glm": {},
    "llama": {},
    "mistral": {},
    "qwen3": {},
    "bert": {"architecture": "BertForMaskedLM"},
    "modernbert": {"architecture": "ModernBertForMaskedLM"},
    "t5": {"architecture": "T5EncoderModel"},
    "umt5": {"architecture": "UMT5EncoderModel"},
}


def draw_prefixes(lengths: list[int]) -> list[int]:
    """The length of part A of each document of a GLM: none, some or all of it."""
    return [(0, length // 2, length)[number % 3] for number, length in enumerate(lengths)]


def spread(prefixes: list[list[int]], lengths: list[list[int]]) -> torch.Tensor:
    """The length of part A of each token's document, [B, S]."""
    rows = zip(prefixes, lengths, strict=True)
    return torch.stack([torch.tensor(a).repeat_interleave(torch.tensor(b)) for a, b in rows])


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
    call = {"input_ids": ids, "seq_idx": numbers}
    prefixes = [draw_prefixes(lengths) for lengths in LENGTHS]
    if family == "glm":
        call["prefix_lengths"] = spread(prefixes, LENGTHS)
    loss, packed = compute_gradients(model, [call], [weights])
    calls = []
    parts = []
    for row, lengths in enumerate(LENGTHS):
        for part, prefix in zip(ids[row].split(lengths), prefixes[row], strict=True):
            calls.append({"input_ids": part[None]})
            if family == "glm":
                calls[-1]["attention_mask"] = torch.tensor([prefix])
        parts += [part[None] for part in weights[row].split(lengths)]
    wanted, alone = compute_gradients(model, calls, parts)
    torch.testing.assert_close(loss, wanted, rtol=1e-10, atol=1e-10)
    for name, gradient in alone.items():
        torch.testing.assert_close(packed[name], gradient, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("rate", every_day([0.3], more=[0.0]))
@pytest.mark.parametrize("family", ["gpt2", "qwen3", "mistral", "bert", "t5"])
def test_documents_one_after_another_are_those_in_batches(family, rate, monkeypatch):
    """As on a GPU, whose kernel takes them without padding; mistral's windows are shorter than documents."""
    config = tiny(family, rate, **FAMILIES[family])
    model = from_config(config, dtype=torch.float64, seed=1).train()
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(5, 90, (2, 45), generator=generator)
    weights = torch.randn(2, 45, 97, generator=generator, dtype=torch.float64)
    numbers = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    call = {"input_ids": ids, "seq_idx": numbers}
    monkeypatch.setattr(relative_bias, "suits_tiles", lambda *_: True)
    results = []
    calls = []

    def remember(*arguments, **rules):
        calls.append(rules)
        return varlen_attention(*arguments, **rules)

    monkeypatch.setattr(attention_block, "varlen_attention", remember)
    for suits in (False, True):
        assert not calls
        monkeypatch.setattr(attention_block, "suits_varlen", lambda _, suits=suits: suits)
        dropout_state.set(7, 3)
        results.append(compute_gradients(model, [call], [weights]))
    assert bool(calls) == (family != "mistral")
    assert all(("keys" in rules) == (rate > 0) for rules in calls)
    (expected, in_batches), (value, in_rows) = results
    torch.testing.assert_close(value, expected, rtol=1e-10, atol=1e-10)
    for name, gradient in in_batches.items():
        torch.testing.assert_close(in_rows[name], gradient, rtol=1e-10, atol=1e-10)


# With their decoders, each of whose documents attends to the encoder's of its number.
SPLIT_FAMILIES = {**FAMILIES, "t5": {}, "mt5": {}, "umt5": {}, "bart": {}}
SPLIT_LENGTHS = [[3, 1, 17, 8, 5, 14], [20, 2, 26]]


def compute_packed_and_alone(mesh: Any, family: str, exchange: str, dtype: torch.dtype):
    """The losses of packed rows on this mesh and of each document in one process, with their gradients."""
    import torch.distributed as dist

    from shardzoo.models import ParallelConfig, from_config

    config = tiny(family, 0.0, **SPLIT_FAMILIES[family])
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(5, 90, (2, 48), generator=generator)
    labels = torch.randint(5, 90, (2, 48), generator=generator)
    numbers = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in SPLIT_LENGTHS])
    batch = {"input_ids": ids, "labels": labels}
    if family in ("t5", "mt5", "umt5", "bart"):
        batch["decoder_input_ids"] = torch.randint(5, 90, (2, 48), generator=generator)
    begins = numbers.diff(dim=1, prepend=numbers[:, :1] - 1) != 0
    is_decoder = family in ("gpt2", "llama", "mistral", "qwen3")
    if is_decoder:
        batch["labels"] = labels.masked_fill(begins, -100)  # the row before it does not predict it

    model = from_config(config, dtype=dtype, seed=1).train()
    wanted = torch.zeros((), dtype=torch.float64)
    for row, lengths in enumerate(SPLIT_LENGTHS):
        prefixes = draw_prefixes(lengths)
        for part, prefix in zip(torch.arange(48).split(lengths), prefixes, strict=True):
            own = {name: value[row : row + 1, part] for name, value in batch.items()}
            if family == "glm":
                own["attention_mask"] = torch.tensor([prefix])
            if (own["labels"] == -100).all():
                continue
            loss = model(**own, num_items_in_batch=1).loss
            loss.backward()
            wanted += loss.detach()
    alone = {name: value.grad for name, value in model.named_parameters()}

    model = from_config(
        config, mesh, dtype=dtype, parallel_config=ParallelConfig(context_exchange=exchange), seed=1
    ).train()
    batch["seq_idx"] = numbers
    if family == "glm":
        prefixes = [draw_prefixes(lengths) for lengths in SPLIT_LENGTHS]
        batch["prefix_lengths"] = spread(prefixes, SPLIT_LENGTHS)
    if "decoder_input_ids" in batch:
        batch["decoder_seq_idx"] = numbers
    loss = model(**batch, num_items_in_batch=1).loss
    loss.backward()
    differences = [abs(loss.item() / wanted.item() - 1)]
    for name, value in model.named_parameters():
        if value.grad is None:
            assert alone[name] is None, name
            continue
        dist.all_reduce(value.grad, group=mesh.cp_group)
        scale = max(1.0, float(alone[name].abs().max()))
        differences.append(float((value.grad - alone[name]).abs().max()) / scale)
    return differences


def compare_every_exchange(mesh: Any, family: str) -> dict[str, float]:
    """The largest difference of each exchange and type of numbers."""
    found = {}
    for exchange in ("heads", "keys", "ring"):
        if exchange == "heads" and mesh.cp_size == 3:
            continue  # of four heads
        for dtype in (torch.float64, torch.float32):
            differences = compute_packed_and_alone(mesh, family, exchange, dtype)
            found[f"{exchange} {dtype}"] = max(differences)
    return found


@pytest.mark.before_release
@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("family", SPLIT_FAMILIES)
def test_split_sequences_compute_each_document_alone(run_mesh, family, ranks):
    for found in run_mesh(1, compare_every_exchange, family, context=ranks):
        print(family, ranks, {name: f"{value:.0e}" for name, value in found.items()})
        for name, difference in found.items():
            assert difference < (1e-10 if "float64" in name else 1e-5), name


@pytest.mark.parametrize(
    ("causal", "reach", "has_prefixes"),
    [
        (True, None, False),
        (True, 4, False),
        (False, None, False),
        (False, 4, False),
        (True, None, True),
    ],
)
def test_plans_say_what_the_whole_mask_says(causal, reach, has_prefixes):
    numbers = torch.stack([torch.repeat_interleave(torch.tensor(row)) for row in LENGTHS])
    keys = torch.ones(2, 1, 1, 45, dtype=torch.bool)
    keys[1, ..., 40:] = False
    prefixes = spread([draw_prefixes(lengths) for lengths in LENGTHS], LENGTHS)
    if has_prefixes:
        documents = Documents(numbers, None, causal=causal, prefixes=prefixes)
    else:
        documents = Documents(numbers, keys, causal=causal, reach=reach)
    whole = documents.to_tensor()
    for first, end in ((0, 45), (0, 15), (15, 30), (30, 45)):
        plan = documents.plan(2, first, end)
        allowed = torch.zeros(2 * (end - first), 2 * 45, dtype=torch.bool)
        for part in plan.batches:
            count, queries = part.queries.shape
            mask = torch.ones(count, 1, queries, part.keys.shape[1], dtype=torch.bool)
            rules = AttentionMask.from_arguments(part.mask, causal, queries)
            found = rules.to_tensor(queries, part.keys.shape[1], mask.device)
            if found is not None:
                mask = mask & found
            for row in part.kept.tolist():
                document, query = divmod(row, queries)
                places = part.keys[document][mask[document, 0, query]]
                allowed[part.queries[document, query], places] = True
        for sample in range(2):
            own = allowed[sample * (end - first) :][: end - first, sample * 45 :][:, :45]
            assert torch.equal(own, whole[sample, 0, first:end])
        assert allowed.sum() == whole[:, :, first:end].sum()


def test_plans_of_cross_attention_join_documents_of_one_number():
    """Some queries have no keys, some keys no queries, and a row has padding."""
    queries = torch.tensor([[0] * 5 + [1] * 3 + [3] * 4, [2] * 12])
    keys = torch.tensor([[0] * 2 + [1] * 9 + [2] * 3 + [3] * 6, [0] * 7 + [1] * 13])
    padding = torch.ones(2, 1, 1, 20, dtype=torch.bool)
    padding[0, ..., 18:] = False
    documents = CrossDocuments(queries, keys, padding)
    whole = documents.to_tensor()
    for first, end in ((0, 12), (0, 6), (6, 12)):
        allowed = torch.zeros(2, end - first, 20, dtype=torch.bool)
        for part in documents.plan(2, first, end).batches:
            count, length = part.queries.shape
            mask = torch.ones(count, 1, length, part.keys.shape[1], dtype=torch.bool)
            if part.mask is not None:
                mask = mask & part.mask
            for row in part.kept.tolist():
                document, query = divmod(row, length)
                sample, place = divmod(int(part.queries[document, query]), end - first)
                columns = part.keys[document][mask[document, 0, query]] - 20 * sample
                allowed[sample, place, columns] = True
        assert torch.equal(allowed, whole[:, 0, first:end])


def test_prefixes_of_documents_need_their_numbers():
    model = from_config(tiny("glm", 0.0))
    ids = torch.arange(3, 13)[None]
    numbers = torch.tensor([[0] * 4 + [1] * 6])
    refused = [
        ({"prefix_lengths": numbers}, "prefix_lengths needs seq_idx"),
        ({"seq_idx": numbers, "prefix_lengths": torch.tensor([2, 3])}, "use that of seq_idx"),
        ({"seq_idx": numbers, "attention_mask": torch.tensor([4])}, "is for rows of one document"),
        ({"seq_idx": numbers, "use_cache": True}, "it needs a call without mems"),
    ]
    for inputs, message in refused:
        with pytest.raises(ValueError, match=message):
            model(ids, **inputs)


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
            start = time.process_time()
            core(q, k, v, mask, None, True).sum().backward()
            best = min(best, time.process_time() - start)
        return best

    ratio = measure(Documents(numbers, None, causal=True)) / measure(None)
    print(f"documents: {ratio:.2f} of the time of one document")
    assert ratio <= 0.6
