"""Tensor parallelism: process mesh, collectives, parameter shards, parallel layers, loss, and
dropout state.
"""

from .collectives import (
    copy_to_tp,
    gather_from_dp,
    gather_from_tp,
    gather_sequence,
    reduce_from_tp,
    reduce_scatter_sequence,
    scatter_sequence,
    scatter_to_tp,
    set_reduction,
    sum_over_replicas,
)
from .context import (
    context_rank,
    context_size,
    cut_sequence,
    exchange_heads,
    gather_from_context,
    reduce_from_context,
    restore_heads,
    share_gradient,
    whole_sequences,
)
from .cross_entropy import head_losses, vocab_parallel_cross_entropy
from .division import divide
from .dropout import (
    Dropout,
    assign_dropout_sites,
    checkpoint,
    draw_seed,
    dropout_state,
    scaled_masked_softmax,
)
from .embedding import VocabParallelEmbedding
from .experts import ParallelExperts, expert_load_counting
from .fused_products import use_symmetric_memory
from .grad_clipping import clip_factor, clip_grad_norm_, grad_norm
from .head import VocabParallelHead
from .initialization import draw_model_seed, initialize, materialize
from .linear import ColumnParallelLinear, RowParallelLinear, cache_shared_heads, column_parallel
from .mesh import ParallelMesh, tp_rank, tp_size, validate_layout
from .norm import LayerNorm, RMSNorm
from .parameter import Fp32Parameters, fp32_parameter
from .pipeline import any_rank, broadcast_from_stage, receive_from_stage, send_to_stage
from .shard import AxisSplit, Shard

# fmt: off
__all__ = [
    "AxisSplit",
    "ColumnParallelLinear",
    "Dropout",
    "Fp32Parameters",
    "LayerNorm",
    "ParallelExperts",
    "ParallelMesh",
    "RMSNorm",
    "RowParallelLinear",
    "Shard",
    "VocabParallelEmbedding",
    "VocabParallelHead",
    "any_rank",
    "assign_dropout_sites",
    "broadcast_from_stage",
    "cache_shared_heads",
    "checkpoint",
    "clip_factor",
    "clip_grad_norm_",
    "column_parallel",
    "context_rank",
    "context_size",
    "copy_to_tp",
    "cut_sequence",
    "divide",
    "draw_model_seed",
    "draw_seed",
    "dropout_state",
    "exchange_heads",
    "expert_load_counting",
    "fp32_parameter",
    "gather_from_context",
    "gather_from_dp",
    "gather_from_tp",
    "gather_sequence",
    "grad_norm",
    "head_losses",
    "initialize",
    "materialize",
    "receive_from_stage",
    "reduce_from_context",
    "reduce_from_tp",
    "reduce_scatter_sequence",
    "restore_heads",
    "scaled_masked_softmax",
    "scatter_sequence",
    "scatter_to_tp",
    "send_to_stage",
    "set_reduction",
    "share_gradient",
    "sum_over_replicas",
    "tp_rank",
    "tp_size",
    "use_symmetric_memory",
    "validate_layout",
    "vocab_parallel_cross_entropy",
    "whole_sequences",
]
# fmt: on
