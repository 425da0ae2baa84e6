"""Reads the arguments of a model's call, in the forms that transformers' models take them."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from types import MethodType, NoneType
from typing import Any, cast

import torch
from torch import Tensor

from ..mpu import context_size
from .blocks.cache import Cache, NewCache, TransformersCache
from .blocks.masks import number_pieces
from .outputs import LazyPast, ModelOutput
from .pipeline import list_stacks

# What every call takes besides the inputs of its class.
CALL_OPTIONS = ("use_cache", "output_attentions", "output_hidden_states", "return_dict")
# What flash attention needs beside `cu_seq_lens_q` to keep packed pieces apart.
FLASH_ATTENTION_INPUTS = ("cu_seq_lens_k", "max_length_q", "max_length_k")
# Inputs beside which a call makes no cache of its own accord, besides labels.
WITHOUT_CACHE = ("cache", "shift_labels", "seq_idx", "decoder_seq_idx", "cu_seq_lens_q")
# Inputs that stand for others, and become those before a head sees them.
EMBEDDINGS = {"inputs_embeds": "input_ids", "decoder_inputs_embeds": "decoder_input_ids"}


def collect_parameters(model_class: Any) -> tuple[str, ...]:
    """Returns the names of what `compute_outputs` takes, also through `**options`, which go on to
    the next class and in the end to `run_backbone`.
    """
    names: list[str] = []
    is_open = True
    for kind in cast("type[Any]", model_class).__mro__:
        function = vars(kind).get("compute_outputs")
        if function is None or not is_open:
            continue
        parameters = inspect.signature(function).parameters.values()
        names += _list_names(parameters)
        is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters)
    if is_open:
        names += _list_names(inspect.signature(model_class.run_backbone).parameters.values())
    return tuple(dict.fromkeys(name for name in names if name != "self"))


def _list_names(parameters: Iterable[inspect.Parameter]) -> list[str]:
    """Returns the names of parameters, without those with a star."""
    stars = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [parameter.name for parameter in parameters if parameter.kind not in stars]


def list_keywords(model_class: Any) -> tuple[str, ...]:
    """Returns the names of what a class's call takes by name alone, or by name too."""
    names: tuple[str, ...] = model_class.parameter_names
    embeddings = [name for name, ids in EMBEDDINGS.items() if ids in names]
    caches = ["past_key_values"] if "cache" in names else []
    return (*names, *embeddings, *caches, *CALL_OPTIONS)


def build_signature(model_class: Any) -> inspect.Signature:
    """Returns the signature of a class's `forward`: transformers' arguments in their order, then
    those that are the zoo's own.
    """
    positional = model_class.positional_inputs + model_class.label_names
    others = list_keywords(model_class)
    parameters = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)]
    for name in positional:
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        parameters.append(inspect.Parameter(name, kind, default=None))
    for name in dict.fromkeys(others):
        if name not in positional:
            kind = inspect.Parameter.KEYWORD_ONLY
            parameters.append(inspect.Parameter(name, kind, default=None))
    return inspect.Signature(parameters)


class SignedForward:
    """Makes the `forward` of each class of models, which calls `run_call` and whose signature has
    the arguments of this class.
    """

    def __init__(self) -> None:
        self.functions: dict[type, Any] = {}

    def __get__(self, model: Any, owner: type) -> Any:
        """Returns the function, bound to the model if it is not asked of the class."""
        function = self.functions.get(owner)
        if function is None:
            function = self.functions[owner] = make_forward(owner)
        return function if model is None else MethodType(function, model)


def make_forward(model_class: Any) -> Any:
    """Returns the `forward` of a class."""

    def forward(self: Any, *inputs: Any, **options: Any) -> Any:
        """Runs the model; see `compute_outputs` and docs/models.md for the arguments."""
        return self.run_call(inputs, options)

    cast(Any, forward).__signature__ = build_signature(model_class)
    return forward


