"""What is trained and what is not: freezing, soft prompts, LoRA, and the counts of the summary."""

from __future__ import annotations

from pathlib import Path

import peft
import pytest
import torch
import transformers
from safetensors.torch import load_file

from shardzoo import finetuning as t2t

SHORT = {
    "max_source_length": 20,
    "max_target_length": 8,
    "lr": 1e-2,
    "weight_decay": 0.5,
    "train_steps": 3,
}
# For both kinds of models: part -> beginnings of its parameters' names, and what belongs to the embeddings.
NAMES = {
    ("t5", False): {"encoder": ("encoder.",), "decoder": ("decoder.",), "embeddings": ("shared.",)},
    ("t5", True): {"encoder": ("encoder.",), "decoder": ("decoder.",), "embeddings": ("word_embeddings.",)},
    ("gpt2", False): {
        "decoder": ("transformer.h.", "transformer.ln_f."),
        "embeddings": ("transformer.wte", "transformer.wpe"),
    },
    ("gpt2", True): {"decoder": ("blocks.", "final_norm."), "embeddings": ("word_embeddings.", "position_embeddings.")},
    ("bert", False): {
        "encoder": ("bert.encoder.", "bert.embeddings.LayerNorm."),
        "embeddings": tuple(f"bert.embeddings.{kind}_embeddings." for kind in ("word", "position", "token_type")),
    },
    ("bert", True): {
        "encoder": ("encoder.blocks.", "encoder.embedding_norm."),
        "embeddings": tuple(f"encoder.{kind}_embeddings." for kind in ("word", "position", "token_type")),
    },
}  # fmt: skip
FILES = {"t5": "pairs.json", "gpt2": "pairs.json", "bert": "names.json"}


def make(checkpoints, files, kind: str, native: bool, folder, **arguments) -> t2t.Trainer:
    return t2t.Trainer(
        model_name_or_path=checkpoints(kind), native=native, train_file=str(files / FILES[kind]),
        output_dir=str(folder / "run"), **{**SHORT, **arguments},
    )  # fmt: skip


def weights(model) -> dict[str, torch.Tensor]:
    return {name: value.detach().clone() for name, value in model.named_parameters()}


def changed(model, before) -> set[str]:
    return {
        name for name, value in model.named_parameters() if not torch.equal(value, before[name])
    }


def frozen(model) -> set[str]:
    return {name for name, value in model.named_parameters() if not value.requires_grad}


@pytest.mark.parametrize(("kind", "native"), NAMES)
def test_freezing_concerns_exactly_the_named_parts(checkpoints, files, tmp_path, kind, native):
    trainer = make(checkpoints, files, kind, native, tmp_path)
    everything = {name for name, _ in trainer.model.named_parameters()}
    parts = {
        part: {name for name in everything if name.startswith(begins)}
        for part, begins in NAMES[kind, native].items()
    }
    assert all(parts.values())
    assert not frozen(trainer.model)
    for part, names in parts.items():
        trainer.freeze(**{part: True})
        assert frozen(trainer.model) == names
        trainer.freeze(**{part: False})
        assert not frozen(trainer.model)
    [body, embeddings] = [next(iter(parts)), "embeddings"]
    trainer.freeze(**{body: True, embeddings: True})
    kept = parts[body] | parts[embeddings]
    assert frozen(trainer.model) == kept
    summary = trainer.model_summary()
    assert summary.trainable == sum(
        p.numel() for p in trainer.model.parameters() if p.requires_grad
    )
    trainer.freeze(**{body: False})
    assert frozen(trainer.model) == parts[embeddings]
    if (
        kind != "gpt2"
    ):  # whose head is its embedding, so that with its body frozen too nothing would be left
        trainer.freeze(**{body: True})
    kept = frozen(trainer.model)
    before = weights(trainer.model)
    trainer.train(valid=False)
    assert changed(trainer.model, before) == everything - kept


def test_a_part_that_a_model_has_not_is_refused(checkpoints):
    decoder = t2t.Trainer(model_name_or_path=checkpoints("gpt2"))
    with pytest.raises(
        ValueError, match="is a decoder and has no encoder: freeze its decoder or its embeddings"
    ):
        decoder.freeze(encoder=True)
    decoder.freeze(encoder=None, embeddings=True)


