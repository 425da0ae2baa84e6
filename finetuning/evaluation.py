"""Measures predictions and generated texts by metrics that have the names of the library
`evaluate`.
"""

from __future__ import annotations

import math
import re
import string
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..data import AnswerSpans
from ..models.language_model import IGNORED
from ..trainer.batches.loss_normalization import find_output_field
from ..trainer.launch.ranks import Ranks
from .arguments import METRICS
from .embedding.metrics import RETRIEVAL_VALUES
from .preference.objective import VALUE_NAMES
from .text_generator import TextGenerator

ROUGE = ("rouge1", "rouge2", "rougeL")
VALUES = {
    "rouge": ROUGE,
    "squad": ("exact_match", "f1"),
    "seqeval": ("f1", "precision", "recall"),
    "retrieval": RETRIEVAL_VALUES,
    "similarity": ("spearmanr", "pearsonr"),
    "preferences": VALUE_NAMES,
    "rewards": VALUE_NAMES[:4],
}
PACKAGES = {
    **dict.fromkeys(
        ("f1", "precision", "recall", "matthews_correlation"), ("sklearn", "scikit-learn")
    ),
    "spearmanr": ("scipy", "scipy"),
    "seqeval": ("seqeval", "seqeval"),
    "similarity": ("scipy", "scipy"),
}
LONGEST_ANSWER = 30  # tokens, as in transformers' run_qa.py


def metric_names(given: str, kind: str) -> tuple[str, ...]:
    """Returns the metrics to compute: those of the `kind` that are named, and its default unless it
    is of texts.

    Raises:
        ValueError: A metric is unknown, or its package is missing.
    """
    named = [name.strip() for name in given.split(",") if name.strip()]
    for name in named:
        if name not in METRICS[kind] and named != [METRICS["texts"][0]]:
            raise ValueError(
                f"metric must be one of {', '.join(METRICS[kind])} for {kind}, not {name!r}"
            )
        module, package = PACKAGES.get(name, ("math", ""))
        if name in METRICS[kind] and find_spec(module) is None:
            raise ValueError(
                f'the metric {name} needs the package {package}: pip install "shardzoo[metrics]"'
            )
    own = [name for name in named if name in METRICS[kind]]
    first = [] if kind in ("texts", "tokens") else [METRICS[kind][0]]
    return tuple(dict.fromkeys([*first, *own]))


def value_names(metrics: Sequence[str]) -> list[str]:
    """Returns the names of the values of metrics."""
    names: list[str] = []
    for metric in metrics:
        names += VALUES.get(metric, (metric,))
    return list(dict.fromkeys(names))


def text_values(
    metrics: Sequence[str], predictions: Sequence[str], targets: Sequence[str]
) -> dict[str, float]:
    """Compares generated texts with their targets; leading and trailing white space is ignored.

    Args:
        metrics: "sacrebleu" is corpus BLEU (Post 2018), "chrf" and "ter" are those of sacrebleu
            too, 0 to 100. "rouge" gives mean F-measures of ROUGE-1, -2 and -L with stemming, 0 to
            100 (Lin 2004). "accuracy" and "exact_match" are the share of texts equal to their
            target, 0 to 1.
    """
    predictions = [text.strip() for text in predictions]
    targets = [text.strip() for text in targets]
    values: dict[str, float] = {}
    for metric in metrics:
        if metric in ("accuracy", "exact_match"):
            values[metric] = sum(p == t for p, t in zip(predictions, targets, strict=True)) / len(
                targets
            )
        elif metric == "rouge":
            values |= _rouge(predictions, targets)
        else:
            import sacrebleu

            function = {"sacrebleu": "bleu"}.get(metric, metric)
            values[metric] = getattr(sacrebleu, f"corpus_{function}")(predictions, [targets]).score
    return values


def _rouge(predictions: Sequence[str], targets: Sequence[str]) -> dict[str, float]:
    from rouge_score.rouge_scorer import RougeScorer

    scorer = RougeScorer(list(ROUGE), use_stemmer=True)
    scores = [scorer.score(target, text) for text, target in zip(predictions, targets, strict=True)]
    return {
        name: 100 * sum(score[name].fmeasure for score in scores) / len(scores) for name in ROUGE
    }


