"""A mixture of experts as the feed-forward part of a block, and its auxiliary loss."""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ...mpu import ParallelExperts, ParallelMesh, context_size, gather_sequence
from ...ops import route_tokens
from ..parallel_config import ParallelConfig, layer_arguments
from .activation_functions import find_activation
from .linear import ReplicatedLinear
from .mlp import GATES, GatedMLP, split_in_halves


class RouterRecord:
    """Keeps the routers' scores of a call that asks for them. Each process has one instance,
    `router_record`.

    Attributes:
        logits: While a call is recorded, the scores [B, S, E] of each mixture, in the order of the
            layers; otherwise None. What a backward pass recomputes is not recorded again.
        tally: What adds the scores up over pipeline stages, a `RouterTally`; None in a call without
            auxiliary losses.
    """

    def __init__(self) -> None:
        self.logits: dict[nn.Module, Tensor] | None = None
        self.tally: object = None

    @contextmanager
    def recording(self, tally: object = None) -> Generator[dict[nn.Module, Tensor]]:
        """Records within the context."""
        before = (self.logits, self.tally)
        found: dict[nn.Module, Tensor] = {}
        self.logits = found
        self.tally = tally
        try:
            yield found
        finally:
            self.logits, self.tally = before


router_record = RouterRecord()


def asks_for_router(model: Any, output_router_logits: bool | None) -> bool:
    """Returns whether a call asks for the routers' scores.

    Raises:
        ValueError: It does, and the layers are in several pipeline stages, of a model that adds no
            auxiliary loss.
    """
    asks: bool = model.config.output_router_logits
    if output_router_logits is not None:
        asks = output_router_logits
    has_stages = model.mesh is not None and model.mesh.pp_size > 1
    if asks and has_stages and not getattr(model, "carries_router_sums", False):
        raise ValueError(
            f"output_router_logits is not supported with pipeline parallelism in a {type(model).__name__}: "
            "no stage has the routers of all layers; set output_router_logits to false"
        )
    return asks


