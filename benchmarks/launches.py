"""Counts the operators of a training step, forward and backward, beside those of transformers.

    python benchmarks/launches.py --families gpt2 t5

Models are built at base size on the meta device, so nothing computes and no GPU is needed. Views and allocations are
left out, because they launch nothing; an operator of shardzoo counts once, though some launch two or three kernels.
PyTorch's scaled_dot_product_attention counts once forward and once backward, as on a GPU, for both sides; the last
columns count the some twenty operators that it is on the meta device. It counts a step after the first, which knows its
dropouts. T5 and mT5 have sequences of 512 and 128 tokens, GPT-2 of 1,024, the others of 512. transformers has no
original GLM. A host read is an operator whose result's size or value Python waits for.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers
import tyro
from rich.console import Console
from rich.table import Table
from torch.fx.experimental import _config
from torch.utils._python_dispatch import TorchDispatchMode

import shardzoo
from shardzoo.models import find_config
from shardzoo.models.language_model import note_target_count
from shardzoo.mpu import assign_dropout_sites, dropout_state

PRESETS = {
    "gpt2": "gpt2",
    "bert": "bert-base-uncased",
    "roberta": "roberta-base",
    "t5": "t5-base",
    "mt5": "mt5-base",
    "glm": "glm-base",
}
ARCHITECTURES = {
    "gpt2": "GPT2LMHeadModel",
    "bert": "BertForMaskedLM",
    "roberta": "RobertaForMaskedLM",
    "t5": "T5ForConditionalGeneration",
    "mt5": "MT5ForConditionalGeneration",
}
NO_LAUNCH = (
    "aten::empty",
    "aten::new_empty",
    "aten::_unsafe_view",
    "aten::_reshape_alias",
    "aten::empty_like",
    "aten::promote_types",
)

READS = (
    "aten::nonzero",
    "aten::_local_scalar_dense",
    "aten::masked_select",
    "aten::_unique2",
)  # wait for the device
ALL_PREDICTED = mock.patch.object(_config, "meta_nonzero_assume_all_nonzero", True)
# torch knows no autocast of the meta device, and raises instead of saying that it is off.
NO_AUTOCAST = mock.patch.multiple(
    "torch", is_autocast_enabled=lambda *_: False, get_autocast_dtype=lambda *_: torch.bfloat16
)


def one_operator(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Does what PyTorch's scaled_dot_product_attention does on a GPU: calls one fused operator."""
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.where(attn_mask, 0.0, float("-inf")).to(query.dtype)
        attn_mask = attn_mask.expand(*query.shape[:3], key.shape[2])
    fused = torch.ops.aten._scaled_dot_product_efficient_attention
    return fused(query, key, value, attn_mask, True, dropout_p, is_causal, scale=scale)[0]


AS_ON_A_GPU = mock.patch.object(torch.nn.functional, "scaled_dot_product_attention", one_operator)


class Operators(TorchDispatchMode):
    """Counts operators by name, without views and allocations."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        view = any(
            result.alias_info and not result.alias_info.is_write for result in func._schema.returns
        )
        if not view and not name.startswith(NO_LAUNCH):
            self.counts[name] += 1
        return func(*args, **(kwargs or {}))


@dataclass
class Options:
    """What to count."""

    families: list[str] = field(default_factory=lambda: list(PRESETS))
    batch: int = 8
    attention: str = "sdpa"  # transformers' implementation
    names: int = 0  # print this many of the most frequent operators
    json: Path | None = None


def settings(family: str, dropout: bool) -> dict[str, Any]:
    """Returns a base configuration with its own dropout or with none."""
    values = find_config(PRESETS[family]).to_dict()
    return (
        values
        if dropout
        else {k: 0.0 if "drop" in k and isinstance(v, float) else v for k, v in values.items()}
    )


def batch_of(family: str, size: int) -> dict[str, torch.Tensor]:
    """Returns inputs and labels on the meta device."""
    lengths = {"t5": (512, 128), "mt5": (512, 128), "gpt2": (1024, 1024)}.get(family, (512, 512))
    ids, labels = (torch.zeros(size, length, dtype=torch.long, device="meta") for length in lengths)
    note_target_count(labels, labels.numel())  # as the trainer does
    return {"input_ids": ids, "labels": labels}


def count(model: Any, batch: dict[str, torch.Tensor]) -> Counter[str]:
    """Returns the operators of a model's second step."""
    model.train()
    counts = Counter[str]()
    for step in range(2):
        model.zero_grad()
        dropout_state.set(0, step * len(batch["labels"]))
        with NO_AUTOCAST, ALL_PREDICTED, Operators() as operators:
            model(**batch).loss.backward()
        counts = operators.counts
    return counts


def native(family: str, dropout: bool, size: int) -> Counter[str]:
    """Returns the operators of shardzoo's model, in bf16."""
    config = shardzoo.models.config_from_dict(settings(family, dropout))
    model = shardzoo.models.from_config(config, device="meta", dtype=torch.bfloat16)
    assign_dropout_sites(model)
    return count(model, batch_of(family, size))


def foreign(family: str, dropout: bool, size: int, attention: str) -> Counter[str]:
    """Returns the operators of transformers' model, in bf16."""
    model_class = getattr(transformers, ARCHITECTURES[family])
    config = model_class.config_class.from_dict(settings(family, dropout))
    with torch.device("meta"):
        model = model_class._from_config(
            config, attn_implementation=attention, dtype=torch.bfloat16
        )
    return count(model, batch_of(family, size))


def compare(family: str, dropout: bool, options: Options) -> dict[str, Any]:
    """Returns a row of the report: both sides' operators and host reads, with fused attention and taken apart."""
    row: dict[str, Any] = {"family": family, "dropout": dropout}
    for suffix, attention in (("", AS_ON_A_GPU), (" in parts", nullcontext())):
        with attention:
            sides = {"shardzoo": native(family, dropout, options.batch)}
            if family in ARCHITECTURES:
                sides["transformers"] = foreign(family, dropout, options.batch, options.attention)
        for side, counts in sides.items():
            row[side + suffix] = counts.total()
            if not suffix:
                row[f"{side} reads"] = sum(counts[read] for read in READS)
        if options.names and not suffix:
            print(family, dropout, sides["shardzoo"].most_common(options.names))
        if len(sides) == 2:
            row["ratio" + suffix] = round(
                row["shardzoo" + suffix] / row["transformers" + suffix], 3
            )
    return row


def main(options: Options) -> int:
    columns = (
        "shardzoo",
        "transformers",
        "ratio",
        "shardzoo reads",
        "transformers reads",
        "ratio in parts",
    )
    heads = ("ours", "theirs", "ratio", "reads", "theirs", "in parts")
    table = Table("family", "dropout", *heads, title="operators of a training step")
    rows = [
        compare(family, dropout, options)
        for family in options.families
        for dropout in (True, False)
    ]
    for row in rows:
        table.add_row(
            row["family"], str(row["dropout"]), *(str(row.get(column, "")) for column in columns)
        )
    Console().print(table)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Options, description=__doc__)))
