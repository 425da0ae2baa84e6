"""Describes Megatron-BERT's blocks for the memory estimate, which are as large as BERT's."""

from ..bert.memory import activations

__all__ = ["activations"]
