"""Computes the loss of a batch of texts to embed, and evaluates embeddings."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ...models.outputs import StageOutput
from ...mpu import ParallelMesh, dropout_state, gather_from_dp, share_gradient
from ...mpu.dropout import checkpoint
from ..replicas import iterate_replica_batches, share_from_last_stage
from . import losses
from .data import TextColumns
from .metrics import measure_retrieval
from .pooling import pool

# Loss -> the least and the greatest number of columns of texts, and whether there are scores.
COLUMNS: dict[str, tuple[int, int | None, bool]] = {
    "multiple_negatives_ranking": (2, None, False),
    "cosent": (2, 2, True),
    "angle": (2, 2, True),
    "cosine": (2, 2, True),
    "contrastive": (2, 2, True),
    "online_contrastive": (2, 2, True),
    "triplet": (3, 3, False),
    "margin_mse": (3, None, True),
    "distill_kl": (3, None, True),
}


@dataclass(frozen=True)
class EmbeddingObjective:
    """Embeds all columns of a batch, and compares them.

    Attributes:
        loss: A key of `COLUMNS`.
        pooling, normalize: See `EmbeddingSettings`.
        scale: The factor of similarities in the losses of similarities.
        margin: That of `triplet` and both contrastive losses; None for their own.
        distance: The name of their distance; None for their own.
        matryoshka_dims: The sizes of truncated embeddings that are trained too.
        mini_batch: Texts in one forward pass, whose activations are computed again in the backward
            pass (GradCache; Gao et al., 2021); None for all at once.
        mesh: Its data-parallel ranks are compared with one another.
    """

    loss: str
    pooling: str
    normalize: bool = False
    scale: float = 20.0
    margin: float | None = None
    distance: str | None = None
    matryoshka_dims: tuple[int, ...] = ()
    mini_batch: int | None = None
    mesh: ParallelMesh | None = None

    def __call__(self, data: Mapping[str, Any], run: Any) -> dict[str, Any] | StageOutput:
        """Runs the model on a batch of `ColumnCollate`. Returns `loss`."""
        embeddings = self.embed(data["input_ids"], data["attention_mask"], run)
        if isinstance(embeddings, StageOutput):
            return embeddings
        loss = self.compute_loss(embeddings.unbind(1), data.get("scores"), self.mesh)
        return {"loss": share_gradient(loss, self.mesh)}

    def embed(self, input_ids: Tensor, attention_mask: Tensor, run: Any) -> Tensor | StageOutput:
        """Returns the embeddings [B, C, H] of token ids int64 [B, C, S].

        A pipeline stage that is not the last returns what its model does.
        """
        count = input_ids.shape[1]
        mini_batch = self.mini_batch
        if mini_batch is None or not torch.is_grad_enabled():
            with dropout_state.rows_per_sample(count):
                embeddings = self._embed_rows(
                    run, input_ids.flatten(0, 1), attention_mask.flatten(0, 1)
                )
            if isinstance(embeddings, StageOutput):
                return embeddings
            return embeddings.unflatten(0, (-1, count))
        # The model runs on some rows at a time and keeps no activations, only their embeddings.
        # When the loss has gradients for all of these, each piece is computed once more.
        pieces: list[Tensor] = []
        step = max(1, mini_batch // count)
        key = dropout_state.capture()
        for start in range(0, len(input_ids), step):
            if key is not None:
                key = key._replace(first_sample=key.first_sample + (step if start else 0))
            with dropout_state.replay(key), dropout_state.rows_per_sample(count):
                rows = slice(start, start + step)
                pieces.append(
                    checkpoint(
                        partial(self._embed_rows, run),
                        input_ids[rows].flatten(0, 1),
                        attention_mask[rows].flatten(0, 1),
                    )
                )
        return torch.cat(pieces).unflatten(0, (-1, count))

    def _embed_rows(
        self, run: Any, input_ids: Tensor, attention_mask: Tensor
    ) -> Tensor | StageOutput:
        """Returns the embeddings [R, H] of rows of token ids int64 [R, S]."""
        output = run(input_ids=input_ids, attention_mask=attention_mask)
        if isinstance(output, StageOutput):
            return output
        hidden = output["last_hidden_state"]
        embeddings = pool(hidden, attention_mask, self.pooling)
        return F.normalize(embeddings, dim=-1) if self.normalize else embeddings

    def compute_loss(
        self, columns: Sequence[Tensor], scores: Tensor | None, mesh: ParallelMesh | None
    ) -> Tensor:
        """Returns the loss of embeddings [B, H] for each column.

        Args:
            mesh: Its data-parallel ranks have the other rows of the batch.
        """
        columns = [
            column.to(torch.promote_types(column.dtype, torch.float32)) for column in columns
        ]
        # Of the options, each loss takes those that it knows.
        chosen: dict[str, Any] = {}
        if self.loss in ("multiple_negatives_ranking", "cosent", "angle"):
            chosen |= {"scale": self.scale, "mesh": mesh}
        if self.loss == "online_contrastive":
            chosen["mesh"] = mesh
        if self.loss in ("triplet", "contrastive", "online_contrastive"):
            if self.margin is not None:
                chosen["margin"] = self.margin
            if self.distance is not None:
                chosen["distance"] = self.distance
        if COLUMNS[self.loss][2]:
            chosen["scores"] = scores
        functions: dict[str, Callable[..., Tensor]] = {
            "multiple_negatives_ranking": losses.multiple_negatives_ranking,
            "cosent": losses.cosent,
            "angle": losses.angle,
            "cosine": losses.cosine,
            "contrastive": losses.contrastive,
            "online_contrastive": losses.online_contrastive,
            "triplet": losses.triplet,
            "margin_mse": losses.margin_mse,
            "distill_kl": losses.distill_kl,
        }
        compute = partial(functions[self.loss], **chosen)
        if self.matryoshka_dims:
            return losses.matryoshka(columns, compute, self.matryoshka_dims)
        return compute(columns)

    @torch.no_grad()
    def evaluate(
        self,
        model: Any,
        device: torch.device,
        samples: Any,
        records: Sequence[TextColumns],
        collate: Callable[[Sequence[Any]], dict[str, Tensor]],
        batch_size: int,
    ) -> dict[str, float]:
        """Returns the mean loss of batches, and how good the embeddings are.

        With scores these are Spearman's and Pearson's correlations of the cosine similarities with
        them; otherwise it is how well anchors find their positives. The values do not depend on the
        number of ranks. Collective.
        """
        # Each data-parallel rank embeds its part of the rows; all get all embeddings.
        found: list[Tensor] = []
        scores: list[Tensor] = []
        for batch in iterate_replica_batches(samples, collate, device, batch_size, self.mesh):
            embeddings = self.embed(batch["input_ids"], batch["attention_mask"], model)
            if isinstance(embeddings, Tensor):
                found.append(gather_from_dp(embeddings.float(), self.mesh))
            if "scores" in batch:
                scores.append(gather_from_dp(batch["scores"], self.mesh))
        embeddings = share_from_last_stage(found, self.mesh)[: len(samples)]  # [N, C, H]
        labels = torch.cat(scores)[: len(samples)] if scores else None

        total = 0.0
        for start in range(0, len(embeddings), batch_size):
            rows = slice(start, start + batch_size)
            part = None if labels is None else labels[rows]
            loss = self.compute_loss(embeddings[rows].unbind(1), part, None)
            total += float(loss) * len(embeddings[rows])
        values = {"loss": total / len(embeddings)}

        if labels is None or labels.dim() > 1 or embeddings.shape[1] > 2:
            texts = [records[number].texts for number in range(len(records))]
            return {**values, **measure_retrieval(texts, embeddings.cpu().numpy())}
        similarities = losses.compute_paired_cosines(embeddings[:, 0], embeddings[:, 1])
        return {**values, **_correlate(similarities.cpu().numpy(), labels.cpu().numpy())}


def _correlate(similarities: np.ndarray, scores: np.ndarray) -> dict[str, float]:
    """Returns Spearman's and Pearson's correlation; 0 if one side is constant."""
    from scipy.stats import rankdata

    pairs = {
        "spearmanr": (rankdata(similarities), rankdata(scores)),
        "pearsonr": (similarities, scores),
    }
    values: dict[str, float] = {}
    for name, (x, y) in pairs.items():
        is_constant = x.std() == 0 or y.std() == 0
        values[name] = 0.0 if is_constant else float(np.corrcoef(x, y)[0, 1])
    return values
