"""Trains GLM to classify texts by filling a blank, as FlagAI's examples for SuperGLUE do.

A pattern writes a record as a text with [MASK], and each label has words that may fill it. The model scores the words
of every label, so that the loss is that of a classifier, without a new head. Without arguments a small random GLM
learns which package a docstring belongs to; `--model` takes a real one with its tokenizer. `--prompt-tokens` freezes
the model and learns vectors before the text alone (P-tuning, Liu et al., 2021, arXiv:2103.10385).
"""

import json
import random
from pathlib import Path
from typing import Any

import tiny
import torch
import tyro
from torch.nn.functional import cross_entropy, pad
from torch.nn.utils.rnn import pad_sequence

import shardzoo
from shardzoo.compat import AutoLoader
from shardzoo.data import glm_tokenizer, load_tokenizer, train_tokenizer
from shardzoo.finetuning.soft_prompt import add_prompt
from shardzoo.mpu import vocab_parallel_cross_entropy
from shardzoo.trainer import Trainer
from shardzoo.trainer.arguments.training_arguments import EnvType
from shardzoo.trainer.launch.ranks import on_first_rank

SIZES = {"num_layers": 2, "hidden_size": 64, "num_attention_heads": 4, "max_sequence_length": 128}


class ClozeTrainer(Trainer):
    def forward_step(self, data: dict[str, Any], model: Any, mems: Any) -> dict[str, Any]:
        labels = data["labels"]  # [B]
        targets = data["targets"]  # [B * C, S]: the words of each of C labels
        logits = model(data["input_ids"], data["position_ids"], data["attention_mask"]).logits
        losses = vocab_parallel_cross_entropy(
            logits, targets, num_classes=model.config.vocab_size, reduction="none", mesh=model.mesh
        )
        scores = -losses.sum(-1).view(len(labels), -1)  # [B, C], log-probabilities
        return {"loss": cross_entropy(scores, labels), "logits": scores}


class Cloze(torch.utils.data.Dataset):
    """Records as the texts of a pattern, once with the words of each label."""

    def __init__(self, records, tokenizer, pattern, words, max_length, prompt_ids):
        self.records = records
        self.tokenizer = tokenizer
        self.pattern = pattern
        self.words = words
        self.max_length = max_length
        self.prompt = torch.tensor(prompt_ids, dtype=torch.long)

    def __len__(self):
        return len(self.records)

    def __getitem__(self, at):
        record = self.records[at]
        text = self.pattern.format(**record)
        filled = [
            self.tokenizer.encode_plus(text, words, max_length=self.max_length)
            for words in self.words.values()
        ]
        return {"rows": filled, "label": list(self.words).index(str(record["label"]))}

    def collate(self, samples):
        rows = [row for sample in samples for row in sample["rows"]]
        prompt = self.prompt
        ids, places, targets = [], [], []
        for row in rows:
            ids.append(torch.cat([prompt, torch.tensor(row["input_ids"])]))
            # The text begins after the prompt: its first positions are the prompt's.
            first, second = torch.tensor(row["position_ids"])
            first = torch.cat([torch.arange(len(prompt)), first + len(prompt)])
            places.append(torch.stack([first, pad(second, (len(prompt), 0))], 1))
            wanted = torch.tensor(row["target_ids"])
            wanted = wanted.where(torch.tensor(row["loss_mask"]) == 1, -100)
            targets.append(pad(wanted, (len(prompt), 0), value=-100))
        lengths = torch.tensor([row["attention_mask"] for row in rows])
        return {
            "input_ids": pad_sequence(ids, batch_first=True),
            "position_ids": pad_sequence(places, batch_first=True).transpose(1, 2).contiguous(),
            "attention_mask": lengths + len(prompt),
            "targets": pad_sequence(targets, batch_first=True, padding_value=-100),
            "labels": torch.tensor([sample["label"] for sample in samples]),
        }


def accuracy(scores, labels):
    return (scores.argmax(-1) == labels).float().mean()


def main(
    model: Path | None = None,
    data: Path | None = None,
    pattern: str = "{text} This is from [MASK].",
    words: dict[str, str] | None = None,
    prompt_tokens: int = 0,
    env_type: EnvType = "pytorch",
    num_gpus: int = 1,
    model_parallel_size: int = 1,
    batch_size: int = 8,
    epochs: int = 2,
    lr: float = 3e-3,
    max_length: int = 32,
    save_dir: Path = Path("runs/examples"),
) -> None:
    """
    Args:
        model: a GLM's folder.
        data: JSON lines with the names that the pattern has in braces, and `label`.
        pattern: the text of a record, in which [MASK] stands for the words of its label.
        words: the words of each label; by default the labels themselves.
        prompt_tokens: learn so many vectors before the text, and nothing else.
    """
    trainer = ClozeTrainer(
        env_type=env_type,
        num_gpus=num_gpus,
        model_parallel_size=model_parallel_size,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        eval_interval=20,
        log_interval=5,
        experiment_name=f"cloze-{env_type}{'-prompt' if prompt_tokens else ''}",
        save_dir=str(save_dir),
        resume=True,
    )
    if data is None:
        records = [
            {"text": one.title, "label": one.package}
            for one in tiny.docstrings()
            if one.package in ("email", "logging")
        ]
    else:
        records = [json.loads(line) for line in data.read_text(encoding="utf-8").splitlines()]
    random.Random(0).shuffle(records)  # files are often sorted by label
    labels = sorted({str(record["label"]) for record in records})
    words = words or {label: label for label in labels}
    folder = model or save_dir / "tiny-cloze"

    def prepare() -> None:
        if model is None:
            train_tokenizer("glm-bpe", (record["text"] for record in records), 600, folder)
            size = glm_tokenizer(load_tokenizer(folder), "gpt2").padded_vocab_size()
            config = {"model_type": "glm", "vocab_size": size, **SIZES}
            shardzoo.from_config(config).save_pretrained(folder)

    on_first_rank(prepare)
    loader = AutoLoader("lm", folder.name, model_dir=str(folder.parent), mesh=trainer.mesh)
    net = loader.get_model()
    prompt_ids: range | list[int] = []
    if prompt_tokens:
        # New ids after the vocabulary, whose vectors begin as those of tokens that occur often.
        embedding = net.get_input_embeddings()
        rows = embedding(torch.arange(prompt_tokens)[None])[0].detach().clone()
        prompt_ids = range(net.config.vocab_size, net.config.vocab_size + prompt_tokens)
        add_prompt(net, embedding, prompt_ids[0], rows)
    held_out = len(records) // 5
    parts = [records[held_out:], records[:held_out]]
    train, validation = (
        Cloze(part, loader.get_tokenizer(), pattern, words, max_length, prompt_ids)
        for part in parts
    )
    values = trainer.train(
        net,
        train_dataset=train,
        valid_dataset=validation,
        collate_fn=train.collate,
        metric_methods=[["accuracy", accuracy]],
    )
    found = [str(record["label"]) for record in validation.records]
    majority = max(map(found.count, labels)) / held_out
    trainer.console.print(
        f"accuracy on {held_out} held-out texts: {values['accuracy']:.2f}; "
        f"of the most frequent label alone: {majority:.2f}"
    )


if __name__ == "__main__":
    tyro.cli(main)
