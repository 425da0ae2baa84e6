"""What transformers loads, the zoo loads with its logits; quantized folders are refused, and say why."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from every_case import every_day
from parity import randomize
from safetensors.torch import load_file, save_file
from tiny_models import hf_model

import shardzoo
from shardzoo.convert.operations import Options, merge, split
from shardzoo.convert.verification import verify_equal

WEIGHTS = "model.safetensors"


def make_folder(folder: Path, architecture: str, **changes: Any) -> Path:
    model = hf_model(architecture, 0.0 if architecture != "LlamaForCausalLM" else None, **changes)
    randomize(model, 1)
    model.save_pretrained(folder)
    return folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    values = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in values.items() if value != "gone"}))


def edit_tensors(folder: Path, change: Any) -> None:
    save_file(change(load_file(folder / WEIGHTS)), folder / WEIGHTS, {"format": "pt"})


def compute_logits(mesh, folder: Path, is_encoder_decoder: bool) -> torch.Tensor:
    model = shardzoo.from_pretrained(folder, mesh, torch.float32)
    ids = torch.arange(3, 12)[None]
    inputs = {"input_ids": ids}
    if is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, :5]
    with torch.no_grad():
        return model.gather_logits(model(**inputs).logits)


def assert_same_logits(folder: Path, architecture: str, run_mesh: Any = None) -> None:
    theirs = getattr(transformers, architecture).from_pretrained(folder, dtype=torch.float32)
    has_decoder = bool(theirs.config.is_encoder_decoder)
    ids = torch.arange(3, 12)[None]
    inputs = {"input_ids": ids, **({"decoder_input_ids": ids[:, :5]} if has_decoder else {})}
    with torch.no_grad():
        expected = theirs(**inputs).logits
    found = [compute_logits(None, folder, has_decoder)]
    if run_mesh is not None:
        found += run_mesh(2, compute_logits, folder, has_decoder)
    for logits in found:
        torch.testing.assert_close(logits, expected, rtol=1e-4, atol=1e-4)


def test_llamas_first_name_and_buffers(tmp_path):
    make_folder(tmp_path, "LlamaForCausalLM")
    edit_config(tmp_path, architectures=["LLaMAForCausalLM"], pad_token_id=-1)
    edit_tensors(tmp_path, lambda tensors: {**tensors, "model.rotary_emb.inv_freq": torch.ones(4)})
    with pytest.warns(UserWarning, match="pad_token_id is -1"):
        assert_same_logits(tmp_path, "LlamaForCausalLM")


def test_an_index_that_names_a_buffer_without_a_tensor(tmp_path):
    make_folder(tmp_path, "LlamaForCausalLM")
    names = [*load_file(tmp_path / WEIGHTS), "model.rotary_emb.inv_freq"]
    (tmp_path / WEIGHTS).rename(tmp_path / "model-00001-of-00001.safetensors")
    weight_map = dict.fromkeys(names, "model-00001-of-00001.safetensors")
    (tmp_path / f"{WEIGHTS}.index.json").write_text(
        json.dumps({"metadata": {}, "weight_map": weight_map})
    )
    assert_same_logits(tmp_path, "LlamaForCausalLM")


def test_nothing_among_the_tensors_of_a_torch_file(tmp_path):
    make_folder(tmp_path, "GPT2LMHeadModel")
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    torch.save({**tensors, "absent.bias": None}, tmp_path / "pytorch_model.bin")
    assert_same_logits(tmp_path, "GPT2LMHeadModel")


def find_differences(first: Path, second: Path) -> tuple[str, ...]:
    return verify_equal(first, second, Options(), lambda done, total: None).differences


def add_different(name: str, like: str) -> Any:
    """Returns a change of tensors that adds one, of `like`'s shape and other values."""

    def change(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        generator = torch.Generator().manual_seed(5)
        return {**tensors, name: torch.randn(tensors[like].shape, generator=generator)}

    return change


HEADS = {
    "BartForConditionalGeneration": ("lm_head.weight", "model.shared.weight"),
    "MBartForConditionalGeneration": ("lm_head.weight", "model.shared.weight"),
    "M2M100ForConditionalGeneration": ("lm_head.weight", "model.shared.weight"),
    "BartForCausalLM": ("lm_head.weight", "model.decoder.embed_tokens.weight"),
    "BertForMaskedLM": ("cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    "RobertaForMaskedLM": ("lm_head.decoder.weight", "roberta.embeddings.word_embeddings.weight"),
    "ElectraForMaskedLM": ("generator_lm_head.weight", "electra.embeddings.word_embeddings.weight"),
    "DistilBertForMaskedLM": (
        "vocab_projector.weight",
        "distilbert.embeddings.word_embeddings.weight",
    ),
    "ModernBertForMaskedLM": ("decoder.weight", "model.embeddings.tok_embeddings.weight"),
}


@pytest.mark.parametrize(
    "architecture",
    every_day(
        ("BartForConditionalGeneration", "BertForMaskedLM"),
        more=(
            "MBartForConditionalGeneration",
            "M2M100ForConditionalGeneration",
            "BartForCausalLM",
            "RobertaForMaskedLM",
            "ElectraForMaskedLM",
            "DistilBertForMaskedLM",
            "ModernBertForMaskedLM",
        ),
    ),
)
def test_a_head_that_differs_from_the_tie(tmp_path, run_mesh, architecture):
    head, embedding = HEADS[architecture]
    make_folder(tmp_path / "hf", architecture)
    edit_tensors(tmp_path / "hf", add_different(head, embedding))
    with pytest.warns(UserWarning, match=f"{head} differs from the word embedding"):
        assert_same_logits(tmp_path / "hf", architecture)
    expected = load_file(tmp_path / "hf" / WEIGHTS)

    # No copy loses it: neither a conversion nor a saved model, on however many ranks.
    split(tmp_path / "hf", tmp_path / "shards", 2)
    merge(tmp_path / "shards", tmp_path / "merged")
    assert not find_differences(tmp_path / "hf", tmp_path / "shards")
    saved = shardzoo.from_pretrained(tmp_path / "shards")
    saved.save_pretrained(tmp_path / "saved")
    for name in ("merged", "saved"):
        found = load_file(tmp_path / name / WEIGHTS)
        assert all(torch.equal(expected[key], found[key]) for key in found)
        assert torch.equal(found[head], expected[head])
        assert_same_logits(tmp_path / name, architecture, run_mesh if name == "saved" else None)


@pytest.mark.parametrize(
    ("architecture", "alias", "bias"),
    [
        ("BertForMaskedLM", "cls.predictions.decoder.bias", "cls.predictions.bias"),
        ("RobertaForMaskedLM", "lm_head.decoder.bias", "lm_head.bias"),
    ],
)
def test_a_bias_that_differs_from_the_tie(tmp_path, run_mesh, architecture, alias, bias):
    make_folder(tmp_path / "hf", architecture)
    edit_tensors(tmp_path / "hf", add_different(alias, bias))
    with pytest.warns(UserWarning, match=f"{alias} differs from {bias}"):
        assert_same_logits(tmp_path / "hf", architecture, run_mesh)
    with pytest.warns(UserWarning, match=f"{alias} differs from {bias}"):
        split(tmp_path / "hf", tmp_path / "shards", 2)
    merge(tmp_path / "shards", tmp_path / "merged")
    expected = load_file(tmp_path / "hf" / WEIGHTS)
    found = load_file(tmp_path / "merged" / WEIGHTS)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)

    # The flag unties the bias too, so that transformers would begin with zeros if it is missing.
    edit_config(tmp_path / "hf", tie_word_embeddings=False)
    edit_tensors(tmp_path / "hf", lambda tensors: {k: v for k, v in tensors.items() if k != alias})
    head, embedding = HEADS[architecture]
    edit_tensors(tmp_path / "hf", add_different(head, embedding))
    with pytest.raises(ValueError, match=f"lacks {alias}, which differs from {bias}"):
        shardzoo.from_pretrained(tmp_path / "hf")


@pytest.mark.parametrize(
    "architecture", ["BartForConditionalGeneration", "MBartForConditionalGeneration"]
)
def test_a_bias_of_the_logits(tmp_path, run_mesh, architecture):
    make_folder(tmp_path / "hf", architecture)
    assert not shardzoo.from_pretrained(tmp_path / "hf").config.final_logits_bias
    edit_tensors(tmp_path / "hf", add_different("final_logits_bias", "final_logits_bias"))
    assert_same_logits(tmp_path / "hf", architecture, run_mesh)
    expected = load_file(tmp_path / "hf" / WEIGHTS)
    split(tmp_path / "hf", tmp_path / "shards", 2)
    merge(tmp_path / "shards", tmp_path / "merged")
    model = shardzoo.from_pretrained(tmp_path / "shards")
    model.save_pretrained(tmp_path / "saved")
    for name in ("merged", "saved"):
        found = load_file(tmp_path / name / WEIGHTS)
        assert all(torch.equal(expected[key], found[key]) for key in found)
        assert torch.equal(found["final_logits_bias"], expected["final_logits_bias"])
        assert_same_logits(tmp_path / name, architecture)

    # The loss has it too, and no training changes it, as in transformers.
    ids = torch.arange(3, 12)[None]
    theirs = getattr(transformers, architecture).from_pretrained(tmp_path / "hf")
    loss = model(input_ids=ids, labels=ids).loss
    torch.testing.assert_close(loss, theirs(input_ids=ids, labels=ids).loss)
    loss.backward()
    assert model.head.fixed_bias.grad is None


def test_projections_of_two_types(tmp_path, run_mesh):
    make_folder(tmp_path / "hf", "BertForMaskedLM")

    def narrow(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        types = {
            "query.weight": torch.bfloat16,
            "key.weight": torch.float16,
            "key.bias": torch.float64,
        }
        changed = dict(tensors)
        for name, tensor in tensors.items():
            for ending, dtype in types.items():
                if name.endswith(ending):
                    changed[name] = tensor.to(dtype)
        return changed

    edit_tensors(tmp_path / "hf", narrow)
    assert_same_logits(tmp_path / "hf", "BertForMaskedLM", run_mesh)
    split(tmp_path / "hf", tmp_path / "shards", 2)
    assert not find_differences(tmp_path / "hf", tmp_path / "shards")
    merge(tmp_path / "shards", tmp_path / "merged")
    expected = load_file(tmp_path / "hf" / WEIGHTS)
    found = load_file(tmp_path / "merged" / WEIGHTS)
    for name, tensor in expected.items():
        assert torch.equal(found[name].double(), tensor.double()), name


def test_views_in_a_torch_file(tmp_path, run_mesh):
    """Transposed, expanded and cut tensors, and a step of two: all that torch.load gives back."""
    make_folder(tmp_path / "hf", "GPT2LMHeadModel")
    tensors = load_file(tmp_path / "hf" / WEIGHTS)
    (tmp_path / "hf" / WEIGHTS).unlink()
    norm = "transformer.h.0.ln_1.weight"
    down = "transformer.h.1.mlp.c_proj.weight"
    views = {
        "transformer.wte.weight": tensors["transformer.wte.weight"].t().contiguous().t(),
        norm: tensors[norm][:1].clone().expand(tensors[norm].shape),
        down: torch.stack([tensors[down]] * 2, 2)[:, :, 1],
    }
    assert not any(view.is_contiguous() for view in views.values())
    views["transformer.h.0.ln_2.bias"] = torch.cat([tensors["transformer.h.0.ln_2.bias"]] * 2)[32:]
    for is_zip in (True, False):
        torch.save(
            {**tensors, **views},
            tmp_path / "hf" / "pytorch_model.bin",
            _use_new_zipfile_serialization=is_zip,
        )
        assert_same_logits(tmp_path / "hf", "GPT2LMHeadModel", run_mesh if is_zip else None)
    split(tmp_path / "hf", tmp_path / "shards", 2)
    assert not find_differences(tmp_path / "hf", tmp_path / "shards")
    merge(tmp_path / "shards", tmp_path / "merged")
    found = load_file(tmp_path / "merged" / WEIGHTS)
    for name, tensor in {**tensors, **views}.items():
        assert torch.equal(found[name], tensor), name


def test_a_small_file_cannot_claim_a_huge_expanded_tensor(tmp_path):
    make_folder(tmp_path, "GPT2LMHeadModel")
    tensors = load_file(tmp_path / WEIGHTS)
    (tmp_path / WEIGHTS).unlink()
    tensors["transformer.h.0.attn.bias"] = torch.ones(1).expand(1 << 30)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"repeats 4 bytes of the file as 4,294,967,296"):
        shardzoo.from_pretrained(tmp_path)


def test_a_t5_without_a_head_has_a_tied_one(tmp_path):
    make_folder(tmp_path, "T5ForConditionalGeneration")
    edit_tensors(
        tmp_path,
        lambda tensors: {name: x for name, x in tensors.items() if name != "lm_head.weight"},
    )
    edit_config(
        tmp_path,
        tie_word_embeddings=False,
        transformers_version="4.24.0",
        scale_decoder_outputs="gone",
    )
    assert_same_logits(tmp_path, "T5ForConditionalGeneration")


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def quantize(tensors: dict[str, torch.Tensor], scale: str | None) -> dict[str, torch.Tensor]:
    made = dict(tensors)
    for name, tensor in tensors.items():
        if name.endswith("proj.weight"):
            made[name] = tensor.to(torch.float8_e4m3fn)
            if scale is not None:
                made[name.removesuffix("weight") + scale] = torch.ones(1, 1)
    return made


@pytest.mark.parametrize(
    ("settings", "scale", "message"),
    [
        (FP8, "weight_scale_inv", r"is quantized: fp8, weight_block_size=\[128, 128\]; it has"),
        (None, "weight_scale_inv", "is quantized: fp8 in blocks; it has"),
        (None, "qweight", "is quantized: GPTQ or AWQ; it has"),
        (
            FP8,
            None,
            "is quantized: fp8.*has type F8_E4M3, and the scales of the weights are missing",
        ),
        ({"load_in_8bit": True}, None, "is quantized: by an unnamed method, load_in_8bit=True"),
    ],
)
def test_quantized_folders_say_how_they_are_quantized(tmp_path, settings, scale, message):
    make_folder(tmp_path, "LlamaForCausalLM")
    edit_tensors(tmp_path, lambda tensors: quantize(tensors, scale))
    edit_config(tmp_path, quantization_config=settings)
    with pytest.raises(ValueError, match=message):
        shardzoo.from_pretrained(tmp_path)


def test_whole_weights_load_whatever_they_once_were(tmp_path):
    make_folder(tmp_path, "LlamaForCausalLM")
    wanted = shardzoo.from_pretrained(tmp_path).state_dict()
    edit_config(
        tmp_path, quantization_config={"quant_method": "bitsandbytes", "load_in_4bit": True}
    )
    with pytest.warns(UserWarning, match="config.json says that the model is quantized"):
        found = shardzoo.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(found[name], value) for name, value in wanted.items())