def flatten_logits(logits: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Returns the routers' scores as most families of transformers do, [B S, E] each."""
    return tuple(scores.flatten(0, -2) for scores in logits)


class Router(ReplicatedLinear):
    """A linear router that computes in fp32 or wider, as the paper of Switch Transformers says.

    Its scores are [B, S, E], of the whole sequence and equal on all tensor-parallel ranks: each of
    them computes a part of every expert.
    """

    def forward(self, input: Tensor) -> Tensor:
        logits = super().forward(input)
        if self.sequence_parallel:
            logits = gather_sequence(logits, self.mesh, partial_grad=False)
        if router_record.logits is not None:
            router_record.logits[self] = logits
        return logits


def refuse_split_rows(mesh: ParallelMesh | None) -> None:
    """Raises ValueError under context parallelism, for a router that counts the tokens of a row."""
    if context_size(mesh) > 1:
        raise ValueError(
            "experts with a limited capacity count the tokens of whole rows, which context "
            "parallelism splits; use context_parallel_size=1"
        )


def multiply_gate(projected: Tensor, activation: Callable[[Tensor], Tensor]) -> Tensor:
    """Returns activation(gate) · up, [n, Fp], of the projections gate and up side by side, [n, 2Fp]."""
    gate, up = split_in_halves(projected)
    multiply = GATES.get(activation)
    if multiply is None:
        return activation(gate) * up
    return multiply(gate, up)


class MixtureMLP(nn.Module):
    """The weighted sum of each token's k experts, which a linear router chooses.

    A shared expert, which computes every token, may be added, times the sigmoid of a linear gate
    (Qwen2-MoE).

    Args:
        inner_size: The width of each expert.
        experts: The number E of experts.
        top_k: The number of experts of a token.
        normalize: See `ops.route_tokens`.
        shared_size: The inner width of the shared expert; 0 for none.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        experts: int,
        top_k: int,
        normalize: bool = True,
        shared_size: int = 0,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        shared = layer_arguments(mesh, parallel_config)
        self.activation = find_activation(activation)
        self.top_k = top_k
        self.normalize = normalize
        self.mesh = mesh
        self.sequence_parallel = parallel_config.sequence_parallel
        self.router = ReplicatedLinear(hidden_size, experts, bias=False, **shared)
        self.experts = ParallelExperts(hidden_size, inner_size, experts, self.activate, **shared)
        self.shared: GatedMLP | None = None
        self.shared_gate: ReplicatedLinear | None = None
        if shared_size:
            self.shared = GatedMLP(
                hidden_size,
                shared_size,
                activation,
                fused=True,
                mesh=mesh,
                parallel_config=parallel_config,
            )
            self.shared_gate = ReplicatedLinear(hidden_size, 1, bias=False, **shared)

    def activate(self, projected: Tensor) -> Tensor:
        """[n, 2Fp] -> [n, Fp]"""
        return multiply_gate(projected, self.activation)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, S, H], or [B, S/tp, H] under sequence parallelism, to the same shape."""
        logits = self.router(x)
        if self.sequence_parallel:
            # Every rank routes all tokens, as it computes a part of every expert.
            logits = gather_sequence(logits, self.mesh, partial_grad=False)
        if router_record.logits is not None:
            router_record.logits[self] = logits
        weights, experts = route_tokens(logits, self.top_k, normalize=self.normalize)
        y = self.experts(x, weights, experts)
        if self.shared is None or self.shared_gate is None:
            return y
        return y + torch.sigmoid(self.shared_gate(x)) * self.shared(x)


@dataclass(frozen=True)
class RouterSums:
    """Sums over the layers and the tokens of each sample, of which the auxiliary losses are made.

    The sums of several parts of a model's layers add up to those of all.

    Attributes:
        chosen: [B, E], the number of times that each expert is chosen by a token.
        probability: [B, E], the sum of its probabilities.
        squares: [B, 1], the sum of logsumexp(scores)².
        tokens: [B, 1], the number of tokens, counted once in each layer.
    """

    chosen: Tensor
    probability: Tensor
    squares: Tensor
    tokens: Tensor

    @classmethod
    def from_scores(
        cls, logits: Sequence[Tensor], top_k: int, attention_mask: Tensor | None = None
    ) -> RouterSums:
        """Adds up the routers' scores.

        Args:
            logits: The scores of each layer, [B, S, E].
            top_k: The number of experts of a token.
            attention_mask: [B, S]; tokens with a 0 do not count. Other masks are ignored.
        """
        wide = torch.promote_types(logits[0].dtype, torch.float32)
        counted = logits[0].new_ones(logits[0].shape[:-1], dtype=wide)
        if attention_mask is not None and attention_mask.shape == counted.shape:
            counted = attention_mask.to(wide)
        counted = counted[..., None]  # [B, S, 1]
        chosen = counted.new_zeros(len(counted), logits[0].shape[-1])
        probability = torch.zeros_like(chosen)
        squares = counted.new_zeros(len(counted), 1)
        for scores in logits:
            probabilities = torch.softmax(scores, dim=-1)
            numbers = torch.topk(probabilities, top_k, dim=-1).indices
            weights = counted.expand_as(numbers)
            chosen = chosen.scatter_add(1, numbers.flatten(1), weights.flatten(1))
            probability = probability + (probabilities.to(wide) * counted).sum(1)
            by_token = scores.to(wide).logsumexp(-1, keepdim=True).square()  # [B, S, 1]
            squares = squares + (by_token * counted).sum(1)
        return cls(chosen, probability, squares, counted.sum(1) * len(logits))

    @classmethod
    def from_tensor(cls, joined: Tensor) -> RouterSums:
        """Reverses `to_tensor`."""
        experts = joined.shape[-1] // 2 - 1
        chosen, probability, squares, tokens = torch.split(joined, [experts, experts, 1, 1], dim=-1)
        return cls(chosen, probability, squares, tokens)

    def to_tensor(self) -> Tensor:
        """Returns the sums side by side, [B, 2E + 2]."""
        return torch.cat([self.chosen, self.probability, self.squares, self.tokens], dim=-1)

    def balance_loss(self) -> Tensor:
        """Returns the auxiliary loss that is smallest, top_k, if all experts get equally many
        tokens.

        It is E · Σ_e f_e p_e over all layers and all samples together, where f_e is the number of
        times that expert e is chosen by a token, and p_e its mean probability (Fedus et al. 2022,
        arXiv:2101.03961, equations 4 to 6), as transformers computes it.
        """
        return _multiply_shares(self.chosen.sum(0), self.probability.sum(0), self.tokens.sum(0))

    def balance_loss_by_sample(self) -> Tensor:
        """Returns the auxiliary loss of each sample alone, [B]; see `balance_loss`.

        Unlike the loss of several samples together, their mean does not depend on how a batch is
        divided into calls.
        """
        return _multiply_shares(self.chosen, self.probability, self.tokens)

    def z_loss_by_sample(self) -> Tensor:
        """Returns the loss that keeps the routers' scores small, of each sample, [B].

        It is the mean of logsumexp(scores)² over the layers and tokens (Zoph et al. 2022,
        arXiv:2202.08906).
        """
        return (self.squares / self.tokens.clamp(min=1)).squeeze(-1)


def _multiply_shares(chosen: Tensor, probability: Tensor, total: Tensor) -> Tensor:
    """Returns E · Σ_e f_e p_e, [...], from sums [..., E] and the number of tokens [..., 1]."""
    total = total.clamp(min=1)
    return chosen.shape[-1] * (chosen / total * probability / total).sum(-1)


def check_experts(config: object, expert_parallel_size: int) -> None:
    """Raises ValueError if the experts of a model, with a configuration of any family, cannot be dealt
    over so many ranks.
    """
    if expert_parallel_size == 1:
        return
    count: int = getattr(config, "expert_count", 0)
    if expert_parallel_size > count:
        kind = getattr(config, "architecture", "this model")
        if not count:
            raise ValueError(
                f"{kind} has no experts to deal over {expert_parallel_size} expert-parallel ranks; "
                "use expert_parallel_size 1"
            )
        raise ValueError(
            f"{count} experts of {kind} cannot be dealt over {expert_parallel_size} "
            f"expert-parallel ranks; use expert_parallel_size 1 to {count}"
        )
