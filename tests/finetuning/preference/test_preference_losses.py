"""Losses of preferences against TRL's own code, with gradients, and by formula in fp64."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from shardzoo.finetuning.preference import losses

ROWS = 4
TOKENS = 3


def make_logps() -> list[torch.Tensor]:
    """Log-probabilities of chosen and rejected answers, and the reference's: [ROWS] each."""
    torch.manual_seed(0)
    return [(-3 * torch.rand(ROWS)).requires_grad_(number < 2) for number in range(4)]


def check(found: torch.Tensor, expected: torch.Tensor, inputs: list[torch.Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    ours = torch.autograd.grad(found, inputs, retain_graph=True)
    theirs = torch.autograd.grad(expected, inputs, retain_graph=True)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def run_trl(kind: str, logps: list[torch.Tensor], lengths: torch.Tensor) -> torch.Tensor:
    """The loss of TRL's DPOTrainer for these log-probabilities, of which each is one token's."""
    trainer = pytest.importorskip("trl.trainer.dpo_trainer").DPOTrainer
    both = torch.cat(logps[:2])
    mask = (torch.arange(TOKENS + 1) > 0)[None] & (torch.arange(TOKENS + 1) <= lengths[:, None])
    per_token = F.pad(both[:, None], (0, TOKENS - 1))
    output = SimpleNamespace(
        log_probs=per_token,
        entropy=torch.zeros(2 * ROWS, TOKENS),
        mean_logits=torch.zeros(2 * ROWS, TOKENS),
        is_top1=torch.zeros(2 * ROWS, TOKENS, dtype=torch.bool),
    )
    accelerator = SimpleNamespace(
        device=torch.device("cpu"), gather_for_metrics=lambda x: x, gather=lambda x: x
    )
    from collections import defaultdict

    stand_in = SimpleNamespace(
        model=SimpleNamespace(training=True),
        accelerator=accelerator,
        aux_loss_enabled=False,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[kind],
        loss_weights=[1.0],
        beta=0.1,
        use_weighting=False,
        _metrics={"train": defaultdict(list)},
        _total_train_tokens=0,
        _tp_size=1,
        # trl 1.14 and earlier would compute the log-probabilities themselves, of logits.
        use_liger_kernel=True,
        _get_per_token_logps_and_entropies=lambda *_: (per_token, output.entropy, output),
    )
    inputs = {
        "input_ids": torch.zeros(2 * ROWS, TOKENS + 1, dtype=torch.long),
        "attention_mask": torch.ones(2 * ROWS, TOKENS + 1, dtype=torch.long),
        "completion_mask": mask.long(),
        "ref_chosen_logps": logps[2],
        "ref_rejected_logps": logps[3],
    }
    return trainer._compute_loss(stand_in, lambda **_: output, inputs, False)


def test_dpo_and_ipo_are_trls():
    logps = make_logps()
    lengths = torch.tensor([1, 2, 3, 3, 2, 1, 3, 2])
    check(losses.dpo(*logps).mean(), run_trl("sigmoid", logps, lengths), logps[:2])
    found = losses.ipo(*logps, chosen_lengths=lengths[:ROWS], rejected_lengths=lengths[ROWS:])
    check(found.mean(), run_trl("ipo", logps, lengths), logps[:2])


def test_orpo_and_simpo_are_trls():
    pytest.importorskip("trl")
    from trl.experimental.cpo import CPOTrainer
    from trl.experimental.orpo import ORPOTrainer

    chosen, rejected, _, _ = make_logps()
    stand_in = SimpleNamespace(
        beta=0.3,
        simpo_gamma=0.5,
        alpha=0.0,
        loss_type="simpo",
        label_smoothing=0.0,
        accelerator=SimpleNamespace(device="cpu"),
    )
    expected = -ORPOTrainer.odds_ratio_loss(stand_in, chosen, rejected)[0]
    check(losses.orpo(chosen, rejected, beta=0.3).sum(), expected.sum(), [chosen, rejected])
    expected = CPOTrainer.cpo_loss(stand_in, chosen, rejected)[0]
    found = losses.simpo(chosen, rejected, beta=0.3, gamma=0.5)
    check(found.sum(), expected.sum(), [chosen, rejected])


def test_all_are_their_formulas_in_fp64():
    """They hold where TRL is not installed, too."""
    chosen, rejected, ref_chosen, ref_rejected = (x.detach().double() for x in make_logps())
    gap = (chosen - ref_chosen) - (rejected - ref_rejected)
    torch.testing.assert_close(
        losses.dpo(chosen, rejected, ref_chosen, ref_rejected, beta=0.2),
        torch.log(1 + torch.exp(-0.2 * gap)),
    )
    good = torch.tensor([True, False, True, False])
    kl = losses.estimate_kl(rejected, ref_rejected)
    assert kl == max(0.0, float((rejected - ref_rejected).mean()))
    ratios = chosen - ref_chosen
    expected = torch.where(
        good, 1 / (1 + torch.exp(0.2 * (ratios - kl))), 1 / (1 + torch.exp(0.2 * (kl - ratios)))
    )
    torch.testing.assert_close(losses.kto(chosen, ref_chosen, good, kl, beta=0.2), expected)
    odds = [torch.exp(x) / (1 - torch.exp(x)) for x in (chosen, rejected)]
    torch.testing.assert_close(
        losses.orpo(chosen, rejected, beta=0.2), 0.2 * torch.log(1 + odds[1] / odds[0])
    )
    torch.testing.assert_close(
        losses.reward(chosen, rejected, center=0.1),
        torch.log(1 + torch.exp(rejected - chosen)) + 0.1 * (chosen + rejected) ** 2,
    )
