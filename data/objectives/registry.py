"""Lists the pretraining objectives by name, and builds the samples of the one that a configuration
selects.

To add an objective, write a subclass of `Objective` with a `name` in a file of this folder, and add
the class to `OBJECTIVES` below.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..indexed.dataset import IndexedDataset
from ..tokenizers.tokenizer import Tokenizer
from .bart import BartObjective, MBartObjective
from .bert import NextSentenceObjective, SentenceOrderObjective
from .glm import GLMObjective
from .gpt import GPTObjective
from .objective import Objective, PretrainingData, PretrainingSamples
from .prefix_lm import PrefixLMObjective
from .roberta import RobertaObjective
from .t5 import T5Objective
from .ul2 import UL2Objective


def index_by_name(objectives: Sequence[type[Objective]]) -> dict[str, type[Objective]]:
    """Returns objectives by their names. ValueError if two of them have the same name."""
    found: dict[str, type[Objective]] = {}
    for kind in objectives:
        if kind.name in found:
            raise ValueError(
                f"{found[kind.name].__name__} and {kind.__name__} are both named {kind.name!r}"
            )
        found[kind.name] = kind
    return found


OBJECTIVES = index_by_name(
    [
        BartObjective,
        GLMObjective,
        GPTObjective,
        MBartObjective,
        NextSentenceObjective,
        PrefixLMObjective,
        RobertaObjective,
        SentenceOrderObjective,
        T5Objective,
        UL2Objective,
    ]
)


def objective_names() -> list[str]:
    """Returns the names of all objectives, sorted."""
    return sorted(OBJECTIVES)


def find_objective(name: str) -> type[Objective]:
    """Returns the objective's class of a name. ValueError lists all names if there is none."""
    if name not in OBJECTIVES:
        raise ValueError(f"unknown objective {name!r}; use one of {', '.join(objective_names())}")
    return OBJECTIVES[name]


def resolve_objective(objective: Objective | str) -> Objective:
    """Returns an objective's settings. A name stands for its defaults."""
    if isinstance(objective, str):
        return find_objective(objective)()
    return objective


def build_dataset(
    config: PretrainingData, indexed: IndexedDataset, tokenizer: Tokenizer
) -> PretrainingSamples:
    """Builds the endless dataset of a configuration.

    Sample n is a function of (corpus, configuration, n).

    Adds the objective's sentinels and other special tokens to the tokenizer if it lacks them, so
    that its `vocab_size` afterwards is the model's.
    """
    objective = resolve_objective(config.objective)
    objective.add_special_tokens(tokenizer)
    return objective.build(indexed, tokenizer, config)
