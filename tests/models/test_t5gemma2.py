"""What T5Gemma 2's merged attention sees and records, and what its configuration allows."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from parity import randomize
from safetensors.torch import load_file, save_file
from tiny_models import tiny

import shardzoo
from shardzoo.models import config_from_dict, from_config

VISION = {
    "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14, "vision_use_head": False,
}  # fmt: skip


def both(folder):
    """transformers' model with images, and ours of its files."""
    values = tiny("t5gemma2", 0.0, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    del values["model_type"]
    values["encoder"] = {**values["encoder"], "vision_config": VISION, "mm_tokens_per_image": 4}
    config = transformers.T5Gemma2Config(**values, attn_implementation="eager")
    for stack in (config.encoder.text_config, config.decoder):
        stack.query_pre_attn_scalar = 100  # see tests/zoo/rows/gemma3_text.py
    theirs = transformers.T5Gemma2ForConditionalGeneration(config).eval()
    randomize(theirs, 1)
    theirs.save_pretrained(folder)
    return theirs, shardzoo.from_pretrained(folder).eval()


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    return both(tmp_path_factory.mktemp("t5gemma2"))


def sample(seed: int, length: int) -> torch.Tensor:
    ids = torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(seed))
    ids[0, 1] = 96  # the token that ends an image
    return ids


def test_probabilities_are_recorded_as_those_of_two_attentions(models):
    theirs, ours = models
    inputs = {"input_ids": sample(0, 9), "decoder_input_ids": sample(1, 7)}
    inputs["attention_mask"] = torch.ones(2, 9, dtype=torch.long)
    inputs["attention_mask"][1, 7:] = 0  # transformers spreads what sees nothing evenly
    expected = theirs(**inputs, output_attentions=True)
    actual = ours(**inputs, output_attentions=True)
    for name in ("encoder_attentions", "decoder_attentions", "cross_attentions"):
        assert len(expected[name]) == 2
        for one, other in zip(actual[name], expected[name], strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-5)


def test_a_cache_of_transformers_is_continued(models):
    ours = copy.deepcopy(models[1]).double()
    ids = sample(2, 8)
    words = sample(3, 6)
    expected = ours(input_ids=ids, decoder_input_ids=words).logits[:, 4:]
    first = ours(input_ids=ids, decoder_input_ids=words[:, :4], use_cache=True)
    past = first.past_key_values
    then = ours(
        encoder_outputs=first.encoder_last_hidden_state,
        decoder_input_ids=words[:, 4:],
        past_key_values=past,
    )
    torch.testing.assert_close(then.logits, expected, rtol=1e-9, atol=1e-11)


def test_packed_pieces_see_themselves_and_their_source_alone(models):
    ours = copy.deepcopy(models[1]).double()
    lengths = ((5, 4), (7, 6))  # of the source and of the target of each piece
    sources = [sample(4 + n, length)[:1] for n, (length, _) in enumerate(lengths)]
    targets = [sample(6 + n, length)[:1] for n, (_, length) in enumerate(lengths)]
    apart = [
        ours(input_ids=source, decoder_input_ids=target).logits
        for source, target in zip(sources, targets, strict=True)
    ]
    packed = ours(
        input_ids=torch.cat(sources, 1),
        decoder_input_ids=torch.cat(targets, 1),
        seq_idx=torch.tensor([[0] * 5 + [1] * 7]),
        decoder_seq_idx=torch.tensor([[0] * 4 + [1] * 6]),
    ).logits
    torch.testing.assert_close(packed, torch.cat(apart, 1), rtol=1e-9, atol=1e-11)


def test_an_embedding_that_a_program_looks_up_has_the_end_of_an_image(models):
    theirs, ours = models
    ids = sample(8, 6)
    looked_up = ours.get_input_embeddings()(ids)
    torch.testing.assert_close(looked_up, theirs.get_input_embeddings()(ids), rtol=0, atol=0)
    words = sample(9, 5)
    expected = ours(input_ids=ids, decoder_input_ids=words).logits
    given = ours(inputs_embeds=looked_up, decoder_input_ids=words).logits
    assert given.equal(expected)


def test_added_masks_count(models):
    """A mask in floating point of the decoder, beside one of the encoder's padding."""
    ours = copy.deepcopy(models[1]).double()
    inputs = {"input_ids": sample(10, 8), "attention_mask": torch.ones(2, 8, dtype=torch.long)}
    inputs["attention_mask"][1, 5:] = 0
    words = sample(11, 6)
    hidden = torch.ones(6, 6, dtype=torch.bool).tril()
    added = torch.zeros(2, 1, 6, 6, dtype=torch.float64).masked_fill(~hidden, float("-inf"))
    full = {**ours.config.to_dict(), "decoder": {**ours.config.to_dict()["decoder"]}}
    full["decoder"]["layer_types"] = ["full_attention"] * 2
    model = from_config(config_from_dict(full), dtype=torch.float64)
    model.load_state_dict(ours.state_dict())
    expected = model.eval()(**inputs, decoder_input_ids=words).logits
    actual = model(**inputs, decoder_input_ids=words, decoder_attention_mask=added).logits
    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-11)


