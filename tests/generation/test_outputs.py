"""What `generate` takes and returns beside tokens is transformers': scores, logits, states, beams, and arguments."""

from __future__ import annotations

import pytest
import torch
import transformers
from repetition import generate_as_newest

import shardzoo
from shardzoo import generation

ALL = {
    "return_dict_in_generate": True,
    "output_scores": True,
    "output_logits": True,
    "output_hidden_states": True,
    "output_attentions": True,
}
# (family, options)
CASES = {
    "greedy": ("gpt2", {"repetition_penalty": 1.3}),
    "several": ("t5", {"eos_token_id": list(range(7, 40))}),
    "beams": ("gpt2", {"num_beams": 3, "num_return_sequences": 2, "eos_token_id": list(range(7, 40))}),
    "answer": ("t5", {"num_beams": 2, "length_penalty": 0.5}),
    "no cache": ("gpt2", {"use_cache": False}),
}  # fmt: skip
FIELDS = ("scores", "logits")
WEIGHTS = ("attentions", "decoder_attentions", "cross_attentions")
STATES = ("hidden_states", "decoder_hidden_states")


def decode_cases(mesh, folders, ids, masks):
    found = {}
    for name, (family, options) in CASES.items():
        model = shardzoo.from_pretrained(folders[family], mesh)
        output = model.generate(
            ids[family], attention_mask=masks[family], max_new_tokens=6, **ALL, **options
        )
        scores = model.compute_transition_scores(
            output.sequences, output.scores, output.get("beam_indices"), normalize_logits=True
        )
        found[name] = dict(output.items()), scores
    return found


@pytest.fixture(scope="module")
def inputs(saved, prompts):
    families = ("gpt2", "t5")
    made = {family: prompts(4, padded_left=family == "gpt2") for family in families}
    return (
        {family: saved(family)[1] for family in families},
        {family: made[family][0] for family in families},
        {family: made[family][1] for family in families},
    )


def test_fields_are_those_of_transformers(saved, inputs, run_mesh):
    _, ids, masks = inputs
    everywhere = [decode_cases(None, *inputs), *run_mesh(3, decode_cases, *inputs)]
    for name, (family, options) in CASES.items():
        reference = saved(family)[0]
        reference.set_attn_implementation("eager")
        wanted = generate_as_newest(
            reference, ids[family], masks[family], max_new_tokens=6, **ALL, **options
        )
        transitions = reference.compute_transition_scores(
            wanted.sequences, wanted.scores, wanted.get("beam_indices"), normalize_logits=True
        )
        keys = list(wanted)
        for place in everywhere:
            output, scores = place[name]
            assert list(output) == keys, name
            if "beam_indices" in keys:
                # transformers fills with the end token where the padding token is 0.
                real = wanted.beam_indices >= 0
                start = wanted.sequences.shape[1] - real.shape[1]
                assert torch.equal(
                    output["sequences"][:, start:][real], wanted.sequences[:, start:][real]
                )
                assert torch.equal(output["beam_indices"], wanted.beam_indices)
                torch.testing.assert_close(output["sequences_scores"], wanted.sequences_scores)
            else:
                assert torch.equal(output["sequences"], wanted.sequences)
            torch.testing.assert_close(scores, transitions, rtol=1e-4, atol=1e-4)
            for key in FIELDS:
                assert len(output[key]) == len(wanted[key])
                for own, theirs in zip(output[key], wanted[key], strict=True):
                    torch.testing.assert_close(own, theirs, rtol=1e-4, atol=1e-4)
            for key in set(WEIGHTS) & set(keys):
                assert len(output[key]) == len(wanted[key])
                for own, theirs in zip(output[key], wanted[key], strict=True):
                    compare_weights(own, theirs, None if family == "t5" else masks[family])
            for key in set(STATES) & set(keys):
                for own, theirs in zip(output[key], wanted[key], strict=True):
                    compare_states(own, theirs, masks[family] if family == "gpt2" else None)
            if family == "t5":
                for own, theirs in zip(
                    output["encoder_hidden_states"], wanted.encoder_hidden_states, strict=True
                ):
                    real = masks[family].bool()
                    torch.testing.assert_close(own[real], theirs[real], rtol=1e-4, atol=1e-4)


