"""Models have the methods of transformers' models, whole and split over ranks."""

from __future__ import annotations

import copy
import io
import pickle

import pytest
import torch
import transformers
from every_case import by_turns
from safetensors.torch import load_file
from tiny_models import hf_model

import shardzoo.models as zoo

NAMES = (
    "GPT2LMHeadModel", "BertForMaskedLM", "T5ForConditionalGeneration", "LlamaForCausalLM",
    "BertForSequenceClassification", "BartForConditionalGeneration", "GPT2Model", "T5EncoderModel",
)  # fmt: skip
CHANGES = {"LlamaForCausalLM": {"tie_word_embeddings": False}}
IDS = torch.tensor([[5, 6, 7, 8, 9, 10]])


@pytest.fixture(scope="module")
def pairs(tmp_path_factory):
    """transformers' model, and the folder that it was saved in, by architecture."""
    found = {}
    for name in NAMES:
        theirs = hf_model(name, 0.0, **CHANGES.get(name, {})).eval()
        folder = tmp_path_factory.mktemp(name)
        theirs.save_pretrained(folder)
        found[name] = (theirs, folder)
    return found


def load(pairs, name):
    theirs, folder = pairs[name]
    return theirs, getattr(zoo, name).from_pretrained(folder)


@pytest.mark.parametrize("name", by_turns(NAMES, 3))
def test_what_a_model_says_of_itself(pairs, name):
    theirs, ours = load(pairs, name)
    for options in ({}, {"exclude_embeddings": True}):
        assert ours.num_parameters(**options) == theirs.num_parameters(**options), options
    ours_body = ours.base_model
    for parameter in ours_body.parameters():
        parameter.requires_grad_(False)
    if name not in ("T5ForConditionalGeneration",):  # transformers' is its own base model.
        for parameter in theirs.base_model.parameters():
            parameter.requires_grad_(False)
        trainable = theirs.num_parameters(only_trainable=True)
        assert ours.num_parameters(only_trainable=True) == trainable
    for parameter in theirs.parameters():
        parameter.requires_grad_(True)
    for attribute in ("base_model_prefix", "main_input_name", "device", "dtype"):
        assert getattr(ours, attribute) == getattr(theirs, attribute), attribute
    assert ours.can_generate() == theirs.can_generate()
    model_output = ours(**ours.dummy_inputs)
    assert len(model_output[0]) == 2
    # Programs look at the direct bases for it.
    assert "GenerationMixin" in str(type(ours).__bases__) or not ours.can_generate()
    has_head = theirs.get_output_embeddings() is not None
    assert (ours.get_output_embeddings() is not None) == has_head
    prefix = theirs.base_model_prefix
    if hasattr(theirs, prefix):
        assert type(getattr(ours, prefix)).__name__ == type(getattr(theirs, prefix)).__name__
    assert not ours.is_gradient_checkpointing
    ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    assert ours.is_gradient_checkpointing
    ours.enable_input_require_grads()
    ours.gradient_checkpointing_disable()
    assert not ours.is_gradient_checkpointing
    ours.add_model_tags(["a", "b"])
    ours.add_model_tags("b")
    assert ours.model_tags == ["a", "b"]
    ours.warnings_issued["x"] = True
    assert ours.warnings_issued == {"x": True}
    assert len(ours._no_split_modules) >= 1


def compare_decoders(theirs, ours, source):
    """Compares two steps with a cache, with and without an encoder's output."""
    for options in ({}, {"encoder_hidden_states": source}):
        past = None
        wanted_past = None
        for part in IDS.split([IDS.shape[1] - 1, 1], 1):
            found = ours(part, past_key_values=past, output_hidden_states=True, **options)
            wanted = theirs(part, past_key_values=wanted_past, **options)
            torch.testing.assert_close(found.last_hidden_state, wanted.last_hidden_state)
            torch.testing.assert_close(found.hidden_states[-1], wanted.last_hidden_state)
            past = found.past_key_values
            wanted_past = wanted.past_key_values
    embeddings = torch.randn(*IDS.shape, source.shape[-1])
    found = ours(inputs_embeds=embeddings, use_cache=False, output_attentions=True)
    assert found.past_key_values is None
    assert found.attentions[0].shape[2:] == (IDS.shape[1], IDS.shape[1])
    assert isinstance(ours(IDS, return_dict=False), tuple)
    with pytest.raises(ValueError, match="needs input_ids or inputs_embeds"):
        ours()


