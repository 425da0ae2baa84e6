"""A mixture whose router scores experts by sigmoids, and corrects the scores to balance the experts.

It is that of DeepSeek-V3 (DeepSeek-AI 2024, arXiv:2412.19437, section 2.1.2) and GLM-4.5. There is
no auxiliary loss (Wang et al. 2024, arXiv:2408.15664): a correction, which is added to an expert's
score when experts are chosen, grows while the expert gets fewer tokens than the mean, and falls
while it gets more.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from ...mpu import (
    Fp32Parameters,
    ParallelExperts,
    ParallelMesh,
    any_rank,
    fp32_parameter,
    sum_over_replicas,
)
from ...ops import route_by_corrected_scores
from ..parallel_config import ParallelConfig, layer_arguments
from .activation_functions import find_activation
from .mlp import GatedMLP
from .moe import Router, multiply_gate


class ScoreCorrection(Fp32Parameters):
    """What is added to the scores of a mixture's experts when a token's experts are chosen.

    Attributes:
        value: fp32 [E], without a gradient and whatever the type of the model: steps of 0.001
            would be lost in bf16.
        choices: int64 [E], how often each expert was chosen since the last update; None if nobody
            counts.
    """

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.value = fp32_parameter(torch.zeros(experts))
        self.choices: Tensor | None = None

    def count(self, experts: Tensor, is_token: Tensor | None) -> None:
        """Adds up the choices of a forward pass.

        Args:
            experts: int64 [B, S, k].
            is_token: [B, S], 0 for padding; None if there is none.
        """
        if self.choices is None:
            return
        ones = torch.ones_like(experts)
        if is_token is not None:
            ones = ones * is_token[..., None].to(ones.dtype)
        self.choices.scatter_add_(0, experts.flatten(), ones.flatten())


class ChoiceCounting:
    """Says whether choices are counted. Each process has one instance, `choice_counting`.

    Attributes:
        is_on: While a forward pass is counted; what a backward pass recomputes is not counted again.
        is_token: [B, S] in that pass, 0 for padding; None if there is none.
    """

    def __init__(self) -> None:
        self.is_on = False
        self.is_token: Tensor | None = None

    @contextmanager
    def over(self, is_token: Tensor | None) -> Generator[None]:
        """Counts within the context."""
        self.is_on = True
        self.is_token = is_token
        try:
            yield
        finally:
            self.is_on = False
            self.is_token = None


choice_counting = ChoiceCounting()


class CorrectionUpdate:
    """Moves the corrections of a model after each step of a run.

    An expert that computed fewer tokens of the global batch than the mean gets `rate` more, and one
    that computed more gets `rate` less. Numbers of tokens are whole, so the update does not depend
    on the layout.

    Args:
        rate: What a correction changes by; 0 changes none.

    Raises:
        ValueError: There is a rate, and the model has no corrections, on no stage of a pipeline.
    """

    def __init__(self, model: nn.Module, rate: float, mesh: ParallelMesh | None) -> None:
        self.rate = rate
        self.mesh = mesh
        self.corrections: list[ScoreCorrection] = []
        for module in model.modules():
            if not rate or not isinstance(module, ScoreCorrection):
                continue
            # The modules of other pipeline stages have no parameters.
            for value in module.parameters():
                module.choices = torch.zeros_like(value, dtype=torch.int64)
                self.corrections.append(module)
        if rate and not any_rank(bool(self.corrections), mesh):
            raise ValueError(
                f"router_bias_update_rate={rate} needs a mixture whose router corrects scores, such "
                f"as glm4_moe; {type(model).__name__} has none, so set it to 0"
            )

    @torch.no_grad()
    def apply(self, found_inf: Tensor | None = None) -> None:
        """Updates all corrections, and counts anew. Collective over the replicas of the model.

        Args:
            found_inf: Not 0 if the step's update was skipped, []; then corrections stay too.
        """
        if not self.corrections:
            return
        counts: list[Tensor] = []
        for correction in self.corrections:
            assert correction.choices is not None
            counts.append(correction.choices)
        sums = sum_over_replicas(torch.stack(counts), self.mesh)  # [mixtures, E]
        rate = self.rate
        factor = rate if found_inf is None else rate * (found_inf == 0).float()
        for correction, chosen in zip(self.corrections, sums, strict=True):
            # The sign of the mean minus each number, in whole numbers.
            direction = torch.sign(chosen.sum() - len(chosen) * chosen)
            correction.value.add_(factor * direction.float())
        for own in counts:
            own.zero_()


class CorrectedMixtureMLP(nn.Module):
    """The weighted sum of each token's k experts, and of a shared expert that computes every token.

    Args:
        inner_size: The width of each expert.
        experts: The number E of experts.
        top_k: The number of experts of a token.
        groups, top_groups, normalize, scale: See `ops.route_by_corrected_scores`.
        shared_size: The inner width of the shared expert.
    """

    def __init__(
        self,
        hidden_size: int,
        inner_size: int,
        activation: str,
        *,
        experts: int,
        top_k: int,
        groups: int,
        top_groups: int,
        normalize: bool,
        scale: float,
        shared_size: int,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig,
    ) -> None:
        super().__init__()
        shared = layer_arguments(mesh, parallel_config)
        self.activation = find_activation(activation)
        self.top_k = top_k
        self.groups = groups
        self.top_groups = top_groups
        self.normalize = normalize
        self.scale = scale
        self.router = Router(hidden_size, experts, bias=False, wide=True, **shared)
        self.correction = ScoreCorrection(experts)
        self.experts = ParallelExperts(hidden_size, inner_size, experts, self.activate, **shared)
        self.shared = GatedMLP(
            hidden_size,
            shared_size,
            activation,
            fused=True,
            mesh=mesh,
            parallel_config=parallel_config,
        )

    def activate(self, projected: Tensor) -> Tensor:
        """[n, 2Fp] -> [n, Fp]"""
        return multiply_gate(projected, self.activation)

    def forward(self, x: Tensor) -> Tensor:
        """Maps [B, S, H], or [B, S/tp, H] under sequence parallelism, to the same shape."""
        weights, experts = route_by_corrected_scores(
            self.router(x),
            self.correction.value,
            self.top_k,
            groups=self.groups,
            top_groups=self.top_groups,
            normalize=self.normalize,
            scale=self.scale,
        )
        if choice_counting.is_on:
            self.correction.count(experts, choice_counting.is_token)
        return self.experts(x, weights, experts) + self.shared(x)
