"""Adds up what the auxiliary losses of mixtures need, over the layers of all pipeline stages.

The losses multiply sums over all layers. In a pipeline each stage adds the sums of its own layers to
those that it receives, and sends them on behind the hidden states; the last stage has all. Gradients
come back the same way.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..mpu import gather_from_context
from .blocks.moe import RouterSums, router_record
from .outputs import StageOutput
from .pipeline import PipelineStage, pack_numbers, unpack_numbers


def select_logits(record: Mapping[nn.Module, Tensor], stack: nn.Module) -> list[Tensor]:
    """Returns the recorded scores of a stack's routers, [B, S, E] each, in the order of layers."""
    return [record[module] for module in stack.modules() if module in record]


@dataclass
class RouterTally:
    """The sums of one call, over the layers of the pipeline stages so far.

    Attributes:
        stacks: The parts of the model that have sums of their own, each with the mask [B, S] of the
            tokens that count, or None for all.
        experts: E.
        top_k: The number of experts of a token.
        mesh: The model's.
        record: The scores of this stage's routers.
        received: The sums of the stages before this one, [B, stacks · (2E + 2)].
    """

    stacks: Sequence[tuple[nn.Module, Tensor | None]]
    experts: int
    top_k: int
    mesh: Any
    record: dict[nn.Module, Tensor] = field(default_factory=dict[nn.Module, Tensor])
    received: Tensor | None = None

    @property
    def width(self) -> int:
        """The number of sums of a sample."""
        return len(self.stacks) * (2 * self.experts + 2)

    @property
    def is_empty(self) -> bool:
        """Whether no layer so far has a router."""
        return not self.record and self.received is None

    def add_up(self, hidden: Tensor) -> Tensor:
        """Returns the sums of all stages so far, [B, stacks · (2E + 2)], in fp32 or wider.

        Args:
            hidden: Any tensor of the samples, [B, ...].
        """
        wide = torch.promote_types(hidden.dtype, torch.float32)
        joined: list[Tensor] = []
        for stack, mask in self.stacks:
            logits = [
                gather_from_context(scores, self.mesh)
                for scores in select_logits(self.record, stack)
            ]
            if logits:
                sums = RouterSums.from_scores(logits, self.top_k, mask)
                joined.append(sums.to_tensor())
            else:
                joined.append(hidden.new_zeros(len(hidden), 2 * self.experts + 2, dtype=wide))
        own = torch.cat(joined, dim=-1)
        return own if self.received is None else self.received + own

    def split(self, hidden: Tensor) -> list[RouterSums]:
        """Returns the sums of each stack; see `add_up`."""
        return [
            RouterSums.from_tensor(part)
            for part in self.add_up(hidden).chunk(len(self.stacks), dim=-1)
        ]


class RouterLossStage(PipelineStage):
    """A stage of a model with auxiliary losses, which sends the routers' sums along.

    While a call with a tally is recorded, hidden states come and go with the sums behind them.
    """

    carries_router_sums: ClassVar[bool] = True

    def receive_hidden_states(self) -> Tensor:
        hidden = super().receive_hidden_states()
        tally = router_record.tally
        if isinstance(tally, RouterTally):
            hidden, tally.received = unpack_numbers(hidden, tally.width)
        return hidden

    def send_hidden_states(self, *tensors: Tensor) -> StageOutput:
        tally = router_record.tally
        if isinstance(tally, RouterTally) and tensors:
            sums = tally.add_up(tensors[0])
            tensors = (*tensors, pack_numbers(sums, tensors[0]))
        return super().send_hidden_states(*tensors)
