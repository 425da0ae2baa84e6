"""Implements the output head whose vocabulary is split over the tensor-parallel ranks."""

from __future__ import annotations

from torch import Tensor

from ..ops import linear_cross_entropy
from ..ops.linear_cross_entropy import cap_logits
from .cross_entropy import head_losses
from .embedding import VocabParallelEmbedding
from .linear import column_parallel
from .mesh import ParallelMesh
from .parameter import SplitLayer, split_parameter
from .shard import Shard
from .token_ids import check_ids


class VocabParallelHead(SplitLayer):
    """Computes the logits of this rank's slice of the vocabulary; the logits are not gathered.

    Input [B, S, H], or [B, S/tp, H] under sequence parallelism. Output [B, S, Vp]. Column c of rank
    r is token r * Vp + c. Columns past the vocabulary are padding: pass `num_classes=` to
    `vocab_parallel_cross_entropy`.

    Args:
        fixed_bias: Whether there is a bias that no training changes; it is [1, V], like the buffer
            `final_logits_bias` of transformers' BART.
        softcap: The logits are softcap * tanh(logits / softcap), if it is given.
        tied: The embedding whose weight this head shares, as the same parameter.
        sequence_parallel: The input is this rank's part of the sequence; the logits are those of
            the whole sequence.
    """

    def __init__(
        self,
        hidden_size: int,
        num_embeddings: int,
        *,
        bias: bool = False,
        fixed_bias: bool = False,
        softcap: float | None = None,
        tied: VocabParallelEmbedding | None = None,
        pad_multiple: int = 1,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.num_embeddings = num_embeddings
        self.softcap = softcap
        self.sequence_parallel = sequence_parallel
        self.mesh = mesh
        if tied is not None:
            if (tied.num_embeddings, tied.embedding_dim) != (num_embeddings, hidden_size):
                raise ValueError(
                    f"a head of {num_embeddings} x {hidden_size} cannot be tied to an embedding of "
                    f"{tied.num_embeddings} x {tied.embedding_dim}"
                )
            pad_multiple = tied.shard.pad_multiple
        self.shard = Shard((num_embeddings, hidden_size), 0, pad_multiple=pad_multiple)
        self.tied = tied is not None
        self.weight = split_parameter(self.shard, mesh) if tied is None else tied.weight  # [Vp, H]
        bias_shard = Shard((num_embeddings,), 0, pad_multiple=pad_multiple)
        self.bias = split_parameter(bias_shard, mesh) if bias else None  # [Vp]
        self.fixed_bias = None
        if fixed_bias:
            row = Shard((1, num_embeddings), 1, pad_multiple=pad_multiple)
            self.fixed_bias = split_parameter(row, mesh)  # [1, Vp]
            self.fixed_bias.requires_grad = False

    def forward(self, hidden: Tensor, table: Tensor | None = None) -> Tensor:
        """Returns the logits [B, S, Vp].

        Args:
            hidden: [B, S, H], or [B, S/tp, H] under sequence parallelism.
            table: The table that the tied embedding's `embed` returned; an untied head ignores it.
        """
        weight = self.shared_weight(table)
        bias = self.bias if self.fixed_bias is None else self.fixed_bias[0]
        logits = column_parallel(
            hidden, weight, bias, sequence_parallel=self.sequence_parallel, mesh=self.mesh
        )
        return cap_logits(logits, self.softcap)

    def losses(
        self, hidden: Tensor, target: Tensor, table: Tensor | None = None, *, ignore_index: int
    ) -> Tensor:
        """Returns the cross-entropy losses [T].

        Args:
            hidden: [T, H], replicated under sequence parallelism too; there the caller sums its
                gradient over the ranks.
            target: int64 [T].
            table: As in `forward`.
            ignore_index: A target with this value has loss 0 and no gradient.
        """
        weight = self.shared_weight(table)
        bias = self.bias if self.fixed_bias is None else self.fixed_bias[0]
        if self.mesh is None or self.mesh.tp_size == 1:
            check_ids(target.masked_fill(target == ignore_index, 0), self.num_embeddings, "label")
            return linear_cross_entropy(
                hidden,
                weight,
                bias,
                target,
                num_classes=self.num_embeddings,
                ignore_index=ignore_index,
                softcap=self.softcap,
            )
        return head_losses(
            hidden,
            weight,
            bias,
            target,
            num_classes=self.num_embeddings,
            ignore_index=ignore_index,
            partial_grad=not self.sequence_parallel,
            softcap=self.softcap,
            mesh=self.mesh,
        )

    def shared_weight(self, table: Tensor | None) -> Tensor:
        """Returns the weight [Vp, H]: the `table` of a tied embedding's last use, if given."""
        return table if self.tied and table is not None else self.weight
