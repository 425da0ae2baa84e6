"""Several sequences in one row do not see one another.

The oracles are transformers, called as its Trainer calls it, and the model's own results for each sequence alone.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from matrix import find_class
from parity import randomize
from tiny_models import hf_model, tiny

import shardzoo

LENGTHS = (5, 9, 1, 3)
TOLERANCE = {"rtol": 1e-4, "atol": 1e-5}
DECODERS = {
    "GPT2LMHeadModel": {},
    "LlamaForCausalLM": {},
    "MistralForCausalLM": {"sliding_window": 4},
    "Qwen2ForCausalLM": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "Qwen3ForCausalLM": {"head_dim": 8},
    "Glm4ForCausalLM": {"head_dim": 8},
}


def make_pieces() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randint(3, 90, (1, length), generator=generator) for length in LENGTHS]


def flatten(pieces: list[torch.Tensor], **options: bool) -> dict[str, torch.Tensor]:
    samples = [{"input_ids": piece[0].tolist()} for piece in pieces]
    collate = transformers.DataCollatorWithFlattening(return_tensors="pt", **options)
    return dict(collate(samples))


@pytest.mark.parametrize("architecture", DECODERS)
def test_restarting_positions_keep_the_pieces_apart_as_in_transformers(architecture, tmp_path):
    theirs = hf_model(architecture, **DECODERS[architecture]).eval()
    randomize(theirs, 1)
    theirs.save_pretrained(tmp_path)
    ours = shardzoo.from_pretrained(tmp_path)
    batch = flatten(make_pieces())
    assert batch.keys() == {"input_ids", "labels", "position_ids"}
    wanted, found = theirs(**batch, use_cache=False), ours(**batch)
    torch.testing.assert_close(found.logits, wanted.logits, **TOLERANCE)
    torch.testing.assert_close(found.loss, wanted.loss, **TOLERANCE)
    wanted.loss.backward()
    found.loss.backward()
    table = theirs.get_input_embeddings().weight.grad
    torch.testing.assert_close(ours.word_embeddings.weight.grad[: len(table)], table, **TOLERANCE)

    # With a mask, transformers takes the row for one sequence.
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    torch.testing.assert_close(
        ours(**batch).logits, theirs(**batch, use_cache=False).logits, **TOLERANCE
    )


ALL = [
    *DECODERS, "BertModel", "RobertaModel", "DistilBertModel", "ElectraModel", "ModernBertModel",
    "T5Model", "UMT5Model", "T5EncoderModel", "BartModel", "MBartModel", "M2M100Model", "BartForCausalLM",
    "BartEncoder", "M2M100Encoder",
]  # fmt: skip


@pytest.mark.parametrize("architecture", ALL)
def test_numbered_pieces_give_what_each_gives_alone(architecture):
    kind = find_class(architecture).config_class.model_type
    values = tiny(kind, architectures=[architecture], **DECODERS.get(architecture, {}))
    model = shardzoo.from_config(values).eval()
    randomize(model, 1)
    pieces = make_pieces()
    row = torch.cat(pieces, 1)
    seq_idx = torch.repeat_interleave(torch.tensor(LENGTHS))[None]
    calls = {"seq_idx": seq_idx}
    targets = [piece.flip(1)[:, : max(1, len(piece[0]) - 2)] for piece in pieces]
    is_pair = hasattr(model, "decoder") and hasattr(model, "encoder")
    if is_pair:
        lengths = torch.tensor([piece.shape[1] for piece in targets])
        calls["decoder_input_ids"] = torch.cat(targets, 1)
        calls["decoder_seq_idx"] = torch.repeat_interleave(lengths)[None]
    with torch.no_grad():
        packed = model(row, **calls)[0]
        alone = [
            model(piece, **({"decoder_input_ids": target} if is_pair else {}))[0]
            for piece, target in zip(pieces, targets, strict=True)
        ]
    torch.testing.assert_close(packed, torch.cat(alone, 1), **TOLERANCE)


@pytest.mark.parametrize(
    "architecture", ["GPT2LMHeadModel", "MistralForCausalLM", "BertModel", "T5Model"]
)
def test_padding_within_pieces_is_not_seen(architecture):
    """Whatever stands where the mask has 0, the other tokens of its piece do not change."""
    kind = getattr(transformers, architecture).config_class.model_type
    values = tiny(kind, architectures=[architecture], **DECODERS.get(architecture, {}))
    model = shardzoo.from_config(values).eval()
    randomize(model, 1)
    row = torch.cat(make_pieces(), 1)
    mask = torch.ones_like(row)
    mask[0, [1, 7]] = 0  # the second token of the first piece, the third of the second
    seq_idx = torch.repeat_interleave(torch.tensor(LENGTHS))[None]
    calls = {"seq_idx": seq_idx, "attention_mask": mask}
    if hasattr(model, "decoder") and hasattr(model, "encoder"):
        calls |= {"decoder_input_ids": row, "decoder_seq_idx": seq_idx}
    kept = torch.ones_like(mask) if "decoder_seq_idx" in calls else mask
    with torch.no_grad():
        first = model(row, **calls)[0][kept.bool()]
        second = model(row.where(mask.bool(), 91), **calls)[0][kept.bool()]
        seen = model(row.where(mask.bool(), 91), **{**calls, "attention_mask": None})[0][
            kept.bool()
        ]
    torch.testing.assert_close(first, second, **TOLERANCE)
    assert not torch.allclose(second, seen, rtol=1e-2, atol=1e-3)


def test_cumulative_lengths_number_the_pieces():
    model = shardzoo.from_config(tiny("llama")).eval()
    pieces = make_pieces()
    batch = flatten(pieces, return_flash_attn_kwargs=True, return_seq_idx=True)
    assert {"cu_seq_lens_q", "max_length_k", "seq_idx"} <= batch.keys()
    alone = torch.cat([model(piece).logits for piece in pieces], 1)
    for names in (("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k"), ("seq_idx",)):
        given = {name: batch[name] for name in names}
        packed = model(batch["input_ids"], **given).logits
        torch.testing.assert_close(packed, alone, **TOLERANCE)


def on_ranks(mesh) -> tuple[torch.Tensor, torch.Tensor]:
    model = shardzoo.from_config(tiny("llama"), mesh).eval()
    batch = flatten(make_pieces())
    with torch.no_grad():
        packed = model(batch["input_ids"], position_ids=batch["position_ids"]).logits
        alone = torch.cat([model(piece).logits for piece in make_pieces()], 1)
    return model.gather_logits(packed), model.gather_logits(alone)


def test_ranks_keep_the_pieces_apart(run_mesh):
    for packed, alone in run_mesh(2, on_ranks):
        torch.testing.assert_close(packed, alone, **TOLERANCE)


def test_packed_rows_have_limits():
    model = shardzoo.from_config(tiny("gpt2", n_positions=9)).eval()
    row = torch.cat(make_pieces(), 1)
    numbers = torch.repeat_interleave(torch.tensor(LENGTHS))[None]
    model(row, seq_idx=numbers)  # no piece is longer than 9
    with pytest.raises(ValueError, match="the sequence has 18 tokens, but the model has only 9"):
        model(row)
    with pytest.raises(ValueError, match="the sequence has 14 tokens, but the model has only 9"):
        model(row, seq_idx=numbers.clamp(min=1))
    pair = shardzoo.from_config(tiny("t5")).eval()
    with pytest.raises(ValueError, match="both seq_idx and decoder_seq_idx"):
        pair(row, seq_idx=numbers, decoder_input_ids=row)
    with pytest.raises(ValueError, match="need decoder_input_ids"):
        pair(row, seq_idx=numbers, decoder_seq_idx=numbers, labels=row)
