"""What a T5Gemma's two configurations allow, and how its stacks see padding."""

from __future__ import annotations

import pytest
import torch
import transformers
from parity import randomize
from tiny_models import tiny

import shardzoo
from shardzoo.models import (
    T5GemmaConfig,
    T5GemmaEncoderModel,
    T5GemmaForConditionalGeneration,
    T5GemmaForSequenceClassification,
    config_from_dict,
)


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
        ({"is_encoder_decoder": False}, "is_encoder_decoder=false leaves a T5Gemma its encoder"),
        ({"decoder": {"num_attention_heads": 0}}, "num_attention_heads must be at least 1"),
        ({"decoder": {"vocab_size": 9}}, "both stacks must have the same vocab_size"),
    ],
)
def test_a_configuration_that_is_none_says_why(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict({**tiny("t5gemma"), **changes})


def write_whole(folder) -> dict[str, torch.Tensor]:
    """Writes an encoder-decoder with random weights; returns a padded batch of it."""
    values = {**tiny("t5gemma", 0.0), "attn_implementation": "eager"}
    del values["model_type"]
    theirs = transformers.T5GemmaForConditionalGeneration(transformers.T5GemmaConfig(**values))
    randomize(theirs, 1)
    theirs.save_pretrained(folder)
    ids = torch.randint(5, 97, (2, 9), generator=torch.Generator().manual_seed(0))
    ids[1, 5:] = 0
    mask = (ids != 0).long()
    mask[0, :3] = 0  # tokens that are no padding
    return {"input_ids": ids, "attention_mask": mask}


def test_the_encoder_of_a_whole_model_classifies(tmp_path):
    """As `T5GemmaForSequenceClassification.from_pretrained(…, is_encoder_decoder=False)` does there."""
    batch = write_whole(tmp_path / "whole")
    options = {"is_encoder_decoder": False, "num_labels": 3}
    with pytest.warns(UserWarning, match="classifier of T5Gemma.* is newly initialized"):
        ours = T5GemmaForSequenceClassification.from_pretrained(tmp_path / "whole", **options)
    assert not any(name.startswith("decoder") for name, _ in ours.named_parameters())
    ours.save_pretrained(tmp_path / "encoder")
    theirs, found = transformers.T5GemmaForSequenceClassification.from_pretrained(
        tmp_path / "encoder", output_loading_info=True, attn_implementation="eager"
    )
    assert not any(found[name] for name in ("missing_keys", "unexpected_keys"))
    assert not theirs.config.is_encoder_decoder
    labels = torch.tensor([2, 0])
    expected = theirs.eval()(**batch, labels=labels)
    actual = ours(**batch, labels=labels)
    torch.testing.assert_close(actual.logits, expected.logits, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match="decoder_input_ids is for a decoder, which a T5Gemma"):
        ours(**batch, decoder_input_ids=batch["input_ids"])
    with pytest.raises(
        ValueError, match="T5GemmaForConditionalGeneration needs is_encoder_decoder"
    ):
        T5GemmaForConditionalGeneration.from_pretrained(tmp_path / "encoder")


def test_a_saved_encoder_is_one_to_transformers(tmp_path):
    """Its class refuses files that say that there is a decoder."""
    batch = write_whole(tmp_path / "whole")
    ours = T5GemmaEncoderModel.from_pretrained(tmp_path / "whole")
    ours.save_pretrained(tmp_path / "encoder")
    theirs = transformers.T5GemmaEncoderModel.from_pretrained(
        tmp_path / "encoder", attn_implementation="eager"
    )
    seen = batch["attention_mask"].bool()
    expected = theirs.eval()(**batch).last_hidden_state[seen]
    actual = ours(**batch).last_hidden_state[seen]
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def test_a_classifier_has_the_width_of_the_stack_that_it_reads():
    stacks = {"encoder": {"hidden_size": 12}, "decoder": {"hidden_size": 24}}
    config = T5GemmaConfig(**stacks, architecture="T5GemmaForTokenClassification")
    assert config.hidden_size == 24
    assert config.with_changes(is_encoder_decoder=False).hidden_size == 12
