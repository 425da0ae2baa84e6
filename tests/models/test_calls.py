"""Calls as code for transformers makes them: their arguments, and what they return, against transformers."""

from __future__ import annotations

import inspect
import pickle

import pytest
import torch
import transformers
from tiny_models import hf_model, tiny
from torch.utils import _pytree as pytree

import shardzoo
from shardzoo.models import ParallelConfig

TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
# Sizes that the ranks do not divide: heads over two ranks are equal, over three not.
MODELS = {
    "GPT2LMHeadModel": {},
    "BertForMaskedLM": {},
    "RobertaForMaskedLM": {},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {},
    "ModernBertForMaskedLM": {},
    "T5ForConditionalGeneration": {},
    "UMT5ForConditionalGeneration": {},
    "BartForConditionalGeneration": {},
    "MBartForConditionalGeneration": {},
    "M2M100ForConditionalGeneration": {},
}
OFTEN = ("GPT2LMHeadModel", "BertForMaskedLM", "LlamaForCausalLM", "T5ForConditionalGeneration")


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Finds transformers' model, ours, and the folder that both come from, by architecture."""
    made = {}

    def find(architecture):
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            theirs = hf_model(architecture, 0.0, initializer_range=0.3, attn_implementation="eager")
            theirs.eval().save_pretrained(folder)
            made[architecture] = theirs, shardzoo.from_pretrained(folder).eval(), folder
        return made[architecture]

    return find


def make_ids(shape=(3, 7), seed=0):
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(seed))


def make_mask(side="right"):
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 4:] = 0
    return mask.flip(1) if side == "left" else mask


def is_seq2seq(architecture):
    return "Conditional" in architecture


def embeddings_of(model, ids):
    return model.get_input_embeddings()(ids).detach()


def run(mesh, folder, inputs, names, sequence_parallel=False):
    """On one rank: fields of the output, logits whole, and the gradients of inputs in floating point."""
    config = ParallelConfig(sequence_parallel=sequence_parallel)
    model = shardzoo.from_pretrained(folder, mesh, parallel_config=config).eval()
    inputs = {
        name: value.clone().requires_grad_()
        if isinstance(value, torch.Tensor) and value.is_floating_point() and "embeds" in name
        else value
        for name, value in inputs.items()
    }
    output = model(**inputs)
    found = {name: output[name] for name in names}
    if "logits" in found:
        found["logits"] = model.gather_logits(found["logits"])
    (output.logits.square().mean() if output.loss is None else output.loss).backward()
    grads = {name: value.grad for name, value in inputs.items() if "embeds" in name}
    return pytree.tree_map(lambda x: x.detach(), (found, grads))


def compare(architecture, models, run_mesh, inputs, names, ranks=()):
    """Compares fields and gradients with transformers', unsplit and on several ranks."""
    theirs, _, folder = models(architecture)
    theirs.zero_grad()
    wanted = {
        name: value.clone().requires_grad_() if "embeds" in name else value
        for name, value in inputs.items()
    }
    expected = theirs(**wanted)
    (expected.logits.square().mean() if expected.loss is None else expected.loss).backward()
    fields = {name: expected[name] for name in names}
    grads = {name: value.grad for name, value in wanted.items() if "embeds" in name}
    results = [run(None, folder, inputs, names)]
    for size in ranks:
        results += run_mesh(size, run, folder, inputs, names)
    for found, found_grads in results:
        torch.testing.assert_close(found, pytree.tree_map(torch.detach, fields), **TOLERANCE)
        torch.testing.assert_close(found_grads, grads, **TOLERANCE)


@pytest.mark.parametrize("architecture", MODELS)
def test_embeddings_instead_of_ids(architecture, models, run_mesh):
    theirs = models(architecture)[0]
    ids = make_ids()
    inputs = {"inputs_embeds": embeddings_of(theirs, ids), "attention_mask": make_mask()}
    if is_seq2seq(architecture):
        target = make_ids((3, 5), 1)
        inputs["decoder_inputs_embeds"] = embeddings_of(theirs, target)
        if architecture != "M2M100ForConditionalGeneration":  # transformers' wants ids for labels
            inputs["labels"] = target
    else:
        inputs["labels"] = ids.masked_fill(make_mask() == 0, -100)
    ranks = (2,) if architecture in OFTEN else ()
    names = [name for name in ("loss", "logits") if name == "logits" or "labels" in inputs]
    compare(architecture, models, run_mesh, inputs, names, ranks)


