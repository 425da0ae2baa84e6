"""Decoding loops that hand transformers' caches from call to call, against transformers."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
from tiny_models import hf_model, tiny
from transformers import DynamicCache, EncoderDecoderCache, StaticCache

import shardzoo
from shardzoo.models import ParallelConfig

DECODERS = ("GPT2LMHeadModel", "LlamaForCausalLM", "MistralForCausalLM", "BartForCausalLM")
SEQ2SEQ = (
    "T5ForConditionalGeneration",
    "UMT5ForConditionalGeneration",
    "M2M100ForConditionalGeneration",
)
TOLERANCE = {"rtol": 2e-4, "atol": 2e-5}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Finds transformers' model and our folder of it, by architecture."""
    made = {}

    def find(architecture):
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            theirs = hf_model(architecture, 0.0, initializer_range=0.3).eval()
            theirs.save_pretrained(folder)
            made[architecture] = theirs, folder
        return made[architecture]

    return find


def make_ids(shape, seed=0):
    return torch.randint(3, 90, shape, generator=torch.Generator().manual_seed(seed))


def decode(model, past=None, calls=(6, 1, 1, 3)):
    """Logits of a loop over parts of a text, whose second row is padded on the left, and its cache."""
    ids, mask = make_ids((2, sum(calls))), torch.ones(2, sum(calls), dtype=torch.long)
    mask[1, :2] = 0
    logits, start = [], 0
    for length in calls:
        stop = start + length
        output = model(
            input_ids=ids[:, start:stop],
            attention_mask=mask[:, :stop],
            past_key_values=past,
            use_cache=True,
        )
        past = output.past_key_values
        assert past.get_seq_length() == stop
        logits.append(getattr(model, "gather_logits", lambda x: x)(output.logits))
        start = stop
    return torch.cat(logits, 1), past


def answer(model, past=None, calls=(2, 1, 1)):
    """Logits of a loop over parts of an answer."""
    encoded = model.encode if hasattr(model, "encode") else model.get_encoder()
    ids, mask = make_ids((2, 6)), torch.ones(2, 6, dtype=torch.long)
    mask[1, 4:] = 0
    source = encoded(ids, mask)
    target, logits, start = make_ids((2, sum(calls)), 1), [], 0
    for length in calls:
        output = model(
            encoder_outputs=source,
            attention_mask=mask,
            decoder_input_ids=target[:, start : start + length],
            past_key_values=past,
            use_cache=True,
        )
        past = output.past_key_values
        logits.append(getattr(model, "gather_logits", lambda x: x)(output.logits))
        start += length
    return torch.cat(logits, 1), past


@torch.no_grad()
def loop_on_rank(mesh, folder, function):
    model = shardzoo.from_pretrained(folder, mesh).eval()
    logits, past = function(model)
    heads = getattr(past, "self_attention_cache", past).layers[0].keys.shape[1]
    return logits, type(past).__name__, heads


