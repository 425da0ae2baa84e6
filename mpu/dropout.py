"""Applies dropout whose mask depends only on (seed, sample, site, element), and recomputes layers
with the same masks.

No random generator is advanced, so the mask does not depend on how the model is split over
processes, and recomputation reproduces it. `ops.dropout` implements the mask function. A site is
one `Dropout` module of the model. `visit` counts the uses of each site under one key, so a module
that runs twice in a forward pass uses two masks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from ..ops import bias_dropout_residual, dropout_keys, masked_softmax, use_key
from ..ops.device import is_recording, records_graph
from ..ops.dropout_mask import keys_from_row, send_use_keys
from ..ops.registration import LIBRARY
from .division import find_first_unit
from .mesh import ParallelMesh


class KnownUses(NamedTuple):
    """The uses that a pass probably makes, because the pass before it made them.

    Attributes:
        seed: The seed of the run.
        rows: Each use, as its site and the number of its visit, and its row in a table of keys.
        on_devices: The keys of the uses on each device that needs them, int64 [uses]. They are sent
            once, and not with every micro-batch.
    """

    seed: int
    rows: dict[tuple[int, int], int]
    on_devices: dict[torch.device, Tensor]


class DropoutKey(NamedTuple):
    """The values that a mask depends on besides its site.

    Attributes:
        seed: The seed of the run.
        first_sample: The global index of the first sample of the micro-batch, or int64 [] on the
            device.
        visits: The number of uses of each site so far under this key.
        known: The uses that the key before this one saw.
        tables: The keys of the samples for each known use, int64 [batch], by first sample, batch
            and device.
        rows: The number of samples, and of each row of the tensors its sample and its position,
            int64 [T], where the tensors [T, 1, ...] leave out some positions.
    """

    seed: int
    first_sample: int | Tensor
    visits: dict[int, int]
    known: KnownUses
    tables: dict[tuple[int | Tensor, int, torch.device], tuple[Tensor, ...]]
    rows: tuple[int, Tensor, Tensor] | None = None


class DropoutState:
    """Holds the key of the current forward pass. Each process has one instance, `dropout_state`.

    Someone who says which samples a pass has calls `set`. Otherwise a model's call draws a key from
    PyTorch's generator when the pass first needs one; see `drawing`.

    The keys of one use are some sixteen operators on as many numbers as there are samples. A pass
    computes those of all uses that the pass before it made as one table, so that a step launches
    these operators once instead of per site.
    """

    def __init__(self) -> None:
        self._key: DropoutKey | None = None
        self._draw: Callable[[], tuple[int, int]] | None = None
        # The last key that was drawn, whose uses the next one will probably make too.
        self._drawn: DropoutKey | None = None

    def set(self, seed: int, first_sample: int | Tensor) -> None:
        """Sets the key. Call this before every training forward pass.

        Args:
            seed: The seed of the run.
            first_sample: The global index of the first sample of this micro-batch, or int64 [] on
                the device, which a CUDA graph reads anew in each step; row b is sample
                first_sample + b. It must never repeat during a run, across epochs either, because
                masks would repeat with it.
        """
        known = _collect_uses(self._key, int(seed))
        if not isinstance(first_sample, Tensor):
            first_sample = int(first_sample)
        self._key = DropoutKey(int(seed), first_sample, {}, known, {})

    def clear(self) -> None:
        """Forgets the key, so that models' calls draw keys again; see `drawing`."""
        self._key = None

    @contextmanager
    def drawing(self, draw: Callable[[], tuple[int, int]]) -> Generator[None]:
        """Within the context, the first use draws a key if there is none.

        The key is forgotten after the context.

        Args:
            draw: Returns a seed and the index of the first sample. It is called at most once, and
                not at all if nothing is dropped.
        """
        if self._key is not None or self._draw is not None:
            yield
            return
        self._draw = draw
        try:
            yield
        finally:
            self._draw = None
            self._drawn = self._key or self._drawn
            self._key = None

    def _current_key(self) -> DropoutKey | None:
        """Returns the key of this pass, which it draws if there is none."""
        if self._key is None and self._draw is not None:
            seed, first_sample = self._draw()
            known = _collect_uses(self._drawn, seed)
            self._key = DropoutKey(seed, first_sample, {}, known, {})
        return self._key

    def capture(self) -> DropoutKey | None:
        """Returns a copy of the current key for a later `replay`."""
        key = self._current_key()
        return None if key is None else _copy_key(key)

    @contextmanager
    def _using(self, key: DropoutKey | None) -> Generator[None]:
        current = self._key
        self._key = key
        try:
            yield
        finally:
            self._key = current

    @contextmanager
    def replay(self, key: DropoutKey | None) -> Generator[None]:
        """Uses a captured key within the context, then restores the current one."""
        with self._using(None if key is None else _copy_key(key)):
            yield

    @contextmanager
    def rows_per_sample(self, count: int) -> Generator[None]:
        """Within the context, each sample of the micro-batch has `count` consecutive rows."""
        key = self._current_key()
        if key is not None:
            key = key._replace(first_sample=key.first_sample * count)
        with self._using(key):
            yield

    @contextmanager
    def packed_rows(self, batch: int, samples: Tensor, positions: Tensor) -> Generator[None]:
        """Within the context, tensors have a row for each of these positions: see
        `DropoutKey.rows`.
        """
        key = self._current_key()
        if key is not None:
            key = key._replace(rows=(batch, samples, positions))
        with self._using(key):
            yield

    def visit_rows(self, site: int, batch: int, device: torch.device) -> Tensor:
        """Returns the keys for this use of the site: of the samples, int64 [batch].

        Within `packed_rows` they are the keys of its rows, int64 [T].
        """
        key = self._key or self._current_key()
        if key is None or key.rows is None:
            return self.visit(site, batch, device)
        batch, samples, positions = key.rows
        return keys_from_row(self.visit(site, batch, device)[samples], positions)

    def visit(self, site: int, batch: int, device: torch.device) -> Tensor:
        """Returns the keys of the samples for this use of the site, int64 [batch].

        Raises RuntimeError before `set` and outside `drawing`.
        """
        key = self._key or self._current_key()
        if key is None:
            raise RuntimeError(
                "call dropout_state.set(seed, first_sample) before a forward pass with dropout"
            )
        seed, first_sample, visits, known, tables, _ = key
        count = visits.get(site, 0)
        visits[site] = count + 1
        row = known.rows.get((site, count))
        name = (first_sample, batch, device)
        if row is None:
            return dropout_keys(use_key(seed, site, count), *name)
        if name in tables:
            return tables[name][row]
        uses = known.on_devices.get(device)
        if uses is None and is_recording(device):
            # A graph that sends the keys would read the host's memory anew whenever it runs.
            return dropout_keys(use_key(seed, site, count), *name)
        if uses is None:
            uses = send_use_keys([use_key(seed, *use) for use in known.rows], device)
            if _outlives_mode(uses):
                known.on_devices[device] = uses
        table = dropout_keys(uses, *name)
        if not _outlives_mode(table):
            return table[row]
        tables[name] = table.unbind()
        return tables[name][row]


