"""What a T5Gemma's two configurations allow, and how its stacks see padding."""

from __future__ import annotations

import pytest
import torch
import transformers
from parity import randomize
from tiny_models import tiny

import shardzoo
from shardzoo.models import config_from_dict


def test_ids_of_padding_are_not_seen_in_training_without_masks(tmp_path):
    """As in transformers, in the stack that they are in; the decoder sees the encoder's padding."""
    values = tiny("t5gemma", 0.0)
    del values["model_type"]
    values["attn_implementation"] = "eager"  # SDPA has no soft cap.
    config = transformers.T5GemmaConfig(**values)
    theirs = transformers.T5GemmaForConditionalGeneration(config)
    randomize(theirs, 1)
    theirs.save_pretrained(tmp_path)
    ours = shardzoo.from_pretrained(tmp_path).train()
    ids = torch.randint(5, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    ids[1, 5:] = 0
    ids[0, 2] = 0
    expected = theirs.train()(input_ids=ids, labels=ids.masked_fill(ids == 0, -100))
    actual = ours(input_ids=ids, labels=ids.masked_fill(ids == 0, -100))
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=0)


def test_both_stacks_follow_the_settings_of_the_whole():
    config = config_from_dict(tiny("t5gemma", 0.1))
    changed = config.with_changes(vocab_size=120)
    assert changed.encoder.vocab_size == changed.decoder.vocab_size == 120
    assert config.decoder.attention_dropout == 0.1
    assert config_from_dict(config.to_dict()) == config


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": 3}, "encoder must be an object, not 3"),
        ({"is_encoder_decoder": False}, "is_encoder_decoder=false makes an encoder"),
        ({"decoder": {"num_attention_heads": 0}}, "num_attention_heads must be at least 1"),
        ({"decoder": {"vocab_size": 9}}, "both stacks must have the same vocab_size"),
    ],
)
def test_a_configuration_that_is_none_says_why(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict({**tiny("t5gemma"), **changes})
