"""Mistakes and borders: what is refused and how, and what the ends of sequences look like."""

from __future__ import annotations

import os
import time

import pytest
import torch
import transformers

import shardzoo
from shardzoo.generation import GenerationSettings
from shardzoo.models import ParallelConfig


@pytest.fixture(scope="module")
def gpt2(saved):
    return shardzoo.from_pretrained(saved("gpt2")[1])


@pytest.fixture(scope="module")
def t5(saved):
    return shardzoo.from_pretrained(saved("t5")[1])


def ids_of(*shape: int) -> torch.Tensor:
    return torch.randint(3, 261, shape, generator=torch.Generator().manual_seed(3))


def test_the_position_table_ends(gpt2, saved):
    with pytest.raises(
        ValueError, match="the prompt has 49 tokens, but the model has only 48 positions"
    ):
        gpt2.generate(ids_of(1, 49))
    with pytest.raises(
        ValueError,
        match=r"40 prompt tokens and 10 new tokens need 49 .* use max_new_tokens up to 9",
    ):
        gpt2.generate(ids_of(1, 40), max_new_tokens=10)
    assert gpt2.generate(ids_of(1, 40), max_new_tokens=9, min_new_tokens=9).shape == (1, 49)
    # Nobody asked for a length: as many as fit.
    assert gpt2.generate(ids_of(1, 40), min_new_tokens=9).shape == (1, 49)
    assert gpt2.generate(ids_of(1, 48), min_new_tokens=1).shape == (1, 49)


def test_prompts_that_are_empty(gpt2, t5):
    from_bos = gpt2.generate(torch.tensor([[1]]), max_new_tokens=5)
    assert torch.equal(gpt2.generate(max_new_tokens=5), from_bos)
    assert torch.equal(
        gpt2.generate(torch.empty(2, 0, dtype=torch.long), max_new_tokens=5), from_bos.expand(2, -1)
    )
    with pytest.raises(ValueError, match="row 1 of attention_mask has no token"):
        gpt2.generate(ids_of(2, 3), torch.tensor([[1, 1, 1], [0, 0, 0]]))
    with pytest.raises(ValueError, match="an encoder needs at least one token"):
        t5.generate(torch.empty(2, 0, dtype=torch.long))
    with pytest.raises(ValueError, match="pass them, or encoder_outputs"):
        t5.generate()


def test_tokens_that_are_unknown(gpt2, t5):
    for model in (gpt2, t5):
        with pytest.raises(
            ValueError, match=r"input_ids\[1, 2\] is 261, but the vocabulary is 0..260"
        ):
            model.generate(torch.tensor([[3, 4, 5], [3, 4, 261]]))
        with pytest.raises(ValueError, match=r"is -1, but"):
            model.generate(torch.tensor([[-1]]))
    with pytest.raises(ValueError, match="must be integers"):
        gpt2.generate(torch.rand(1, 3))


def test_no_new_tokens(gpt2, t5):
    ids = ids_of(2, 5)
    assert torch.equal(gpt2.generate(ids, max_new_tokens=0), ids)
    assert torch.equal(gpt2.generate(ids, max_new_tokens=0, num_beams=4, num_return_sequences=2),
                       ids.repeat_interleave(2, 0))  # fmt: skip
    assert t5.generate(ids, max_new_tokens=0).tolist() == [[0], [0]]
    with pytest.raises(ValueError, match="max_length=5 leaves none"):
        gpt2.generate(ids, max_length=5)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"num_beams": 4, "num_beam_groups": 2,
                                                            "diversity_penalty": 0.5}])  # fmt: skip
