"""An encoder that leaves padding out of its layers computes what one that does not computes, with the same dropout."""

from __future__ import annotations

import pytest
import torch
import torch.utils.flop_counter
from every_case import by_turns
from tiny_models import TINY, hf_model, tiny

import shardzoo
from shardzoo import mpu
from shardzoo.models import ParallelConfig, config_from_dict, family, from_config, seq2seq
from shardzoo.models.blocks import attention as attention_block
from shardzoo.models.blocks import relative_bias
from shardzoo.models.blocks.attention import CrossAttention
from shardzoo.models.blocks.cache import Cache
from shardzoo.models.blocks.masks import key_mask
from shardzoo.models.blocks.padding import Tokens
from shardzoo.models.language_model import count_mask, note_token_count
from shardzoo.models.seq2seq import find_tokens

FAMILIES = [name for name in TINY if family(name).kind == "encoder-decoder"]
LENGTH = 18
WHOLE = torch.ones(5, LENGTH, dtype=torch.long)


def ragged():
    """Padding on the right, on the left, in between, everywhere but for one token, and everywhere."""
    mask = WHOLE.clone()
    mask[0, 11:], mask[1, :6], mask[2, 4:9], mask[3, 1:], mask[4] = 0, 0, 0, 0, 0
    return mask


def batch_of(mask):
    g = torch.Generator().manual_seed(4)
    ids, labels = (torch.randint(5, 97, (len(mask), length), generator=g) for length in (LENGTH, 8))
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def step(mesh, name, mask, rate, options, leave_out=True):
    """Returns how many encoder passes left padding out, the loss, the encoder's states, and this rank's gradients."""
    config, passes = config_from_dict(tiny(name, rate)), []
    model = from_config(
        config, mesh, dtype=torch.float64, parallel_config=ParallelConfig(**options)
    ).train()

    def find(mask, *arguments):
        passes.append(find_tokens(mask, *arguments) if leave_out else mask)
        return passes[-1]

    seq2seq.find_tokens = find  # also in the process of a rank
    try:
        mpu.dropout_state.set(3, 8)
        output = model(**batch_of(mask), output_hidden_states=True)
        output.loss.backward()
    finally:
        seq2seq.find_tokens = find_tokens
    states = [x.detach() for x in (*output.encoder_hidden_states, output.encoder_last_hidden_state)]
    grads = {key: p.grad for key, p in model.named_parameters()}
    return sum(isinstance(found, Tokens) for found in passes), output.loss.detach(), states, grads


def assert_same(one, other, mask):
    left_out, loss, states, grads = one
    kept, expected_loss, expected_states, expected_grads = other
    assert (left_out, kept) == (1, 0)
    close = {"rtol": 1e-11, "atol": 1e-12}
    torch.testing.assert_close(loss, expected_loss, **close)
    torch.testing.assert_close(grads, expected_grads, **close)
    is_token = mask.bool()
    for state, expected in zip(states, expected_states, strict=True):
        torch.testing.assert_close(state[is_token], expected[is_token], **close)
        assert not state[~is_token].any()


@pytest.mark.parametrize("recompute", by_turns(["none", "selective", "full"], 3))
@pytest.mark.parametrize("rate", [0.0, 0.3])
@pytest.mark.parametrize("name", FAMILIES)
def test_a_step_is_that_of_the_whole_batch(name, rate, recompute):
    arguments = (None, name, ragged(), rate, {"recompute": recompute})
    assert_same(step(*arguments), step(*arguments, leave_out=False), ragged())


def padded_right():
    """Samples of four lengths, and one of padding alone."""
    mask = WHOLE.clone()
    mask[0, 11:], mask[1, 1:], mask[3, 4:], mask[4] = 0, 0, 0, 0
    return mask


