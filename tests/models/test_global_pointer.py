"""Global pointers over spans of tokens, beside one span after another in complex numbers."""

from __future__ import annotations

import cmath
import math

import pytest
import torch
from every_case import by_turns
from tiny_models import tiny

import shardzoo
from shardzoo.convert.operations import merge, split
from shardzoo.models import FAMILIES, family, from_config
from shardzoo.models.blocks.global_pointer import IMPOSSIBLE, score_spans, span_loss

POINTER_FAMILIES = [name for name in FAMILIES if "token-classification" in family(name).tasks]


def one_score(features, kind, first, last, kinds):
    """Returns the score of a span of one text; features [S, C · 2 · D]."""
    size = features.shape[1] // (2 * kinds)
    query = features[first].view(kinds, 2, size)[kind, 0]
    key = features[last].view(kinds, 2, size)[kind, 1]
    total = features.new_zeros(())
    for pair in range(size // 2):
        a, b = query[2 * pair : 2 * pair + 2]
        c, d = key[2 * pair : 2 * pair + 2]
        turn = cmath.exp(1j * (last - first) * 10000 ** (-2 * pair / size))
        # The real part of conj(query) · key · turn.
        real = (a * c + b * d) * turn.real - (a * d - b * c) * turn.imag
        total = total + real
    return total / math.sqrt(size)


def spans(kept):
    """Lists the spans between kept tokens."""
    places = kept.nonzero().flatten().tolist()
    return [(first, last) for first in places for last in places if first <= last]


def one_loss(features, labels, kept, kinds):
    """Returns the mean over texts and kinds of the paper's loss."""
    total = features.new_zeros(())
    for text, wanted, tokens in zip(features, labels, kept, strict=True):
        for kind in range(kinds):
            entities, others = torch.ones(()).to(features), torch.ones(()).to(features)
            for first, last in spans(tokens):
                score = one_score(text, kind, first, last, kinds)
                if wanted[kind, first, last]:
                    entities = entities + (-score).exp()
                else:
                    others = others + score.exp()
            total = total + entities.log() + others.log()
    return total / (len(features) * kinds)


KEPT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0], [0, 0, 1, 1, 1]], dtype=torch.bool)


def make_case(kinds=2, size=6):
    torch.manual_seed(0)
    features = torch.randn(3, 5, kinds * 2 * size, dtype=torch.float64, requires_grad=True)
    labels = torch.zeros(3, kinds, 5, 5)
    labels[0, 0, 1, 3] = labels[0, 0, 2, 2] = labels[1, 1, 0, 2] = 1
    return features, labels


def test_scores_losses_and_gradients_are_those_of_one_span_after_another():
    features, labels = make_case()
    scores = score_spans(features, 2, KEPT)
    assert scores.dtype == torch.float64
    for row, tokens in enumerate(KEPT):
        possible = torch.zeros(5, 5, dtype=torch.bool)
        for first, last in spans(tokens):
            possible[first, last] = True
            expected = one_score(features[row], 1, first, last, 2)
            # Angles are computed in fp32.
            torch.testing.assert_close(scores[row, 1, first, last], expected, rtol=0, atol=1e-6)
        assert (scores[row][:, ~possible] == IMPOSSIBLE).all()
    losses = span_loss(scores, labels)
    expected = one_loss(features, labels, KEPT, 2)
    torch.testing.assert_close(losses.mean(), expected, rtol=0, atol=1e-6)
    found = torch.autograd.grad(losses.mean(), features)
    wanted = torch.autograd.grad(expected, features)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-6)
    assert not found[0][~KEPT].any()


def test_half_precision_is_computed_in_fp32():
    features = make_case()[0].detach().bfloat16()
    assert torch.equal(score_spans(features, 2, KEPT), score_spans(features.float(), 2, KEPT))


def test_labels_have_the_shape_of_the_scores():
    features, labels = make_case()
    with pytest.raises(ValueError, match=r"labels of shape \(3, 2, 5, 5\).* not \(3, 5\)"):
        span_loss(score_spans(features, 2, KEPT), labels[:, 0, 0])


def build(name, mesh=None):
    architecture = family(name).tasks["token-classification"]
    config = tiny(name, vocab_size=40, architecture=architecture, num_labels=3, pointer_size=4)
    return from_config(config, mesh, dtype=torch.float64)


def make_batch():
    torch.manual_seed(0)
    ids = torch.randint(5, 40, (4, 6))
    labels = (torch.rand(4, 3, 6, 6) < 0.1).long().triu()
    return ids, labels


def run_family(mesh, name):
    """Returns the loss, that of an unequal split of the batch, the logits, and the head's gradient."""
    model = build(name, mesh).eval()
    ids, labels = make_batch()
    output = model(ids, labels=labels)
    output.loss.backward()
    head = model.get_submodule(model.linear_name).weight.grad
    parts = [
        model(ids[rows], labels=labels[rows], num_items_in_batch=model.count_targets(labels)).loss
        for rows in (slice(0, 1), slice(1, 4))
    ]
    return output.loss.detach(), sum(parts).detach(), output.logits.detach(), head


@pytest.mark.parametrize("name", by_turns(POINTER_FAMILIES, 5))
def test_every_family_has_the_head_in_every_layout(name, run_mesh):
    loss, parts, logits, head = run_family(None, name)
    assert logits.shape == (4, 3, 6, 6)
    torch.testing.assert_close(parts, loss)
    assert head.abs().sum() > 0
    for rank in run_mesh(2, run_family, name):
        torch.testing.assert_close(rank, (loss, parts, logits, head), rtol=0, atol=1e-9)


@pytest.mark.parametrize(("tp", "context"), [(3, 1), (1, 2)])
def test_three_ranks_and_a_split_sequence_compute_the_same(tp, context, run_mesh):
    expected = run_family(None, "roberta")
    ranks = run_mesh(tp, run_family, "roberta", context=context)
    for rank in ranks:
        torch.testing.assert_close(rank[:3], expected[:3], rtol=0, atol=1e-9)
    # Ranks that share a sequence have a part of the gradient each, which the trainer adds.
    head = sum(rank[3] for rank in ranks) / tp
    torch.testing.assert_close(head, expected[3], rtol=0, atol=1e-9)


def test_the_attention_mask_leaves_spans_out():
    model = build("bert").eval()
    ids, _ = make_batch()
    mask = (torch.arange(6) < torch.tensor([6, 1, 3, 4])[:, None]).long()
    logits = model(ids, attention_mask=mask).logits
    for row, tokens in enumerate(mask.bool()):
        assert (logits[row, 0] > IMPOSSIBLE).sum() == len(spans(tokens))


def test_files_keep_the_pointer(tmp_path):
    model = build("bert").eval()
    ids, labels = make_batch()
    expected = model(ids, labels=labels)
    model.save_pretrained(tmp_path / "hf")
    split(tmp_path / "hf", tmp_path / "two", 2)
    merge(tmp_path / "two", tmp_path / "again")
    for folder in ("hf", "two", "again"):
        found = shardzoo.from_pretrained(tmp_path / folder).eval()(ids, labels=labels)
        torch.testing.assert_close((found.loss, found.logits), (expected.loss, expected.logits))
    plain = build("bert").config.with_changes(pointer_size=None)
    assert "pointer_size" not in plain.to_dict()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"pointer_size": 3}, "pointer_size must be even.* not 3"),
        ({"pointer_size": 4, "crf": True}, "not both"),
    ],
)
def test_a_configuration_names_what_is_possible(changes, message):
    with pytest.raises(ValueError, match=message):
        from_config(tiny("bert", architecture="BertForTokenClassification", **changes))
