"""What exists for scripts that were written for FlagAI, t2t-tuner or LiBai alone.

- `AutoLoader`, `Predictor`, `EnvArgs`, `EnvTrainer` and four collate functions are FlagAI's.
- `spellings.py` has the names of arguments in those systems and in transformers. The package
  accepts them everywhere, because its face imports that file.

t2t-tuner's own names are those of `shardzoo.finetuning`. Each name is imported at its first use.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .auto_loader import (
        AutoLoader,
        bert_cls_collate_fn,
        bert_sequence_label_collate_fn,
        bert_sequence_label_gp_collate_fn,
        seq2seq_collate_fn,
    )
    from .env_trainer import EnvArgs, EnvTrainer
    from .predictor import Predictor

_MODULES = {
    "AutoLoader": "auto_loader",
    "EnvArgs": "env_trainer",
    "EnvTrainer": "env_trainer",
    "Predictor": "predictor",
    "bert_cls_collate_fn": "auto_loader",
    "bert_sequence_label_collate_fn": "auto_loader",
    "bert_sequence_label_gp_collate_fn": "auto_loader",
    "seq2seq_collate_fn": "auto_loader",
}
__all__ = [
    "AutoLoader",
    "EnvArgs",
    "EnvTrainer",
    "Predictor",
    "bert_cls_collate_fn",
    "bert_sequence_label_collate_fn",
    "bert_sequence_label_gp_collate_fn",
    "seq2seq_collate_fn",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
