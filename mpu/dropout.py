"""Dropout whose mask is a function of (seed, sample, site, element) and of nothing else; recomputation that replays it.

No generator is advanced, so the mask does not depend on how the model is laid out over processes, and recomputation
reproduces it. `ops.dropout` has the function. A site is a `Dropout` of the model; `visit` counts its uses under
one key, so a module that runs twice in a forward pass draws two masks.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager, nullcontext
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.utils import checkpoint as torch_checkpoint

from ..ops import dropout, dropout_keys, masked_softmax, use_key
from .mesh import ParallelMesh


class DropoutKey(NamedTuple):
    """What a mask depends on besides its site. visits: uses so far of each site under this key."""

    seed: int
    first_sample: int
    visits: dict[int, int]


class DropoutState:
    """The key of the forward pass that is running. One per process: `dropout_state`."""

    def __init__(self) -> None:
        self._key: DropoutKey | None = None

    def set(self, seed: int, first_sample: int) -> None:
        """Call before every training forward pass.

        first_sample: global index of the first sample of this micro-batch, of which row b is sample first_sample + b.
        It must never repeat during a run (epochs included), or masks would.
        """
        self._key = DropoutKey(int(seed), int(first_sample), {})

    def capture(self) -> DropoutKey | None:
        """The current key, to be replayed later."""
        return self._key and self._key._replace(visits=dict(self._key.visits))

    @contextmanager
    def replay(self, key: DropoutKey | None) -> Generator[None]:
        """Run with a captured key; the key that was current comes back afterwards."""
        current, self._key = self._key, key and key._replace(visits=dict(key.visits))
        try:
            yield
        finally:
            self._key = current

    def visit(self, site: int) -> tuple[int, int]:
        """(64-bit key of this use of the site, first sample). Raises `RuntimeError` before any `set`."""
        if self._key is None:
            raise RuntimeError("call dropout_state.set(seed, first_sample) before a forward pass with dropout")
        seed, first_sample, visits = self._key
        count = visits.get(site, 0)
        visits[site] = count + 1
        return use_key(seed, site, count), first_sample


dropout_state = DropoutState()


class Dropout(nn.Module):
    """Dropout that every tensor-parallel layout of a model performs on the same elements.

    p: probability of zeroing an element; survivors are scaled by 1 / (1 - p).
    split_dim: the dimension of the input that is split over the tensor-parallel ranks (1 for a split sequence or for
        heads in [B, N, S, S], -1 for split features), or None where the input is replicated.

    Input [B, ..., C], at least two dimensions; the batch is dimension 0. `assign_dropout_sites` must have named the
    site (`materialize` and `initialize` do), and `dropout_state.set` the samples.
    """

    def __init__(self, p: float, *, split_dim: int | None = None, mesh: ParallelMesh | None = None):
        super().__init__()
        if not 0 <= p < 1:
            raise ValueError(f"dropout probability {p} must be at least 0 and below 1")
        if split_dim not in (None, 1, -1):
            raise ValueError(f"split_dim {split_dim} must be 1 (sequence or heads), -1 (features) or None")
        self.p, self.split_dim, self.mesh = p, split_dim, mesh
        self.site: int | None = None

    @property
    def drops(self) -> bool:
        """Whether a forward pass now would drop anything."""
        return self.training and self.p > 0

    def forward(self, tensor: Tensor) -> Tensor:
        return dropout(tensor, self.p, **self.mask_arguments(tensor)) if self.drops else tensor

    def mask_arguments(self, tensor: Tensor) -> dict[str, Any]:
        """Where this use lies in the unsplit model: the arguments `keys`, `first_row` and `first_column` of `ops`."""
        if self.site is None:
            raise RuntimeError("call assign_dropout_sites(model) once after building the model")
        key, first_sample = dropout_state.visit(self.site)
        arguments: dict[str, Any] = {"keys": dropout_keys(key, first_sample, tensor.shape[0], tensor.device)}
        if self.mesh is None:
            return arguments
        if self.split_dim in (-1, tensor.dim() - 1):
            arguments["first_column"] = self.mesh.tp_rank * tensor.shape[-1]
        elif self.split_dim == 1:
            arguments["first_row"] = self.mesh.tp_rank * math.prod(tensor.shape[1:-1])
        return arguments

    # What torch.compiler.disable sets; calling that would import dynamo. A key is a new constant in every step.
    vars(mask_arguments)["_torchdynamo_disable"] = True

    def extra_repr(self) -> str:
        return f"p={self.p}, split_dim={self.split_dim}"


def assign_dropout_sites(model: nn.Module, prefix: str = "") -> None:
    """Give every `Dropout` of the model a site derived from its qualified name.

    A pipeline stage passes the `prefix` that its modules have in the whole model.
    """
    modules = cast(Iterable[tuple[str, nn.Module]], model.named_modules(prefix=prefix))
    for name, module in modules:
        if isinstance(module, Dropout):
            module.site = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


def scaled_masked_softmax(
    scores: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    scale: float = 1.0,
    causal: bool = False,
    dropout: Dropout | None = None,
) -> Tensor:
    """softmax(scale * scores + bias) over the allowed keys, in fp32, then dropout.

    scores: [B, Np, Sq, Sk]. mask: broadcastable to scores; bool, True where a query may attend, or added. A row that
    may attend to nothing gives zeros. bias: broadcastable, trained. causal: query i sees the keys j <= i + Sk - Sq.
    dropout: a `Dropout(p, split_dim=1, mesh=mesh)`, since the heads are split. Returns [B, Np, Sq, Sk] in the dtype
    of scores.
    """
    dropped: dict[str, Any] = {}
    if dropout is not None and dropout.drops:
        dropped = {"dropout": dropout.p, **dropout.mask_arguments(scores)}
    return masked_softmax(scores, mask, bias, scale=scale, causal=causal, **dropped)


def checkpoint(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`, keeping only its inputs and computing it again in backward.

    The dropout masks of the first run are replayed exactly; so is torch's own random state. Around a whole block it
    is full recomputation, around the attention core alone selective recomputation (arXiv:2205.05198, section 5).
    """
    key = dropout_state.capture()
    return cast(Any, torch_checkpoint).checkpoint(
        function,
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), dropout_state.replay(key)),
        **kwargs,
    )