def test_the_model_without_its_head_computes_the_same(pairs):
    theirs, ours = load(pairs, "BertForSequenceClassification")
    mine = ours.bert(IDS)
    expected = theirs.bert(IDS)
    torch.testing.assert_close(mine.last_hidden_state, expected.last_hidden_state)
    torch.testing.assert_close(mine.pooler_output, expected.pooler_output)
    theirs, ours = load(pairs, "T5ForConditionalGeneration")
    encoded = ours.get_encoder()(IDS, attention_mask=torch.ones_like(IDS), return_dict=True)
    expected = theirs.get_encoder()(IDS, attention_mask=torch.ones_like(IDS))
    torch.testing.assert_close(encoded.last_hidden_state, expected.last_hidden_state)
    ours(encoder_outputs=encoded, decoder_input_ids=IDS)
    compare_decoders(theirs.get_decoder(), ours.get_decoder(), encoded.last_hidden_state)
    count = sum(parameter.numel() for parameter in theirs.get_encoder().parameters())
    padded = ours.embedding.weight.numel() - 97 * 32
    assert sum(p.numel() for p in ours.get_encoder().parameters()) - padded == count


@pytest.mark.parametrize("name", by_turns(NAMES, 3))
def test_state_dicts_in_their_names(pairs, name, tmp_path):
    theirs, ours = load(pairs, name)
    state = ours.hf_state_dict()
    expected = theirs.state_dict()
    expected = {key: value for key, value in expected.items() if key != "final_logits_bias"}
    assert state.keys() == expected.keys()
    assert all(torch.equal(state[key], expected[key]) for key in expected)
    other = getattr(zoo, name)(ours.config)
    result = other.load_state_dict(theirs.state_dict())
    assert not result.missing_keys
    for mine, loaded in zip(ours.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, loaded)
    first = next(key for key in state if "norm" in key or "ln_" in key or "LayerNorm" in key)
    broken = {key: value for key, value in state.items() if key != first}
    with pytest.raises(ValueError, match=f"lacks .*{first}"):
        other.load_state_dict(broken)
    assert other.load_state_dict(broken, strict=False).missing_keys == [first]
    # The model's own names stay as they are.
    other.load_state_dict(ours.state_dict())

    changed = {key: value + 1 for key, value in ours.state_dict().items()}
    ours.save_pretrained(tmp_path / "a", state_dict=changed, is_main_process=True)
    key, value = next(iter(load_file(tmp_path / "a/model.safetensors").items()))
    stored = load_file(pairs[name][1] / "model.safetensors")
    bare = key.removeprefix("transformer.")  # as transformers saves a GPT2Model
    torch.testing.assert_close(value, stored[key if key in stored else bare] + 1)
    ours.save_pretrained(tmp_path / "b", is_main_process=False)
    assert not (tmp_path / "b").exists()
    for options, message in (
        ({"safe_serialization": False}, "safetensors alone"),
        ({"variant": "fp16"}, "name another folder"),
        ({"anything": 1}, "no argument 'anything'"),
    ):
        with pytest.raises(ValueError, match=message):
            ours.save_pretrained(tmp_path / "c", **options)


def test_copies(pairs):
    _, ours = load(pairs, "T5ForConditionalGeneration")
    stream = io.BytesIO()
    torch.save(ours, stream)
    stream.seek(0)
    copies = (
        copy.deepcopy(ours),
        pickle.loads(pickle.dumps(ours)),
        torch.load(stream, weights_only=False),
    )
    expected = ours(IDS, decoder_input_ids=IDS).logits
    for other in copies:
        assert torch.equal(other(IDS, decoder_input_ids=IDS).logits, expected)
        assert other.head.weight is other.word_embeddings.weight
        assert other.word_embeddings.weight.shard == ours.word_embeddings.weight.shard
        assert type(other.word_embeddings.weight) is type(ours.word_embeddings.weight)
        next(other.parameters()).data.zero_()
    assert torch.equal(ours(IDS, decoder_input_ids=IDS).logits, expected)


