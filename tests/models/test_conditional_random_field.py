"""Conditional random fields over labels of tokens, beside sums and maxima over all sequences of labels."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from every_case import by_turns
from tiny_models import tiny

import shardzoo
from shardzoo.convert.operations import merge, split
from shardzoo.models import FAMILIES, family, from_config
from shardzoo.models.blocks.conditional_random_field import ConditionalRandomField

CRF_FAMILIES = [name for name in FAMILIES if "token-classification" in family(name).tasks]
KEPT = torch.tensor(
    [[1, 1, 1, 1], [0, 1, 0, 1], [0, 0, 1, 0], [0, 0, 0, 0], [1, 0, 0, 1], [1, 1, 1, 0]], dtype=bool
)


def all_scores(crf, emissions, kept):
    """Returns a dict of each sequence of labels of the kept positions -> its score, for one row."""
    emissions = emissions[kept]
    scores = {}
    for labels in product(range(emissions.shape[1]), repeat=len(emissions)):
        score = crf.start_transitions[labels[0]] + crf.end_transitions[labels[-1]]
        for position, label in enumerate(labels):
            score = score + emissions[position, label]
            if position:
                score = score + crf.transitions[labels[position - 1], label]
        scores[labels] = score
    return scores


def enumerated_loss(crf, emissions, labels):
    """Returns the summed negative log-likelihood of labels, where -100 is no position."""
    total = emissions.new_zeros(())
    for row, wanted in zip(emissions, labels, strict=True):
        kept = wanted != -100
        if kept.any():
            scores = all_scores(crf, row, kept)
            every = torch.stack(list(scores.values()))
            total = total + every.logsumexp(0) - scores[tuple(wanted[kept].tolist())]
    return total


def make_crf(dtype=torch.float64):
    torch.manual_seed(1)
    crf = ConditionalRandomField(3).to(dtype)
    for parameter in crf.parameters():
        torch.nn.init.normal_(parameter)
    return crf


def test_likelihoods_and_gradients_are_those_of_all_sequences():
    """Positions are left out at both ends and between; one row has one position, and one has none."""
    crf = make_crf()
    emissions = torch.randn(*KEPT.shape, 3, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(3, KEPT.shape).masked_fill(~KEPT, -100)
    found = []
    for number in range(2):
        if number:
            loss = enumerated_loss(crf, emissions, labels)
        else:
            rows = crf.negative_log_likelihood(emissions, labels, KEPT)
            assert rows[3] == 0
            loss = rows.sum()
        gradients = torch.autograd.grad(loss, [emissions, *crf.parameters()])
        found.append([loss, *gradients])
    torch.testing.assert_close(found[0], found[1], rtol=1e-12, atol=1e-12)
    assert not found[0][1][~KEPT].any()


def test_the_best_labels_are_those_of_all_sequences():
    crf = make_crf()
    for seed in range(4):
        torch.manual_seed(seed)
        emissions = torch.randn(*KEPT.shape, 3, dtype=torch.float64)
        decoded = crf.decode(emissions, KEPT, -100)
        assert (decoded[~KEPT] == -100).all()
        for row, kept in enumerate(KEPT):
            if kept.any():
                scores = all_scores(crf, emissions[row], kept)
                assert tuple(decoded[row][kept].tolist()) == max(scores, key=scores.get)


def test_half_precision_is_computed_in_fp32():
    crf = make_crf(torch.bfloat16)
    wide = make_crf(torch.float32)
    wide.load_state_dict(crf.state_dict())
    emissions = torch.randn(6, 4, 3).bfloat16()
    labels = torch.randint(3, KEPT.shape)
    found = crf.negative_log_likelihood(emissions, labels, KEPT)
    assert found.dtype == torch.float32
    assert torch.equal(found, wide.negative_log_likelihood(emissions.float(), labels, KEPT))


@pytest.mark.parametrize("label", [3, -5])
def test_a_label_must_be_a_class(label):
    labels = torch.zeros(KEPT.shape, dtype=torch.long)
    labels[0, 1] = label
    with pytest.raises(ValueError, match=f"label {label} is no class of the model, which has 3"):
        make_crf().negative_log_likelihood(torch.randn(6, 4, 3), labels, KEPT)


def build(name, mesh=None, **changes):
    architecture = family(name).tasks["token-classification"]
    config = tiny(name, vocab_size=40, architecture=architecture, num_labels=3, crf=True, **changes)
    return from_config(config, mesh)


def make_batch():
    torch.manual_seed(0)
    ids = torch.randint(5, 40, (4, 6))
    labels = torch.randint(3, (4, 6))
    labels[torch.rand(4, 6) < 0.3] = -100
    labels[2] = -100
    return ids, labels


def run_family(mesh, name):
    """Returns the loss, the decoded labels, and the gradients of the head, of an unequal split of the batch too."""
    model = build(name, mesh).eval()
    ids, labels = make_batch()
    output = model(ids, labels=labels)
    output.loss.backward()
    gradients = {
        n: p.grad.clone() for n, p in model.named_parameters() if n.startswith("crf_layer")
    }
    parts = [
        model(ids[rows], labels=labels[rows], num_items_in_batch=(labels != -100).sum()).loss
        for rows in (slice(0, 1), slice(1, 4))
    ]
    return output.loss.detach(), output.predictions, gradients, sum(parts).detach(), output.logits


@pytest.mark.parametrize("name", by_turns(CRF_FAMILIES, 5))
def test_every_family_has_the_head_in_every_layout(name, run_mesh):
    loss, predictions, gradients, parts, logits = run_family(None, name)
    ids, labels = make_batch()
    model = build(name).eval()
    expected = enumerated_loss(model.crf_layer, model(ids).logits, labels)
    torch.testing.assert_close(loss, (expected / (labels != -100).sum()).detach())
    torch.testing.assert_close(parts, loss)
    assert sorted(gradients) == [
        f"crf_layer.{part}" for part in ("end_transitions", "start_transitions", "transitions")
    ]
    assert torch.equal(predictions, model.crf_layer.decode(logits, labels != -100, -100))
    for rank in run_mesh(2, run_family, name):
        torch.testing.assert_close(rank[:4], (loss, predictions, gradients, parts))


@pytest.mark.parametrize(("tp", "context"), [(3, 1), (1, 2)])
def test_three_ranks_and_a_split_sequence_compute_the_same(tp, context, run_mesh):
    expected = run_family(None, "roberta")
    for rank in run_mesh(tp, run_family, "roberta", context=context):
        torch.testing.assert_close(rank[0], expected[0])
        assert torch.equal(rank[1], expected[1])


def test_predictions_are_made_in_evaluation_mode_only():
    model = build("bert")
    ids, labels = make_batch()
    assert model.train()(ids, labels=labels).predictions is None
    mask = (torch.arange(6) < torch.tensor([6, 1, 3, 4])[:, None]).long()
    output = model.eval()(ids, attention_mask=mask)
    assert torch.equal(output.predictions == -100, mask == 0)
    assert not (model(ids).predictions == -100).any()


def test_files_keep_the_transitions_and_transformers_reads_the_rest(tmp_path):
    import transformers

    model = build("bert").eval()
    ids, labels = make_batch()
    expected = model(ids, labels=labels)
    model.save_pretrained(tmp_path / "hf")
    split(tmp_path / "hf", tmp_path / "two", 2)
    merge(tmp_path / "two", tmp_path / "again")
    for folder in ("hf", "two", "again"):
        found = shardzoo.from_pretrained(tmp_path / folder).eval()(ids, labels=labels)
        torch.testing.assert_close(found.loss, expected.loss)
        assert torch.equal(found.predictions, expected.predictions)
    theirs, loading = transformers.BertForTokenClassification.from_pretrained(
        tmp_path / "again", output_loading_info=True
    )
    assert set(loading["unexpected_keys"]) == {n for n, _ in model.named_parameters() if "crf" in n}
    assert not loading["missing_keys"]
    torch.testing.assert_close(theirs(ids).logits, expected.logits)
    # Without the setting, the transitions are not read.
    plain = {**theirs.config.to_dict(), "crf": False}
    without = shardzoo.from_pretrained(tmp_path / "hf", config=plain)
    assert not hasattr(without, "crf_layer")
    torch.testing.assert_close(without(ids).logits, expected.logits)
    assert "crf" not in without.config.to_dict()
