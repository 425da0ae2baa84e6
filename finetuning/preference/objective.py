"""Computes the loss of a batch of prompts with answers, and what is logged of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from ...models.language_model import IGNORED
from ...models.lora import adapters_disabled
from ...models.outputs import StageOutput
from ...mpu import (
    ParallelMesh,
    cut_sequence,
    dropout_state,
    gather_from_dp,
    reduce_from_context,
    share_gradient,
    vocab_parallel_cross_entropy,
)
from ...trainer.launch.ranks import Ranks
from ..replicas import iterate_replica_batches, scale_to_global_batch, share_from_last_stage
from . import losses

WITH_REFERENCE = ("dpo", "ipo", "kto")
VALUE_NAMES = (
    "rewards/chosen",
    "rewards/rejected",
    "rewards/accuracies",
    "rewards/margins",
    "logps/chosen",
    "logps/rejected",
)


@dataclass(frozen=True)
class AnswerValues:
    """What the losses need of the answers of a batch, [B, A] each.

    Attributes:
        logps: The sum of the log-probabilities of an answer's tokens.
        lengths: The number of its tokens.
        text_logps: The sum of the log-probabilities of all tokens of a text that are predicted:
            for ORPO those of a decoder's prompt too, otherwise those of the answer.
        text_lengths: The number of these.
        reference: The same sum as `logps` by the reference model; zeros without one.
    """

    logps: Tensor
    lengths: Tensor
    text_logps: Tensor
    text_lengths: Tensor
    reference: Tensor

    def stack(self) -> Tensor:
        """Returns all values as one tensor, [B, A, 5]."""
        values = [getattr(self, name.name) for name in fields(self)]
        return torch.stack([value.to(self.logps.dtype) for value in values], -1)

    def select(self, rows: slice) -> AnswerValues:
        """Returns the values of some rows."""
        return AnswerValues(*self.stack()[rows].unbind(-1))


@dataclass
class PreferenceObjective:
    """Compares the answers to the prompts of a batch.

    Attributes:
        loss: "dpo", "ipo", "kto", "orpo" or "simpo".
        model: The model that is trained.
        has_decoder: Whether it is an encoder-decoder.
        beta: The factor of log-ratios (DPO, KTO), of the regularization (IPO), or of the odds ratio
            (ORPO); `gamma` is SimPO's margin.
        desirable_weight, undesirable_weight: KTO's factors of the losses of both kinds of rows.
        reference_model: A second model, which is not trained; None if the model without its
            adapter is the reference.
        mesh: The mesh of both models.
    """

    loss: str
    model: Any
    has_decoder: bool
    beta: float
    gamma: float = 0.5
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference_model: Any = None
    mesh: ParallelMesh | None = None
    _sums: list[Tensor] = field(default_factory=list[Tensor])

    def __call__(self, data: Mapping[str, Any], run: Any) -> dict[str, Any] | StageOutput:
        """Runs the model on a batch of `PreferenceCollate`. Returns `loss`."""
        values = self.measure(data, run)
        if isinstance(values, StageOutput):
            return values
        rows, logged = self.compute_loss(values, data.get("is_desirable"), self.mesh)
        self._sums.append(logged.detach())
        return {"loss": scale_to_global_batch(rows, data)}

    def measure(self, data: Mapping[str, Any], run: Any) -> AnswerValues | StageOutput:
        """Returns the log-probabilities of a batch's answers, by the model and the reference.

        A pipeline stage that is not the last returns what its model does. There the batch has the
        values of the reference.
        """
        values = self._measure_answers(data, run)
        if isinstance(values, StageOutput):
            return values
        if "reference" in data:
            return replace(values, reference=data["reference"])
        if self.loss in WITH_REFERENCE:
            reference = self.measure_reference(data)
            assert reference is not None
            return replace(values, reference=reference)
        return values

    @torch.no_grad()
    def measure_reference(self, data: Mapping[str, Any]) -> Tensor | None:
        """Returns the reference model's log-probabilities of a batch's answers, [B, A].

        Of a pipeline's stages, the last one has them; the others return None.
        """
        if self.reference_model is not None:
            values = self._measure_answers(data, self.reference_model)
        else:
            was_training = self.model.training
            self.model.eval()
            with adapters_disabled(self.model):
                values = self._measure_answers(data, self.model)
            self.model.train(was_training)
        return None if isinstance(values, StageOutput) else values.logps

    @torch.no_grad()
    def measure_samples(
        self,
        samples: Any,
        collate: Callable[[Sequence[Any]], dict[str, Tensor]],
        device: torch.device,
        batch_size: int,
    ) -> Any:
        """Returns the reference's log-probabilities of all samples, a numpy array [N, A].

        Collective.
        """
        found: list[Tensor] = []
        for batch in iterate_replica_batches(samples, collate, device, batch_size, self.mesh):
            logps = self.measure_reference(batch)
            if logps is not None:
                found.append(gather_from_dp(logps, self.mesh))
        every = share_from_last_stage(found, self.mesh)
        return every[: len(samples)].float().cpu().numpy()

    def _measure_answers(self, data: Mapping[str, Any], run: Any) -> AnswerValues | StageOutput:
        """Returns the log-probabilities and the numbers of tokens of answers, without a reference.

        The logits stay split over the vocabulary: the ranks exchange two numbers a token.
        """
        shape = data["input_ids"].shape[:2]
        labels = data["targets"].flatten(0, 1)  # [B A, T]
        inputs = {name: data[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}
        if self.has_decoder:
            inputs["decoder_input_ids"] = self.model.prepare_decoder_input_ids_from_labels(labels)
            answers = labels
        else:
            answers = self.model.targets(labels)
        texts = answers
        if self.loss == "orpo" and not self.has_decoder:
            # As in TRL, a decoder's cross-entropy is that of the prompt with the answer.
            read = inputs["input_ids"].masked_fill(inputs["attention_mask"] == 0, IGNORED)
            texts = self.model.targets(read)
        with dropout_state.rows_per_sample(shape[1]):
            output = run(**inputs)
        if isinstance(output, StageOutput):
            return output
        logits = output["logits"]  # [B A, T, Vp]
        logps = -vocab_parallel_cross_entropy(
            logits,
            cut_sequence(texts, self.mesh),
            num_classes=self.model.config.vocab_size,
            reduction="none",
            mesh=self.mesh,
        )
        text_logps = reduce_from_context(logps.sum(1), self.mesh).view(shape)
        text_lengths = (texts != IGNORED).sum(1).view(shape)
        if texts is answers:
            values = (text_logps, text_lengths)
        else:
            is_answer = answers != IGNORED
            own_is_answer = cut_sequence(is_answer, self.mesh)
            answer_logps = reduce_from_context(
                logps.masked_fill(~own_is_answer, 0.0).sum(1), self.mesh
            )
            values = (answer_logps.view(shape), is_answer.sum(1).view(shape))
        return AnswerValues(*values, text_logps, text_lengths, torch.zeros_like(text_logps))

    def compute_loss(
        self, values: AnswerValues, is_desirable: Tensor | None, mesh: ParallelMesh | None
    ) -> tuple[Tensor, Tensor]:
        """Returns the loss of each row [B], and the sums of what is logged.

        The latter are [2 n + 2]: the sum and the count of each of `VALUE_NAMES`, and of the KL
        divergence.

        Args:
            mesh: Its data-parallel ranks have the other rows of the batch.
        """
        logps = values.logps
        if self.loss == "kto":
            return self._compute_kto(values, is_desirable, mesh)
        if self.loss in ("ipo", "dpo"):
            pairs = (*logps.unbind(1), *values.reference.unbind(1))
            if self.loss == "dpo":
                rows = losses.dpo(*pairs, beta=self.beta)
            else:
                chosen_lengths, rejected_lengths = values.lengths.unbind(1)
                rows = losses.ipo(
                    *pairs,
                    chosen_lengths=chosen_lengths,
                    rejected_lengths=rejected_lengths,
                    beta=self.beta,
                )
            ratios = logps - values.reference
            return rows, _sum_pairs(self.beta * ratios, logps, ratios)
        means = logps / values.lengths.clamp(min=1)
        if self.loss == "simpo":
            rows = losses.simpo(*means.unbind(1), beta=self.beta, gamma=self.gamma)
        else:
            # The cross-entropy is the mean over the tokens of all ranks' better texts.
            tokens = values.text_lengths[:, 0].sum().view(1)
            tokens = gather_from_dp(tokens, mesh).double().mean()
            entropy = -values.text_logps[:, 0] * (len(logps) / tokens.to(logps.dtype))
            rows = entropy + losses.orpo(*means.unbind(1), beta=self.beta)
        return rows, _sum_pairs(self.beta * means, means)

    def _compute_kto(
        self, values: AnswerValues, is_desirable: Tensor | None, mesh: ParallelMesh | None
    ) -> tuple[Tensor, Tensor]:
        assert is_desirable is not None
        kl = losses.estimate_kl(
            gather_from_dp(values.logps[:, 1].detach(), mesh),
            gather_from_dp(values.reference[:, 1], mesh),
        )
        logps = values.logps[:, 0]
        rows = losses.kto(logps, values.reference[:, 0], is_desirable, kl, beta=self.beta)
        weights = torch.where(is_desirable, self.desirable_weight, self.undesirable_weight)
        rewards = self.beta * (logps - values.reference[:, 0])
        # Each row is better or worse, so that there is no accuracy; the margin is that of means.
        counts = torch.stack([is_desirable.sum(), (~is_desirable).sum()]).to(logps.dtype)
        zeros = logps.new_zeros(2)
        sums = [
            torch.stack([(part * is_desirable).sum(), (part * ~is_desirable).sum()])
            for part in (rewards, logps)
        ]
        logged = torch.cat([sums[0], zeros, sums[1], kl.view(1)])
        numbers = torch.cat([counts, zeros, counts, logps.new_ones(1)])
        return rows * weights, torch.cat([logged, numbers])

    def pop_values(self, ranks: Ranks) -> dict[str, float]:
        """Returns the means of what has been logged since the last call. Collective."""
        return self._name_values(_pop_sums(self._sums, ranks))

    def _name_values(self, numbers: Sequence[float]) -> dict[str, float]:
        names = (*VALUE_NAMES, "kl")
        sums = numbers[: len(names)]
        counts = numbers[len(names) :]
        values = {
            name: total / count
            for name, total, count in zip(names, sums, counts, strict=True)
            if count
        }
        if self.loss == "kto" and {"rewards/chosen", "rewards/rejected"} <= values.keys():
            values["rewards/margins"] = values["rewards/chosen"] - values["rewards/rejected"]
        return values

    @torch.no_grad()
    def evaluate(
        self,
        model: Any,
        device: torch.device,
        samples: Any,
        records: Any,
        collate: Callable[[Sequence[Any]], dict[str, Tensor]],
        batch_size: int,
    ) -> dict[str, float]:
        """Returns the mean loss, and the values that training logs. Collective.

        They do not depend on the number of ranks.
        """
        found: list[Tensor] = []
        desirable: list[Tensor] = []
        for batch in iterate_replica_batches(samples, collate, device, batch_size, self.mesh):
            values = self.measure(batch, model)
            if isinstance(values, AnswerValues):
                found.append(gather_from_dp(values.stack(), self.mesh))
            if "is_desirable" in batch:
                desirable.append(gather_from_dp(batch["is_desirable"].to(torch.uint8), self.mesh))
        rows = share_from_last_stage(found, self.mesh)[: len(samples)]
        every = AnswerValues(*rows.unbind(-1))
        is_desirable = torch.cat(desirable)[: len(samples)].bool() if desirable else None

        loss = 0.0
        logged: list[Tensor] = []
        for start in range(0, len(samples), batch_size):
            chosen = slice(start, start + batch_size)
            part = None if is_desirable is None else is_desirable[chosen]
            row_losses, sums = self.compute_loss(every.select(chosen), part, None)
            loss += float(row_losses.sum())
            logged.append(sums)
        total = torch.stack(logged).double().sum(0)
        return {"loss": loss / len(samples), **self._name_values(total.tolist())}


def _pop_sums(sums: list[Tensor], ranks: Ranks) -> Sequence[float]:
    """Returns the totals, over batches and data-parallel ranks, of sums that it removes.

    A pipeline stage that is not the last has none.
    """
    total = [0.0] * (2 * len(VALUE_NAMES) + 2)
    if sums:
        total = torch.stack(sums).double().sum(0).tolist()
    sums.clear()
    return ranks.sum_replicas(*total)


def _sum_pairs(rewards: Tensor, logps: Tensor, ratios: Tensor | None = None) -> Tensor:
    """Returns the sums and counts of `VALUE_NAMES` for pairs of answers, and of the estimate of the
    KL divergence that log-ratios [B, 2] are, if there are any.
    """
    rewards = rewards.detach()
    chosen, rejected = rewards.unbind(1)
    values = torch.stack(
        [
            chosen,
            rejected,
            (chosen > rejected).to(chosen.dtype),
            chosen - rejected,
            *logps.detach().unbind(1),
        ]
    )
    kl = chosen.new_zeros(2)  # its sum and its count
    if ratios is not None:
        kl = torch.stack([ratios.detach().sum(), kl.new_tensor(ratios.numel())])
    counts = chosen.new_full((len(VALUE_NAMES),), len(chosen))
    return torch.cat([values.sum(1), kl[:1], counts, kl[1:]])


@dataclass
class RewardObjective:
    """Trains a classifier of one class, whose output is the reward of an answer.

    Attributes:
        center: See `losses.reward`.
    """

    center: float = 0.0
    mesh: ParallelMesh | None = None
    _sums: list[Tensor] = field(default_factory=list[Tensor])

    def __call__(self, data: Mapping[str, Any], run: Any) -> dict[str, Any] | StageOutput:
        """Runs the model on a batch of `PreferenceCollate`. Returns `loss`."""
        rewards = self.measure(data, run)
        if isinstance(rewards, StageOutput):
            return rewards
        rows = losses.reward(*rewards.unbind(1), margin=data.get("margin"), center=self.center)
        self._sums.append(_sum_pairs(rewards, torch.zeros_like(rewards)).detach())
        return {"loss": share_gradient(scale_to_global_batch(rows, data), self.mesh)}

    def measure(self, data: Mapping[str, Any], run: Any) -> Tensor | StageOutput:
        """Returns the rewards of a batch's answers, [B, A].

        A pipeline stage that is not the last returns what its model does.
        """
        inputs = {name: data[name].flatten(0, 1) for name in ("input_ids", "attention_mask")}
        with dropout_state.rows_per_sample(data["input_ids"].shape[1]):
            output = run(**inputs)
        if isinstance(output, StageOutput):
            return output
        scores = output["logits"]  # [B A, 1]
        return scores.float().view(data["input_ids"].shape[:2])

    def pop_values(self, ranks: Ranks) -> dict[str, float]:
        """Returns the means of what has been logged since the last call. Collective."""
        return _name_rewards(_pop_sums(self._sums, ranks))

    @torch.no_grad()
    def evaluate(
        self,
        model: Any,
        device: torch.device,
        samples: Any,
        records: Any,
        collate: Callable[[Sequence[Any]], dict[str, Tensor]],
        batch_size: int,
    ) -> dict[str, float]:
        """Returns the mean loss, and the values that training logs. Collective."""
        found: list[Tensor] = []
        margins: list[Tensor] = []
        for batch in iterate_replica_batches(samples, collate, device, batch_size, self.mesh):
            scores = self.measure(batch, model)
            if isinstance(scores, Tensor):
                found.append(gather_from_dp(scores, self.mesh))
            if "margin" in batch:
                margins.append(gather_from_dp(batch["margin"], self.mesh))
        rewards = share_from_last_stage(found, self.mesh)[: len(samples)]
        margin = torch.cat(margins)[: len(samples)] if margins else None
        loss = losses.reward(*rewards.unbind(1), margin=margin, center=self.center).mean()
        sums = _sum_pairs(rewards, torch.zeros_like(rewards))
        return {"loss": float(loss), **_name_rewards(sums.double().tolist())}


def _name_rewards(numbers: Sequence[float]) -> dict[str, float]:
    """Returns the values of rewards; there are no log-probabilities."""
    count = len(VALUE_NAMES) + 1
    return {
        name: numbers[place] / numbers[count + place]
        for place, name in enumerate(VALUE_NAMES)
        if name.startswith("rewards/") and numbers[count + place]
    }
