"""Computes the loss of a batch of queries with documents, and evaluates rankings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...models.outputs import StageOutput
from ...mpu import ParallelMesh, dropout_state, gather_from_dp, share_gradient
from ..embedding.metrics import measure_ranking
from ..replicas import iterate_replica_batches, scale_to_global_batch, share_from_last_stage
from . import losses
from .data import RankedDocuments, count_documents


@dataclass(frozen=True)
class RankingObjective:
    """Scores the documents of each query by a classifier with one output.

    Attributes:
        loss: "bce", "ranknet", "listnet" or "listmle".
        mesh: Its data-parallel ranks have other queries.
    """

    loss: str
    mesh: ParallelMesh | None = None

    def __call__(self, data: Mapping[str, Any], run: Any) -> dict[str, Any] | StageOutput:
        """Runs the model on a batch of `RankingCollate`. Returns `loss`."""
        scores = self.score(data, run)
        if isinstance(scores, StageOutput):
            return scores
        rows = self.compute_loss(scores, data["relevance"], self.mesh)
        return {"loss": share_gradient(scale_to_global_batch(rows, data), self.mesh)}

    def score(self, data: Mapping[str, Any], run: Any) -> Tensor | StageOutput:
        """Returns the scores of a batch's documents, fp32 [B, D].

        A pipeline stage that is not the last returns what its model does.
        """
        names = ("input_ids", "attention_mask", "token_type_ids")
        inputs = {name: data[name].flatten(0, 1) for name in names if name in data}
        shape = data["input_ids"].shape[:2]
        with dropout_state.rows_per_sample(shape[1]):
            output = run(**inputs)
        if isinstance(output, StageOutput):
            return output
        scores = output["logits"]  # [B D, 1]
        return scores.view(shape).to(torch.promote_types(scores.dtype, torch.float32))

    def compute_loss(self, scores: Tensor, relevance: Tensor, mesh: ParallelMesh | None) -> Tensor:
        """Returns the loss of each query, [B]; see the functions of `losses`."""
        if self.loss == "bce":
            return losses.binary_cross_entropy(scores, relevance)
        if self.loss == "ranknet":
            return losses.ranknet(scores, relevance, mesh=mesh)
        if self.loss == "listnet":
            return losses.listnet(scores, relevance)
        return losses.listmle(scores, relevance)

    @torch.no_grad()
    def evaluate(
        self,
        model: Any,
        device: torch.device,
        samples: Any,
        records: Sequence[RankedDocuments],
        collate: Callable[[Sequence[Any]], dict[str, Tensor]],
        batch_size: int,
    ) -> dict[str, float]:
        """Returns the mean loss of batches, and how well the documents are ranked. Collective.

        The documents of records with the same query are ranked together. The values do not depend
        on the number of ranks.
        """
        most = count_documents(records)
        found: list[Tensor] = []
        for batch in iterate_replica_batches(samples, collate, device, batch_size, self.mesh):
            scores = self.score(batch, model)
            if isinstance(scores, StageOutput):
                continue
            # All ranks send the same number of columns.
            both = torch.stack([scores, batch["relevance"]])
            if scores.shape[1] < most:
                both = torch.nn.functional.pad(both, (0, most - scores.shape[1]), value=-torch.inf)
            both = both[..., :most]
            found.append(gather_from_dp(both.movedim(0, 1).contiguous(), self.mesh))
        every = share_from_last_stage(found, self.mesh)[: len(samples)]
        scores, relevance = every.unbind(1)
        scores = scores.masked_fill(relevance.isinf(), 0.0)

        total = 0.0
        for start in range(0, len(scores), batch_size):
            rows = slice(start, start + batch_size)
            total += float(self.compute_loss(scores[rows], relevance[rows], None).sum())
        values = {"loss": total / len(scores)}

        queries: dict[str, list[tuple[float, bool]]] = {}
        for number in range(len(records)):
            record = records[number]
            ranked = queries.setdefault(record.query, [])
            for place, label in enumerate(record.relevance):
                ranked.append((float(scores[number, place]), label > 0))
        hits: list[np.ndarray] = []
        for ranked in queries.values():
            # A query without a relevant document has no value, as in sentence-transformers.
            if any(is_relevant for _, is_relevant in ranked):
                in_order = sorted(ranked, key=lambda pair: -pair[0])
                hits.append(np.array([is_relevant for _, is_relevant in in_order]))
        if not hits:
            return values
        return {**values, **measure_ranking(hits, [int(row.sum()) for row in hits])}
