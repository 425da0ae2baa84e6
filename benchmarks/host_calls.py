"""Counts the calls of Python functions in a training step, beside those of transformers.

    python benchmarks/host_calls.py --families gpt2 llama

On an accelerator a step of few tokens waits for the host, whose time is that of these calls. No
accelerator is needed: tensors of the CPU say that they are on a GPU, so that layers and operators
take its path, up to the compiled kernel of each operator, which is the CPU's. What a Triton kernel
costs beyond that is not counted.

A call is an event "call" of `sys.setprofile`, in the forward and backward pass together, of ours,
transformers' and PyTorch's functions; "and of C" adds the events "c_call". Models have 12 layers and
one head of 64, which the number of calls does not depend on; it counts the third step.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Generator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any
from unittest import mock

import torch
import transformers
import tyro
from rich.console import Console
from rich.table import Table

import shardzoo
from shardzoo.models.language_model import note_target_count
from shardzoo.mpu import assign_dropout_sites, dropout_state
from shardzoo.ops.registration import OPS

ENCODER = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 12,
    "num_attention_heads": 1,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "gpt2": {"n_embd": 64, "n_layer": 12, "n_head": 1},
    "llama": {**ENCODER, "num_key_value_heads": 1},
    "bert": ENCODER,
    "t5": {
        "d_model": 64,
        "d_kv": 64,
        "d_ff": 128,
        "num_layers": 12,
        "num_heads": 1,
        "decoder_start_token_id": 0,
    },
}
NO_DROPOUT: dict[str, dict[str, float]] = {
    "gpt2": {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0},
    "llama": {"attention_dropout": 0.0},
    "bert": {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0},
    "t5": {"dropout_rate": 0.0},
}
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "llama": "LlamaForCausalLM",
    "bert": "BertForMaskedLM",
    "t5": "T5ForConditionalGeneration",
}
BATCH = 2
LENGTH = 64


@dataclass
class Options:
    """What to count."""

    families: list[str] = field(default_factory=lambda: list(CONFIGS))
    names: int = 0  # print this many of our functions that are called most
    json: Path | None = None


@dataclass
class Calls:
    """The calls of a step: of Python functions by file and name, and the number of C functions."""

    functions: Counter[str] = field(default_factory=Counter)
    c_functions: int = 0

    @property
    def total(self) -> int:
        return self.functions.total()

    def profile(self, frame: FrameType, event: str, argument: Any) -> None:
        if event == "call":
            code = frame.f_code
            self.functions[f"{code.co_filename}:{code.co_name}"] += 1
        elif event == "c_call":
            self.c_functions += 1


@contextmanager
def on_accelerator() -> Generator[None]:
    """Within the context, tensors say that they are on a GPU.

    Operators whose only kernels are Triton's, which do not run here, return memory that nobody has
    written.
    """
    only_in_triton = [op for op in OPS.values() if op.variants == ("triton",)]
    torch.Tensor.is_cpu = False
    torch.Tensor.is_cuda = True
    try:
        with ExitStack() as patches:
            for op in only_in_triton:
                patches.enter_context(mock.patch.object(op, "reference", op.allocate))
            yield
    finally:
        del torch.Tensor.is_cpu, torch.Tensor.is_cuda


def count(model: Any) -> Calls:
    """Returns the calls of a model's third step."""
    model.train()
    batch = {name: torch.zeros(BATCH, LENGTH, dtype=torch.long) for name in ("input_ids", "labels")}
    note_target_count(batch["labels"], batch["labels"].numel())  # as the trainer does
    calls = Calls()
    for step in range(3):
        model.zero_grad()
        dropout_state.set(0, step * BATCH)
        calls = Calls()
        sys.setprofile(calls.profile)
        try:
            model(**batch).loss.backward()
        finally:
            sys.setprofile(None)
    dropout_state.clear()
    return calls


def build_settings(family: str, dropout: bool) -> dict[str, Any]:
    """Returns the keys of a configuration with the family's own dropout or with none."""
    changes = {} if dropout else NO_DROPOUT[family]
    return {"vocab_size": 512, **CONFIGS[family], **changes}


def count_native(family: str, dropout: bool) -> Calls:
    """Returns the calls of shardzoo's model on an accelerator."""
    model = shardzoo.from_config({"model_type": family, **build_settings(family, dropout)})
    assign_dropout_sites(model)
    with on_accelerator():
        return count(model)


def count_foreign(family: str, dropout: bool) -> Calls:
    """Returns the calls of transformers' model."""
    model_class = getattr(transformers, ARCHITECTURES[family])
    config = model_class.config_class(**build_settings(family, dropout))
    return count(model_class._from_config(config, attn_implementation="sdpa"))


def main(options: Options) -> int:
    heads = ("ours", "and of C", "theirs", "and of C")
    table = Table("family", "dropout", *heads, title="calls of Python functions in a step")
    rows: list[dict[str, Any]] = []
    for family in options.families:
        for dropout in (True, False):
            ours = count_native(family, dropout)
            theirs = count_foreign(family, dropout)
            row = {
                "family": family,
                "dropout": dropout,
                "shardzoo": ours.total,
                "shardzoo with C": ours.total + ours.c_functions,
                "transformers": theirs.total,
                "transformers with C": theirs.total + theirs.c_functions,
            }
            rows.append(row)
            table.add_row(*(str(value) for value in row.values()))
            for name, calls in ours.functions.most_common(options.names):
                print(calls, name)
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