def compare_weights(own, theirs, mask):
    """Those of padded queries have no meaning."""
    assert len(own) == len(theirs)
    for mine, wanted in zip(own, theirs, strict=True):
        assert mine.shape == wanted.shape
        real = torch.ones(len(wanted), wanted.shape[2], dtype=torch.bool)
        if mask is not None and wanted.shape[2] >= mask.shape[1]:
            real[:, : mask.shape[1]] = mask.bool().repeat_interleave(len(wanted) // len(mask), 0)
        torch.testing.assert_close(
            mine.transpose(1, 2)[real], wanted.transpose(1, 2)[real], rtol=1e-4, atol=1e-5
        )


def compare_states(own, theirs, mask):
    """Those of padding have no meaning."""
    assert len(own) == len(theirs)
    for mine, wanted in zip(own, theirs, strict=True):
        assert mine.shape == wanted.shape
        real = torch.ones(wanted.shape[:2], dtype=torch.bool)
        if mask is not None and wanted.shape[1] >= mask.shape[1]:
            copies = len(wanted) // len(mask)
            real[:, : mask.shape[1]] = mask.bool().repeat_interleave(copies, 0)
        torch.testing.assert_close(mine[real], wanted[real], rtol=1e-4, atol=1e-4)


def test_an_output_is_indexed_like_transformers(saved):
    model = shardzoo.from_pretrained(saved("gpt2")[1])
    ids = torch.tensor([[5, 6, 7]])
    output = model.generate(ids, max_new_tokens=3, return_dict_in_generate=True, output_scores=True)
    assert isinstance(output, transformers.generation.GenerateDecoderOnlyOutput)
    assert isinstance(output, generation.GenerateDecoderOnlyOutput)
    assert output[0] is output.sequences
    assert output["scores"] is output.scores
    assert output.logits is None
    assert not output.sequences.is_inference()
    again = model.generate(ids, max_new_tokens=3, output_scores=True)
    assert torch.equal(again, output.sequences)  # as in transformers, without a dict no scores


def arguments_cases(mesh, folders, ids, types, processor, criterion):
    gpt2, t5 = (shardzoo.from_pretrained(folders[name], mesh) for name in ("gpt2", "t5"))
    config = transformers.GenerationConfig(max_new_tokens=5, num_beams=2)
    marks = transformers.WatermarkingConfig(bias=4.0, context_width=1)
    prompts = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(8))
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    width = gpt2.config.n_embd
    return {
        "embeddings": gpt2.generate(
            inputs_embeds=prompts[..., :width], attention_mask=mask, max_new_tokens=5, num_beams=2
        ),
        "greedy embeddings": gpt2.generate(inputs_embeds=prompts[..., :width], max_length=9),
        "source embeddings": t5.generate(inputs_embeds=prompts[..., :24], max_new_tokens=5),
        "by position": gpt2.generate(ids, config),
        "inputs": gpt2.generate(inputs=ids, max_new_tokens=5),
        "types": gpt2.generate(input_ids=ids, token_type_ids=types, max_new_tokens=5, num_beams=2),
        "positions": gpt2.generate(ids, position_ids=torch.arange(3, 9)[None], max_new_tokens=5),
        "right": gpt2.generate(ids, attention_mask=(types == 0).long(), max_new_tokens=5),
        "watermark": gpt2.generate(ids, watermarking_config=marks, max_new_tokens=5),
        "lists": t5.generate(
            ids, token_type_ids=types * 0, logits_processor=transformers.LogitsProcessorList([processor]),
            stopping_criteria=transformers.StoppingCriteriaList([criterion]), max_new_tokens=9,
            return_dict_in_generate=True, output_scores=True,
        ).sequences,
    }  # fmt: skip


class Shift(transformers.LogitsProcessor):
    """Moves all scores by one token, for which the whole vocabulary is needed."""

    def __call__(self, input_ids, scores):
        assert scores.shape[1] == 261
        return scores.roll(1, 1)


