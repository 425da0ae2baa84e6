"""Arguments by position mean what they mean to transformers' class of the same name."""

from __future__ import annotations

import inspect

import pytest
import torch
from matrix import find_class
from tiny_models import hf_model, tiny

import shardzoo
from shardzoo.models import FAMILIES, family

# What transformers 5.24 has renamed, and the zoo's classes take by both names.
LATER_NAMES = {"cache": "past_key_values"}
CLASSES = [
    found
    for name in FAMILIES
    if family(name).in_transformers
    for found in family(name).architectures.values()
]


@pytest.mark.parametrize("found", CLASSES, ids=lambda found: found.__name__)
def test_the_order_is_that_of_transformers(found):
    theirs = find_class(found.__name__)
    names = [
        LATER_NAMES.get(parameter.name, parameter.name)
        for parameter in inspect.signature(theirs.forward).parameters.values()
        if parameter.kind == parameter.POSITIONAL_OR_KEYWORD
    ]
    ours = found.positional_inputs + found.label_names
    assert ours == tuple(names[1 : 1 + len(ours)])
    labels = {"labels", "start_positions", "end_positions", "next_sentence_label"}
    assert labels & set(names) == labels & set(ours)


def both(architecture: str, tmp_path, **changes):
    model = hf_model(architecture, 0.0, initializer_range=0.5, **changes).eval()
    model.save_pretrained(tmp_path)
    return model, shardzoo.from_pretrained(tmp_path)


def test_calls_by_position_compute_the_same(tmp_path):
    ids = torch.randint(3, 90, (2, 3, 9), generator=torch.Generator().manual_seed(0))
    types, mask = torch.zeros_like(ids), torch.ones_like(ids)
    types[..., 4:] = 1
    mask[..., 6:] = 0
    theirs, ours = both("RobertaForMultipleChoice", tmp_path / "a", type_vocab_size=2)
    torch.testing.assert_close(ours(ids, types, mask).logits, theirs(ids, types, mask).logits)
    theirs, ours = both("GPT2ForQuestionAnswering", tmp_path / "b")
    rows = (ids[:, 0], mask[:, 0], types[:, 0])
    torch.testing.assert_close(ours(*rows).start_logits, theirs(*rows).start_logits)
    theirs, ours = both("GPT2LMHeadModel", tmp_path / "c")
    rows = (ids[:, 0], None, mask[:, 0], types[:, 0])
    torch.testing.assert_close(ours(*rows).logits, theirs(*rows).logits)
    theirs = hf_model("T5ForConditionalGeneration", 0.0).eval()
    theirs.save_pretrained(tmp_path / "d")
    ours = shardzoo.from_pretrained(tmp_path / "d")
    encoded = (ours.encode(ids[:, 0]).last_hidden_state,)
    given = (None, mask[:, 0], ids[:, 1], None, encoded)
    torch.testing.assert_close(ours(*given).logits, theirs(*given).logits)


def test_other_arguments_are_refused():
    model = shardzoo.from_config(tiny("gpt2")).eval()
    ids = torch.arange(3, 9)[None]
    model(ids, None, torch.ones_like(ids), inputs_embeds=None)
    with pytest.raises(ValueError, match="encoder_hidden_states only with add_cross_attention"):
        model(ids, encoder_hidden_states=torch.ones_like(ids))
    proteins = shardzoo.from_config(tiny("esm")).eval()
    with pytest.raises(ValueError, match="EsmForMaskedLM takes no encoder_hidden_states"):
        proteins(ids, None, None, None, torch.ones_like(ids))
    with pytest.raises(TypeError, match="at most 9 arguments by position: input_ids, past"):
        model(*[ids] * 10)
    with pytest.raises(TypeError, match="two values for input_ids"):
        model(ids, input_ids=ids)
