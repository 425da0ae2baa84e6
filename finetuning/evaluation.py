"""Measures a model's predictions and generated texts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from ..models.common.language_model import IGNORED
from ..trainer.launch.ranks import Ranks
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