def name_inputs(model: Any, inputs: tuple[Any, ...], options: dict[str, Any]) -> dict[str, Any]:
    """Returns the arguments of a call by name, without those that are None.

    Raises:
        TypeError: There are too many arguments by position, one is given twice, or one is unknown.
    """
    kind = cast(Any, type(model))
    names: tuple[str, ...] = kind.positional_inputs + kind.label_names
    if len(inputs) > len(names):
        raise TypeError(
            f"{kind.__name__} takes at most {len(names)} arguments by position: {', '.join(names)}"
        )
    named = dict(zip(names, inputs, strict=False))
    repeated = named.keys() & options.keys()
    if repeated:
        raise TypeError(f"{kind.__name__} got two values for {min(repeated)}")
    named.update(options)
    known: frozenset[str] = kind.call_names
    rename_cache(kind, named)
    unknown = named.keys() - known
    if unknown:
        raise TypeError(
            f"{kind.__name__} has no argument {', '.join(sorted(unknown))}; it takes "
            f"{', '.join(inspect.signature(model.forward).parameters)}"
        )
    return {name: value for name, value in named.items() if value is not None}


def rename_cache(kind: Any, named: dict[str, Any]) -> None:
    """Calls a cache of transformers `past_key_values`, where transformers 5.24 and later call it
    `cache`. The zoo's own is called so too, and keeps that name.

    Args:
        kind: The class of the model.
        named: The arguments of a call, which are changed in place.

    Raises:
        TypeError: Both names are given.
    """
    if "cache" not in named or "past_key_values" not in kind.call_names:
        return
    if "cache" in kind.call_names and isinstance(named["cache"], (Cache, NoneType)):
        return
    given = named.pop("cache")
    if given is not None and named.get("past_key_values") is not None:
        raise TypeError(f"{kind.__name__} got two caches, cache and past_key_values: pass one")
    if given is not None:
        named["past_key_values"] = given


def resolve_inputs(model: Any, named: dict[str, Any]) -> None:
    """Brings the inputs of a call into the forms that heads take, in place.

    - Embeddings take the place of the ids: what is called `input_ids` within is int64 [B, S], or
      [B, S, H] in floating point.
    - The encoder's output becomes a tuple that begins with its last hidden state.
    - `cu_seq_lens_q`, the cumulative lengths of packed pieces, becomes `seq_idx`.

    Raises:
        ValueError: Ids and embeddings are both given, or an argument that transformers' class of
            this name has and the zoo's does not.
    """
    kind = cast(Any, type(model))
    for name, ids in EMBEDDINGS.items():
        if name not in named:
            continue
        if ids in named:
            raise ValueError(f"{kind.__name__} takes {ids} or {name}, not both")
        if ids in kind.parameter_names:
            named[ids] = named.pop(name)
    if "encoder_outputs" in named:
        named["encoder_outputs"] = read_encoder_outputs(named["encoder_outputs"])
    if "cu_seq_lens_q" in named:
        length = named["input_ids"].shape[1]
        named["seq_idx"] = number_pieces(named["cu_seq_lens_q"], length)
        for name in ("cu_seq_lens_q", *FLASH_ATTENTION_INPUTS):
            named.pop(name, None)
    for name in named:
        if name not in kind.parameter_names:
            raise ValueError(f"{kind.__name__} has no argument {name}; it must be None")
    if "input_ids" not in named and "encoder_outputs" not in kind.parameter_names:
        raise ValueError(f"{kind.__name__} needs input_ids or inputs_embeds")