class Likely(transformers.StoppingCriteria):
    """Ends a sequence by the scores of its steps."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), len(scores) == 4)


@pytest.mark.filterwarnings("ignore:prompts to be continued are padded on the right")
def test_arguments_mean_what_they_mean_to_transformers(saved, inputs, run_mesh):
    ids = torch.randint(3, 261, (2, 6), generator=torch.Generator().manual_seed(7))
    types = torch.tensor([[0, 0, 0, 0, 0, 0], [0, 0, 0, 0, 1, 1]])
    gpt2, t5 = saved("gpt2")[0], saved("t5")[0]
    processor, criterion = Shift(), Likely()
    given = (inputs[0], ids, types, processor, criterion)
    config = transformers.GenerationConfig(max_new_tokens=5, num_beams=2)
    marks = transformers.WatermarkingConfig(bias=4.0, context_width=1)
    prompts = torch.randn(2, 5, 64, generator=torch.Generator().manual_seed(8))
    mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
    width = gpt2.config.n_embd
    wanted = {
        "embeddings": gpt2.generate(
            inputs_embeds=prompts[..., :width], attention_mask=mask, max_new_tokens=5, num_beams=2
        ),
        "greedy embeddings": gpt2.generate(inputs_embeds=prompts[..., :width], max_length=9),
        "source embeddings": t5.generate(inputs_embeds=prompts[..., :24], max_new_tokens=5),
        "by position": gpt2.generate(ids, config),
        "inputs": gpt2.generate(ids, max_new_tokens=5),
        "types": gpt2.generate(ids, token_type_ids=types, max_new_tokens=5, num_beams=2),
        "positions": gpt2.generate(ids, position_ids=torch.arange(3, 9)[None].expand(2, -1), max_new_tokens=5),
        "right": gpt2.generate(ids, attention_mask=(types == 0).long(), max_new_tokens=5),
        "watermark": gpt2.generate(ids, watermarking_config=marks, max_new_tokens=5),
        "lists": t5.generate(
            ids, logits_processor=[processor], stopping_criteria=[criterion], max_new_tokens=9,
            return_dict_in_generate=True, output_scores=True,
        ).sequences,
    }  # fmt: skip
    for found in (arguments_cases(None, *given), *run_mesh(2, arguments_cases, *given)):
        for name, tokens in wanted.items():
            assert torch.equal(found[name], tokens), name


def test_what_cannot_be_meant_is_refused(saved):
    model = shardzoo.from_pretrained(saved("gpt2")[1])
    ids = torch.tensor([[5, 6, 7], [8, 9, 10]])
    for arguments, message in (
        ({"cache_implementation": "quantized"}, "the names that change nothing are dynamic"),
        ({"synced_gpus": True}, "gather each other's parameters"),
        ({"custom_generate": "org/name"}, "decoding runs no code of others"),
        ({"negative_prompt_ids": ids}, "second forward pass"),
        ({"input_ids": ids}, "the same argument"),
        ({"decoder_input_ids": ids}, "generates without decoder_input_ids"),
        ({"position_ids": ids[:, 1:]}, "position_ids must be"),
        ({"output_score": True}, "did you mean output_scores"),
        ({"output_scores": 1}, "output_scores must be true or false"),
        (
            {"num_beams": 2, "num_beam_groups": 2, "diversity_penalty": 0.5, **ALL},
            "diverse beam search keeps no scores",
        ),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=message):
            model.generate(ids, **arguments)
    llama = shardzoo.from_pretrained(saved("llama")[1])
    with pytest.raises(ValueError, match="has no token types"):
        llama.generate(ids, token_type_ids=ids)
    with pytest.warns(UserWarning, match="padded on the right"):
        model.generate(ids, torch.tensor([[1, 1, 1], [1, 1, 0]]), max_new_tokens=1)
    neutral = {
        "synced_gpus": False, "cache_implementation": "static", "logits_to_keep": 1, "guidance_scale": 1.0,
        "disable_compile": True, "max_cache_len": 9, "trust_remote_code": False, "past_key_values": None,
    }  # fmt: skip
    plain = model.generate(ids, max_new_tokens=3)
    assert torch.equal(model.generate(ids, max_new_tokens=3, **neutral), plain)
    model.generation_config = transformers.GenerationConfig(max_new_tokens=3)
    assert torch.equal(model.generate(ids), plain)
    assert model.generation_config.update(num_beams=2, other=1) == {"other": 1}
    assert model.generation_config.num_beams == 2
