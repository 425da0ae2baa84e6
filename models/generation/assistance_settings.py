"""Defines the settings of assisted decoding, with transformers' names, meanings and defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..config import shown

SCHEDULES = ("constant", "heuristic", "heuristic_transient")


@dataclass(frozen=True)
class AssistanceSettings:
    """The settings of assisted decoding; None is the assistant's own setting, or else
    transformers' default.
    """

    prompt_lookup_num_tokens: int | None = None
    """Draft at most this many tokens by looking in the text for what followed its last tokens."""
    max_matching_ngram_size: int | None = None
    """The number of last tokens that are looked for first; then fewer; by default 2."""
    num_assistant_tokens: int | None = None
    """The number of tokens that an assistant drafts at first; by default 20."""
    num_assistant_tokens_schedule: str | None = None
    """constant, the default; or heuristic or heuristic_transient: two more after a step that took
    all, and one fewer after others."""
    assistant_confidence_threshold: float | None = None
    """An assistant's draft ends with a token whose probability is below this; by default 0.4."""

    def __post_init__(self) -> None:
        for name in ("prompt_lookup_num_tokens", "max_matching_ngram_size", "num_assistant_tokens"):
            value: Any = getattr(self, name)
            is_count = isinstance(value, int | float) and value >= 1 and int(value) == value
            if value is not None and (not is_count or isinstance(value, bool)):
                raise ValueError(f"{name} must be an integer of at least 1, not {shown(value)}")
        schedule = self.num_assistant_tokens_schedule
        if schedule is not None and schedule not in SCHEDULES:
            raise ValueError(
                f"num_assistant_tokens_schedule must be {', '.join(SCHEDULES)}, not {shown(schedule)}"
            )
        threshold: Any = self.assistant_confidence_threshold
        if threshold is not None and not isinstance(threshold, int | float):
            raise ValueError(
                f"assistant_confidence_threshold must be a number, not {shown(threshold)}"
            )
