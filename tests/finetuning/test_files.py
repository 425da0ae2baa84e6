"""What files become: the loss of every kind of them equals transformers' on its own tokens."""

from __future__ import annotations

import json

import pytest
import torch
import transformers

from shardzoo import finetuning as t2t


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def mean_loss(model, samples) -> float:
    """Over all targets of (ids, labels), one sample at a time."""
    total = count = 0.0
    for ids, labels in samples:
        with torch.no_grad():
            loss = model(input_ids=torch.tensor([ids]), labels=torch.tensor([labels])).loss
        shifted = labels[1:] if isinstance(model, transformers.GPT2LMHeadModel) else labels
        targets = sum(label != -100 for label in shifted)
        total, count = total + loss.item() * targets, count + targets
    return total / count


@pytest.mark.parametrize("native", [True, False])
def test_pairs_of_other_keys_with_a_prefix_and_two_lengths(checkpoints, files, native):
    folder = checkpoints("t5")
    trainer = t2t.Trainer(
        model_name_or_path=folder, native=native, validation_file=str(files / "other.json"), source_id="en",
        target_id="ro", prefix="new: ", max_source_length=6, max_target_length=3,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder)
    samples = [
        (
            tokenizer(
                "new: " + record["translation"]["en"], truncation=True, max_length=6
            ).input_ids,
            tokenizer(record["translation"]["ro"], truncation=True, max_length=3).input_ids,
        )
        for record in lines(files / "other.json")
    ]
    assert {len(ids) for ids, _ in samples} == {6}
    values = trainer.evaluate()
    assert values["loss"] == pytest.approx(mean_loss(model, samples), rel=1e-5)
    assert values["perplexity"] == pytest.approx(
        torch.tensor(values["loss"]).exp().item(), rel=1e-6
    )


def test_two_text_files_and_a_soft_limit_on_samples(checkpoints, files, tmp_path):
    records = [record["translation"] for record in lines(files / "pairs.json")]
    for side, key in (("source", "s"), ("target", "t")):
        (tmp_path / f"pairs.{side}").write_text("".join(record[key] + "\n" for record in records))
    whole = t2t.Trainer(model_name_or_path=checkpoints("t5"), max_eval_samples=7)
    for name in ("pairs", "pairs.source"):
        assert whole.evaluate(str(tmp_path / name)) == whole.evaluate(str(files / "pairs.json"))


@pytest.mark.parametrize("native", [True, False])
def test_plain_text_for_a_decoder(checkpoints, files, native):
    folder = checkpoints("gpt2")
    trainer = t2t.Trainer(
        model_name_or_path=folder, native=native, validation_file=str(files / "text.txt"), task="text-generation",
        block_size=16, metric="accuracy",
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    tokens = [*tokenizer((files / "text.txt").read_text()).input_ids, tokenizer.eos_token_id]
    blocks = [tokens[i : i + 16] for i in range(0, len(tokens) - 15, 16)]
    values = trainer.evaluate()
    assert values["loss"] == pytest.approx(
        mean_loss(model, [(block, block) for block in blocks]), rel=1e-4
    )
    predicted = model(torch.tensor(blocks)).logits[:, :-1].argmax(-1)
    hits = (predicted == torch.tensor(blocks)[:, 1:]).float().mean().item()
    assert values["accuracy"] == pytest.approx(hits, abs=0.005)


@pytest.mark.parametrize("native", [True, False])
def test_pairs_for_a_decoder(checkpoints, files, native):
    folder = checkpoints("gpt2")
    trainer = t2t.Trainer(
        model_name_or_path=folder, native=native, train_file=str(files / "pairs.json"), max_source_length=20,
        max_target_length=4, validation_split=0, validation_file=str(files / "pairs.json"), separator=" =",
    )  # fmt: skip
    assert trainer.task == "text2text-generation"
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.GPT2LMHeadModel.from_pretrained(folder)
    samples = []
    for record in lines(files / "pairs.json"):
        prompt = tokenizer(record["translation"]["s"] + " =").input_ids
        answer = [*tokenizer(record["translation"]["t"]).input_ids[:3], tokenizer.eos_token_id]
        samples.append((prompt + answer, [-100] * len(prompt) + answer))
    assert trainer.evaluate()["loss"] == pytest.approx(mean_loss(model, samples), rel=1e-5)


def test_padding_may_be_learnt(checkpoints, files):
    folder = checkpoints("t5")
    trainer = t2t.Trainer(
        model_name_or_path=folder, validation_file=str(files / "pairs.json"), ignore_pad_token_for_loss=False,
        micro_batch_size=48,
    )  # fmt: skip
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    model = transformers.T5ForConditionalGeneration.from_pretrained(folder)
    records = [record["translation"] for record in lines(files / "pairs.json")]
    batch = tokenizer([record["s"] for record in records], padding=True, return_tensors="pt")
    labels = tokenizer(
        [record["t"] for record in records], padding=True, return_tensors="pt"
    ).input_ids
    assert (labels == tokenizer.pad_token_id).any()
    loss = model(
        input_ids=batch.input_ids, attention_mask=batch.attention_mask, labels=labels
    ).loss.item()
    assert trainer.evaluate()["loss"] == pytest.approx(loss, rel=1e-5)