@pytest.mark.parametrize("kind", ["t5", "gpt2", "bert"])
def test_the_summary_counts_as_transformers_does(checkpoints, files, tmp_path, kind, run_mesh):
    theirs = make(checkpoints, files, kind, False, tmp_path)
    ours = make(checkpoints, files, kind, True, tmp_path)
    whole = theirs.model.num_parameters()
    for trainer in (theirs, ours):
        summary = trainer.model_summary()
        assert (summary.total, summary.trainable) == (whole, whole)
        assert sum(total for total, _ in summary.parts.values()) == whole
    assert theirs.model_summary().parts == ours.model_summary().parts or kind == "bert"

    folder, file = checkpoints(kind), str(files / FILES[kind])

    def split(mesh):
        trainer = t2t.Trainer(
            model_name_or_path=folder, train_file=file, model_parallel_size=2, mesh=mesh, **SHORT
        )
        trainer.freeze(embeddings=True)
        return trainer.model_summary()

    for summary in run_mesh(2, split):
        assert summary.total == whole
        assert summary.parts["embeddings"][1] == 0
        assert whole - summary.trainable == summary.parts["embeddings"][0]


@pytest.mark.parametrize("kind", ["t5", "gpt2", "bert"])
@pytest.mark.parametrize("native", [True, False])
def test_a_soft_prompt_is_all_that_changes(checkpoints, files, tmp_path, kind, native):
    optimizer = "adafactor" if kind == "t5" else "adamw"
    trainer = make(checkpoints, files, kind, native, tmp_path, optimizer=optimizer)
    untouched = weights(trainer.model)
    trainer.convert_to_prompt_tuning(["<p0>", "<p1>", "<p2>"])
    before = weights(trainer.model)
    assert {name for name in before if name not in untouched} == {
        name for name, value in trainer.model.named_parameters() if value.requires_grad
    }
    assert trainer.model_summary().trainable == 3 * 32
    trainer.train(valid=False)
    [prompt] = changed(trainer.model, before)
    assert prompt.endswith(".prompt")
    assert (weights(trainer.model)[prompt] != before[prompt]).all()
    assert all(
        torch.equal(value, untouched[name])
        for name, value in weights(trainer.model).items()
        if name != prompt
    )


@pytest.mark.parametrize("native", [True, False])
def test_a_soft_prompt_is_input_vectors_before_the_source(checkpoints, files, tmp_path, native):
    """The same loss as transformers' with the vectors before the embedded source."""
    trainer = make(checkpoints, files, "t5", native, tmp_path)
    trainer.convert_to_prompt_tuning(["<p0>", "<p1>"])
    trainer.train(valid=False)
    rows = next(
        value for name, value in trainer.model.named_parameters() if name.endswith(".prompt")
    )
    one = tmp_path / "one.json"
    one.write_text('{"s": "red one two", "t": "red"}\n')
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints("t5"))
    model = transformers.T5ForConditionalGeneration.from_pretrained(checkpoints("t5"))
    embedded = model.shared(tokenizer("red one two", return_tensors="pt").input_ids)
    labels = tokenizer("red", return_tensors="pt").input_ids
    loss = model(inputs_embeds=torch.cat([rows[None], embedded], 1), labels=labels).loss
    assert trainer.evaluate(str(one))["loss"] == pytest.approx(loss.item(), rel=1e-5)
    two = tmp_path / "two.json"  # where the source has the tokens, they stay where they are
    two.write_text('{"s": "<p0><p1>red one two", "t": "red"}\n')
    assert trainer.evaluate(str(two)) == trainer.evaluate(str(one))
    folder = trainer.save_model()
    assert not native or "library_name: transformers" in (folder / "README.md").read_text()
    assert load_file(folder / "soft_prompt.safetensors")["prompt"].shape == (2, 32)
    stored = transformers.T5ForConditionalGeneration.from_pretrained(folder)
    for name, value in model.named_parameters():
        assert torch.equal(value, stored.get_parameter(name)), name
    again = t2t.Trainer(model_name_or_path=str(folder), native=native)
    assert again.evaluate(str(one)) == trainer.evaluate(str(one))
    assert again.generate_single("red one two", max_new_tokens=8) == trainer.generate_single(
        "red one two"
    )