def step_by_rows(mesh, name, rate, options):
    """Returns the step of samples whose attention leaves padding out too, as on a GPU, and how often it did so."""
    attended = []
    compute = attention_block.varlen_attention

    def remember(*arguments, **rules):
        attended.append(arguments[3] is arguments[4])
        return compute(*arguments, **rules)

    with pytest.MonkeyPatch.context() as patch:
        # The reference computes it here, and the bias has a number for each distance.
        patch.setattr(attention_block, "suits_varlen", lambda _: True)
        patch.setattr(relative_bias, "suits_tiles", lambda *_: True)
        patch.setattr(attention_block, "varlen_attention", remember)
        return step(mesh, name, padded_right(), rate, options), attended


@pytest.mark.parametrize("recompute", by_turns(["none", "selective", "full"], 3))
@pytest.mark.parametrize("name", FAMILIES)
def test_attention_to_rows_is_that_of_the_whole_batch(name, recompute):
    options = {"recompute": recompute}
    by_rows, attended = step_by_rows(None, name, 0.3, options)
    assert_same(by_rows, step(None, name, padded_right(), 0.3, options, False), padded_right())
    assert True in attended
    assert False in attended  # in the decoder


@pytest.mark.parametrize("name", by_turns(["t5", "bart", "m2m_100"], 3))
def test_ranks_attend_to_the_same_rows(name, run_mesh):
    expected = step(None, name, padded_right(), 0.3, {}, False)
    for by_rows, attended in run_mesh(2, step_by_rows, name, 0.3, {}):
        assert attended
        torch.testing.assert_close(by_rows[1], expected[1], rtol=1e-11, atol=0)


def test_attention_gets_padding_that_is_not_on_the_right(monkeypatch):
    monkeypatch.setattr(attention_block, "suits_varlen", lambda _: True)
    monkeypatch.setattr(attention_block, "varlen_attention", None)
    assert step(None, "bart", ragged(), 0.3, {})[0] == 1


@pytest.mark.parametrize("name", ["t5", "bart"])
def test_an_accelerator_is_told_the_number_of_tokens(name, monkeypatch):
    """Whose mask the host cannot read without waiting."""
    monkeypatch.setattr(seq2seq, "host_can_read", lambda _: False)
    mask = ragged()
    assert step(None, name, mask, 0.3, {})[0] == 0
    note_token_count(mask, count_mask(mask))
    told = step(None, name, mask, 0.3, {})
    assert_same(told, step(None, name, ragged(), 0.3, {}), mask)


@pytest.mark.parametrize("first", [1, 4], ids=["left", "everywhere"])
@pytest.mark.parametrize("name", ["t5", "bart"])
def test_the_first_position_of_a_batch_may_be_padding(name, first):
    """It comes before the first token, so no row of the tokens stands before it."""
    mask = ragged().roll(-first, 0)
    assert not mask[0, 0]
    arguments = (None, name, mask, 0.3, {})
    assert_same(step(*arguments), step(*arguments, leave_out=False), mask)


def both_steps(mesh, *arguments):
    return step(mesh, *arguments), step(mesh, *arguments, leave_out=False)


@pytest.mark.parametrize("tp", [2, 3])
@pytest.mark.parametrize("name", by_turns(FAMILIES, 3))
def test_ranks_leave_out_the_same(name, tp, run_mesh):
    arguments = (name, ragged(), 0.3, {})
    whole = step(None, *arguments)
    for one, other in run_mesh(tp, both_steps, *arguments):
        assert_same(one, other, ragged())
        torch.testing.assert_close(one[1], whole[1], rtol=1e-11, atol=0)


