"""Trains mT5 to restore Romanian diacritics, on a stream that need not fit in memory, with Adafactor.

Every text is read by one rank and one worker. After a stop (Ctrl-C, SIGTERM, a crash) the same command resumes after
the last text of its last checkpoint. Without arguments a small random mT5 learns sentences that this script makes.
"""

import unicodedata
from pathlib import Path

import tiny
import tyro

import shardzoo
from shardzoo.data import DocumentRecords, ResumableStream, load_tokenizer
from shardzoo.data.pairs.datasets import truncate_with_end
from shardzoo.trainer import Trainer
from shardzoo.trainer.arguments.training_arguments import EnvType


def strip_diacritics(text: str) -> str:
    return "".join(c for c in unicodedata.normalize("NFD", text) if not unicodedata.combining(c))


def main(
    model: Path | None = None,
    data: Path | None = None,
    env_type: EnvType = "pytorch",
    num_gpus: int = 1,
    num_workers: int = 2,
    batch_size: int = 8,
    epochs: int = 1,
    lr: float = 1e-4,
    max_length: int = 256,
    save_interval: int = 50,
    save_dir: Path = Path("runs/examples"),
) -> None:
    """
    Args:
        model: an mT5's Hugging Face folder.
        data: JSON lines with `text`, a parquet file, or a folder of them.
        num_workers: processes that read and tokenize, for each rank.
    """
    trainer = Trainer(
        env_type=env_type,
        num_gpus=num_gpus,
        epochs=epochs,
        batch_size=batch_size,
        optimizer="adafactor",  # eps (1e-30, 1e-3), clip threshold 1, decay -0.8, no first moment
        relative_step=False,  # also turns parameter scaling off
        lr=lr,
        lr_schedule="constant",
        weight_decay=0.0,
        clip_grad=0.0,
        log_interval=5,
        save_interval=save_interval,
        save_total_limit=2,
        experiment_name="diacritics",
        save_dir=str(save_dir),
        resume=True,
    )
    source = data or tiny.json_lines(
        [{"text": text} for text in tiny.sentences(800)], save_dir / "romanian.jsonl"
    )
    folder = model or tiny.checkpoint(
        "mt5", tiny.sentences(800), save_dir / "tiny-mt5", vocab_size=350
    )
    tokenizer = load_tokenizer(folder)

    def sample(text, generator):
        pair = tokenizer.encode_batch([strip_diacritics(text), text])
        source, target = (
            truncate_with_end(ids, max_length, tokenizer.eos_token_id) for ids in pair
        )
        return {
            "input_ids": source,
            "labels": target,
        }  # input_ids are padded with the padding token, labels with -100

    records, share = DocumentRecords(source), trainer.share
    stream = ResumableStream(
        records, sample, share, shuffle_buffer=1000, epochs=epochs, num_workers=num_workers
    )
    trainer.train(shardzoo.from_pretrained(folder, trainer.mesh), train_dataset=stream)


if __name__ == "__main__":
    tyro.cli(main)