@pytest.mark.parametrize("native", [True, False])
def test_ids_beyond_the_tokenizer_are_no_prompt_and_are_never_generated(
    checkpoints, tmp_path, native
):
    """T5's table and head have rows for ids that its tokenizer has not."""
    folder = tmp_path / "padded"
    model = transformers.T5ForConditionalGeneration.from_pretrained(checkpoints("t5"))
    tokenizer = transformers.AutoTokenizer.from_pretrained(checkpoints("t5"))
    first = len(tokenizer)
    model.resize_token_embeddings(first + 6, mean_resizing=False)
    with torch.no_grad():
        # One of two opposite rows has the largest logit.
        row = 100 * torch.randn(model.config.d_model, generator=torch.Generator().manual_seed(1))
        for number in range(6):
            model.get_output_embeddings().weight[first + number] = row * (-1) ** number
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    trainer = t2t.Trainer(model_name_or_path=str(folder), native=native)
    trainer.convert_to_prompt_tuning(["<p0>", "<p1>"])
    embedding = next(
        module for module in trainer.model.modules() if type(module).__name__ == "PromptedEmbedding"
    )
    ids = torch.tensor([[first - 1, first, first + 1, first + 2, first + 5]])
    plain = embedding.base(ids)
    found = embedding(ids)
    assert torch.equal(found[0, [0, 3, 4]], plain[0, [0, 3, 4]])
    assert torch.equal(found[0, 1:3], embedding.prompt)

    decoded = []
    decode = trainer._texts.backend.batch_decode
    trainer._texts.backend.batch_decode = lambda rows, **options: (
        decoded.extend(rows),
        decode(rows, **options),
    )[1]
    for settings in ({"num_beams": 1}, {"num_beams": 2, "suppress_tokens": [5]}):
        trainer.generate_single("one two", max_new_tokens=5, **settings)
    trainer.generate_diverse("one two", output_count=2, beam_width=1, max_new_tokens=5)
    assert len(decoded) == 4
    assert all(id < first for row in decoded for id in row)


def test_a_soft_prompt_is_the_same_when_layers_are_split(checkpoints, files, tmp_path, run_mesh):
    folder, file, out = checkpoints("t5"), str(files / "pairs.json"), str(tmp_path)

    def tune(mesh):
        trainer = t2t.Trainer(
            model_name_or_path=folder, train_file=file, model_parallel_size=mesh.tp_size, mesh=mesh,
            env_type="deepspeed+mpu", output_dir=f"{out}/{mesh.tp_size}", **SHORT,
        )  # fmt: skip
        trainer.convert_to_prompt_tuning(["<p0>", "<p1>"])
        before = weights(trainer.model)
        trainer.train(valid=False)
        [name] = changed(trainer.model, before)
        return (
            weights(trainer.model)[name],
            trainer.generate_single("red one two"),
            trainer.evaluate(file),
        )

    [(rows, text, values)] = run_mesh(1, tune)
    for other_rows, other_text, other_values in run_mesh(2, tune):
        torch.testing.assert_close(other_rows, rows, rtol=1e-4, atol=1e-4)
        assert other_text == text
        assert other_values == pytest.approx(values, rel=1e-4)