def loss_of_parts(mesh) -> float:
    from shardzoo.models import ParallelConfig

    config = ParallelConfig(sequence_parallel=mesh is not None)
    model = from_config(tiny("t5gemma2", 0.0, bos_token_id=1), mesh, parallel_config=config)
    return float(model(input_ids=sample(12, 8), labels=sample(13, 6)).loss)


@pytest.mark.before_release
def test_parts_of_sequences_without_a_mask_see_each_other(run_mesh):
    assert run_mesh(2, loss_of_parts) == pytest.approx([loss_of_parts(None)] * 2, rel=1e-6)


def test_images_are_refused(models):
    _, ours = models
    with pytest.raises(ValueError, match="has no argument pixel_values; it must be None"):
        ours(input_ids=sample(0, 5), pixel_values=torch.zeros(1, 3, 28, 28), labels=sample(1, 5))


def test_the_keys_of_images_are_kept():
    values = tiny("t5gemma2", 0.1)
    values["encoder"] = {**values["encoder"], "vision_config": VISION, "mm_tokens_per_image": 4}
    config = config_from_dict(values)
    written = config.to_dict()
    assert written["encoder"]["vision_config"] == VISION
    assert written["encoder"]["eoi_token_index"] == 96
    assert config_from_dict(written) == config
    assert config.decoder.attention_dropout == 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"encoder": 3}, "encoder must be an object, not 3"),
        ({"encoder": {"text_config": 3}}, "encoder must be an object, not 3"),
        ({"tie_word_embeddings": False}, "have one embedding: tie_word_embeddings must be true"),
        ({"is_encoder_decoder": False}, "has both stacks: is_encoder_decoder must be true"),
        ({"decoder": {"hidden_size": 36, "vocab_size": 97}}, "same hidden_size, not 32 and 36"),
        ({"decoder": {"attn_logit_softcapping": 2.0, "vocab_size": 97}}, "does not cap scores"),
    ],
)
def test_a_configuration_that_is_none_says_why(changes, message):
    with pytest.raises(ValueError, match=message):
        config_from_dict({**tiny("t5gemma2"), **changes})


@pytest.mark.parametrize("model_type", ["t5gemma", "t5gemma2"])
def test_other_ids_of_tokens_are_those_of_both_stacks(model_type, tmp_path):
    """A new model has those of its tokenizer. transformers reads the decoder's alone."""
    ids = {"pad_token_id": 5, "bos_token_id": 6, "eos_token_id": 7, "decoder_start_token_id": 4}
    values = tiny(model_type, 0.0)
    if model_type == "t5gemma2":
        values["encoder"] = {**values["encoder"], "vision_config": VISION, "mm_tokens_per_image": 4}
    config = config_from_dict(values).with_changes(**ids)
    assert config.encoder.pad_token_id == config.decoder.pad_token_id == 5
    assert config.encoder.eos_token_id == config.decoder.eos_token_id == 7
    assert config.decoder.bos_token_id == 4
    assert config_from_dict(config.to_dict()) == config
    labels = sample(0, 6)
    labels[1, 4:] = -100
    ours = from_config(config)
    ours.config.decoder_start_token_id = 8
    ours.save_pretrained(tmp_path)
    kind = getattr(transformers, type(ours).__name__)
    theirs = kind.from_pretrained(tmp_path, attn_implementation="eager").eval()
    batch = {"input_ids": sample(1, 9), "labels": labels}
    expected = theirs(**batch)
    actual = ours.eval()(**batch)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=0)
    seen = labels >= 0
    logits = ours.gather_logits(actual.logits)
    torch.testing.assert_close(logits[seen], expected.logits[seen], rtol=0, atol=1e-5)


def test_a_new_model_is_evaluated_by_transformers_without_its_part_of_images(tmp_path):
    """Its files lack that part, of which transformers makes a new one."""
    from shardzoo.models import find_config
    from shardzoo.pretraining.export import load_exported

    ours = from_config(find_config("t5gemma2-quickstart")).eval()
    ours.save_pretrained(tmp_path)
    theirs = load_exported(tmp_path)
    batch = {"input_ids": sample(2, 40), "labels": sample(3, 21)}
    batch["labels"][1, 9:] = -100
    expected = theirs(**batch)
    actual = ours(**batch)
    torch.testing.assert_close(actual.loss, expected.loss, rtol=1e-6, atol=0)
    torch.testing.assert_close(
        ours.gather_logits(actual.logits), expected.logits, rtol=0, atol=1e-5
    )
    file = tmp_path / "model.safetensors"
    values = load_file(file)
    del values["model.decoder.norm.weight"]
    save_file(values, file, {"format": "pt"})
    with pytest.raises(ValueError, match=r"does not load .*missing_keys': \['model\.decoder\.norm"):
        load_exported(tmp_path)
