"""BART, mBART and M2M100 where the parity matrix does not look: labels, positions, refusals."""

from __future__ import annotations

import pytest
import torch
import transformers
from tiny_models import hf_model, tiny

import shardzoo
from shardzoo.generation import generate
from shardzoo.models import config_from_dict, from_config

FAMILIES = ("bart", "mbart", "m2m_100")


@pytest.mark.parametrize(("name", "stem"), [("bart", "Bart"), ("mbart", "MBart")])
def test_decoder_inputs_are_those_of_transformers(name, stem):
    labels = torch.randint(4, 97, (5, 8), generator=torch.Generator().manual_seed(0))
    for row in range(1, 5):
        labels[row, 8 - row :] = -100  # mBART begins with the last token, wherever it is
    labels[4, 2] = -100 if name != "mbart" else 7
    theirs = hf_model(f"{stem}ForConditionalGeneration").prepare_decoder_input_ids_from_labels(
        labels.clone()
    )
    ours = from_config(tiny(name), device="meta").prepare_decoder_input_ids_from_labels(labels)
    assert torch.equal(ours, theirs)


def test_sinusoids_have_any_length_and_width(tmp_path):
    """Of an odd width, beyond max_position_embeddings, with padding on both sides."""
    theirs = hf_model("M2M100Model", 0.0, d_model=27, encoder_attention_heads=3, decoder_attention_heads=3,
                      max_position_embeddings=6).eval()  # fmt: skip
    theirs.save_pretrained(tmp_path)
    ids = torch.randint(4, 97, (2, 19), generator=torch.Generator().manual_seed(0))
    ids[0, :3], ids[1, 15:] = 1, 1
    inputs = {
        "input_ids": ids,
        "attention_mask": (ids != 1).long(),
        "decoder_input_ids": ids.flip(0),
    }
    with torch.no_grad():
        found, expected = shardzoo.from_pretrained(tmp_path)(**inputs), theirs(**inputs)
    torch.testing.assert_close(
        found.last_hidden_state, expected.last_hidden_state, rtol=1e-5, atol=1e-5
    )


def test_learned_positions_are_limited():
    model = from_config(tiny("bart", max_position_embeddings=9)).eval()
    ids = torch.full((1, 10), 5)
    with pytest.raises(
        ValueError, match="the sequence has 10 tokens, but the model has only 9 positions"
    ):
        model(ids, labels=ids[:, :4])
    with pytest.raises(ValueError, match="the sequence has 10 tokens"):
        model(ids[:, :4], labels=ids)
    with pytest.raises(
        ValueError, match=r"1 prompt tokens and 10 new tokens need 10 positions.*up to 9"
    ):
        generate(model, ids[:, :4], max_new_tokens=10)
    assert generate(model, ids[:, :4], max_new_tokens=9, eos_token_id=96).shape[1] <= 10


@pytest.mark.parametrize("name", FAMILIES)
def test_layer_drop_is_refused_in_training_only(name):
    model = from_config(tiny(name, 0.0, decoder_layerdrop=0.05))
    ids = torch.full((1, 4), 5)
    model.eval()(ids, labels=ids)
    with pytest.raises(
        ValueError, match=r"a layer drop of 0.05 is unsupported: .*; set .*decoder_layerdrop to 0"
    ):
        model.train()(ids, labels=ids)


def use_own_embeddings(mesh, folder, saved):
    """On one rank: a model whose stacks have embeddings of their own; loss, gradients, tokens, and after a resize."""
    model = shardzoo.from_pretrained(folder, mesh)
    ids = torch.randint(4, 97, (2, 7), generator=torch.Generator().manual_seed(0))
    output = model(ids, labels=ids[:, :5].contiguous())
    output.loss.backward()
    kept = {"loss": output.loss.item(), "trained": {}}
    for name, parameter in model.named_parameters():
        if name.endswith("word_embeddings.weight"):
            kept["trained"][name] = parameter.grad is not None
    kept["tokens"] = model.generate(ids, max_new_tokens=5, do_sample=False).tolist()
    model.resize_token_embeddings(110)
    ids[:, -1] = 105
    kept["resized loss"] = model.eval()(ids, labels=ids).loss.item()
    model.save_pretrained(saved)
    with pytest.raises(ValueError, match="word embeddings of their own"):
        model.set_input_embeddings(torch.nn.Embedding(110, model.hidden_size))
    return kept