def generated_texts(
    generator: TextGenerator, model: Any, sources: Sequence[str], ranks: Ranks
) -> list[str]:
    """Returns the texts generated for the sources, on all ranks; the data-parallel ranks share the
    sources.

    Of a model that FSDP has split, every step gathers blocks, and of dealt experts every step sends
    tokens to them, so that the ranks that need one another take the same steps for the same sources.
    """
    if getattr(model, "sharded_model", None) is not None:
        with torch.random.fork_rng():
            # Drawn tokens must be the same on every rank.
            torch.manual_seed(0)
            return generator(model, sources)
    # Ranks along the expert axis have the same sources.
    mine = range(ranks.dp_rank // ranks.ep_size, len(sources), ranks.dp_size // ranks.ep_size)
    with torch.random.fork_rng(enabled=ranks.ep_size > 1):
        if ranks.ep_size > 1:
            torch.manual_seed(mine.start)
        texts = generator(model, [sources[number] for number in mine])
    every = ranks.gather(list(zip(mine, texts, strict=True)) if ranks.reports else [])
    found = dict(pair for part in every for pair in part)
    return [found[number] for number in range(len(sources))]


def collect_predictions(kind: str, output: Any, batch: Mapping[str, Tensor]) -> list[Any]:
    """Returns what the metrics of a `kind` need of each row: (prediction, label), for words lists
    of such pairs, and for answers the logits of the first and the last token."""
    if kind == "answers":
        start = find_output_field(output, "start_logits").float().cpu().tolist()
        end = find_output_field(output, "end_logits").float().cpu().tolist()
        return list(zip(start, end, strict=True))
    logits = find_output_field(output, "logits").float().cpu()
    labels = batch["labels"].cpu()
    if kind == "numbers":
        return list(zip(logits.view(-1).tolist(), labels.view(-1).tolist(), strict=True))
    if kind == "several classes":
        return list(zip((logits > 0).int().tolist(), labels.int().tolist(), strict=True))
    chosen = logits.argmax(-1).tolist()
    if kind == "classes":
        return list(zip(chosen, labels.tolist(), strict=True))
    decoded = find_output_field(output, "predictions")
    if decoded is not None:
        chosen = decoded.cpu().tolist()
    rows: list[Any] = []
    for predicted, wanted in zip(chosen, labels.tolist(), strict=True):
        pairs = zip(predicted, wanted, strict=True)
        rows.append([(found, label) for found, label in pairs if label != IGNORED])
    return rows


def predicted_values(
    kind: str, metrics: Sequence[str], found: Sequence[Any], names: Sequence[str]
) -> dict[str, float]:
    """Returns the values of metrics of predictions, which `collect_predictions` returned.

    Classes: f1, precision and recall are of class 1 if there are two classes, else means over the
    classes; of several classes they are over all decisions, and accuracy is the share of rows that
    are right in all classes. Words: accuracy is that of words, and seqeval's values are those of
    entities (CoNLL-2000's, by BIO labels `names`).
    """
    if kind == "words":
        return _word_values(metrics, found, names)
    predicted = np.array([prediction for prediction, _ in found])
    wanted = np.array([label for _, label in found])
    if kind == "numbers":
        return {metric: _measure_numbers(metric, predicted, wanted) for metric in metrics}
    values: dict[str, float] = {}
    for metric in metrics:
        if metric == "accuracy":
            values[metric] = float((predicted == wanted).reshape(len(found), -1).all(1).mean())
            continue
        from sklearn import metrics as library

        if metric == "matthews_correlation":
            values[metric] = float(library.matthews_corrcoef(wanted, predicted))
            continue
        average = "macro"
        if kind == "several classes":
            average = "micro"
        elif len(names) == 2:
            average = "binary"
        function = getattr(library, f"{metric}_score")
        values[metric] = float(function(wanted, predicted, average=average, zero_division=0))
    return values


def _measure_numbers(metric: str, predicted: np.ndarray, wanted: np.ndarray) -> float:
    if metric == "mse":
        return float((np.abs(predicted - wanted) ** 2).mean())
    if metric == "mae":
        return float(np.abs(predicted - wanted).mean())
    if metric == "spearmanr":
        # It is Pearson's correlation of the ranks, of which equal numbers share their mean.
        from scipy.stats import rankdata

        predicted = rankdata(predicted)
        wanted = rankdata(wanted)
    if predicted.std() == 0 or wanted.std() == 0:
        return 0.0  # undefined for equal numbers
    return float(np.corrcoef(predicted, wanted)[0, 1])


def _word_values(
    metrics: Sequence[str], found: Sequence[Any], names: Sequence[str]
) -> dict[str, float]:
    pairs = [pair for row in found for pair in row]
    values = {"accuracy": sum(a == b for a, b in pairs) / max(1, len(pairs))}
    if "seqeval" in metrics:
        from seqeval import metrics as library

        predicted: list[list[Any]] = []
        wanted: list[list[Any]] = []
        for row in found:
            predicted.append([names[prediction] for prediction, _ in row])
            wanted.append([names[label] for _, label in row])
        for name in VALUES["seqeval"]:
            function = getattr(library, f"{name}_score")
            values[name] = float(function(wanted, predicted, zero_division=0))
    return values


def best_answers(spans: AnswerSpans, found: Sequence[Any]) -> list[str]:
    """Returns the answer to each question: of all its windows, the text with the largest sum of
    logits.

    If some question has no answer, the answer is empty where the sum for the [CLS] token is larger
    in every window.

    Args:
        found: For each window the logits [S] of the first and of the last token.
    """
    best: dict[int, tuple[float, str]] = {}
    absent: dict[int, float] = {}
    for (question, places, cls), logits in zip(spans.windows, found, strict=True):
        start, end = map(np.array, logits)
        inside = [token for token, place in enumerate(places) if place is not None]
        scores = start[inside, None] + end[None, inside]  # [n, n]
        allowed = np.tril(np.triu(np.ones_like(scores)), LONGEST_ANSWER - 1)
        first, last = divmod(int(np.where(allowed > 0, scores, -np.inf).argmax()), len(inside))
        context = spans.records[question].context
        text = context[(places[inside[first]] or (0,))[0] : (places[inside[last]] or (0, 0))[1]]
        best[question] = max(best.get(question, (-np.inf, "")), (float(scores[first, last]), text))
        absent[question] = min(absent.get(question, np.inf), float(start[cls] + end[cls]))
    may_lack = any(not record.answers for record in spans.records)
    return [
        "" if may_lack and absent[n] > best[n][0] else best[n][1] for n in range(len(spans.records))
    ]


def answer_values(answers: Sequence[str], records: Sequence[Any]) -> dict[str, float]:
    """Returns SQuAD's values (Rajpurkar et al., 2016), 0 to 100: the shares of answers that equal
    one of a question's, and the mean over the questions of the largest F1 of words, both after
    `normalized`."""
    exact = 0.0
    f1 = 0.0
    for answer, record in zip(answers, records, strict=True):
        wanted = [normalized(text) for text, _ in record.answers] or [""]
        exact += normalized(answer) in wanted
        f1 += max(_word_f1(normalized(answer).split(), text.split()) for text in wanted)
    return {"exact_match": 100 * exact / len(answers), "f1": 100 * f1 / len(answers)}


def normalized(text: str) -> str:
    """Returns a text in lower case, without punctuation, articles and repeated white space."""
    kept = "".join(letter for letter in text.lower() if letter not in string.punctuation)
    return " ".join(re.sub(r"\b(a|an|the)\b", " ", kept).split())


def _word_f1(answer: list[str], wanted: list[str]) -> float:
    if not answer or not wanted:
        return float(answer == wanted)
    common = sum((Counter(answer) & Counter(wanted)).values())
    return 2 * common / (len(answer) + len(wanted))


def next_token_accuracy(logits: Tensor, labels: Tensor) -> tuple[float, float]:
    """Returns (correct tokens, tokens); logits [B, S, V] at a position predict labels int64 [B, S]
    at the next.
    """
    predicted = logits[:, :-1].argmax(-1)
    wanted = labels[:, 1:]
    kept = wanted != IGNORED
    return float((predicted[kept] == wanted[kept]).sum()), float(kept.sum())


def perplexity(loss: float) -> float:
    """Returns exp(loss) for a mean loss in nats per token."""
    return math.exp(loss) if loss < 700 else math.inf