def test_an_end_that_comes_first(gpt2, saved, options):
    ids = ids_of(1, 5)
    first = int(gpt2.generate(ids, max_new_tokens=1)[0, -1])
    found = gpt2.generate(
        ids,
        max_new_tokens=6,
        eos_token_id=first,
        early_stopping=True,
        length_penalty=-5.0,
        **options,
    )
    assert found[0, :6].tolist() == [*ids[0].tolist(), first]
    assert set(found[0, 6:].tolist()) <= {0}
    # In a batch, the other rows go on.
    batch = gpt2.generate(torch.cat([ids, ids_of(1, 5) + 1]), max_new_tokens=6, eos_token_id=first)
    assert batch[0].tolist() == [*ids[0].tolist(), first] + [0] * (batch.shape[1] - 6)


def test_padding_on_the_wrong_side(gpt2):
    with pytest.warns(UserWarning, match="padding_side='left'"):
        gpt2.generate(ids_of(2, 3), torch.tensor([[1, 1, 1], [1, 1, 0]]))
    with pytest.raises(
        ValueError,
        match=r"attention_mask has shape \[2, 4\], but must have that of the ids, \[2, 3\]",
    ):
        gpt2.generate(ids_of(2, 3), torch.ones(2, 4))


def test_arguments_that_are_wrong(gpt2):
    ids = ids_of(1, 3)
    for arguments, message in (
        ({"max_new_token": 3}, "no argument 'max_new_token'; did you mean max_new_tokens"),
        ({"penalty_alpha": 0.6}, "no argument 'penalty_alpha'"),
        (
            {"num_beams": 4, "num_beam_groups": 3, "diversity_penalty": 1.0},
            r"use num_beam_groups from \[1, 2, 4\]",
        ),
        (
            {"num_beams": 4, "num_beam_groups": 2},
            "needs do_sample=False and a diversity_penalty above 0",
        ),
        ({"num_return_sequences": 2}, "must not exceed num_beams=1"),
        ({"early_stopping": "sometimes"}, "must be true, false or 'never'"),
        ({"max_new_tokens": -1}, "max_new_tokens must be at least 0"),
        ({"max_length": "five"}, "max_length must be an integer or null, not 'five'"),
        ({"min_length": 2.5}, "min_length must be an integer, not 2.5"),
        ({"temperature": [1.0]}, r"temperature must be a number, not \[1.0\]"),
        ({"use_cache": "no"}, "use_cache must be true or false, not 'no'"),
        (
            {"eos_token_id": [[1]]},
            r"eos_token_id must be an integer or list\[int\] or null, not \[\[1\]\]",
        ),
        ({"suppress_tokens": 5}, r"suppress_tokens must be list\[int\] or null, not 5"),
        ({"bad_words_ids": "word"}, "bad_words_ids must be"),
        ({"sequence_bias": 3}, "sequence_bias must be"),
        ({"stop_strings": ["x"]}, "needs the tokenizer"),
        ({"temperature": 0.0, "do_sample": True}, "has to be a strictly positive float"),
    ):
        with pytest.raises(ValueError, match=message):
            gpt2.generate(ids, **arguments)


def test_settings_come_from_three_places(gpt2):
    ids = ids_of(2, 4)
    wanted = gpt2.generate(ids, max_new_tokens=5, num_beams=2)
    for config in (
        transformers.GenerationConfig(max_new_tokens=9, num_beams=2),
        {"max_new_tokens": 9, "num_beams": 2, "transformers_version": "5.0.0"},
        GenerationSettings(max_new_tokens=9, num_beams=2),
    ):
        assert torch.equal(gpt2.generate(ids, generation_config=config, max_new_tokens=5), wanted)
    with pytest.raises(ValueError, match="no argument 'guidance_scale'"):
        gpt2.generate(ids, generation_config=transformers.GenerationConfig(guidance_scale=2.0))


def test_models_that_cannot(saved):
    split = shardzoo.from_pretrained(
        saved("gpt2")[1], parallel_config=ParallelConfig(sequence_parallel=True)
    )
    with pytest.raises(ValueError, match="without sequence parallelism"):
        split.generate(ids_of(1, 3))
    bert = shardzoo.from_config({"model_type": "bert", "hidden_size": 8, "num_attention_heads": 2,
                                 "num_hidden_layers": 1, "intermediate_size": 8, "vocab_size": 20})  # fmt: skip
    with pytest.raises(
        ValueError, match=r"BertForMaskedLM generates no text; see generation\.fill_mask"
    ):
        bert.generate(ids_of(1, 3))