def test_embeddings_under_sequence_parallelism(models, run_mesh):
    theirs, _, folder = models("GPT2LMHeadModel")
    ids = make_ids((2, 8))
    inputs = {"inputs_embeds": embeddings_of(theirs, ids), "labels": ids}
    whole = run(None, folder, inputs, ("loss", "logits"))
    for found in run_mesh(2, run, folder, inputs, ("loss", "logits"), True):
        torch.testing.assert_close(found, whole, **TOLERANCE)


@pytest.mark.parametrize("architecture", MODELS)
def test_attentions_and_hidden_states(architecture, models, run_mesh):
    inputs = {"input_ids": make_ids(), "attention_mask": make_mask()}
    inputs |= {"output_attentions": True, "output_hidden_states": True, "labels": make_ids()}
    names = ["hidden_states", "attentions"]
    if is_seq2seq(architecture):
        names = ["decoder_hidden_states", "encoder_hidden_states", "encoder_attentions"]
        names += ["decoder_attentions", "cross_attentions"]
    ranks = (3,) if architecture in OFTEN else ()
    compare(architecture, models, run_mesh, inputs, ["loss", "logits", *names], ranks)


def test_hidden_states_of_choices(models):
    theirs, ours, _ = models("BertForMultipleChoice")
    inputs = {"input_ids": make_ids((2, 3, 7)), "labels": torch.tensor([2, 0])}
    inputs |= {"output_attentions": True, "output_hidden_states": True}
    expected, found = theirs(**inputs), ours(**inputs)
    assert list(found.keys()) == list(expected.keys())
    torch.testing.assert_close(dict(found), dict(expected), **TOLERANCE)


def test_what_is_recorded_has_gradients(models):
    """Also where an encoder in training leaves padding out."""
    _, ours, _ = models("T5ForConditionalGeneration")
    inputs = {"input_ids": make_ids(), "attention_mask": make_mask(), "labels": make_ids()}
    output = ours.train()(**inputs, output_attentions=True, output_hidden_states=True)
    ours.eval()
    kept = [output.encoder_hidden_states[0], output.encoder_attentions[0]]
    kept += [output.decoder_hidden_states[0], output.cross_attentions[0]]
    for tensor in kept:
        tensor.retain_grad()
    output.logits.sum().backward()
    assert all(tensor.grad is not None for tensor in kept)


def complete_masks():
    """Masks with a row for each query, for decoders and encoders."""
    allowed = torch.rand(3, 7, 7, generator=torch.Generator().manual_seed(3)) < 0.6
    allowed = (allowed | torch.eye(7, dtype=torch.bool)).tril()
    least = torch.finfo(torch.float32).min
    added = torch.zeros(3, 1, 7, 7).masked_fill(~allowed[:, None], least)
    return {
        "bool": allowed[:, None],
        "long": allowed[:, None].long(),
        "3-D": allowed,
        "added": added,
    }


@pytest.mark.parametrize("kind", ["bool", "long", "3-D", "added"])
@pytest.mark.parametrize(
    "architecture", ["GPT2LMHeadModel", "BertForMaskedLM", "MistralForCausalLM"]
)
def test_complete_masks(architecture, kind, models, run_mesh):
    theirs, _, folder = models(architecture)
    masks = complete_masks()
    expected = theirs(input_ids=make_ids(), attention_mask=masks["added"]).logits
    inputs = {"input_ids": make_ids(), "attention_mask": masks[kind]}
    results = [run(None, folder, inputs, ("logits",))]
    if architecture == "GPT2LMHeadModel":
        results += run_mesh(2, run, folder, inputs, ("logits",))
    for found, _ in results:
        torch.testing.assert_close(found["logits"], expected, **TOLERANCE)


