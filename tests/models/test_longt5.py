"""LongT5's encoder at lengths that are no multiple of its blocks, and what it refuses and keeps."""

from __future__ import annotations

import pytest
import torch
import transformers
from memory import kept_bytes
from parity import randomize
from tiny_models import tiny

import shardzoo

KINDS = ("local", "transient-global")


@pytest.mark.parametrize("kind", KINDS)
def test_each_length_equals_transformers(kind, tmp_path):
    """Blocks have four positions, and so have sums; rows are padded on both sides."""
    values = tiny("longt5", 0.0, encoder_attention_type=kind, layers=2)
    del values["model_type"]
    theirs = transformers.LongT5EncoderModel(transformers.LongT5Config(**values)).eval()
    randomize(theirs, 1)
    theirs.save_pretrained(tmp_path)
    ours = shardzoo.from_pretrained(tmp_path).eval()
    for length in (1, 3, 4, 5, 8, 13):
        ids = torch.randint(5, 97, (3, length))
        mask = torch.ones_like(ids)
        mask[1, max(1, length // 2) :] = 0
        mask[2, : length // 3] = 0
        for given in (None, mask):
            options = {"attention_mask": given, "output_attentions": True}
            expected = theirs(ids, **options)
            actual = ours(ids, **options)
            seen = torch.ones_like(mask) if given is None else given
            largest = expected[0].abs().max()
            difference = (actual[0] - expected[0]) * seen[..., None]
            assert difference.abs().max() < 1e-5 * largest
            if length >= 4 and given is None:
                torch.testing.assert_close(
                    actual.attentions[1][:, :-1], expected.attentions[1][:, :-1]
                )


def test_local_attention_keeps_memory_in_proportion_to_the_length():
    """A T5 that wrote its scores would keep four times as much for twice the length."""
    model = shardzoo.from_config(tiny("longt5", 0.0, encoder_attention_type="local")).train()
    labels = torch.full((1, 4), 7)
    kept = [
        kept_bytes(
            lambda length=length: model(torch.full((1, length), 9), labels=labels).loss,
            model.parameters(),
        )
        for length in (512, 1024, 2048)
    ]
    assert kept[2] - kept[1] == pytest.approx(2 * (kept[1] - kept[0]), rel=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_what_local_attention_does_not_do_is_refused(kind):
    model = shardzoo.from_config(tiny("longt5", encoder_attention_type=kind))
    ids = torch.full((1, 6), 9)
    with pytest.raises(ValueError, match=r"must be \[B, S\], 0 for padding"):
        model(ids, attention_mask=torch.ones(1, 6, 6), labels=ids)
    pieces = torch.tensor([[0, 0, 0, 1, 1, 1]])
    with pytest.raises(ValueError, match="does not take packed rows"):
        model(ids, decoder_input_ids=ids, seq_idx=pieces, decoder_seq_idx=pieces)
    with pytest.raises(ValueError, match="encoder_attention_type must be"):
        shardzoo.from_config(tiny("longt5", encoder_attention_type="global"))
