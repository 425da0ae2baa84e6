"""BERT and its relatives as decoders, and GPT-2 with two heads, against transformers."""

from __future__ import annotations

import pytest
import torch
from every_case import by_turns
from tiny_models import hf_model
from torch.utils import _pytree as pytree
from transformers import DynamicCache

import shardzoo

TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}
CLASSES = ("BertLMHeadModel", "RobertaForCausalLM", "GPT2LMHeadModel", "ElectraForCausalLM")


def make_ids(shape=(3, 7), seed=0):
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(seed))


def make_inputs():
    """A batch of a decoder, of which rows are padded, that attends to an encoder's output."""
    mask = torch.ones(3, 7, dtype=torch.long)
    mask[1, 5:] = 0
    source_mask = torch.ones(3, 5, dtype=torch.long)
    source_mask[2, 3:] = 0
    return {
        "input_ids": make_ids().masked_fill(mask == 0, 1),
        "attention_mask": mask,
        "encoder_hidden_states": torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(2)),
        "encoder_attention_mask": source_mask,
        "labels": make_ids().masked_fill(mask == 0, -100),
        "output_attentions": True,
        "output_hidden_states": True,
    }


def run(mesh, folder, inputs):
    """On one rank: the output, whole, and the gradient of the encoder's output."""
    model = shardzoo.from_pretrained(folder, mesh).eval()
    source = inputs["encoder_hidden_states"].clone().requires_grad_()
    output = model(**inputs | {"encoder_hidden_states": source})
    output.loss.backward()
    found = dict(output)
    found["logits"] = model.gather_logits(found["logits"])
    return pytree.tree_map(lambda x: x.detach(), (found, source.grad))


@pytest.mark.parametrize("architecture", by_turns(CLASSES, 2))
def test_cross_attention(architecture, run_mesh, tmp_path):
    changes = {"is_decoder": True, "add_cross_attention": True, "initializer_range": 0.3}
    theirs = hf_model(architecture, 0.0, attn_implementation="eager", **changes).eval()
    theirs.save_pretrained(tmp_path / "hf")
    inputs = make_inputs()
    source = inputs["encoder_hidden_states"].clone().requires_grad_()
    expected = theirs(**inputs | {"encoder_hidden_states": source}, use_cache=False)
    expected.loss.backward()
    results = [run(None, tmp_path / "hf", inputs), *run_mesh(3, run, tmp_path / "hf", inputs)]
    for found, grad in results:
        assert list(found) == list(expected.keys())
        torch.testing.assert_close(found, dict(expected), **TOLERANCE)
        torch.testing.assert_close(grad, source.grad, **TOLERANCE)
    # Without an encoder's output, the blocks leave the attention out; and files come back whole.
    ours = shardzoo.from_pretrained(tmp_path / "hf").eval()
    ids = make_ids()
    torch.testing.assert_close(ours(ids).logits, theirs(ids).logits, **TOLERANCE)
    ours.save_pretrained(tmp_path / "again")
    again = type(theirs).from_pretrained(tmp_path / "again")
    assert all(map(torch.equal, again.state_dict().values(), theirs.state_dict().values()))


@torch.no_grad()
def run_bare(mesh, folder, inputs):
    model = shardzoo.from_pretrained(folder, mesh).eval()
    return dict(model(**inputs, use_cache=False))


def test_a_bare_model_as_decoder(run_mesh, tmp_path):
    changes = {"is_decoder": True, "add_cross_attention": True, "initializer_range": 0.3}
    theirs = hf_model("BertModel", 0.0, attn_implementation="eager", **changes).eval()
    theirs.save_pretrained(tmp_path / "bare")
    inputs = make_inputs()
    del inputs["labels"]
    expected = theirs(**inputs, use_cache=False)
    folder = tmp_path / "bare"
    for found in (run_bare(None, folder, inputs), *run_mesh(2, run_bare, folder, inputs)):
        torch.testing.assert_close(found, dict(expected), **TOLERANCE)
    head = hf_model("BertLMHeadModel", 0.0, **changes).eval()
    head.save_pretrained(tmp_path / "head")
    ours = shardzoo.from_pretrained(tmp_path / "head")
    assert type(ours.base_model).__name__ == "BertModel"
    ids = make_ids()
    torch.testing.assert_close(
        ours.bert(ids).last_hidden_state, head.bert(ids).last_hidden_state, **TOLERANCE
    )