@pytest.mark.parametrize("architecture", [*DECODERS, *SEQ2SEQ])
def test_a_loop_gives_the_logits_of_transformers(architecture, models, run_mesh):
    theirs, folder = models(architecture)
    function = answer if architecture in SEQ2SEQ else decode
    with torch.no_grad():
        expected, past = function(theirs)
    results = [loop_on_rank(None, folder, function)]
    if architecture in ("GPT2LMHeadModel", "LlamaForCausalLM", "T5ForConditionalGeneration"):
        results += run_mesh(2, loop_on_rank, folder, function)
    keep = slice(None)
    if function is decode:
        keep = torch.ones(2, 11, dtype=torch.bool)
        keep[1, :2] = False  # padding
    for logits, kind, _ in results:
        torch.testing.assert_close(logits[keep], expected[keep], **TOLERANCE)
        assert kind == ("EncoderDecoderCache" if function is answer else "DynamicCache")
    whole = getattr(past, "self_attention_cache", past).layers[0].keys.shape[1]
    assert [heads for *_, heads in results[1:]] in ([], [whole // 2] * 2)


@torch.no_grad()
def test_caches_that_the_caller_makes(models):
    theirs, folder = models("MistralForCausalLM")  # of a sliding window
    ours = shardzoo.from_pretrained(folder).eval()
    expected = decode(theirs)[0]
    for past in (
        DynamicCache(),
        DynamicCache(config=theirs.config),
        StaticCache(theirs.config, 16),
    ):
        logits, again = decode(ours, past, calls=(6, 1, 1, 1, 1, 1))
        assert again is past
        torch.testing.assert_close(logits[0], expected[0], **TOLERANCE)
    theirs, folder = models("T5ForConditionalGeneration")
    ours = shardzoo.from_pretrained(folder).eval()
    expected = answer(theirs)[0]
    for past in (DynamicCache(), EncoderDecoderCache(DynamicCache(), DynamicCache())):
        logits, again = answer(ours, past)
        torch.testing.assert_close(logits, expected, **TOLERANCE)
        assert all(again.is_updated.values())
        # A cache of transformers' goes on in our model: both hold the same keys and values.
    _, past = answer(theirs, calls=(3,))
    torch.testing.assert_close(
        again.cross_attention_cache.layers[0].keys,
        past.cross_attention_cache.layers[0].keys,
        **TOLERANCE,
    )


@torch.no_grad()
def test_a_cache_has_the_name_of_later_releases_too(models):
    """transformers 5.24 has renamed `past_key_values`, in calls and in outputs, to `cache`."""
    theirs, folder = models("GPT2LMHeadModel")
    ours = shardzoo.from_pretrained(folder).eval()
    ids = make_ids((2, 9))
    first = ours(ids[:, :6])
    assert "cache" in first
    assert first.cache is first["cache"] is first.get("cache") is first.past_key_values
    given = ours.prepare_inputs_for_generation(ids, 3, cache=first.cache)
    assert list(given) == ["input_ids", "cache"]
    second = ours(**given)
    assert second.cache is first.cache
    torch.testing.assert_close(second.logits, theirs(ids).logits[:, 6:], **TOLERANCE)
    wanted = ours.generate(ids, max_new_tokens=4)
    begun = ours(ids[:, :6]).cache
    assert torch.equal(ours.generate(ids, max_new_tokens=4, cache=begun), wanted)
    assert begun.get_seq_length() == 12
    assert ours(ids, cache=None, use_cache=False).cache is None
    bert = shardzoo.from_config(tiny("bert", architectures=["BertModel"])).eval()
    assert torch.equal(bert(ids, cache=None)[0], bert(ids, past_key_values=None)[0])
    assert not hasattr(bert(ids), "logits")
    with pytest.raises(ValueError, match="must be a Cache of transformers"):
        ours(ids, cache=((ids, ids),))
    with pytest.raises(TypeError, match="two caches, cache and past_key_values"):
        ours(ids, cache=begun, past_key_values=begun)
    with pytest.raises(ValueError, match="cache and past_key_values are the same argument"):
        ours.generate(ids, cache=begun, past_key_values=begun)


@torch.no_grad()
def test_a_decoder_alone_takes_both_names_of_a_cache(models):
    _, folder = models("T5ForConditionalGeneration")
    decoder = shardzoo.from_pretrained(folder).eval().get_decoder()
    ids, source = make_ids((2, 5)), torch.randn(2, 3, 32)
    whole = decoder(ids, encoder_hidden_states=source).last_hidden_state
    for name in ("past_key_values", "cache"):
        past = decoder(ids[:, :3], encoder_hidden_states=source, use_cache=True).cache
        rest = decoder(ids[:, 3:], encoder_hidden_states=source, **{name: past})
        torch.testing.assert_close(rest.last_hidden_state, whole[:, 3:], **TOLERANCE)


def test_what_cannot_have_a_cache(models):
    _, folder = models("GPT2LMHeadModel")
    ids = make_ids((2, 5))
    model = shardzoo.from_pretrained(folder).eval()
    assert model(ids, use_cache=False).past_key_values is None
    assert model(ids, labels=ids).past_key_values is None
    assert model.train()(ids).past_key_values is None
    model.eval().config.use_cache = False
    assert model(ids).past_key_values is None
    with pytest.raises(
        ValueError, match="past_key_values must be a Cache of transformers, such as"
    ):
        model(ids, past_key_values=((ids, ids),))
    config = ParallelConfig(recompute="full")
    model = shardzoo.from_pretrained(folder, parallel_config=config).train()
    with pytest.warns(UserWarning, match="use_cache=True has no effect with recomputation"):
        assert model(ids, labels=ids, use_cache=True).past_key_values is None
    with pytest.raises(ValueError, match="cannot be used with recomputation"):
        model(ids, past_key_values=DynamicCache())
    config = ParallelConfig(sequence_parallel=True)
    model = shardzoo.from_pretrained(folder, parallel_config=config).eval()
    with pytest.raises(ValueError, match="a cache needs the whole sequence on each rank"):
        model(ids, use_cache=True)


@pytest.mark.before_release
def test_a_call_without_a_cache_does_not_import_transformers():
    program = (
        "import sys, torch, shardzoo\n"
        "sizes = {'n_embd': 8, 'n_head': 2, 'n_layer': 1, 'vocab_size': 9}\n"
        "model = shardzoo.from_config({'model_type': 'gpt2', **sizes})\n"
        "output = model.eval()(torch.arange(4)[None], output_attentions=True)\n"
        "assert 'past_key_values' in output\n"
        "sys.exit('transformers' in sys.modules)\n"
    )
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