def test_dropout_is_off_and_training_goes_on(gpt2):
    ids = ids_of(2, 4)
    wanted = gpt2.generate(ids, max_new_tokens=5)
    gpt2.train()
    try:
        assert torch.equal(gpt2.generate(ids, max_new_tokens=5), wanted)
        assert gpt2.training
        assert gpt2.blocks[0].training
    finally:
        gpt2.eval()


def test_the_callers_own_rules(gpt2):
    class Only(transformers.LogitsProcessor):
        def __call__(self, input_ids, scores):
            return scores.masked_fill(torch.arange(261) != 77, float("-inf"))

    class AfterThree(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.full((len(input_ids),), input_ids.shape[1] >= 6)

    ids = ids_of(1, 3)
    found = gpt2.generate(
        ids, logits_processor=[Only()], stopping_criteria=[AfterThree()], max_new_tokens=9
    )
    assert found[0, 3:].tolist() == [77, 77, 77]
    found = gpt2.generate(
        ids, prefix_allowed_tokens_fn=lambda batch, row: [20 + len(row)], max_new_tokens=3
    )
    assert found[0, 3:].tolist() == [23, 24, 25]


def test_a_streamer_gets_every_token(gpt2):
    class Kept(transformers.generation.streamers.BaseStreamer):
        def __init__(self):
            self.parts, self.ended = [], False

        def put(self, value):
            self.parts.append(value)

        def end(self):
            self.ended = True

    kept, ids = Kept(), ids_of(1, 3)
    found = gpt2.generate(ids, streamer=kept, max_new_tokens=4)
    assert torch.equal(torch.cat([part.flatten() for part in kept.parts]), found[0])
    assert kept.ended
    with pytest.raises(ValueError, match="beam search chooses its tokens only at the end"):
        gpt2.generate(ids, streamer=kept, num_beams=2)


def with_little_time(mesh, folder, ids):
    model = shardzoo.from_pretrained(folder, mesh)
    if mesh.tp_rank == 1:  # its clock is far ahead

        class Fast:
            time = staticmethod(lambda: time.time() + 1e6 * os.urandom(1)[0])

        import transformers.generation.stopping_criteria as criteria

        criteria.time = Fast
    return model.generate(ids, max_new_tokens=8, min_new_tokens=8, max_time=1e4)


def test_ranks_whose_clocks_differ_stop_together(saved, run_mesh):
    first, second = run_mesh(2, with_little_time, saved("gpt2")[1], ids_of(1, 4), isolated=True)
    assert torch.equal(first, second)
    assert first.shape == (1, 12)


def die_while_decoding(mesh, folder, ids):
    class Death(transformers.StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            if mesh.tp_rank == 1 and input_ids.shape[1] == 6:
                os._exit(9)
            return torch.zeros(len(input_ids), dtype=torch.bool)

    model = shardzoo.from_pretrained(folder, mesh)
    model.generate(ids, stopping_criteria=[Death()], max_new_tokens=12)


def test_a_rank_that_dies_takes_the_others_along(saved, run_mesh):
    start = time.monotonic()
    with pytest.raises(AssertionError) as failure:
        run_mesh(2, die_while_decoding, saved("gpt2")[1], ids_of(1, 4), isolated=True)
    assert "rank 1 of 2 failed:\nthe process died with exit code 9" in str(failure.value)
    assert "rank 0 of 2 failed" in str(
        failure.value
    )  # an error of the collective, not a wait without end
    assert time.monotonic() - start < 30


def test_scores_that_are_not_finite(saved):
    model = shardzoo.from_pretrained(saved("gpt2")[1])
    with torch.no_grad():
        model.final_norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="scores are not finite"):
        model.generate(ids_of(1, 3), do_sample=True)
