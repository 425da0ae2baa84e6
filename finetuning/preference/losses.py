"""Computes the losses of preferences from log-probabilities of answers, with TRL's definitions.

All arguments are [B] unless they are numbers: `chosen` and `rejected` are the log-probabilities
that the trained model gives the better and the worse answer to a prompt, `reference_…` those of the
reference model. All functions return the loss of each row, [B].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def dpo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """Returns -log sigmoid(β (the log-ratio of chosen minus that of rejected)).

    A log-ratio is the log-probability minus the reference's (Rafailov et al., 2023, eq. 7; TRL's
    `loss_type="sigmoid"`).
    """
    gap = (chosen - reference_chosen) - (rejected - reference_rejected)
    return -F.logsigmoid(beta * gap)


def ipo(
    chosen: Tensor,
    rejected: Tensor,
    reference_chosen: Tensor,
    reference_rejected: Tensor,
    *,
    chosen_lengths: Tensor,
    rejected_lengths: Tensor,
    beta: float = 0.1,
) -> Tensor:
    """Returns (the gap of the mean log-ratios per token - 1 / 2β)² (Azar et al., 2023, eq. 17).

    Args:
        chosen_lengths, rejected_lengths: The numbers of tokens of the answers.
    """
    better = (chosen - reference_chosen) / chosen_lengths.clamp(min=1)
    worse = (rejected - reference_rejected) / rejected_lengths.clamp(min=1)
    return (better - worse - 1 / (2 * beta)).square()


def kto(
    answers: Tensor,
    reference_answers: Tensor,
    is_desirable: Tensor,
    kl: Tensor,
    *,
    beta: float = 0.1,
) -> Tensor:
    """Returns 1 - sigmoid(β (log-ratio - KL)), or of the negative for an undesirable answer.

    Ethayarajh et al., 2024, eq. 7.

    Args:
        answers, reference_answers: Log-probabilities of one answer to each prompt.
        is_desirable: Bool [B].
        kl: [], an estimate of the KL divergence from the reference; see `estimate_kl`.
    """
    gaps = answers - reference_answers - kl
    return 1 - torch.sigmoid(beta * torch.where(is_desirable, gaps, -gaps))


def estimate_kl(mismatched: Tensor, reference_mismatched: Tensor) -> Tensor:
    """Returns KTO's estimate of the KL divergence, [], without a gradient.

    It is the mean log-ratio of answers to other prompts, at least 0.
    """
    return (mismatched - reference_mismatched).detach().mean().clamp(min=0)


def orpo(chosen: Tensor, rejected: Tensor, *, beta: float = 0.1) -> Tensor:
    """Returns -β log sigmoid(the log of the odds ratio) (Hong et al., 2024, eq. 6 and 7).

    The loss of ORPO also has the cross-entropy of the better answer.

    Args:
        chosen, rejected: Mean log-probabilities per token, below 0.
    """
    log_odds = (chosen - rejected) - (_log_complement(chosen) - _log_complement(rejected))
    return -beta * F.logsigmoid(log_odds)


def _log_complement(logps: Tensor) -> Tensor:
    """Returns log(1 - exp(logps)), in the form that is exact for each logps (Mächler, 2012)."""
    is_near_zero = logps > -0.6931471805599453
    # Each form gets only arguments for which its gradient is finite.
    near = torch.log(-torch.expm1(torch.where(is_near_zero, logps, -1.0)))
    far = torch.log1p(-torch.exp(torch.where(is_near_zero, -1.0, logps)))
    return torch.where(is_near_zero, near, far)


def simpo(chosen: Tensor, rejected: Tensor, *, beta: float = 2.0, gamma: float = 0.5) -> Tensor:
    """Returns -log sigmoid(β (chosen - rejected) - γ) (Meng et al., 2024, eq. 6).

    Args:
        chosen, rejected: Mean log-probabilities per token.
        gamma: The margin by which the better answer shall be ahead.
    """
    return -F.logsigmoid(beta * (chosen - rejected) - gamma)


def reward(
    chosen: Tensor, rejected: Tensor, *, margin: Tensor | None = None, center: float = 0.0
) -> Tensor:
    """Returns -log sigmoid(chosen - rejected - margin) for the rewards of both answers.

    Bradley and Terry, 1952; Ouyang et al., 2022, eq. 1.

    Args:
        margin: How far the better answer shall be ahead; None for 0 (Touvron et al., 2023).
        center: The factor of the square of the rewards' sum, which keeps their mean at 0
            (Eisenstein et al., 2023).
    """
    gap = chosen - rejected
    losses = -F.logsigmoid(gap if margin is None else gap - margin)
    if center:
        losses = losses + center * (chosen + rejected).square()
    return losses
