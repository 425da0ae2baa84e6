"""Measures a model's predictions and generated texts, and extends the trainer to report the measurements."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..models.common.language_model import IGNORED
from ..mpu import ParallelMesh
from ..trainer.evaluation import Metric
from ..trainer.launch.ranks import Ranks
from ..trainer.trainer import Trainer
from .arguments import FinetuningArguments
from .text_generator import TextGenerator

ROUGE = ("rouge1", "rouge2", "rougeL")


def text_value_names(metric: str) -> tuple[str, ...]:
    """Returns the names of the values that `text_values` returns."""
    return ROUGE if metric == "rouge" else (metric,)


def text_values(metric: str, predictions: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    """Compares generated texts with their targets; leading and trailing white space is ignored.

    Args:
        metric: "sacrebleu" is corpus BLEU, 0 to 100 (Post 2018). "rouge" gives mean F-measures of ROUGE-1, -2 and -L
            with stemming, 0 to 100 (Lin 2004). "accuracy" is the share of texts equal to their target, 0 to 1.
    """
    predictions, targets = [text.strip() for text in predictions], [text.strip() for text in targets]
    if metric == "accuracy":
        return {"accuracy": sum(p == t for p, t in zip(predictions, targets, strict=True)) / len(targets)}
    if metric == "sacrebleu":
        import sacrebleu

        return {"sacrebleu": sacrebleu.corpus_bleu(predictions, [targets]).score}
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    scores = [scorer.score(target, text) for text, target in zip(predictions, targets, strict=True)]
    return {name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE}


def generated_values(
    metric: str, generator: TextGenerator, model: Any, sources: Sequence[str], targets: Sequence[str], ranks: Ranks
) -> dict[str, float]:
    """Returns the `text_values` of generated texts on all ranks; the data-parallel ranks share the sources."""
    mine = range(ranks.dp_rank, len(sources), ranks.dp_size)
    texts = generator(model, [sources[number] for number in mine])
    every = ranks.gather(list(zip(mine, texts, strict=True)) if ranks.reports else [])
    found = dict(pair for part in every for pair in part)
    return text_values(metric, [found[number] for number in range(len(sources))], targets)


def class_accuracy(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Returns (correct rows, rows) for logits [B, C] and labels int64 [B]."""
    return float((logits.argmax(-1) == labels).sum()), float(len(labels))


def next_token_accuracy(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Returns (correct tokens, tokens); logits [B, S, V] at a position predict labels int64 [B, S] at the next."""
    predicted, wanted = logits[:, :-1].argmax(-1), labels[:, 1:]
    kept = wanted != IGNORED
    return float((predicted[kept] == wanted[kept]).sum()), float(kept.sum())


def perplexity(loss: float) -> float:
    """Returns exp(loss) for a mean loss in nats per token."""
    return math.exp(loss) if loss < 700 else math.inf


class FinetuningTrainer(Trainer):
    """Extends the trainer by validation values: perplexity, and metrics of generated texts.

    Attributes:
        measure: Returns further validation values of the unwrapped model. Collective over all ranks.
        measured: The names of these values.
    """

    def __init__(self, arguments: FinetuningArguments, mesh: ParallelMesh | None = None) -> None:
        super().__init__(arguments, mesh=mesh)
        self.is_language_model = True
        self.measure: Callable[[nn.Module], dict[str, float]] | None = None
        self.measured: tuple[str, ...] = ()

    def check(self, validates: bool, metrics: Mapping[str, Metric]) -> None:
        """Raises the ValueError that `train` would raise for these arguments, before the run's folder is created."""
        best = self.arguments.save_best
        if best is not None and not validates:
            raise ValueError(
                f"save_best={best!r} is a validation value, but nothing validates: set a validation_file or a "
                "validation_split above 0, and call train(valid=True)"
            )
        of_texts = ["perplexity"] if self.is_language_model else []
        self.check_arguments(["loss", *of_texts, *metrics, *self.measured])

    def validate(
        self, model: Any, module: nn.Module, dataset: Any, metrics: Mapping[str, Metric], collate: Callable[[Any], Any]
    ) -> dict[str, float]:
        values = super().validate(model, module, dataset, metrics, collate)
        if self.is_language_model:
            values = {"loss": values["loss"], "perplexity": perplexity(values["loss"]), **values}
        return {**values, **(self.measure(module) if self.measure else {})}