@pytest.mark.parametrize("architecture", ["LlamaForCausalLM", "BartForConditionalGeneration"])
def test_the_architecture_names_the_family(architecture, tmp_path):
    make_folder(tmp_path, architecture)
    edit_config(tmp_path, model_type="gone")
    assert_same_logits(tmp_path, architecture)
    edit_config(tmp_path, architectures=["NobodysModel"])
    with pytest.raises(ValueError, match="no model_type and no architectures of the zoo"):
        shardzoo.from_pretrained(tmp_path)


@pytest.mark.parametrize(
    "architecture", ["BartForConditionalGeneration", "MBartForConditionalGeneration"]
)
def test_a_padding_token_is_needed_for_labels_alone(architecture, tmp_path, run_mesh):
    make_folder(tmp_path, architecture)
    edit_config(tmp_path, pad_token_id=None)
    assert_same_logits(tmp_path, architecture, run_mesh)
    model = shardzoo.from_pretrained(tmp_path)
    assert model.config.pad_token_id is None
    ids = torch.arange(3, 12)[None]
    with pytest.raises(ValueError, match="pad_token_id must be set"):
        model(input_ids=ids, labels=ids)
    model.save_pretrained(tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["pad_token_id"] is None


def test_m2m100_counts_positions_by_its_padding(tmp_path):
    make_folder(tmp_path, "M2M100ForConditionalGeneration")
    edit_config(tmp_path, pad_token_id=None)
    with pytest.raises(ValueError, match="m2m_100 counts the positions"):
        shardzoo.from_pretrained(tmp_path)
