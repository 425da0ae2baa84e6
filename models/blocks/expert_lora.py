"""Implements LoRA (Hu et al., 2021, arXiv:2106.09685) for the stacked matrices of a mixture's experts,
as peft's `target_parameters` do.

Each expert has factors of its own. They are dealt over the expert-parallel ranks with the experts. Along
the tensor axis, the factor of the inner features is split like the matrix, and the other one, which is
as wide as the hidden states, is replicated. So nothing is exchanged in the forward pass.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...mpu import ParallelExperts, Shard, copy_to_tp
from ...mpu.parameter import split_parameter
from ...mpu.shard import AxisSplit
from ...ops import grouped_linear, grouped_product


class ExpertFactors(nn.Module):
    """The two factors of one of the stacked matrices, filled with NaN until they are initialized or
    loaded.

    Args:
        experts: The experts that they adapt.
        weight: "gate_up" or "down".
        r: The rank of each expert's factors.
        scaling: The factor of the product.

    Attributes:
        lora_A: Of `gate_up` [E · r, H], of `down` [E · F, r]: transposed, as `down` itself is.
        lora_B: Of `gate_up` [E · 2F, r], of `down` [E · r, H].
    """

    def __init__(self, experts: ParallelExperts, weight: str, r: int, scaling: float) -> None:
        super().__init__()
        self.weight = weight
        self.count = experts.count
        self.r = r
        self.scaling = scaling
        self.mesh = experts.mesh
        self.own = experts.last - experts.first
        shard: Any = getattr(experts, weight).shard
        inner = Shard.from_splits((shard.shape[0], r), *shard.splits)
        hidden = Shard.from_splits(
            (experts.count * r, experts.hidden_size), AxisSplit(0, axis="expert", unit=r)
        )
        self.is_down = weight == "down"
        self.lora_A = split_parameter(inner if self.is_down else hidden, self.mesh)
        self.lora_B = split_parameter(hidden if self.is_down else inner, self.mesh)

    def take_factors(self, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Returns this rank's factors of its experts: of the inner features [Ep, rows, r], and of the
        hidden states [Ep, r, H], whose gradients of the tensor-parallel ranks are added up.
        """
        inner = self.lora_A if self.is_down else self.lora_B
        hidden = self.lora_B if self.is_down else self.lora_A
        hidden = copy_to_tp(hidden.to(dtype), self.mesh)
        return inner.to(dtype).view(self.own, -1, self.r), hidden.view(self.own, self.r, -1)

    def compute(self, x: Tensor, counts: Tensor) -> Tensor:
        """Returns what the factors add to the product with the matrix.

        Args:
            x: [M, H] or, of `down`, [M, Fp], sorted by expert.
            counts: int64 [Ep], the number of rows of each expert.
        """
        inner, hidden = self.take_factors(x.dtype)
        if self.is_down:
            narrow = grouped_product(x, inner, counts)  # [M, r]
            return self.scaling * grouped_product(narrow, hidden, counts)
        narrow = grouped_linear(x, hidden, counts)
        return self.scaling * grouped_linear(narrow, inner, counts)

    @torch.no_grad()
    def add_to(self, weight: Tensor) -> Tensor:
        """Returns this rank's part of the matrices with the products of the factors added, rounded
        once.
        """
        inner, hidden = self.take_factors(torch.float32)
        product = self.scaling * (inner @ hidden)
        return (weight.float() + product.flatten(0, 1)).to(weight.dtype)

    def to_peft(self, name: str, whole: Tensor) -> Tensor:
        """Returns a whole factor as peft stores it: A is [r · E, in], B is [out, r · E].

        Args:
            name: "lora_A" or "lora_B".
        """
        if name == "lora_A":
            if not self.is_down:
                return whole
            return whole.view(self.count, -1, self.r).transpose(1, 2).flatten(0, 1).contiguous()
        if self.is_down:
            stacked = whole.view(self.count, self.r, -1).permute(2, 1, 0)  # [H, r, E]
        else:
            stacked = whole.view(self.count, -1, self.r).permute(1, 2, 0)  # [2F, r, E]
        return stacked.flatten(1).contiguous()

    def from_peft(self, name: str, stored: Tensor) -> Tensor:
        """Reverses `to_peft`."""
        if name == "lora_A":
            if not self.is_down:
                return stored
            return stored.view(self.count, self.r, -1).transpose(1, 2).flatten(0, 1).contiguous()
        by_expert = stored.view(-1, self.r, self.count)  # [out, r, E]
        order = (2, 1, 0) if self.is_down else (2, 0, 1)
        return by_expert.permute(order).flatten(0, 1).contiguous()

    def list_peft_shapes(self) -> dict[str, tuple[int, int]]:
        """Returns the shapes in which peft stores the factors."""
        shapes: dict[str, tuple[int, int]] = {}
        for name in ("lora_A", "lora_B"):
            factor: Any = getattr(self, name)
            empty = torch.empty(factor.shard.shape, device="meta")
            rows, columns = self.to_peft(name, empty).shape
            shapes[name] = (rows, columns)
        return shapes

    def extra_repr(self) -> str:
        return f"{self.weight}, {self.count} x r={self.r}, scaling={self.scaling:g}"


class ExpertAdapter(nn.Module):
    """The factors of a mixture's experts. It is the submodule `adapter` of `ParallelExperts`, which
    calls it.

    Args:
        factors: peft's name of a parameter, such as `gate_up_proj`, -> its factors.
    """

    def __init__(self, factors: dict[str, ExpertFactors]) -> None:
        super().__init__()
        self.enabled = True
        """Whether the products have those of the factors added."""
        for name, pair in factors.items():
            self.add_module(name, pair)

    @property
    def factors(self) -> list[ExpertFactors]:
        return [module for module in self.children() if isinstance(module, ExpertFactors)]

    def add(self, weight: str, product: Tensor, x: Tensor, counts: Tensor) -> Tensor:
        """Returns the product of x with the matrices of a name, with that of their factors added."""
        for pair in self.factors:
            if self.enabled and pair.weight == weight:
                product = product + pair.compute(x, counts)
        return product