def take_cache(model: Any, named: dict[str, Any]) -> Any:
    """Puts transformers' cache, `past_key_values`, in the place of our own among the arguments of a
    call, or a new one with `use_cache`.

    As in transformers, `config.use_cache` decides if the call does not say it. Where nobody could
    read the cache, or it cannot be (in training, beside labels, in packed rows, in a compiled or
    split sequence), a call without `use_cache` makes none.

    Returns:
        The cache for the output, or what makes it; None if there is none, or use_cache is False.

    Raises:
        ValueError: The model cannot take a cache.
    """
    parameters: tuple[str, ...] = model.parameter_names
    if "use_cache" in parameters:  # the model has a memory of its own
        return None
    uses = named.pop("use_cache", None)
    past = named.get("past_key_values")
    if past is None and not (uses or (uses is None and model.config.use_cache)):
        return None
    if "cache" not in parameters or (past is None and not model.keeps_cache):
        return None  # `resolve_inputs` refuses a cache that is given
    if past is None and uses is None and model.training:
        return None
    stacks = [blocks for _, blocks in list_stacks(model)]
    layers = len(stacks[-1])
    has_sources: bool = model.attends_to_encoder
    if past is None and uses is None:
        is_split = model.parallel_config.sequence_parallel or context_size(model.mesh) > 1
        is_whole = model.stage is None and not is_split
        is_kept = not model.training and not stacks[-1].recompute_blocks and is_whole
        if not is_kept or torch.compiler.is_compiling() or _needs_no_cache(model, named):
            return None
        named["cache"] = NewCache(layers, has_sources=has_sources)
        return LazyPast(named["cache"])
    if past is not None and not hasattr(past, "get_seq_length"):
        raise ValueError(
            f"past_key_values must be a Cache of transformers, such as DynamicCache, not "
            f"{type(past).__name__}"
        )
    if stacks[-1].recompute_blocks and torch.is_grad_enabled():
        if past is not None:
            raise ValueError("past_key_values cannot be used with recomputation of blocks")
        warnings.warn("use_cache=True has no effect with recomputation of blocks", stacklevel=4)
        return None
    if model.parallel_config.sequence_parallel:
        raise ValueError(
            "a cache needs the whole sequence on each rank: build the model without sequence "
            "parallelism"
        )
    if model.stage is not None:
        raise ValueError("past_key_values and use_cache need a model without pipeline stages")
    past = make_cache(past, has_sources=has_sources)
    named.pop("past_key_values", None)
    named["cache"] = TransformersCache(past, layers, has_sources=has_sources)
    return None if uses is False else past


def _needs_no_cache(model: Any, named: dict[str, Any]) -> bool:
    """Returns whether a call has labels, or rows that may be packed, or a cache of the zoo."""
    if "position_ids" in named and "attention_mask" not in named:
        return True
    return any(name in named for name in (*WITHOUT_CACHE, *model.label_names))


def make_cache(past: Any, *, has_sources: bool) -> Any:
    """Returns the cache of transformers that a call extends: the given one, or a new one.

    Args:
        has_sources: Whether it also keeps the keys and values of an encoder's output.
    """
    if past is not None and (hasattr(past, "cross_attention_cache") or not has_sources):
        return past
    from transformers import DynamicCache, EncoderDecoderCache

    if past is None:
        past = DynamicCache()
    return EncoderDecoderCache(past, DynamicCache()) if has_sources else past


def read_encoder_outputs(given: Any) -> tuple[Any, ...]:
    """Returns the encoder's last hidden state, the states of all its blocks and their attention
    probabilities, the latter two None if they are not known.

    Args:
        given: A tensor, a tuple or list that begins with it, or an output of the zoo or of
            transformers.
    """
    if isinstance(given, Tensor):
        return given, None, None
    if isinstance(given, (ModelOutput, Mapping)):
        values = cast(Mapping[str, Any], given)
        last = values["last_hidden_state"]
        return last, values.get("hidden_states"), values.get("attentions")
    last, *others = given
    states, attentions, *_ = (*others, None, None)
    return last, states, attentions


def count_samples(inputs: Any) -> int:
    """Returns the number of samples B of a call's inputs [B, ...]."""
    return max(len(value) for value in inputs if isinstance(value, Tensor) and value.dim())


def keep_positions(x: Tensor, logits_to_keep: Tensor | int) -> Tensor:
    """Returns the positions of [B, S, H] whose logits are wanted.

    Args:
        logits_to_keep: The number of last positions, 0 for all; or their indices, int64 [K].
    """
    if isinstance(logits_to_keep, int):
        return x[:, -logits_to_keep:]
    if logits_to_keep.dim() == 0:
        return x[:, -int(logits_to_keep) :]
    return x[:, logits_to_keep.to(torch.long)]
