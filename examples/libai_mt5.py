"""LiBai's mT5 benchmark: pretrains mT5 by span corruption from one configuration file.

    python examples/libai_mt5.py train.num_gpus=8 train.lr=2e-4 corpus=data/loss_compara --resume

It reports seconds per iteration and samples per second. Without a corpus it uses the Python standard library.
"""

import sys
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import torch
from torch.utils.data import Subset
from tyro.conf import AvoidSubcommands, FlagConversionOff

import shardzoo
from shardzoo.cli.arguments import parse
from shardzoo.cli.console import exit_code_of
from shardzoo.data import LIBAI_MT5, IndexedDataset, PretrainingData, build_dataset, build_loader, prepare_corpus
from shardzoo.data.tokenizers.tokenizer import T5_SENTINELS, load_tokenizer
from shardzoo.models.mt5 import MT5Config
from shardzoo.trainer import Trainer, TrainingArguments
from shardzoo.trainer.launch.rank_info import RankInfo
from shardzoo.trainer.launch.ranks import on_first_rank


@dataclass(frozen=True)
class Benchmark:
    model: MT5Config = field(default_factory=MT5Config)
    data: AvoidSubcommands[FlagConversionOff[PretrainingData]] = LIBAI_MT5
    train: FlagConversionOff[TrainingArguments] = field(default_factory=TrainingArguments)
    corpus: str | None = None
    """Prefix of a .bin/.idx pair with its tokenizer beside it, or any text; by default Python's standard library."""
    pretrained_model_path: str | None = None
    """Folder of a model to start from; `model` is then unused."""
    eval_samples: int = 64
    """Held-out samples for each evaluation."""
    tf32: FlagConversionOff[bool] = True
    """Multiply fp32 matrices as TensorFloat-32 on a GPU that supports it."""
    fast_dev_run: bool = False
    """Run twenty iterations, with an evaluation after every tenth."""
    resume: bool = False
    """Resume the run in train.save_dir."""
    eval_only: bool = False
    """Evaluate the run's last checkpoint, or the pretrained model."""
    config: Path | None = None
    """Configuration file; by default libai_mt5.yaml."""


def main() -> int:
    config = parse(
        Benchmark, sys.argv[1:], program="libai_mt5.py", description=__doc__ or "",
        quiet=not RankInfo.from_environment().is_first, defaults=Path(__file__).with_suffix(".yaml"), overrides=True,
    )  # fmt: skip
    torch.set_float32_matmul_precision("high" if config.tf32 else "highest")
    train = replace(config.train, resume=config.resume or config.train.resume)
    if config.fast_dev_run:
        train = replace(train, train_steps=20, eval_interval=10)
    trainer = Trainer(train)
    folder, pieces = trainer.run_folder, config.model.vocab_size - T5_SENTINELS
    corpus = on_first_rank(
        lambda: prepare_corpus(config.corpus, folder.data, vocab_size=pieces, tokenizer="sentencepiece")
    )
    tokenizer = load_tokenizer(corpus.tokenizer_dir)
    data, share = replace(config.data, micro_batch_size=train.micro_batch_size), trainer.share
    loader = build_loader(
        data, IndexedDataset(corpus.train_prefix), tokenizer,
        rank=share.rank, world_size=share.world_size, num_workers=train.num_workers,
    )  # fmt: skip
    held_out = Subset(build_dataset(data, IndexedDataset(corpus.valid_prefix), tokenizer), range(config.eval_samples))

    last = folder.latest_step() if config.eval_only else None
    path = folder.checkpoint(last) if last else config.pretrained_model_path
    model = shardzoo.from_pretrained(path, trainer.mesh) if path else shardzoo.from_config(config.model, trainer.mesh)
    if tokenizer.vocab_size > model.config.vocab_size:
        raise ValueError(f"{tokenizer.vocab_size} tokens do not fit model.vocab_size={model.config.vocab_size}")
    if config.eval_only:
        trainer.console.print(trainer.evaluate(model, held_out))
        return 0
    trainer.train(model, train_dataset=loader, valid_dataset=held_out)
    seconds = median(record["train/seconds"] for record in folder.metrics() if "train/seconds" in record)
    samples = train.global_batch(share.world_size) / seconds
    trainer.console.print(f"time: {seconds:.3g} s/iter, total_throughput: {samples:.3g} samples/s")
    return 0


if __name__ == "__main__":
    sys.exit(exit_code_of(main, quiet=not RankInfo.from_environment().is_first))