@torch.no_grad()
def loop(mesh, folder):
    """On one rank: the logits of a decoding loop with a cache, and those of one pass."""
    model = shardzoo.from_pretrained(folder, mesh).eval()
    inputs = make_inputs()
    options = {name: inputs[name] for name in ("encoder_hidden_states", "encoder_attention_mask")}
    ids, past, logits = make_ids(), None, []
    for part in ids.split([4, 1, 2], 1):
        output = model(part, past_key_values=past, use_cache=True, **options)
        past = output.past_key_values
        logits.append(model.gather_logits(output.logits))
    return torch.cat(logits, 1), model.gather_logits(model(ids, **options).logits)


def test_a_cache_of_cross_attention(run_mesh, tmp_path):
    changes = {"is_decoder": True, "add_cross_attention": True, "initializer_range": 0.3}
    hf_model("RobertaForCausalLM", 0.0, **changes).save_pretrained(tmp_path)
    results = [loop(None, tmp_path), *run_mesh(2, loop, tmp_path)]
    for found, whole in results:
        torch.testing.assert_close(found, whole, **TOLERANCE)
        torch.testing.assert_close(found, results[0][0], **TOLERANCE)


def test_what_a_decoder_needs(tmp_path):
    ids = make_ids()
    values = {"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 97}
    values |= {"num_hidden_layers": 1, "intermediate_size": 8, "architectures": ["BertLMHeadModel"]}
    model = shardzoo.from_config(values).eval()  # every token attends to all, as in transformers
    assert model(ids, use_cache=False).logits.shape == (3, 7, 97)
    assert model(ids, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="BertLMHeadModel has a cache only with is_decoder"):
        model(ids, past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="encoder_hidden_states only with add_cross_attention"):
        model(ids, encoder_hidden_states=torch.zeros(3, 2, 8))
    with pytest.raises(ValueError, match="add_cross_attention needs is_decoder"):
        shardzoo.from_config(values | {"add_cross_attention": True})
    with pytest.raises(ValueError, match="BertForMaskedLM is supported only as an encoder"):
        shardzoo.from_config(values | {"is_decoder": True, "architectures": ["BertForMaskedLM"]})
    values = {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "n_layer": 1, "vocab_size": 97}
    values |= {"architectures": ["GPT2DoubleHeadsModel"], "summary_type": "mean"}
    with pytest.raises(ValueError, match="GPT2DoubleHeadsModel scores a choice by the state of"):
        shardzoo.from_config(values)


def test_two_heads_without_labels_and_choices(tmp_path):
    theirs = hf_model("GPT2DoubleHeadsModel", 0.0, initializer_range=0.3).eval()
    theirs.save_pretrained(tmp_path)
    ours = shardzoo.from_pretrained(tmp_path).eval()
    ids = make_ids((2, 3, 7))
    labels = make_ids((2, 3, 7), 1)
    given = {"input_ids": ids, "labels": labels, "mc_labels": torch.tensor([2, 0])}
    for inputs in ({"input_ids": ids}, given):
        expected = theirs(**inputs, use_cache=False)
        found = ours(**inputs, use_cache=False)
        assert list(found.keys()) == list(expected.keys())
        torch.testing.assert_close(dict(found), dict(expected), **TOLERANCE)
    embedded = theirs.get_input_embeddings()(ids).detach()
    found = ours(inputs_embeds=embedded, labels=labels, mc_labels=given["mc_labels"])
    torch.testing.assert_close(dict(found), dict(expected), **TOLERANCE)


def test_one_class_that_is_no_number(tmp_path):
    """transformers takes it where the settings change after the model was built."""
    theirs = hf_model("BertForSequenceClassification", 0.0, num_labels=1).eval()
    theirs.save_pretrained(tmp_path)
    theirs.config.problem_type = "single_label_classification"
    ours = shardzoo.from_pretrained(tmp_path).eval()
    ours.config.problem_type = "single_label_classification"
    ids = make_ids((2, 5))
    labels = torch.tensor([0, -100])
    expected, found = theirs(input_ids=ids, labels=labels), ours(input_ids=ids, labels=labels)
    torch.testing.assert_close(found.loss, expected.loss)
    torch.testing.assert_close(found.logits, expected.logits, **TOLERANCE)
    with pytest.raises(ValueError, match="label 1 is no class of the model, which has 1"):
        ours(input_ids=ids, labels=labels + 1)