def test_added_masks_with_dropout_and_relative_positions(models):
    theirs, ours, _ = models("T5EncoderModel")
    ids = make_ids()
    added = complete_masks()["added"]
    expected = theirs(input_ids=ids, attention_mask=added).last_hidden_state
    torch.testing.assert_close(ours(ids, added).last_hidden_state, expected, **TOLERANCE)
    torch.testing.assert_close(ours.train()(ids, added).last_hidden_state, expected, **TOLERANCE)
    ours.eval()


@pytest.mark.parametrize(
    "architecture", ["T5ForConditionalGeneration", "BartForConditionalGeneration"]
)
def test_encoder_outputs_in_every_form(architecture, models):
    theirs, ours, _ = models(architecture)
    ids, mask, target = make_ids(), make_mask(), make_ids((3, 5), 1)
    encoded = theirs.get_encoder()(ids, mask, output_hidden_states=True, output_attentions=True)
    inputs = {"attention_mask": mask, "decoder_input_ids": target, "output_hidden_states": True}
    inputs["output_attentions"] = True
    expected = theirs(encoder_outputs=encoded, **inputs)
    forms = [encoded, encoded.to_tuple(), list(encoded.to_tuple()), dict(encoded)]
    forms += [ours.encode(ids, mask, output_hidden_states=True)]
    forms += [encoded.last_hidden_state, (encoded.last_hidden_state,)]
    for number, form in enumerate(forms):
        found = ours(encoder_outputs=form, **inputs)
        torch.testing.assert_close(found.logits, expected.logits, **TOLERANCE)
        if number < 5:
            states = found.encoder_hidden_states
            torch.testing.assert_close(states, expected.encoder_hidden_states, **TOLERANCE)
        if number < 4:
            assert found.encoder_attentions is not None


def test_logits_to_keep_and_shifted_labels(models, run_mesh):
    theirs, _, folder = models("LlamaForCausalLM")
    ids = make_ids()
    for kept in (2, torch.tensor([0, 3, 6])):
        inputs = {"input_ids": ids, "logits_to_keep": kept}
        expected = theirs(**inputs).logits
        for found, _ in [
            run(None, folder, inputs, ["logits"]),
            *run_mesh(2, run, folder, inputs, ["logits"]),
        ]:
            torch.testing.assert_close(found["logits"], expected, **TOLERANCE)
    shifted = torch.nn.functional.pad(ids[:, 1:], (0, 1), value=-100)
    inputs = {"input_ids": ids, "labels": ids, "shift_labels": shifted.roll(1, 0)}
    compare("LlamaForCausalLM", models, run_mesh, inputs, ["loss"])


def test_positions_and_types(models, run_mesh):
    ids = make_ids()
    # Of padding, and of the token after it, no model predicts anything.
    after = make_mask("left").roll(1, 1) * make_mask("left")
    inputs = {"input_ids": ids, "attention_mask": make_mask("left")}
    inputs["labels"] = ids.masked_fill(after == 0, -100)
    inputs["position_ids"] = (make_mask("left").cumsum(1) - 1).clamp(min=0)
    compare("LlamaForCausalLM", models, run_mesh, inputs, ["loss"])
    inputs["token_type_ids"] = make_ids(seed=4)
    compare("GPT2LMHeadModel", models, run_mesh, inputs, ["loss"])
    inputs["token_type_ids"] = ids % 2
    compare("BertForMaskedLM", models, run_mesh, inputs, ["loss"])


def test_embeddings_in_classifiers(models):
    ids = make_ids((2, 3, 7))
    for architecture in (
        "BertForMultipleChoice",
        "GPT2ForSequenceClassification",
        "DistilBertForTokenClassification",
    ):
        theirs, ours, _ = models(architecture)
        rows = ids if "Choice" in architecture else ids[:1, 0]
        given = embeddings_of(theirs, rows)
        expected = theirs(inputs_embeds=given).logits
        torch.testing.assert_close(ours(inputs_embeds=given).logits, expected, **TOLERANCE)
    _, ours, _ = models("BartForSequenceClassification")
    with pytest.raises(ValueError, match="finds the end of a sequence by its id: pass input_ids"):
        ours(inputs_embeds=torch.zeros(1, 4, 32), decoder_input_ids=ids[0, :1, :4])