def _outlives_mode(tensor: Tensor) -> bool:
    """Returns whether a tensor is of use later: one of inference mode, or of a tracing mode, is not."""
    return type(tensor) is Tensor and not tensor.is_inference()


def _collect_uses(key: DropoutKey | None, seed: int) -> KnownUses:
    """Returns `known` of the key that follows `key`: the uses so far, as they are with its seed.

    Keys with the same uses share one object.
    """
    if key is None:
        return KnownUses(seed, {}, {})
    uses = [(site, visit) for site, count in key.visits.items() for visit in range(count)]
    if seed == key.known.seed and uses == list(key.known.rows):
        return key.known
    return KnownUses(seed, {use: row for row, use in enumerate(uses)}, {})


def _copy_key(key: DropoutKey) -> DropoutKey:
    """Returns a key that counts visits of its own."""
    return key._replace(visits=dict(key.visits))


dropout_state = DropoutState()


def draw_seed(mesh: ParallelMesh | None) -> int:
    """Returns a seed from PyTorch's generator on the CPU: that of the first of the ranks that compute
    the same samples.

    The other ranks draw too, so that all generators advance alike.
    """
    seed = torch.randint(1 << 32, ())
    if mesh is None or mesh.size("context", "tensor") == 1:
        return int(seed)
    seed = seed.to(mesh.device_type)
    for axis in ("tensor", "context"):
        if mesh.size(axis) > 1:
            cast(Any, dist).broadcast(seed, group=mesh.group(axis), group_src=0)
    return int(seed)


def _visit_site(x: Tensor, site: Tensor) -> Tensor:
    return dropout_state.visit(int(site) % (1 << 64), x.shape[0], x.device)


