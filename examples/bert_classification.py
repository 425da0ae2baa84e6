"""Trains BERT to classify texts: which package of the standard library does a docstring belong to?

Without arguments a small random BERT is trained; `--model` takes a real one, `--data` any labeled texts.
"""

import json
from pathlib import Path

import tiny
import torch
import tyro
from torch.utils.data import random_split
from transformers import AutoTokenizer

import shardzoo
from shardzoo.models import find_config
from shardzoo.trainer import Trainer
from shardzoo.trainer.arguments.training_arguments import EnvType


def read(path: Path | None) -> list[tuple[str, str]]:
    if path is None:
        return [(f"{doc.title} {doc.text}", doc.package) for doc in tiny.docstrings()]
    rows = map(json.loads, path.read_text(encoding="utf-8").splitlines())
    return [(row["text"], str(row["label"])) for row in rows]


def accuracy(logits, labels):
    return (logits.argmax(-1) == labels).float().mean()


def main(
    model: Path | None = None,
    data: Path | None = None,
    env_type: EnvType = "pytorch",
    num_gpus: int = 1,
    model_parallel_size: int = 1,
    batch_size: int = 16,
    epochs: int = 3,
    lr: float = 3e-3,
    max_length: int = 64,
    save_dir: Path = Path("runs/examples"),
) -> None:
    """
    Args:
        model: a BERT's Hugging Face folder; the classifier is newly initialized.
        data: JSON lines with `text` and `label`.
    """
    trainer = Trainer(
        env_type=env_type,
        num_gpus=num_gpus,
        model_parallel_size=model_parallel_size,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        weight_decay=0.01,
        eval_interval=20,
        log_interval=5,
        save_best="accuracy",
        experiment_name=f"bert-{env_type}",
        save_dir=str(save_dir),
        resume=True,
    )
    rows = read(data)
    names = sorted({label for _, label in rows})
    folder = model or tiny.checkpoint("bert", [text for text, _ in rows], save_dir / "tiny-bert")
    tokenizer = AutoTokenizer.from_pretrained(folder)
    samples = [
        {**tokenizer(text, max_length=max_length, truncation=True), "labels": names.index(label)}
        for text, label in rows
    ]
    held_out, train = random_split(samples, [0.2, 0.8], generator=torch.Generator().manual_seed(0))

    config = find_config(str(folder)).with_changes(
        architecture="BertForSequenceClassification",
        num_labels=len(names),
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
    )
    net = shardzoo.from_pretrained(folder, trainer.mesh, config=config, new=["classifier"])
    values = trainer.train(
        net, train_dataset=train, valid_dataset=held_out, metric_methods={"accuracy": accuracy}
    )
    share = f"{values['accuracy']:.0%} of {len(held_out)} held-out texts"
    trainer.console.print(f"{share} are classified correctly; the classes are {names}")


if __name__ == "__main__":
    tyro.cli(main)
