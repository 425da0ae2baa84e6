"""What `generate` leaves for a next call, and prompts as embeddings, against transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DynamicCache,
    EncoderDecoderCache,
    StaticCache,
    T5Config,
    T5ForConditionalGeneration,
)

import shardzoo

FAMILIES = ("gpt2", "qwen2", "t5")  # learned positions, a sliding window, an encoder's output


def continue_cases(mesh, folders, ids, masks):
    """On one rank: 5 tokens in two calls, by greedy search and by beams, and the heads of caches."""
    found = {}
    for family in FAMILIES:
        model = shardzoo.from_pretrained(folders[family], mesh)
        mask = masks[family]
        options = {"max_new_tokens": 3, "return_dict_in_generate": True}
        first = model.generate(ids[family], attention_mask=mask, **options)
        past = first.past_key_values
        if family == "t5":
            inputs = {"input_ids": ids[family], "decoder_input_ids": first.sequences}
            assert isinstance(past, EncoderDecoderCache)
        else:
            inputs = {"input_ids": first.sequences}
            mask = torch.nn.functional.pad(mask, (0, 3), value=1)
            assert isinstance(past, DynamicCache)
        assert past.get_seq_length() == first.sequences.shape[1] - 1
        length = past.get_seq_length()
        options["max_new_tokens"] = 2
        again = model.generate(**inputs, attention_mask=mask, past_key_values=past, **options)
        assert again.past_key_values is past  # extended in place
        assert past.get_seq_length() == length + 2
        layers = getattr(past, "self_attention_cache", past).layers
        found[family] = again.sequences, layers[0].keys.shape[1]
    model = shardzoo.from_pretrained(folders["gpt2"], mesh)
    embeddings = model.get_input_embeddings()(ids["gpt2"])
    for beams in (1, 2):
        options = {"attention_mask": masks["gpt2"], "max_new_tokens": 5, "num_beams": beams}
        both = model.generate(ids["gpt2"], inputs_embeds=embeddings, **options)
        alone = model.generate(inputs_embeds=embeddings, **options)
        found[beams] = both, alone
    return found


def test_calls_go_on_from_caches_and_embeddings(saved, prompts, run_mesh):
    made = {family: prompts(4, padded_left=family != "t5") for family in FAMILIES}
    folders = {family: saved(family)[1] for family in FAMILIES}
    ids = {family: made[family][0] for family in FAMILIES}
    masks = {family: made[family][1] for family in FAMILIES}
    given = (folders, ids, masks)
    alone, *split = [continue_cases(None, *given), *run_mesh(2, continue_cases, *given)]
    for found in (alone, *split):
        for family in FAMILIES:
            wanted = saved(family)[0].generate(
                ids[family], attention_mask=masks[family], max_new_tokens=5
            )
            assert torch.equal(found[family][0], wanted), family
        for beams in (1, 2):
            options = {"attention_mask": masks["gpt2"], "max_new_tokens": 5, "num_beams": beams}
            wanted = saved("gpt2")[0].generate(ids["gpt2"], **options)
            both, new = found[beams]
            assert torch.equal(both, wanted)
            assert torch.equal(new, wanted[:, ids["gpt2"].shape[1] :])
    assert all(found["gpt2"][1] < alone["gpt2"][1] for found in split)


def test_caches_that_cannot_be_continued(saved):
    model = shardzoo.from_pretrained(saved("gpt2")[1])
    ids = torch.tensor([[5, 6, 7]])
    past = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True).past_key_values
    for arguments, message in (
        ({"past_key_values": past}, "has 5 positions, so the 3 tokens of the prompt"),
        ({"past_key_values": (ids,)}, "it must be a Cache of transformers"),
        ({"past_key_values": past, "use_cache": False}, "it needs use_cache=True"),
        ({"past_key_values": past, "prompt_lookup_num_tokens": 2}, "a cache of the call's own"),
        ({"inputs_embeds": torch.zeros(1, 2, 64)}, "must be their tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            model.generate(ids, max_new_tokens=2, **arguments)
    options = {"cache_implementation": "static", "return_dict_in_generate": True}
    static = model.generate(ids, max_new_tokens=4, eos_token_id=None, **options).past_key_values
    assert isinstance(static, StaticCache)
    assert static.layers[0].keys.shape[2] == static.get_seq_length() == 6
    plain = model.generate(ids, max_new_tokens=3, use_cache=False, return_dict_in_generate=True)
    assert plain.past_key_values is None


def test_an_encoder_decoder_can_begin_with_nothing():
    """Its encoder reads the token that begins texts, which may be the padding's, as in T5."""
    sizes = {
        "vocab_size": 97,
        "d_model": 16,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 1,
        "num_heads": 2,
    }
    theirs = T5ForConditionalGeneration(T5Config(**sizes, bos_token_id=0)).eval()
    theirs.config.pad_token_id = None
    theirs.generation_config.pad_token_id = None
    ours = shardzoo.models.T5ForConditionalGeneration(theirs.config)
    ours.load_state_dict(theirs.state_dict())
    options = {"max_new_tokens": 4, "min_new_tokens": 4, "do_sample": False}
    assert torch.equal(ours.generate(**options), theirs.generate(**options))
