"""Logs how evenly the tokens of a run are spread over the experts of its mixtures."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ...mpu import ParallelExperts, cut_sequence
from ..launch.ranks import Ranks

MIXTURE = ".mlp.experts"  # how the name of a mixture's experts in a block ends
BLOCKS = "blocks."
STACKS = ("encoder", "decoder")
IGNORED = -100  # the label of a position that is no target


class ExpertLoad:
    """Counts what the experts of a model compute between two logged steps.

    The counts stay on the device. They are added up over all ranks, and read, only when a step is
    logged, whose results the host has then read already: it waits for nothing else.
    """

    def __init__(self, model: nn.Module, ranks: Ranks, device: torch.device) -> None:
        self._ranks = ranks
        # All stages of a pipeline have the same modules, so their counts have the same order.
        self._mixtures: dict[str, Tensor] = {}
        for name, module in model.named_modules():
            if isinstance(module, ParallelExperts):
                module.load = torch.zeros(module.count + 1, dtype=torch.int64, device=device)
                module.stack = next((stack for stack in STACKS if name.startswith(stack)), "")
                self._mixtures[name_layer(name)] = module.load

    def read(self) -> dict[str, float]:
        """Returns the values to log, of all tokens since the last call, and counts anew. Collective.

        Returns:
            `router/load`, of the layer with the busiest expert: the rows of this expert, relative
            to the mean of all experts. `router/entropy`, of the layer where it is smallest: the
            entropy of the distribution of rows over the experts, relative to that of an even one.
            `router/dropped`, if any choice was dropped: the share of dropped choices in all layers.
            The same names with a layer at the end are those of single layers. Nothing if no token
            was counted.
        """
        if not self._mixtures:
            return {}
        # Tensor-parallel ranks count the same tokens, which changes no share.
        own = torch.cat(list(self._mixtures.values()))
        sums: list[int] = self._ranks.sum_on_device(own).tolist()
        layers: dict[str, Sequence[int]] = {}
        for name, counts in self._mixtures.items():
            layers[name] = sums[: len(counts)]
            sums = sums[len(counts) :]
            counts.zero_()
        return summarize_load(layers)


def find_token_masks(inputs: Mapping[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Returns which positions of each stack are no padding, as `expert_load_counting` takes it.

    A decoder's positions without a mask count where they have a target.

    Args:
        inputs: Of a micro-batch of this rank, whole rows.
    """
    mesh = getattr(model, "mesh", None)
    masks: dict[str, Tensor] = {}
    mask = inputs.get("attention_mask")
    if isinstance(mask, Tensor) and mask.dim() == 2:
        masks[""] = cut_sequence(mask, mesh)
        masks["encoder"] = mask
    labels = inputs.get("labels")
    decoder_mask = inputs.get("decoder_attention_mask")
    if isinstance(decoder_mask, Tensor) and decoder_mask.dim() == 2:
        masks["decoder"] = decoder_mask
    elif isinstance(labels, Tensor) and labels.dim() == 2:
        masks["decoder"] = labels != IGNORED
    return masks


def name_layer(name: str) -> str:
    """Returns the name of a mixture's layer: "3" for "blocks.3.mlp.experts", or "encoder.3"."""
    return name.removesuffix(MIXTURE).replace(BLOCKS, "")


def summarize_load(layers: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Returns the values of `ExpertLoad.read`.

    Args:
        layers: Layer -> how often each expert was chosen, and the number of dropped choices.
    """
    loads: dict[str, float] = {}
    entropies: dict[str, float] = {}
    dropped: dict[str, float] = {}
    all_dropped = 0
    all_choices = 0
    for name, (*rows, left_out) in layers.items():
        total = sum(rows)
        if total + left_out == 0:
            continue
        all_dropped += left_out
        all_choices += total + left_out
        dropped[name] = left_out / (total + left_out)
        if total:
            loads[name] = max(rows) * len(rows) / total
            shares = [row / total for row in rows if row]
            entropy = -math.fsum(share * math.log(share) for share in shares)
            entropies[name] = entropy / math.log(len(rows)) if len(rows) > 1 else 1.0
    values: dict[str, float] = {}
    if loads:
        values["router/load"] = max(loads.values())
        values["router/entropy"] = min(entropies.values())
    if all_dropped:
        values["router/dropped"] = all_dropped / all_choices
    values |= {f"router/load/{name}": value for name, value in loads.items()}
    values |= {f"router/entropy/{name}": value for name, value in entropies.items()}
    if all_dropped:
        values |= {f"router/dropped/{name}": value for name, value in dropped.items()}
    return values


def describe_load(values: Mapping[str, float]) -> str:
    """Returns what a line of the console says of a mixture's experts; nothing of another model."""
    if "router/load" not in values:
        return ""
    text = f"  expert load {values['router/load']:.2f}"
    if "router/dropped" in values:
        text += f", {values['router/dropped']:.1%} dropped"
    return text
