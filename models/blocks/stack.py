"""The blocks of a model in their order, of which a pipeline stage holds a part."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from ...mpu import checkpoint
from ..parallel_config import WHOLE_BLOCKS, ParallelConfig, Recompute
from .attention import attention_record
from .offload import BlockInputs

BlockArguments = Callable[[int], tuple[Any, ...]]
"""Returns the arguments of block i after its input, such as masks and caches."""


class Block(nn.Module):
    """A block of a stack, which maps (its input, *its arguments) to its output.

    Attributes:
        compiled: What runs instead of `compute`, with the block as its first argument; None without
            `compile_compute`.
    """

    compiled: Callable[..., Tensor] | None = None

    def forward(self, x: Tensor, *arguments: Any) -> Tensor:
        if self.compiled is not None:
            return self.compiled(self, x, *arguments)
        return self.compute(x, *arguments)

    def compute(self, *arguments: Any, **named: Any) -> Tensor:
        """Returns the block's output for its input, both [B, S, H]. A family has its own."""
        raise NotImplementedError

    def compile_compute(self, backend: str) -> None:
        """Compiles what the block computes as one graph, and leaves the block's hooks outside of it.

        `nn.Module.compile` takes the hooks into the graph, where those of `fully_shard` cannot be.
        """
        compute: Any = type(self).compute
        self.compiled = cast(Any, torch).compile(compute, backend=backend, fullgraph=True)

    @property
    def is_compiled(self) -> bool:
        """Whether compiled code runs: the whole call, by `nn.Module.compile`, or `compute`."""
        return self.compiled is not None or getattr(self, "_compiled_call_impl", None) is not None


class BlockList(nn.ModuleList):
    """The blocks of a stack, each of which maps (its input, *its arguments) to its output.

    A pipeline stage has all blocks, so that each keeps its name, but parameters only in those of
    `own`.

    Attributes:
        own: The numbers of the blocks that are in this pipeline stage; all of them without a
            pipeline.
        recompute_blocks: Whether to keep only each block's input for the backward pass, which
            computes it again.
        offloads_inputs: Whether these inputs are in the host's memory until then; see `offload.py`.
    """

    def __init__(self, blocks: Iterable[nn.Module], parallel_config: ParallelConfig) -> None:
        super().__init__(blocks)
        self.own = range(len(self))
        self.set_recompute(parallel_config.recompute)

    def set_recompute(self, recompute: Recompute) -> None:
        """Sets what a backward pass computes again: of blocks as a whole, all or nothing."""
        self.recompute_blocks = recompute in WHOLE_BLOCKS
        self.offloads_inputs = recompute == "offload"

    @property
    def gradient_checkpointing(self) -> bool:
        """transformers' name of `recompute_blocks`."""
        return self.recompute_blocks

    @property
    def is_compiled(self) -> bool:
        """Whether blocks run compiled code, whose shapes should not depend on the batch."""
        return any(block.is_compiled for block in self)

    @property
    def has_first(self) -> bool:
        """Whether the first block of the stack is in this pipeline stage."""
        return len(self.own) > 0 and self.own.start == 0

    @property
    def has_last(self) -> bool:
        """Whether the last block of the stack is in this pipeline stage."""
        return len(self.own) > 0 and self.own.stop == len(self)

    def run(self, x: Tensor, block_arguments: BlockArguments) -> list[Tensor]:
        """Runs the blocks of this pipeline stage.

        Args:
            x: The input of the first of them, [B, S, H], or [B, S/tp, H] under sequence
                parallelism.

        Returns:
            That input, and each block's output in the same shape; where inputs go to the host, the
            last output alone.
        """
        # What is recorded would be computed twice.
        recomputes = self.recompute_blocks and attention_record.probabilities is None
        offloads = recomputes and self.offloads_inputs and torch.is_grad_enabled()
        inputs = BlockInputs(x.device) if offloads else None
        states = [x]
        blocks = list(self)
        for number in self.own:
            block = blocks[number]
            arguments = block_arguments(number)
            if inputs is not None:
                with inputs.keeping(x):
                    x = checkpoint(block, x, *arguments)
                # Nothing else may keep what has gone to the host.
                states.clear()
            elif recomputes:
                x = checkpoint(block, x, *arguments)
            else:
                x = block(x, *arguments)
            states.append(x)
        return states

    def gather_attentions(
        self, record: Mapping[nn.Module, Tensor], name: str
    ) -> tuple[Tensor, ...] | None:
        """Returns the attention probabilities of each block, for all heads [B, N, Sq, Sk]; None if
        there are none.

        Args:
            record: See `AttentionRecord`.
            name: The blocks' module, "attention" or "cross_attention".
        """
        attentions = [getattr(block, name) for block in self if hasattr(block, name)]
        found = tuple(
            attention.gather_probabilities(record[attention.core])
            for attention in attentions
            if attention.core in record
        )
        return found or None
