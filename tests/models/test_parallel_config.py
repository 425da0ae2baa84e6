"""Modes that change how a model runs: compiled blocks, recomputation; and what its calls accept."""

from __future__ import annotations

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from every_case import every_day
from tiny_models import TINY, tiny
from transformers.models.t5.modeling_t5 import T5Attention

import shardzoo
from shardzoo import mpu
from shardzoo.models import ParallelConfig
from shardzoo.models.blocks.attention import CoreAttention
from shardzoo.models.blocks.relative_bias import RelativeBias
from shardzoo.models.outputs import Seq2SeqLMOutput
from shardzoo.mpu import dropout_state
from shardzoo.ops.attention import eager_beats_sdpa
from shardzoo.ops.cpu import products
from shardzoo.ops.softmax import lay_out_diagonals
from shardzoo.trainer.engines.precision import compile_model

GPT2 = tiny("gpt2", 0.0, n_positions=40)
T5 = tiny("t5", 0.0, layers=2, d_kv=6, feed_forward_proj="gated-gelu")
FAMILIES = pytest.mark.parametrize("values", [GPT2, T5], ids=["gpt2", "t5"])


def batch(values, length=20):
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(1, 61, (2, length), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, 15:] = 0
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def gradients(model, inputs):
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), [parameter.grad.clone() for parameter in model.parameters()]


DAILY = [("gpt2", "full"), ("bert", "none")]
ALL = ["gpt2", "t5", "bert", "roberta", "mt5", "glm", "llama", "modernbert", "bart"]
OTHERS = [case for case in product(ALL, ("none", "full")) if case not in DAILY]


@pytest.mark.parametrize(("family", "recompute"), every_day(DAILY, more=OTHERS))
def test_a_block_compiles_without_a_break(family, recompute, monkeypatch):
    """With dropout, each step of a compiled block has new masks, the same as those of the plain block.

    Its products are operators, as large ones are.
    """
    monkeypatch.setattr(products, "MIN_PRODUCT", 1)
    torch.compiler.reset()
    values, inputs = (
        tiny(family, 0.1, layers=2) if family != "t5" else T5 | {"dropout_rate": 0.1},
        batch(GPT2),
    )
    models = [
        shardzoo.from_config(values, parallel_config=ParallelConfig(recompute=recompute))
        for _ in range(2)
    ]
    compile_model(models[1], "aot_eager")
    losses = []
    for step in range(3):
        found = []
        for model in models:
            dropout_state.set(5, 2 * step)
            found.append(gradients(model.train(), inputs))
        torch.testing.assert_close(*found, rtol=1e-6, atol=1e-7)
        losses.append(found[0][0].item())
    assert len(set(losses)) == 3


STACKS = {
    **dict.fromkeys(
        (
            "t5",
            "mt5",
            "umt5",
            "longt5",
            "bart",
            "mbart",
            "m2m_100",
            "pegasus",
            "marian",
            "smollm3",
            "gemma2",
            "gemma3_text",
            "olmo3",
        ),
        2,
    ),
    **dict.fromkeys(("modernbert", "modernbert-decoder"), 3),
}
"""The graphs that a family needs: one a stack. ModernBERT's blocks are of three kinds, SmolLM3's of two, with and
without rotary positions, and Gemma's of two, with and without a window."""