class Logits(torch.nn.Module):
    """Returns a model's logits alone."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, input_ids):
        return self.model(input_ids).logits


@pytest.mark.parametrize("name", ["GPT2LMHeadModel", "BertForSequenceClassification"])
def test_an_exported_program(pairs, name):
    _, ours = load(pairs, name)
    program = torch.export.export(Logits(ours), (IDS,), strict=False)
    other = IDS.flip(1)
    torch.testing.assert_close(program.module()(other), ours(other).logits)


@pytest.mark.parametrize(
    "name", ["GPT2LMHeadModel", "LlamaForCausalLM", "BertForMaskedLM", "T5ForConditionalGeneration"]
)
@pytest.mark.parametrize("count", [203, 90, (None, 8)])
def test_resized_embeddings(pairs, name, count):
    theirs, ours = load(pairs, name)
    theirs = copy.deepcopy(theirs)
    arguments = count if isinstance(count, tuple) else (count,)
    torch.manual_seed(0)
    theirs.resize_token_embeddings(*arguments)
    torch.manual_seed(0)
    assert ours.resize_token_embeddings(*arguments) is ours.get_input_embeddings()
    assert ours.config.vocab_size == theirs.config.vocab_size
    state = ours.hf_state_dict()
    for key, value in theirs.state_dict().items():
        torch.testing.assert_close(state[key], value, rtol=0, atol=1e-6)
    options = {"decoder_input_ids": IDS} if name.startswith("T5") else {}
    logits = ours(input_ids=IDS, **options).logits
    torch.testing.assert_close(
        logits, theirs(input_ids=IDS, **options).logits, rtol=1e-4, atol=1e-4
    )


def test_a_resized_bias_of_the_logits():
    config = zoo.BartConfig(d_model=32, encoder_layers=1, decoder_layers=1, vocab_size=97,
                            encoder_attention_heads=4, decoder_attention_heads=4,
                            final_logits_bias=True)  # fmt: skip
    model = zoo.BartForConditionalGeneration(config)
    model.head.fixed_bias.data.fill_(2.0)
    count = model.num_parameters()
    model.resize_token_embeddings(203)
    assert model.num_parameters() == count + 32 * (203 - 97)
    bias = model.hf_state_dict()["final_logits_bias"]
    assert bias.tolist() == [[2.0] * 97 + [0.0] * (203 - 97)]
    assert model(IDS, decoder_input_ids=IDS).logits.shape == (1, 6, 203)


def resize(mesh, name, folder, saved):
    torch.manual_seed(mesh.rank)
    model = getattr(zoo, name).from_pretrained(folder, mesh)
    model.resize_token_embeddings(203)
    state = model.hf_state_dict()
    parts = model.hf_state_dict(gather=False)
    model.save_pretrained(saved)
    other = getattr(zoo, name)(model.config, mesh=mesh)
    other.load_state_dict(state)
    same = all(
        torch.equal(mine, loaded)
        for mine, loaded in zip(model.parameters(), other.parameters(), strict=True)
    )
    twin = copy.deepcopy(model)
    try:
        pickle.dumps(model)
    except ValueError as error:
        refused = str(error)
    sizes = {key: list(part.shape) for key, part in parts.items()}
    return state, sizes, same, twin.num_parameters(), refused


@pytest.mark.parametrize("name", ["LlamaForCausalLM", "BertForMaskedLM"])
def test_split_models(pairs, name, run_mesh, tmp_path):
    theirs, folder = pairs[name]
    theirs = copy.deepcopy(theirs)
    torch.manual_seed(0)
    theirs.resize_token_embeddings(203)
    expected = theirs.state_dict()
    for state, sizes, same, count, refused in run_mesh(2, resize, name, folder, tmp_path):
        assert state.keys() == expected.keys()
        for key, value in expected.items():
            torch.testing.assert_close(state[key], value, rtol=0, atol=1e-6)
        assert same
        assert count == theirs.num_parameters()
        assert "cannot be pickled" in refused
        query = next(key for key in sizes if "query.weight" in key or "q_proj.weight" in key)
        assert sizes[query] == [16, 32]
    again = getattr(transformers, name).from_pretrained(tmp_path)
    torch.testing.assert_close(again.state_dict(), expected, rtol=0, atol=1e-6)
