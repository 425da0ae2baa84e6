"""Drafted tokens save forward passes, and change no token: greedy and sampled, split and unsplit."""

from __future__ import annotations

import pytest
import torch
from every_case import every_day

import shardzoo

ENDS = list(range(7, 20))
CASES = {
    "assistant": {},
    "the model itself": {"is_same": True, "assistant_confidence_threshold": 0.0},
    "no threshold, a long schedule": {
        "num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic", "assistant_confidence_threshold": 0.0,
    },
    "lookup": {"prompt_lookup_num_tokens": 4},
    "lookup, penalty, ends": {"prompt_lookup_num_tokens": 3, "max_matching_ngram_size": 3, "repetition_penalty": 1.2,
                              "eos_token_id": ENDS},
    "assistant, ngrams": {"no_repeat_ngram_size": 2, "assistant_confidence_threshold": 0.0},
    "sampled": {"is_same": True, "assistant_confidence_threshold": 0.0, "do_sample": True, "seed": 5, "top_k": 20},
    "sampled lookup": {"prompt_lookup_num_tokens": 4, "do_sample": True, "seed": 6, "temperature": 0.7},
}  # fmt: skip


class Kept:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True


def count_passes(model, passes):
    return model.register_forward_pre_hook(lambda *_: passes.append(1))


def decode_cases(mesh, folders, ids, mask, is_whole):
    """Returns what each case decodes and how often it calls the model, with drafts and without."""
    model = shardzoo.from_pretrained(folders[0], mesh)
    assistant = shardzoo.from_pretrained(folders[1], None if is_whole else mesh)
    found = {}
    for name, case in CASES.items():
        options = {"attention_mask": mask, "max_new_tokens": 16, "return_dict_in_generate": True, "output_scores": True,
                   "output_hidden_states": True, **case}  # fmt: skip
        helper = model if options.pop("is_same", False) else assistant
        drafts = {
            key: options.pop(key)
            for key in list(options)
            if key.startswith(("prompt_", "max_m", "assist", "num_a"))
        }
        if "prompt_lookup_num_tokens" not in drafts and helper is not model:
            drafts["assistant_model"] = helper
        elif "prompt_lookup_num_tokens" not in drafts:
            # A copy that shares the weights, so that its passes are not counted.
            drafts["assistant_model"] = (
                assistant
                if mesh is None and is_whole
                else shardzoo.from_pretrained(folders[0], mesh)
            )
        passes, streamer = [], Kept()
        hook = count_passes(model, passes)
        plain = model.generate(ids, **options)
        few = len(passes)
        passes.clear()
        drafted = model.generate(ids, streamer=streamer, **options, **drafts)
        hook.remove()
        states = "hidden_states" if "hidden_states" in plain else "decoder_hidden_states"
        shapes = [[tuple(part.shape) for part in step] for step in drafted[states]]
        assert shapes == [[tuple(part.shape) for part in step] for step in plain[states]], name
        for one, other in zip(plain[states], drafted[states], strict=True):
            torch.testing.assert_close(one[-1][:, -1], other[-1][:, -1], rtol=1e-4, atol=1e-4)
        assert len(plain.scores) == len(drafted.scores)
        for one, other in zip(plain.scores, drafted.scores, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
        if mesh is None or mesh.tp_rank == 0:
            assert streamer.tokens == drafted.sequences.flatten().tolist()
            assert streamer.ended
        found[name] = plain.sequences, drafted.sequences, few, len(passes)
    return found


@pytest.mark.parametrize("family", every_day(["llama"], more=["t5", "gpt2"]))
def test_tokens_are_those_without_drafts(family, saved, tmp_path_factory, run_mesh):
    reference, folder = saved(family)
    is_decoder = family != "t5"
    # An assistant that often agrees: the model with a little noise.
    noisy = shardzoo.from_pretrained(folder)
    with torch.no_grad():
        for parameter in noisy.parameters():
            parameter += 0.02 * torch.randn(
                parameter.shape, generator=torch.Generator().manual_seed(1)
            )
    near = tmp_path_factory.mktemp("near")
    noisy.save_pretrained(near)
    ids = torch.randint(30, 261, (1, 7), generator=torch.Generator().manual_seed(2)).repeat(1, 2)
    mask = torch.ones_like(ids)
    mask[:, :2] = 0 if is_decoder else 1
    folders = (folder, near)
    places = [decode_cases(None, folders, ids, mask, False)]
    if family != "llama":
        places += run_mesh(
            2 if family == "t5" else 3, decode_cases, folders, ids, mask, family == "t5"
        )
    for found in places:
        for name, (plain, drafted, few, fewer) in found.items():
            assert torch.equal(plain, drafted), name
            assert torch.equal(plain, places[0][name][0]) or "sampled" in name
            assert fewer <= few, name
        assert found["the model itself"][3] < found["the model itself"][2] / 3
        assert found["sampled"][3] < found["sampled"][2] / 3
    # transformers' own loop with the same drafts takes as many passes.
    wanted = reference.generate(
        ids, attention_mask=mask, max_new_tokens=16, prompt_lookup_num_tokens=4
    )
    assert torch.equal(places[0]["lookup"][1], wanted)


def test_what_cannot_be_assisted_is_refused(saved):
    gpt2, llama, t5 = (shardzoo.from_pretrained(saved(name)[1]) for name in ("gpt2", "llama", "t5"))
    small = shardzoo.from_config(
        {"model_type": "gpt2", "vocab_size": 50, "n_embd": 8, "n_head": 2, "n_layer": 1}
    )
    ids = torch.tensor([[5, 6, 7]])
    for options, message in (
        ({"assistant_model": t5}, "needs a model of the zoo that generates as it does"),
        ({"assistant_model": saved("gpt2")[0]}, "needs a model of the zoo"),
        ({"assistant_model": small}, "has a vocabulary of 50 tokens, but the model has 261"),
        ({"assistant_model": llama, "num_beams": 2}, "makes one sequence"),
        ({"assistant_model": llama, "use_cache": False}, "needs use_cache=True"),
        ({"assistant_model": llama, "prompt_lookup_num_tokens": 2}, "not both"),
        ({"prompt_lookup_num_tokens": 0}, "must be an integer of at least 1"),
        (
            {"assistant_model": llama, "num_assistant_tokens_schedule": "often"},
            "must be constant, heuristic",
        ),
        (
            {"assistant_model": llama, "assistant_tokenizer": object()},
            "must have the model's vocabulary",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            gpt2.generate(ids, **options)
    with pytest.raises(ValueError, match="for one prompt, not 2"):
        gpt2.generate(ids.repeat(2, 1), assistant_model=llama)
    # An assistant with fewer positions drafts as long as it can.
    plain = gpt2.generate(ids, max_new_tokens=20)
    assert torch.equal(gpt2.generate(ids, max_new_tokens=20, assistant_model=llama), plain)