def test_mistakes_are_named(models):
    _, ours, _ = models("GPT2LMHeadModel")
    ids = make_ids()
    with pytest.raises(
        TypeError, match="GPT2LMHeadModel has no argument labls, wieght; it takes input_ids, past"
    ):
        ours(ids, labls=ids, wieght=None)
    with pytest.raises(ValueError, match="takes input_ids or inputs_embeds, not both"):
        ours(ids, inputs_embeds=torch.zeros(3, 7, 32))
    with pytest.raises(ValueError, match="GPT2LMHeadModel needs input_ids or inputs_embeds"):
        ours(attention_mask=ids)
    with pytest.raises(ValueError, match=r"attention_mask must be \[B, S\], 0 for padding"):
        ours(ids, attention_mask=torch.ones(3))


@pytest.mark.parametrize(
    "architecture", [*OFTEN, "BertForMultipleChoice", "T5ForQuestionAnswering"]
)
def test_signatures_show_what_is_taken(architecture, models):
    _, ours, _ = models(architecture)
    theirs = inspect.signature(getattr(transformers, architecture).forward).parameters
    for shown in (inspect.signature(type(ours).forward), inspect.signature(ours.forward)):
        names = [name for name in shown.parameters if name != "self"]
        assert set(theirs) - {"self", "kwargs"} <= set(names)
        assert {"return_dict", "output_attentions", "num_items_in_batch"} <= set(names)
    assert "self" not in inspect.signature(ours.forward).parameters


def test_outputs_are_those_of_transformers(models):
    theirs, ours, _ = models("GPT2LMHeadModel")
    ids = make_ids()
    expected = theirs(ids, labels=ids, use_cache=False, output_hidden_states=True)
    found = ours(ids, labels=ids, use_cache=False, output_hidden_states=True)
    assert list(found.keys()) == list(expected) == ["loss", "logits", "hidden_states"]
    assert list(found) == list(expected)
    assert dict(found) == dict(found.items())
    assert found.attentions is found.cross_attentions is found.past_key_values is None
    assert "attentions" not in found
    assert found[0] is found.loss
    assert len(found) == len(found[:]) == 3
    assert [len(part) for part in (found[:2], found[1:])] == [2, 2]
    as_tuple = ours(ids, labels=ids, output_hidden_states=True, return_dict=False)
    assert isinstance(as_tuple, tuple)
    torch.testing.assert_close(as_tuple, found.to_tuple())
    leaves, tree = pytree.tree_flatten(found)
    assert "logits" in found._lazy_values or len(leaves) == 5
    again = pytree.tree_unflatten(leaves, tree)
    assert type(again) is type(found)
    torch.testing.assert_close(again.to_tuple(), found.to_tuple())
    with torch.no_grad():
        kept = pickle.loads(pickle.dumps(ours(ids, labels=ids)))
    torch.testing.assert_close(kept.logits, found.logits.detach())
    found["loss"] = torch.zeros(())
    assert found.loss == 0
    built = type(found)({"loss": found.loss, "logits": found.logits})
    assert built.keys() == ("loss", "logits")


def test_attentions_with_recomputation_and_dropout():
    """Probabilities are those that are multiplied, with dropout, and their gradients flow."""
    torch.manual_seed(0)
    losses, grads = [], []
    for recompute in ("none", "full", "selective"):
        config = ParallelConfig(recompute=recompute)
        model = shardzoo.from_config(tiny("t5", 0.3), parallel_config=config).train()
        torch.manual_seed(1)
        output = model(make_ids(), labels=make_ids(), output_attentions=True)
        output.encoder_attentions[0].retain_grad()
        output.loss.backward()
        assert output.encoder_attentions[0].grad.abs().sum() > 0
        dropped = (output.decoder_attentions[0] == 0).float().mean()
        assert dropped > 0.4  # a third, and what follows
        losses.append(output.loss.detach())
        grads.append([p.grad for p in model.parameters()])
    torch.manual_seed(1)
    losses.append(model(make_ids(), labels=make_ids()).loss.detach())
    for loss in losses[1:]:
        torch.testing.assert_close(loss, losses[0])
    torch.testing.assert_close(grads[1], grads[0])
