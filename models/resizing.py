"""Changes the number of tokens of a model: its word embedding and its output head."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributions import constraints
from torch.distributions.multivariate_normal import MultivariateNormal

from ..checkpoint.layout import ParameterSpec
from ..mpu import ParallelMesh, Shard, VocabParallelEmbedding, VocabParallelHead
from ..mpu.collectives import gather_bytes
from ..mpu.mesh import axis_ranks, axis_sizes
from ..mpu.parameter import SplitParameter, split_parameter
from .hf_state import gather_parameter

# Scales the covariance of the old rows, as in transformers: new rows are almost their mean.
COVARIANCE_SCALE = 1e-9


@torch.no_grad()
def resize_token_embeddings(
    model: Any,
    new_num_tokens: int | None = None,
    pad_to_multiple_of: int | None = None,
    mean_resizing: bool = True,
) -> VocabParallelEmbedding:
    """Adds tokens after the last one of a model, or removes its last tokens.

    New rows are drawn as transformers draws them: around the mean of the old rows, or like initial
    weights. They follow from PyTorch's generator, on all ranks of a mesh from that of the first
    one. An optimizer has to be made after the call, because parameters are replaced. Collective
    over the mesh; each rank holds the whole table for a moment.

    Args:
        new_num_tokens: The number of tokens; by default the present one.
        pad_to_multiple_of: The number is rounded up to a multiple of it.
        mean_resizing: Draw new rows around the mean of the old ones.

    Returns:
        The word embedding.

    Raises:
        ValueError: A number is not possible, or the model is a pipeline stage or has LoRA weights.
    """
    embedding: VocabParallelEmbedding = model.embedding
    count = _count_tokens(embedding.num_embeddings, new_num_tokens, pad_to_multiple_of)
    old_count = embedding.num_embeddings
    if count == old_count:
        return embedding
    if model.stage is not None:
        raise ValueError("a pipeline stage cannot be resized; load the model without a pipeline")
    if getattr(model, "lora", None) is not None:
        raise ValueError("a model with LoRA weights cannot be resized; merge them, or resize first")

    heads: list[VocabParallelHead] = []
    for module in model.modules():
        if isinstance(module, VocabParallelHead) and module.num_embeddings == old_count:
            heads.append(module)
    with _shared_generator(model.mesh):
        table = _resize_table(model, "weight", embedding, count, mean_resizing)
        for head in heads:
            # transformers draws the rows of a tied head, too, before it ties it again.
            weight = _resize_table(model, "weight", head, count, mean_resizing, is_linear=True)
            bias = None if head.bias is None else _resize_bias(model, head, count)
            if head.tied:
                head.weight = cast(Any, table)
            else:
                head.weight = cast(Any, weight)
            head.bias = cast(Any, bias)
            if head.fixed_bias is not None:
                # BART's bias of the logits is [1, V]; as in transformers, new tokens have none.
                values = _gather(head.fixed_bias, model.mesh)
                padded = values.new_zeros(1, count)
                kept = min(count, old_count)
                padded[:, :kept] = values[:, :kept]
                head.fixed_bias = cast(Any, _split(padded, head.fixed_bias, model.mesh))
            head.num_embeddings = count
            head.shard = cast(SplitParameter, head.weight).shard
        _replace_table(embedding, table)
        # The stacks of an encoder-decoder may have embeddings of their own.
        for module in model.modules():
            if isinstance(module, VocabParallelEmbedding) and module.num_embeddings == old_count:
                _replace_table(module, _resize_table(model, "weight", module, count, mean_resizing))
    model.config.change_built(vocab_size=count)
    return embedding


def _replace_table(embedding: VocabParallelEmbedding, table: nn.Parameter) -> None:
    """Gives an embedding a table with another number of rows."""
    embedding.weight = cast(Any, table)
    embedding.shard = cast(SplitParameter, table).shard
    embedding.num_embeddings = embedding.shard.shape[0]
    if embedding.padding_idx is not None and embedding.padding_idx >= embedding.num_embeddings:
        embedding.padding_idx = None


def _count_tokens(old: int, new: Any, multiple: Any) -> int:
    """Returns the new number of tokens. Raises ValueError if an argument is not possible."""
    if multiple is not None and (not isinstance(multiple, int) or multiple < 1):
        raise ValueError(f"pad_to_multiple_of must be a positive integer, not {multiple!r}")
    count = old if new is None else new
    if not isinstance(count, int) or count < 1:
        raise ValueError(f"new_num_tokens must be a positive integer, not {count!r}")
    if multiple is not None:
        count = -(-count // multiple) * multiple
    return count


@contextmanager
def _shared_generator(mesh: ParallelMesh | None) -> Generator[None]:
    """Gives all ranks of a mesh the state of the first one's generator.

    The others get their own state back.
    """
    if mesh is None or mesh.world_size == 1:
        yield
        return
    state = bytes(torch.get_rng_state().numpy())
    first = gather_bytes(state)[0]
    if mesh.rank == 0:
        yield
        return
    with cast(Any, torch.random).fork_rng(devices=()):
        torch.set_rng_state(torch.frombuffer(bytearray(first), dtype=torch.uint8))
        yield


def _resize_table(
    model: Any,
    name: str,
    module: VocabParallelEmbedding | VocabParallelHead,
    count: int,
    mean_resizing: bool,
    is_linear: bool = False,
) -> nn.Parameter:
    """Returns the parameter for a table of `count` rows [count, H], with the old rows first."""
    old_parameter = cast(SplitParameter, getattr(module, name))
    old = _gather(old_parameter, model.mesh)
    width = old.shape[1]
    # The module's own random values are drawn first, as in transformers, and thrown away.
    if is_linear:
        drawn = nn.Linear(width, count, bias=False).weight
    else:
        drawn = nn.Embedding(count, width).weight
    rows = drawn.detach().to(old.dtype)
    if count > len(old):
        if mean_resizing:
            rows[len(old) :] = _draw_rows(old.cpu(), count - len(old))
        else:
            full = torch.empty(count, width)
            seed = int(torch.randint(1 << 62, ()))
            names = {id(parameter): name for name, parameter in model.named_parameters()}
            generator = torch.Generator().manual_seed(seed)
            model.initialize_parameter(names[id(old_parameter)], full, generator)
            rows = full.to(old.dtype)
    kept = min(count, len(old))
    rows[:kept] = old[:kept].to(rows.device)
    return _split(rows, old_parameter, model.mesh)


def _draw_rows(old: Tensor, added: int) -> Tensor:
    """Draws rows [added, H] from a normal distribution around the mean of the old rows [V, H].

    Its covariance is that of the old rows, scaled down; if that is not positive definite, every row
    is the mean (https://nlp.stanford.edu/~johnhew/vocab-expansion.html).
    """
    rows = old.float()
    mean = rows.mean(dim=0)
    centered = rows - mean
    covariance = COVARIANCE_SCALE * (centered.T @ centered / len(rows))
    positive_definite: Any = constraints.positive_definite
    if bool(positive_definite.check(covariance).all()):
        distribution: Any = MultivariateNormal(mean, covariance_matrix=covariance)
        return distribution.sample((added,)).to(old.dtype)
    return mean[None].repeat(added, 1).to(old.dtype)


def _resize_bias(model: Any, head: VocabParallelHead, count: int) -> nn.Parameter:
    """Returns the parameter for a head's bias [count]; new values are around the mean."""
    old_parameter = cast(SplitParameter, head.bias)
    old = _gather(old_parameter, model.mesh).cpu()
    values = old.new_zeros(count)
    kept = min(count, len(old))
    values[:kept] = old[:kept]
    if count > len(old):
        mean = float(old.float().mean())
        deviation = COVARIANCE_SCALE * float(old.float().std())
        values[len(old) :].normal_(mean, deviation)
    return _split(values, old_parameter, model.mesh)


def _gather(parameter: SplitParameter, mesh: ParallelMesh | None) -> Tensor:
    """Returns the whole of a parameter without padding."""
    spec = ParameterSpec("", parameter.shard.shape, parameter.shard)
    return gather_parameter(parameter.detach(), spec, mesh)


def _split(whole: Tensor, old: SplitParameter, mesh: ParallelMesh | None) -> nn.Parameter:
    """Returns a parameter for this rank's part of other values, on the device of the old one."""
    dim = old.shard.dim
    shard = Shard(tuple(whole.shape), dim, pad_multiple=old.shard.pad_multiple)
    part = shard.slice(whole, axis_ranks(mesh), axis_sizes(mesh))
    made = split_parameter(shard, mesh)
    made.data = part.to(old.device)
    made.requires_grad_(old.requires_grad)
    return made
