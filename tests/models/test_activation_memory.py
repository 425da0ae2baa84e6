"""What blocks keep for backward, measured at the tensors that autograd saves: the formulas are right to the byte."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from every_case import EVERY_CASE, by_turns, every_day
from memory import kept_bytes
from small_transformer import build_transformer
from tiny_models import TINY, tiny

from shardzoo import mpu
from shardzoo.models import ParallelConfig, config_from_dict, family, from_config
from shardzoo.models.activations import Batch, Layout, block_bytes, head_sum_bytes, logit_bytes
from shardzoo.models.blocks.activation_functions import ACTIVATIONS

SIZE, SOURCE, TARGET = 2, 16, 12
HIDDEN, HEADS = 32, 4
T5 = ("t5", "mt5", "umt5")
LAYERS = (
    2,
    3,
)  # the last of three has no mask and no rotary positions of its own; it shares those of another
DTYPES = {4: torch.float32, 2: torch.bfloat16}


def kept_by_layers(mesh, layers, options):
    model = build_transformer(
        mesh, layers=layers, hidden=HIDDEN, heads=HEADS, vocabulary=37, **options
    )
    ids = torch.arange(SIZE * SOURCE).view(SIZE, SOURCE) % 37
    for _ in range(2):  # the second key knows no uses, so each dropout keeps keys of its own
        mpu.dropout_state.set(0, 0)
    return kept_bytes(lambda: model(ids, ids), model.parameters())


def documented(tp, sequence_parallel, recompute):
    """docs/mpu.md, for fp32: n = B S H elements and a = B N S S attention weights."""
    n, a, tokens = SIZE * SOURCE * HIDDEN, SIZE * HEADS * SOURCE**2, SIZE * SOURCE
    outer_share = tp if sequence_parallel else 1
    if recompute == "full":
        return 4 * n / outer_share  # the layer's input
    outer = 4 * (2 * n + 2 * n) + 4 * 2 * 2 * tokens  # norm inputs and outputs, statistics
    inner = 4 * (3 * n + n + 4 * n + 4 * n)  # q, k, v, attention's output, GELU's input and output
    attention = 0 if recompute == "selective" else (4 + 4) * a
    constants = (
        8 * SIZE * (2 if recompute == "selective" else 3)
    )  # a key per sample of each dropout
    return outer / outer_share + (inner + attention) / tp + constants


@pytest.mark.parametrize("recompute", ["none", "selective", "full"])
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("tp", by_turns([4, 1, 2], 3))
def test_a_layer_keeps_what_the_documentation_says(tp, sequence_parallel, recompute, run_mesh):
    options = {"sequence_parallel": sequence_parallel, "recompute": recompute}
    one, three = (run_mesh(tp, kept_by_layers, layers, options)[0] for layers in (1, 3))
    assert (three - one) / 2 == documented(tp, sequence_parallel, recompute)


def test_the_loss_keeps_the_logits_and_a_few_numbers_per_token():
    logits = torch.randn(64, 500, dtype=torch.bfloat16, requires_grad=True)
    labels = torch.randint(500, (64,))
    kept = kept_bytes(lambda: mpu.vocab_parallel_cross_entropy(logits, labels))
    assert kept <= logits.numel() * 2 + 64 * 32


def is_seq2seq(name) -> bool:
    return family(name).kind == "encoder-decoder"


def config_of(name, layers, drops, **changes):
    """Heads of another width together than the hidden size, where the family can have that."""
    wide = {"d_kv": 16} if name in T5 else {}
    return config_from_dict(tiny(name, 0.1 if drops else 0.0, layers=layers, **wide, **changes))


def kept_by_blocks(
    mesh, name, layers, drops, padded, itemsize, parallel_config, length=SOURCE - 3, **changes
):
    """`length`: of a sample that is padded; without so much padding that an encoder leaves it out."""
    config = config_of(name, layers, drops, **changes)
    model = from_config(
        config, mesh, dtype=DTYPES[itemsize], parallel_config=parallel_config
    ).train()
    ids = torch.arange(SIZE * SOURCE).view(SIZE, SOURCE) % 37 + 5
    batch = {"input_ids": ids, "labels": ids[:, :TARGET].clone() if is_seq2seq(name) else ids}
    if padded:
        mask = torch.ones_like(ids)
        mask[1, length:] = 0
        batch["attention_mask"] = torch.tensor([4, 9]) if name == "glm" else mask
    for _ in range(2):  # the second key knows no uses, so each dropout keeps keys of its own
        mpu.dropout_state.set(0, 0)
    return kept_bytes(lambda: model(**batch).loss, model.parameters())


def formula(name, drops, padded, layout, **changes):
    batch = Batch(SIZE, SOURCE, TARGET if is_seq2seq(name) else 0, padded)
    stacks = family(name).activations(config_of(name, 1, drops, **changes)).stacks
    return sum(block_bytes(stack, batch, layout).kept for stack in stacks)


# Of each family, every day, all things on.
HOW = list(product((False, True), (4, 2), (False, True))) if EVERY_CASE else [(True, 2, True)]


@pytest.mark.parametrize(("drops", "itemsize", "padded"), HOW)
@pytest.mark.parametrize(
    "name",
    [*TINY, "gpt_oss", "glm4_moe", "deepseek_v3", "longt5", "deberta-v2", "t5gemma", "t5gemma2"],
)
def test_a_block_keeps_what_the_formula_says(name, drops, itemsize, padded):
    parallel_config = ParallelConfig()
    fewer, more = (
        kept_by_blocks(None, name, layers, drops, padded, itemsize, parallel_config)
        for layers in LAYERS
    )
    assert more - fewer == formula(name, drops, padded, Layout(itemsize, 1, parallel_config))


# The key of the activation, what stands before its name, and the dropout that follows it.
ACTIVATION_KEYS = {
    "bart": ("activation_function", "", {"activation_dropout": 0.1}),
    "bert": ("hidden_act", "", {}),
    "t5": ("feed_forward_proj", "gated-", {}),
    "llama": ("hidden_act", "", {}),
    "modernbert": ("hidden_activation", "", {"mlp_dropout": 0.1}),
}
DAILY_ACTIVATIONS = [
    ("bart", "relu"), ("bart", "sqrtsoftplus"), ("bert", "quick_gelu"), ("t5", "relu"), ("t5", "laplace"),
    ("llama", "tanh"), ("llama", "linear"), ("modernbert", "relu2"),
]  # fmt: skip
OTHER_ACTIVATIONS = [
    pair for pair in product(ACTIVATION_KEYS, ACTIVATIONS) if pair not in DAILY_ACTIVATIONS
]


@pytest.mark.parametrize(
    ("name", "activation"), every_day(DAILY_ACTIVATIONS, more=OTHER_ACTIVATIONS)
)
def test_an_activation_keeps_what_the_formula_says(name, activation):
    key, prefix, dropout = ACTIVATION_KEYS[name]
    changes = {key: prefix + activation, **dropout}
    parallel_config = ParallelConfig()
    fewer, more = (
        kept_by_blocks(None, name, layers, True, False, 4, parallel_config, **changes)
        for layers in LAYERS
    )
    assert more - fewer == formula(name, True, False, Layout(4, 1, parallel_config), **changes)


@pytest.mark.parametrize("length", [SOURCE - 4, 1])
@pytest.mark.parametrize("name", [name for name in TINY if is_seq2seq(name)])
def test_leaving_padding_out_keeps_less(name, length):
    fewer, more = (
        kept_by_blocks(None, name, n, True, True, 4, ParallelConfig(), length) for n in LAYERS
    )
    assert more - fewer < formula(name, True, True, Layout(4, 1, ParallelConfig()))


@pytest.mark.parametrize("recompute", ["selective", "full"])
@pytest.mark.parametrize("drops", by_turns([True, False], 2))
@pytest.mark.parametrize("name", [*TINY, "longt5", "deberta-v2", "t5gemma", "t5gemma2"])
def test_recomputation_keeps_what_the_formula_says(name, drops, recompute):
    parallel_config = ParallelConfig(recompute=recompute)
    fewer, more = (
        kept_by_blocks(None, name, layers, drops, False, 4, parallel_config) for layers in LAYERS
    )
    assert more - fewer == formula(name, drops, False, Layout(4, 1, parallel_config))


@pytest.mark.parametrize(("tp", "sequence_parallel"), [(3, False), (2, True)])
@pytest.mark.parametrize("name", by_turns(TINY, 3))
def test_a_rank_keeps_what_the_formula_says(name, tp, sequence_parallel, run_mesh):
    """The busiest rank: of four heads over three, the one with two."""
    parallel_config = ParallelConfig(sequence_parallel=sequence_parallel)
    fewer, more = (
        run_mesh(tp, kept_by_blocks, name, layers, True, False, 4, parallel_config)
        for layers in LAYERS
    )
    expected = formula(name, True, False, Layout(4, tp, parallel_config))
    assert max(b - a for a, b in zip(fewer, more, strict=True)) == expected


@pytest.mark.parametrize(
    ("name", "architecture"),
    [
        ("t5", "T5ForTokenClassification"),
        ("umt5", "UMT5ForTokenClassification"),
        ("bart", "BartEncoder"),
        ("m2m_100", "M2M100Encoder"),
    ],
)
def test_an_encoder_alone_keeps_no_decoder(name, architecture):
    def kept(layers):
        model = from_config(config_of(layers)).train()
        ids = torch.arange(SIZE * SOURCE).view(SIZE, SOURCE) % 37 + 5
        for _ in range(2):  # the second key knows no uses, so each dropout keeps keys of its own
            mpu.dropout_state.set(0, 0)
        if architecture.endswith("Encoder"):
            return kept_bytes(lambda: model(ids).last_hidden_state.sum(), model.parameters())
        return kept_bytes(lambda: model(ids, labels=ids % 2).loss, model.parameters())

    def config_of(layers):
        return config_from_dict(tiny(name, 0.1, layers=layers, architectures=[architecture]))

    (stack,) = family(name).activations(config_of(1)).stacks
    assert kept(2) - kept(1) == block_bytes(stack, Batch(SIZE, SOURCE), Layout(4)).kept


@pytest.mark.parametrize(
    ("itemsize", "dropout", "recompute"), [(4, 0.1, "none"), (2, 0.1, "selective")]
)
def test_terms_of_relative_positions_are_counted(itemsize, dropout, recompute):
    """DeBERTa-v2's, at a length from which other attention would be computed in tiles."""
    values = {
        "model_type": "deberta-v2", "architectures": ["DebertaV2ForMaskedLM"], "hidden_size": 32, "vocab_size": 97,
        "num_attention_heads": 4, "intermediate_size": 48, "max_position_embeddings": 64, "relative_attention": True,
        "position_buckets": 8, "norm_rel_ebd": "layer_norm", "share_att_key": True, "pos_att_type": "p2c|c2p",
        "position_biased_input": False, "hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout,
    }  # fmt: skip
    parallel_config = ParallelConfig(recompute=recompute)
    ids = torch.arange(2 * 64).view(2, 64) % 89 + 5

    def kept(layers):
        config = config_from_dict({**values, "num_hidden_layers": layers})
        model = from_config(config, parallel_config=parallel_config).to(DTYPES[itemsize]).train()
        for _ in range(2):  # the second key knows no uses, so each dropout keeps keys of its own
            mpu.dropout_state.set(0, 0)
        return kept_bytes(lambda: model(input_ids=ids, labels=ids).loss, model.parameters())

    [stack] = family("deberta-v2").activations(config_from_dict(values)).stacks
    layout = Layout(itemsize, 1, parallel_config)
    assert kept(3) - kept(2) == block_bytes(stack, Batch(2, 64, 0, False), layout).kept


def test_the_loss_of_a_large_head_needs_less_on_a_gpu():
    """8,192 tokens, 4,096 features and 131,072 words in bf16, as docs/estimate.md says."""
    batch = Batch(8, 1024)
    shape = (131072, 4096)
    on_gpu = Layout(2, device="cuda")
    assert logit_bytes(131072, batch, on_gpu) == 2 << 25
    assert logit_bytes(131072, batch, Layout(2)) == 2 << 26
    sums = 4 * 8192 * 4096
    head = 2 * 131072 * 4096
    assert head_sum_bytes(shape, batch, on_gpu, is_trained=True) == sums + head
    assert head_sum_bytes(shape, batch, on_gpu, is_trained=False) == sums
    assert head_sum_bytes(shape, batch, Layout(2), is_trained=True) == 2 * head
    assert head_sum_bytes(shape, Batch(1, 1024), on_gpu, is_trained=True) == 0
