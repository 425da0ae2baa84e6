"""Defines the arguments of the model `shardzoo` of lm-evaluation-harness: its `--model_args`."""

from __future__ import annotations

import difflib
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from ..checkpoint.hub import TEXTS, find_model

# The arguments of the harness's own model of transformers, `hf`, that say how it evaluates, not
# what it loads.
HARNESS_ARGUMENTS = (
    "add_bos_token",
    "batch_size",
    "chat_template_args",
    "enable_thinking",
    "logits_cache",
    "max_batch_size",
    "max_length",
    "mixed_precision_dtype",
    "prefix_token_id",
    "softmax_dtype",
    "think_end_token",
    "truncation",
    "use_fast_tokenizer",
)
DTYPES = ("auto", "float32", "bfloat16", "float16")


@dataclass(frozen=True)
class ModelArguments:
    """Says which model is evaluated, and over how many ranks it is split.

    Attributes:
        pretrained: A Hugging Face folder or a shardzoo folder with its tokenizer, or
            org/name[@revision] on the Hub.
        tensor_parallel_size: Number of processes that each layer is split over.
        dtype: Type of the weights; auto: as they are stored.
        tokenizer: A folder with the tokenizer, or a name on the Hub; by default the model's.
        peft: A folder with LoRA weights, or a name on the Hub; they are merged into the model.
        device: "cpu" or "cuda"; by default GPUs if there are any.
        harness: Arguments of the harness's model `hf` that say how it evaluates.

    Raises:
        ValueError: A value cannot work.
    """

    pretrained: str
    tensor_parallel_size: int = 1
    dtype: str = "auto"
    tokenizer: str | None = None
    peft: str | None = None
    device: str | None = None
    harness: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def from_given(cls, given: Mapping[str, Any]) -> ModelArguments:
        """Returns the arguments that a command line or a call names."""
        own = [entry.name for entry in fields(cls) if entry.name != "harness"]
        known = (*own, *HARNESS_ARGUMENTS)
        for name in given:
            if name not in known:
                close = difflib.get_close_matches(name, known, n=1)
                advice = f"did you mean {close[0]}?" if close else f"use {', '.join(known)}"
                raise ValueError(f"model_args: there is no argument {name!r}; {advice}")
        if "pretrained" not in given:
            raise ValueError("model_args must name the model: pretrained=FOLDER")
        named = {name: value for name, value in given.items() if name in own and value is not None}
        harness = {name: given[name] for name in HARNESS_ARGUMENTS if name in given}
        return cls(**named, harness=harness)

    def __post_init__(self) -> None:
        size = self.tensor_parallel_size
        if not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise ValueError(f"tensor_parallel_size must be an integer of at least 1, not {size!r}")
        if str(self.dtype).removeprefix("torch.") not in DTYPES:
            raise ValueError(f"dtype must be one of {', '.join(DTYPES)}, not {self.dtype!r}")
        if self.device is not None and str(self.device).partition(":")[0] not in ("cpu", "cuda"):
            raise ValueError(f"device must be cpu or cuda, not {self.device!r}")
        if size > 1 and str(self.harness.get("batch_size", "")).startswith("auto"):
            raise ValueError(
                f"batch_size={self.harness['batch_size']} tries sizes until memory is exhausted, "
                "which the ranks of a split model do not survive; with "
                f"tensor_parallel_size={size} set batch_size to a number"
            )

    def find_folders(self) -> tuple[Path, Path, Path | None]:
        """Returns the folders of the model, its tokenizer and its LoRA weights, downloaded if they
        are on the Hub.
        """
        model = find_model(self.pretrained, "pretrained")
        if not model.is_dir():
            raise ValueError(
                f"pretrained: {model} is not a folder, nor a name on the Hub: org/name[@revision]"
            )
        texts = model
        if self.tokenizer is not None:
            texts = find_model(self.tokenizer, "tokenizer", TEXTS)
        adapter = None
        if self.peft is not None:
            adapter = find_model(self.peft, "peft")
        return model, texts, adapter