def compare_deep_stacks(mesh, family, layers, sequence_parallel=False, **changes):
    """Takes three steps of SGD with plain and with compiled blocks; returns losses and graphs."""
    from torch._dynamo.utils import counters

    torch.compiler.reset()
    counters.clear()
    config = ParallelConfig(sequence_parallel=sequence_parallel)
    values = tiny(family, 0.1, layers=layers, **changes)
    losses = []
    for is_compiled in (False, True):
        model = shardzoo.from_config(values, mesh, parallel_config=config).train()
        if is_compiled:
            compile_model(model, "aot_eager" if layers == 12 else "eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            mpu.dropout_state.set(5, 2 * step)
            loss = model(**batch(GPT2)).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    torch.compiler.reset()
    return losses[:3], losses[3:], counters["stats"]["unique_graphs"]


def check_deep_stacks(result, graphs):
    plain, compiled, found = result
    assert found == graphs
    assert len(set(plain)) == 3
    assert compiled == pytest.approx(plain, rel=1e-6)


DEEP_DAILY = [("t5", 12, 1)]
DEEP = [case for case in product(TINY, (12, 24), (1, 2)) if case not in DEEP_DAILY]
DEEP += product(("longt5", "deberta-v2"), (12,), (1, 2))


@pytest.mark.parametrize(("family", "layers", "tp"), every_day(DEEP_DAILY, more=DEEP))
def test_all_blocks_of_a_stack_share_one_graph(family, layers, tp, run_mesh):
    """With dropout, whose sites differ from block to block."""
    if tp == 1:
        results = [compare_deep_stacks(None, family, layers)]
    else:
        results = run_mesh(tp, compare_deep_stacks, family, layers, family == "gpt2")
    for result in results:
        check_deep_stacks(result, STACKS.get(family, 1))


@pytest.mark.before_release
def test_blocks_that_differ_get_a_graph_each():
    """The scale of attention is a constant of a graph."""
    changes = {"scale_attn_by_inverse_layer_idx": True}
    check_deep_stacks(compare_deep_stacks(None, "gpt2", 10, **changes), 10)


@pytest.mark.before_release
@pytest.mark.parametrize("values", every_day([T5], more=[GPT2]))
def test_a_whole_model_compiles(values):
    torch.compiler.reset()
    plain = gradients(shardzoo.from_config(values), batch(values))
    model = shardzoo.from_config(values)
    model.compile(backend="aot_eager")
    torch.testing.assert_close(gradients(model, batch(values)), plain, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_16_bit_attention_is_that_of_sdpa(masked):
    generator = torch.Generator().manual_seed(0)
    q, k, v, grad = (torch.randn(2, 3, 9, 8, generator=generator).bfloat16() for _ in range(4))
    mask = torch.ones(2, 1, 9, 9, dtype=torch.bool).tril() if masked else None
    if mask is not None:
        mask[1, :, 4] = False  # a query that sees nothing
    core = CoreAttention(3, 3, scale=0.3, dropout=0.0, mesh=None, parallel_config=ParallelConfig())
    own = [tensor.clone().requires_grad_() for tensor in (q, k, v)]
    assert eager_beats_sdpa(own[0], own[1])
    actual = core(*own, mask, None, causal=not masked)
    wide = [tensor.float().requires_grad_() for tensor in (q, k, v)]
    expected = F.scaled_dot_product_attention(
        *wide, attn_mask=mask, is_causal=not masked, scale=0.3
    )
    torch.testing.assert_close(actual.float(), expected, rtol=2e-2, atol=1e-2)
    for a, e in zip(
        torch.autograd.grad(actual, own, grad),
        torch.autograd.grad(expected, wide, grad.float()),
        strict=True,
    ):
        assert (a.float() - e).norm() < 1e-2 * e.norm()


def kept_bytes(values, recompute):
    """Of activations that the backward pass finds stored."""
    model = shardzoo.from_config(values, parallel_config=ParallelConfig(recompute=recompute))
    own = {parameter.data_ptr() for parameter in model.parameters()}
    stored = {}

    def note(tensor):
        if tensor.data_ptr() not in own:
            stored[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        output = model(**batch(values))  # noqa: F841 - it keeps the graph alive
    return sum(stored.values())


@FAMILIES
def test_recomputation_keeps_less(values):
    none, selective, full = (kept_bytes(values, mode) for mode in ("none", "selective", "full"))
    assert full < 0.6 * none
    assert full < selective < none if values is T5 else selective <= none


def encoder_results(mesh, sequence_parallel):
    model = shardzoo.from_config(
        T5, mesh, parallel_config=ParallelConfig(sequence_parallel=sequence_parallel)
    ).eval()
    inputs = batch(T5)
    with torch.no_grad():
        whole = model(**inputs, output_hidden_states=True)
        encoded = model.encode(
            inputs["input_ids"], inputs["attention_mask"], output_hidden_states=True
        )
        again = model(
            attention_mask=inputs["attention_mask"],
            labels=inputs["labels"],
            encoder_outputs=encoded,
        )
    assert torch.equal(encoded.last_hidden_state, whole.encoder_last_hidden_state)
    assert all(
        torch.equal(a, b)
        for a, b in zip(encoded.hidden_states, whole.encoder_hidden_states, strict=True)
    )
    torch.testing.assert_close(again.logits, whole.logits)
    return whole.encoder_last_hidden_state


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_an_encoder_output_can_be_used_again(sequence_parallel, run_mesh):
    first, second = run_mesh(2, encoder_results, sequence_parallel)
    assert torch.equal(first, second)
    assert first.shape == (2, 20, 32)


def test_decoder_inputs_are_the_labels_moved_right():
    model = shardzoo.from_config(T5 | {"decoder_start_token_id": 9, "pad_token_id": 3}).eval()
    labels = torch.tensor([[4, 5, -100, 6], [7, -100, -100, -100]])
    moved = model.prepare_decoder_input_ids_from_labels(labels)
    assert moved.tolist() == [[9, 4, 5, 3], [9, 7, 3, 3]]
    assert labels[0, 2] == -100
    ids = torch.ones(2, 5, dtype=torch.long)
    given = model(input_ids=ids, decoder_input_ids=moved, labels=labels)
    assert torch.equal(given.loss, model(input_ids=ids, labels=labels).loss)
    with pytest.raises(ValueError, match="pass labels, or decoder_input_ids"):
        model(input_ids=ids)
    with pytest.raises(ValueError, match="pass input_ids, or the encoder_outputs"):
        model(labels=labels)


@FAMILIES
def test_the_loss_is_a_share_of_the_global_batchs_mean(values):
    model, inputs = shardzoo.from_config(values), batch(values)
    whole = model(**inputs).loss
    targets = model.count_targets(inputs["labels"])
    halves = [{name: tensor[i : i + 1] for name, tensor in inputs.items()} for i in range(2)]
    parts = sum(model(**half, num_items_in_batch=targets).loss for half in halves)
    torch.testing.assert_close(parts, whole)


@pytest.mark.parametrize(
    ("mask", "message"),
    [
        (torch.ones(20), "attention_mask must be"),
        (torch.ones(1, 2, 1, 20, 20), "attention_mask must be"),
    ],
)
def test_a_mask_of_another_kind_is_refused(mask, message):
    model = shardzoo.from_config(GPT2)
    with pytest.raises(ValueError, match=message):
        model(**batch(GPT2) | {"attention_mask": mask})


def test_a_finished_mask_is_taken_as_it_is():
    model, inputs = shardzoo.from_config(GPT2).eval(), batch(GPT2)
    mask = (
        torch.ones(20, 20, dtype=torch.bool).tril() & inputs["attention_mask"].bool()[:, None, None]
    )
    for kind in (torch.bool, torch.long):
        finished = model(**inputs | {"attention_mask": mask.to(kind)})
        torch.testing.assert_close(finished.loss, model(**inputs).loss)


def test_a_sequence_longer_than_the_position_table():
    with pytest.raises(ValueError, match="41 tokens, but the model has only 40 positions"):
        shardzoo.from_config(GPT2)(torch.ones(1, 41, dtype=torch.long))


@FAMILIES
def test_heads_that_cannot_be_split_say_which_sizes_work(values, run_mesh):
    def build(mesh):
        with pytest.raises(
            ValueError, match=r"2 attention heads cannot be split 3 ways; use .* from 1 to 2"
        ):
            shardzoo.from_config({**values, "n_head": 2, "num_heads": 2}, mesh, device="meta")

    run_mesh(3, build)


@FAMILIES
def test_bf16_stays_close_and_finite(values):
    inputs = batch(values)
    wide = shardzoo.from_config(values)
    narrow = shardzoo.from_config(values, dtype=torch.bfloat16)
    loss, grads = gradients(narrow, inputs)
    expected, expected_grads = gradients(wide, inputs)
    assert loss.dtype == torch.float32
    assert abs(loss - expected) < 0.02 * expected
    for grad, reference in zip(grads, expected_grads, strict=True):
        assert grad.dtype == torch.bfloat16
        assert (grad.float() - reference).norm() < 0.15 * reference.norm() + 1e-4


def whole(bias, queries, keys):
    """Returns a bias for each pair of positions, of one for each distance, as kernels take it."""
    return bias if bias.dim() == 4 else lay_out_diagonals(bias, queries, keys)[None]


@pytest.mark.parametrize(
    ("queries", "keys"), [(1, 1), (5, 5), (1, 9), (4, 9), (64, 64), (65, 70), (200, 200)]
)
@pytest.mark.parametrize("bidirectional", [True, False])
def test_relative_bias_is_a_lookup_for_each_pair_of_positions(queries, keys, bidirectional):
    module = RelativeBias(32, 3, 128, bidirectional=bidirectional)
    torch.nn.init.normal_(module.weight)
    bias = whole(module(queries, keys), queries, keys)
    theirs = T5Attention._relative_position_bucket(
        torch.arange(keys)[None] - torch.arange(keys - queries, keys)[:, None],
        bidirectional=bidirectional,
    )
    expected = module.weight[theirs].permute(2, 0, 1)[None]
    assert torch.equal(bias, expected)
    cotangent = torch.randn(1, 3, queries, keys)
    grads = [torch.autograd.grad(value, module.weight, cotangent)[0] for value in (bias, expected)]
    torch.testing.assert_close(*grads, rtol=1e-5, atol=1e-5 * grads[1].abs().max().item())


def test_the_gradient_of_a_bf16_relative_bias_is_rounded_once():
    exact = RelativeBias(32, 3, 128, bidirectional=True)
    torch.nn.init.normal_(exact.weight)
    module = RelativeBias(32, 3, 128, bidirectional=True).bfloat16()
    grad = torch.randn(1, 3, 300, 300).bfloat16()
    whole(module(300, 300), 300, 300).backward(grad)
    whole(exact(300, 300), 300, 300).backward(grad.float())
    error = (module.weight.grad.float() - exact.weight.grad).norm() / exact.weight.grad.norm()
    assert (
        error < 5e-3
    )  # half a unit in the last place is 2e-3; adding up in bf16 gives ten times as much


def test_outputs_are_had_by_name_and_position():
    output = Seq2SeqLMOutput(None, torch.ones(1), encoder_last_hidden_state=torch.zeros(1))
    assert output.keys() == ("logits", "encoder_last_hidden_state")
    assert output[0] is output["logits"] is output.to_tuple()[0]
    logits, encoded = output.to_tuple()
    assert encoded is output.encoder_last_hidden_state
    assert logits is output.logits
    assert len(output[:2]) == len(output) == 2
    with pytest.raises(KeyError, match="loss"):
        output["loss"]