@pytest.mark.parametrize("native", [True, False])
def test_lora_changes_only_what_it_adds(checkpoints, files, tmp_path, native):
    trainer = make(checkpoints, files, "t5", native, tmp_path)
    trainer.convert_to_lora(r=2, target_modules=["q", "v"])
    before = weights(trainer.model)
    added = {name for name in before if "lora_" in name}
    assert trainer.model_summary().trainable == sum(before[name].numel() for name in added)
    trainer.train(valid=False)
    assert changed(trainer.model, before) == added
    folder = trainer.save_model()
    assert not (folder / "model.safetensors").exists()
    if native:
        card = (folder / "README.md").read_text()
        assert f"generate --model {Path(checkpoints('t5')).resolve()} --adapter ." in card
        assert 'AutoPeftModelForSeq2SeqLM.from_pretrained(".")' in card
    base = transformers.T5ForConditionalGeneration.from_pretrained(checkpoints("t5"))
    adapted = peft.PeftModel.from_pretrained(base, folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    one = tmp_path / "one.json"
    one.write_text('{"s": "red one two", "t": "red"}\n')
    ids, labels = (
        tokenizer(text, return_tensors="pt").input_ids for text in ("red one two", "red")
    )
    loss = adapted(input_ids=ids, labels=labels).loss.item()
    assert trainer.evaluate(str(one))["loss"] == pytest.approx(loss, rel=1e-6)
    for reader in (True, False):
        again = t2t.Trainer(model_name_or_path=str(folder), native=reader)
        assert again.evaluate(str(one))["loss"] == pytest.approx(loss, rel=1e-6)


def test_a_classifier_with_lora_is_saved_with_its_head(checkpoints, files, tmp_path):
    trainer = make(
        checkpoints, files, "bert", True, tmp_path, lora_rank=2, lora_target="query,value"
    )
    before = weights(trainer.model)
    trainer.train(valid=False)
    assert changed(trainer.model, before) == {
        n for n in before if "lora_" in n or n.startswith("classifier")
    }
    folder = trainer.save_model()
    values = trainer.evaluate(str(files / "names.json"))
    again = t2t.Trainer(model_name_or_path=str(folder), max_source_length=20)
    assert again.evaluate(str(files / "names.json")) == pytest.approx(values)
    base = transformers.BertForSequenceClassification.from_pretrained(
        checkpoints("bert"), num_labels=2
    )
    adapted = peft.PeftModel.from_pretrained(base, folder).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    batch = tokenizer(["red one two", "one"], return_tensors="pt", padding=True)
    expected = trainer.model.eval()(**batch).logits
    torch.testing.assert_close(adapted(**batch).logits, expected, rtol=0, atol=1e-6)
    merged = trainer.save_model(tmp_path / "merged", merge_adapter=True)
    whole = transformers.BertForSequenceClassification.from_pretrained(merged).eval()
    torch.testing.assert_close(whole(**batch).logits, expected, rtol=0, atol=1e-6)


def test_what_cannot_be_converted_is_refused(checkpoints, files, tmp_path):
    native = make(checkpoints, files, "t5", True, tmp_path)
    with pytest.raises(ValueError, match=r"LoRA: models of the zoo do not support use_dora=True"):
        native.convert_to_lora(r=2, use_dora=True)
    with pytest.raises(
        ValueError, match=r"LoRA: target_modules 'q_proj' match no linear layer .* has q, k, v, o"
    ):
        native.convert_to_lora(r=2, target_modules=["q_proj"])
    with pytest.raises(
        ValueError, match=r"match shared, which is no linear layer .* modules_to_save"
    ):
        native.convert_to_lora(r=2, target_modules=["shared"])
    with pytest.raises(
        ValueError,
        match=r"modules_to_save name lm_head|modules_to_save name shared|matches no module",
    ):
        native.convert_to_lora(r=2, modules_to_save=["shared"])
    with pytest.raises(ValueError, match="tokenizer has the token '</s>' already"):
        native.convert_to_prompt_tuning(["</s>"])
    with pytest.raises(ValueError, match="must name new tokens"):
        native.convert_to_prompt_tuning([])
    native.convert_to_prompt_tuning(["<p0>"])
    with pytest.raises(ValueError, match="has a soft prompt already: <p0>"):
        native.convert_to_prompt_tuning(["<p1>"])
    theirs = make(checkpoints, files, "t5", False, tmp_path)
    with pytest.raises(ValueError, match=r"LoRA: .*no_such_layer"):
        theirs.convert_to_lora(r=2, target_modules=["no_such_layer"])
    text = t2t.Trainer(
        model_name_or_path=checkpoints("gpt2"), train_file=str(files / "text.txt"), block_size=8
    )
    with pytest.raises(ValueError, match="plain text has no sources; use pairs"):
        text.convert_to_prompt_tuning(["<p0>"])