def _allocate_keys(x: Tensor, site: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.int64)


# In a compiled graph, the keys come from an operator, because each step has others: they must not
# become constants, and an operator is called at the same places of the forward pass in which a
# module that is not compiled counts its visits. The tag keeps a compiler from calling it once for
# two uses, or again in the backward pass. The site is a tensor in the host's memory, not a number:
# a graph would hold the number as a constant, so that each block of a stack would need a graph of
# its own.
cast(Any, LIBRARY).define(
    "keys_of_site(Tensor x, Tensor site) -> Tensor", tags=(torch.Tag.nondeterministic_seeded,)
)
cast(Any, LIBRARY).impl("keys_of_site", _visit_site, "CompositeExplicitAutograd")
cast(Any, torch).library.register_fake("shardzoo::keys_of_site", _allocate_keys, lib=LIBRARY)


class AttentionPlace(NamedTuple):
    """Where the scores of some heads and queries are within those of a tensor-parallel rank.

    Attributes:
        heads: The number of the rank's heads.
        first_head: The first head, counted from the rank's first one.
        first_query: The first query.
        keys: The keys of the rows for this use of the site, int64 [B], where the rows are not the
            samples.
    """

    heads: int
    first_head: int
    first_query: int
    keys: Tensor | None = None


class Dropout(nn.Module):
    """Dropout that zeroes the same elements in every tensor-parallel layout of a model.

    The input is [B, ..., C], with at least two dimensions; the batch is dimension 0. Before the
    forward pass, `assign_dropout_sites` must set the site (`materialize` and `initialize` call it),
    and `dropout_state.set` must name the samples, unless it is part of a model's call, which draws
    a seed.

    Args:
        p: The probability of zeroing an element; the other elements are scaled by 1 / (1 - p).
        split_dim: The dimension of the input that is split over the tensor-parallel ranks (1 for a
            split sequence, -1 for split features), or None if it is replicated.
            `scaled_masked_softmax` does not use it.
        count: The number of features, or for `scaled_masked_softmax` of heads, over all ranks,
            which may hold unequal parts as `Shard` says; None if all ranks hold equally many.
    """

    def __init__(
        self,
        p: float,
        *,
        split_dim: int | None = None,
        count: int | None = None,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability {p} must be at least 0 and below 1")
        if split_dim not in (None, 1, -1):
            raise ValueError(f"split_dim {split_dim} must be 1 (sequence), -1 (features) or None")
        self.p = p
        self.split_dim = split_dim
        self.count = count
        self.mesh = mesh
        self.site: int | None = None
        # The bits of the site as a signed number, int64 [], on the host: for compiled graphs.
        self._site_tensor: Tensor | None = None

    @property
    def drops(self) -> bool:
        """Whether the next forward pass drops elements."""
        return self.training and self.p > 0

    def forward(self, tensor: Tensor, residual: Tensor | None = None) -> Tensor:
        """Returns residual + dropout(tensor), in one operator where both have one dtype."""
        if not self.drops:
            return tensor if residual is None else residual + tensor
        arguments = self.mask_arguments(tensor)
        if residual is not None and residual.dtype != tensor.dtype:  # under autocast
            return residual + bias_dropout_residual(tensor, None, None, p=self.p, **arguments)
        return bias_dropout_residual(tensor, None, residual, p=self.p, **arguments)

    def mask_arguments(self, tensor: Tensor) -> dict[str, Any]:
        """Returns the arguments `keys`, `first_row` and `first_column` of `ops`.

        They say where this rank's part begins in the unsplit tensor.
        """
        arguments: dict[str, Any] = {"keys": self.keys(tensor, dropout_state.visit_rows)}
        if self.mesh is None:
            return arguments
        if self.split_dim in (-1, tensor.dim() - 1):
            arguments["first_column"] = self.find_first(tensor.shape[-1])
        if tensor.dim() == 2:
            return arguments
        first_position = 0
        if self.split_dim == 1:
            first_position = self.find_first(tensor.shape[1])
        if self.mesh.cp_size > 1:
            # Context-parallel ranks come before tensor-parallel ones: the parts of sequence
            # parallelism are parts of this rank's positions.
            split = self.mesh.tp_size if self.split_dim == 1 else 1
            first_position += self.mesh.cp_rank * tensor.shape[1] * split
        if first_position:
            arguments["first_row"] = first_position * math.prod(tensor.shape[2:-1])
        return arguments

    def attention_arguments(
        self, tensor: Tensor, place: AttentionPlace | None = None
    ) -> dict[str, Any]:
        """Returns the arguments of `ops` for attention with this rank's heads.

        There are none if nothing is dropped.

        Args:
            tensor: [B, Np, ...].
            place: Where the heads and queries are, if they are not all of this rank's.
        """
        if not self.drops:
            return {}
        keys = None if place is None else place.keys
        if keys is None:
            keys = self.keys(tensor)
        first_head = self.find_first(tensor.shape[1])
        if place is not None:
            first_head = self.find_first(place.heads) + place.first_head
            if place.first_query:
                keys = keys_from_row(keys, place.first_query)
        return {"dropout": self.p, "keys": keys, "first_head": first_head}

    def find_first(self, local: int) -> int:
        """Returns the index over all ranks of the first of this rank's `local` heads, features or
        positions.
        """
        if self.mesh is None or self.mesh.tp_size == 1:
            return 0
        if self.count is None:
            return self.mesh.tp_rank * local
        return find_first_unit(self.count, self.mesh.tp_rank, self.mesh.tp_size)

    def keys(
        self,
        tensor: Tensor,
        visit: Callable[[int, int, torch.device], Tensor] = dropout_state.visit,
    ) -> Tensor:
        """Returns the keys of the samples of a tensor [B, ...] for this use of the site, int64 [B].

        `visit` is `dropout_state.visit_rows` for tensors of which positions may be left out.
        """
        if records_graph() and self._site_tensor is not None:
            return torch.ops.shardzoo.keys_of_site(tensor, self._site_tensor)
        if self.site is None:
            raise RuntimeError("call assign_dropout_sites(model) once after building the model")
        return visit(self.site, tensor.shape[0], tensor.device)

    def assign_site(self, name: str) -> None:
        """Derives the site from the module's qualified name in the model."""
        digest = hashlib.blake2b(name.encode(), digest_size=8).digest()
        self.site = int.from_bytes(digest, "little")
        signed = self.site - (self.site >> 63 << 64)
        self._site_tensor = torch.tensor(signed, dtype=torch.int64, device="cpu")

    def extra_repr(self) -> str:
        return f"p={self.p}, split_dim={self.split_dim}"


def assign_dropout_sites(model: nn.Module, prefix: str = "") -> None:
    """Gives every `Dropout` of the model a site derived from its qualified name.

    A pipeline stage passes the `prefix` that its modules have in the whole model.
    """
    modules = cast(Iterable[tuple[str, nn.Module]], model.named_modules(prefix=prefix))
    for name, module in modules:
        if isinstance(module, Dropout):
            module.assign_site(name)


def scaled_masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    prefix: Tensor | None = None,
    dropout: Dropout | None = None,
    place: AttentionPlace | None = None,
) -> Tensor:
    """Computes softmax(scale * scores + bias) over the allowed keys, in fp32, then applies dropout.

    Args:
        scores: [B, Np, Sq, Sk].
        mask: Broadcastable to scores; either bool, True where a query may attend, or numbers that
            are added. A row that may attend to no key gives zeros.
        bias: Broadcastable to scores; it may be trained.
        causal: Query i may attend to the keys j <= i + Sk - Sq.
        prefix: int64 [B], only with `causal`: every query of sample b may also attend to the keys j
            < prefix[b].
        dropout: A `Dropout(p, mesh=mesh)`. Whether it keeps an element depends on the sample, head,
            query and key alone, not on the lengths that the batch is padded to.
        place: Where the heads and queries are, if they are not all of this rank's.

    Returns:
        [B, Np, Sq, Sk] in the dtype of scores.
    """
    dropped = {} if dropout is None else dropout.attention_arguments(scores, place)
    return masked_softmax(scores, mask, bias, scale=scale, causal=causal, prefix=prefix, **dropped)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Runs `function(*args, **kwargs)`, keeps only its inputs, and runs it again in the backward
    pass.

    The second run replays the dropout masks of the first exactly, and PyTorch's own random state.
    Applied to a whole block this is full recomputation; applied to the attention core alone it is
    selective recomputation (arXiv:2205.05198, section 5).
    """
    key = dropout_state.capture()
    return cast(Any, torch_checkpoint).checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), dropout_state.replay(key)),
        **kwargs,
    )