@pytest.mark.parametrize(
    "architecture", ["T5ForConditionalGeneration", "M2M100ForConditionalGeneration"]
)
def test_a_step_is_that_of_transformers(architecture, tmp_path):
    theirs = hf_model(architecture, 0.0).train().double()
    theirs.save_pretrained(tmp_path)
    ours = shardzoo.from_pretrained(tmp_path, dtype=torch.float64).train()
    batch = batch_of(ragged()[:4])
    passes, forward = [], CrossAttention.forward

    def remember(self, x, source, *args, **kwargs):
        passes.append(source.shape[:2])
        return forward(self, x, source, *args, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CrossAttention, "forward", remember)
        loss = ours(**batch).loss
    expected = theirs(**batch).loss
    assert set(passes) == {(int(batch["attention_mask"].sum()), 1)}
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    loss.backward()
    expected.backward()
    found, wanted = (
        torch.stack([p.grad.norm() for p in m.parameters() if p.grad is not None])
        for m in (ours, theirs)
    )
    torch.testing.assert_close(found.square().sum(), wanted.square().sum(), rtol=1e-5, atol=0)


def test_where_it_is_left_out():
    """In training on a CPU, where an eighth is padding, in code of shapes that may change."""
    model = from_config(tiny("t5", 0.0)).train()
    blocks = model.encoder.blocks

    def leaves_out(mask, rows=None):
        ids = torch.empty(
            rows or (1 if mask is None else len(mask)), LENGTH if mask is None else mask.shape[-1]
        )
        return isinstance(find_tokens(key_mask(mask), ids, blocks), Tokens)

    assert leaves_out(ragged())
    eighth = torch.ones(4, 16, dtype=torch.long)
    eighth[0, 8:] = 0
    assert leaves_out(eighth)
    eighth[0, 8] = 1
    assert not leaves_out(eighth)
    assert not leaves_out(WHOLE)
    assert not leaves_out(WHOLE * 0)
    assert not leaves_out(None)
    assert not leaves_out(ragged()[:1], rows=5)
    assert not leaves_out(ragged().to("meta"))
    assert not leaves_out(ragged()[:, None, None].expand(-1, 1, LENGTH, -1))
    with torch.no_grad():
        assert not leaves_out(ragged())
    with torch.utils.flop_counter.FlopCounterMode(display=False):
        assert leaves_out(ragged())
    transformed = []
    torch.vmap(lambda x: transformed.append(leaves_out(ragged())) or x)(torch.zeros(2))
    assert transformed == [False]
    assert not leaves_out(model.eval() and ragged())
    assert leaves_out(model.train() and ragged())
    blocks[0].compile()
    assert not leaves_out(ragged())


def test_a_filled_cache_serves_in_training_too():
    model, batch = from_config(tiny("t5", 0.0, layers=2)).train(), batch_of(ragged())
    ids, inputs = batch.pop("labels"), batch
    cache = Cache(2, 8, LENGTH)
    pieces = [
        model(**inputs, decoder_input_ids=part, cache=cache).logits
        for part in (ids[:, :5], ids[:, 5:])
    ]
    whole = model(**inputs, decoder_input_ids=ids).logits
    torch.testing.assert_close(torch.cat(pieces, 1), whole, rtol=1e-5, atol=1e-5)


def test_sequence_parallelism_keeps_padding(run_mesh):
    for left_out, loss, *_ in run_mesh(2, step, "t5", ragged(), 0.3, {"sequence_parallel": True}):
        assert left_out == 0
        assert loss.isfinite()


@pytest.mark.parametrize("first", [0, 1])
def test_rows_are_moved_and_their_gradients_back(first):
    mask = ragged().roll(-first, 0).bool()[:, None, None]
    blocks = from_config(tiny("t5", 0.0)).train().encoder.blocks
    tokens = find_tokens(mask, torch.empty(5, LENGTH), blocks)
    x = torch.randn(5, LENGTH, 3, dtype=torch.float64, requires_grad=True)
    rows = tokens.unpad(x)
    assert torch.equal(rows, x[mask[:, 0, 0]][:, None])
    assert torch.equal(tokens.pad(rows), x * mask[:, 0, 0, :, None])
    for function, argument in ((tokens.unpad, x), (tokens.pad, rows.detach().requires_grad_())):
        assert torch.autograd.gradcheck(function, argument)
        assert torch.autograd.gradgradcheck(function, argument)
