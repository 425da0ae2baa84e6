"""Fine-tunes models of the zoo and of transformers on texts, with the API of t2t-tuner.

    from shardzoo import finetuning as t2t

    trainer_arguments = t2t.TrainerArguments(model_name_or_path="t5-small", train_file="pairs.json")
    trainer = t2t.Trainer(arguments=trainer_arguments)
    trainer.train(valid=False)

Each name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..trainer.trainer import Trainer
    from .arguments import FinetuningArguments as TrainerArguments
    from .auto_loader import AutoLoader, bert_sequence_label_collate_fn, seq2seq_collate_fn
    from .freezing import ModelSummary
    from .predictor import Predictor

# Name, of which those of t2t-tuner and FlagAI are theirs -> (module, name in it).
_NAMES = {
    "AutoLoader": (".auto_loader", "AutoLoader"),
    "Predictor": (".predictor", "Predictor"),
    "bert_sequence_label_collate_fn": (".auto_loader", "bert_sequence_label_collate_fn"),
    "seq2seq_collate_fn": (".auto_loader", "seq2seq_collate_fn"),
    "ModelSummary": (".freezing", "ModelSummary"),
    "Trainer": ("..trainer.trainer", "Trainer"),
    "TrainerArguments": (".arguments", "FinetuningArguments"),
}
__all__ = [
    "AutoLoader", "ModelSummary", "Predictor", "Trainer", "TrainerArguments", "bert_sequence_label_collate_fn",
    "seq2seq_collate_fn",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name not in _NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, attribute = _NAMES[name]
    return getattr(import_module(module, __name__), attribute)
