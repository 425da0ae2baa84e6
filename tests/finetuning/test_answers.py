"""The answers that are taken from the logits of windows, against a search of all spans."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from shardzoo.finetuning.evaluation import LONGEST_ANSWER, best_answers

CONTEXT = "".join(chr(ord("a") + number % 26) + str(number) + " " for number in range(60))
PLACES = [(start, start + 1) for start in range(len(CONTEXT))][:45]
QUESTION_TOKENS = 4  # the first of them is [CLS]


def make_spans(windows: list[int], answers: list[list[Any]]) -> Any:
    """Returns windows of the numbered questions, whose tokens are single letters of the context."""
    records = [SimpleNamespace(context=CONTEXT, answers=own) for own in answers]
    listed = []
    for number, question in enumerate(windows):
        places = [None] * QUESTION_TOKENS + PLACES[number : number + 40] + [None]
        listed.append((question, places, 0))
    return SimpleNamespace(records=records, windows=listed)


def search(spans: Any, found: list[Any]) -> list[str]:
    """Looks at every span of every window, one after the other."""
    answers = []
    for number, record in enumerate(spans.records):
        best = (-np.inf, "")
        absent = np.inf
        for (question, places, cls), (start, end) in zip(spans.windows, found, strict=True):
            if question != number:
                continue
            absent = min(absent, start[cls] + end[cls])
            for first in range(len(places)):
                for last in range(first, min(first + LONGEST_ANSWER, len(places))):
                    if places[first] is None or places[last] is None:
                        continue
                    score = start[first] + end[last]
                    if score > best[0]:
                        best = (score, record.context[places[first][0] : places[last][1]])
        lacks = any(not other.answers for other in spans.records)
        answers.append("" if lacks and absent > best[0] else best[1])
    return answers


@pytest.mark.parametrize("lacking", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_the_best_span_of_all_windows_is_found(seed, lacking):
    chance = np.random.default_rng(seed)
    windows = [0, 0, 1, 2, 2, 2]
    spans = make_spans(windows, [["x"], [] if lacking else ["y"], ["z"]])
    found = [chance.normal(size=(2, len(places))) for _, places, _ in spans.windows]
    for number in (0, 2, 3, 4, 5):  # No answer is likely for the second question alone ...
        found[number][:, 0] += 3.0
    found[1][:, 0] -= 6.0  # ... and for the first one in one of its windows alone.
    for logits in found:  # Far apart, and in the wrong order, are the largest sums.
        logits[0, 40] += 4.0
        logits[1, 6] += 4.0
    assert best_answers(spans, found) == search(spans, found)


def test_a_question_without_an_answer_is_answered_by_nothing_in_all_windows():
    spans = make_spans([0, 0], [[]])
    found = [np.zeros((2, len(places))) for _, places, _ in spans.windows]
    for logits in found:
        logits[:, 0] = 1.0
    assert best_answers(spans, found) == [""]
    found[0][:, 0] = -1.0
    assert best_answers(spans, found) != [""]