def test_stacks_with_own_embeddings(tmp_path, run_mesh):
    """`tie_word_embeddings: false` unties the head and the look-ups of both stacks, in any layout."""
    theirs = hf_model("BartForConditionalGeneration", 0.0, tie_word_embeddings=False).eval()
    with torch.no_grad():
        theirs.model.encoder.embed_tokens.weight.mul_(1.5)
    theirs.save_pretrained(tmp_path / "theirs")
    ids = torch.randint(4, 97, (2, 7), generator=torch.Generator().manual_seed(0))
    loss = theirs(input_ids=ids, labels=ids[:, :5].contiguous()).loss.item()
    tokens = theirs.generate(ids, max_new_tokens=5, do_sample=False).tolist()
    alone = use_own_embeddings(None, tmp_path / "theirs", tmp_path / "alone")
    for size in (1, 3):
        saved = tmp_path / f"saved{size}"
        for kept in run_mesh(size, use_own_embeddings, tmp_path / "theirs", saved):
            assert kept["loss"] == pytest.approx(loss, rel=1e-6)
            assert kept["tokens"] == tokens
            assert kept["resized loss"] == pytest.approx(alone["resized loss"], rel=1e-6)
            assert kept["trained"] == {
                "word_embeddings.weight": False,
                "encoder.word_embeddings.weight": True,
                "decoder.word_embeddings.weight": True,
            }
    with pytest.raises(ValueError, match="both must be equal"):
        shardzoo.models.BartForCausalLM.from_pretrained(tmp_path / "theirs")
    again = transformers.BartForConditionalGeneration.from_pretrained(tmp_path / "alone").eval()
    ids[:, -1] = 105
    assert again(input_ids=ids, labels=ids).loss.item() == pytest.approx(
        alone["resized loss"], rel=1e-6
    )


def test_own_embeddings_need_an_untied_head():
    with pytest.raises(ValueError, match="own_embeddings needs tie_word_embeddings=false"):
        config_from_dict(tiny("bart")).with_changes(own_embeddings=True)
    untied = config_from_dict(tiny("bart", tie_word_embeddings=False))
    assert untied.to_dict()["tie_word_embeddings"] is False
    head_alone = config_from_dict(tiny("bart")).with_changes(tie_word_embeddings=False)
    assert head_alone.to_dict()["tie_word_embeddings"] is True
    assert not head_alone.has_own_embeddings


@pytest.mark.parametrize("name", ["BartForConditionalGeneration", "M2M100ForConditionalGeneration"])
def test_embeddings_that_a_program_looks_up_are_scaled(name):
    theirs = hf_model(name, 0.0, scale_embedding=True).eval()
    ours = getattr(shardzoo.models, name)(theirs.config)
    ours.load_state_dict(theirs.state_dict())
    ids = torch.randint(4, 97, (2, 7), generator=torch.Generator().manual_seed(0))
    found = ours.get_input_embeddings()(ids)
    assert torch.equal(found, theirs.get_input_embeddings()(ids))
    of_ids = ours(ids, decoder_input_ids=ids).logits
    of_embeddings = ours(inputs_embeds=found, decoder_input_ids=ids).logits
    torch.testing.assert_close(of_embeddings, of_ids, rtol=1e-6, atol=1e-6)


@pytest.fixture
def folder(tmp_path):
    """A BART as transformers writes it, without its bias of zeros in `bare`."""
    hf_model("BartForConditionalGeneration").save_pretrained(tmp_path / "hf")
    return tmp_path


def test_every_head_loads_the_published_bare_model(tmp_path):
    """bart-base and bart-large are stored as BartModel, without the prefix."""
    bare = hf_model("BartModel").eval()
    bare.save_pretrained(tmp_path)
    values = {**bare.config.to_dict(), "architectures": ["BartForConditionalGeneration"]}
    model = shardzoo.from_pretrained(tmp_path, config=values)
    theirs = transformers.BartForConditionalGeneration.from_pretrained(tmp_path).eval()
    ids = torch.randint(4, 97, (2, 7), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found, expected = model(ids, labels=ids), theirs(ids, labels=ids)
    torch.testing.assert_close(found.logits, expected.logits)
    values["architectures"] = ["BartForSequenceClassification"]
    assert (
        shardzoo.from_pretrained(tmp_path, config=values, new=("pooler", "classifier")).num_outputs
        == 3
    )
