"""Defines the settings of generation, with transformers' names, meanings and defaults."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from types import NoneType
from typing import Any, Literal, cast, get_args, get_origin, get_type_hints

from ..config import shown

DEFAULT_NEW_TOKENS = 20
_REMOVED = "transformers 5 does not have it either, but loads code from the Hub for it"
_SAME_CACHES = ("dynamic", "dynamic_full", "static", "hybrid", "hybrid_chunked", "sliding_window")
REFUSALS: dict[str, tuple[tuple[Any, ...], str]] = {
    "guidance_scale": ((1,), "guidance would need a second forward pass in each step"),
    "negative_prompt_ids": ((), "guidance would need a second forward pass in each step"),
    "negative_prompt_attention_mask": (
        (),
        "guidance would need a second forward pass in each step",
    ),
    "penalty_alpha": ((), _REMOVED),
    "dola_layers": ((), _REMOVED),
    "constraints": ((), _REMOVED),
    "force_words_ids": ((), _REMOVED),
    "custom_generate": ((), "decoding runs no code of others; write a logits_processor"),
    "trust_remote_code": ((), "decoding runs no code of others"),
    "low_memory": ((), "transformers 5 refuses it too"),
    "token_healing": ((), "shorten the prompt by its last token, and force it by a processor"),
    "prefill_chunk_size": ((), "a prompt is processed at once"),
    "continuous_batching_config": ((), "the rows of a batch start together"),
    "use_mtp": ((), "the models have no heads for later tokens"),
    "speculation_type": ((), "drafts come from an assistant_model or from the prompt"),
    "assistant_tokenizer": ((), "an assistant_model must have the model's vocabulary"),
    "assistant_early_exit": ((), "the model's early layers have no head"),
    "assistant_ensemble_weight": ((1,), "the tokens are those of the model alone"),
    "is_assistant": ((), "pass assistant_model=… to the model that is assisted"),
    "cache_config": ((), "keys and values stay on the device, in the model's data type"),
    "cache_implementation": (
        _SAME_CACHES,
        "keys and values stay on the device, in the model's data type; the names that change "
        f"nothing are {', '.join(_SAME_CACHES)}",
    ),
}
"""Settings of transformers that the zoo does not have: the values that change nothing, and why
others are refused. Other unknown entries of a `generation_config.json` have no effect in
transformers either."""

_CHANGE_NO_TOKEN = (
    "low_memory",
    "prefill_chunk_size",
    "continuous_batching_config",
    "cache_config",
)
"""Those that a model's file may have, because they decide only how transformers decodes."""

WITHOUT_EFFECT = (
    "max_cache_len",
    "compile_config",
    "disable_compile",
    "logits_to_keep",
    "target_lookbehind",
    "assistant_lookbehind",
    "use_model_defaults",
)
"""Arguments of transformers that change nothing here, because the cache has the size that a call
needs, decoding is not compiled, and only the last logits of a prompt are computed in any case."""


@dataclass(frozen=True)
class GenerationSettings:
    """Arguments of `generate`; those without a description are as in transformers'
    `GenerationConfig`.
    """

    max_new_tokens: int | None = None
    """Maximum number of new tokens; by default 20, or what max_length leaves."""
    max_length: int | None = None
    """Maximum number of tokens, including the prompt."""
    min_new_tokens: int | None = None
    """Minimum number of new tokens, before which no sequence may end."""
    min_length: int = 0
    """Minimum number of tokens, including the prompt."""
    max_time: float | None = None
    """Seconds after which no further token is started."""
    stop_strings: list[str] | str | None = None
    """A sequence ends when it contains one of these; needs a tokenizer."""

    do_sample: bool = False
    """Sample tokens by their probability, instead of taking the most likely one."""
    seed: int | None = None
    """Seed of sampling, the same for every tensor-parallel size; by default from the first rank's
    torch generator.
    """
    num_beams: int = 1
    """Number of beams; 1 is greedy decoding or sampling."""
    num_beam_groups: int = 1
    """Number of groups of diverse beam search, which avoid each other's tokens."""
    diversity_penalty: float = 0.0
    """Subtracted from the score of a token for each beam of an earlier group that has just chosen
    it.
    """
    early_stopping: bool | Literal["never"] = False
    """When beam search ends: once num_beams are finished (True), once better ones are unlikely
    (False), or once they are impossible (never)."""
    length_penalty: float = 1.0
    """Beams are compared by their log-probability divided by their length to this power."""
    num_return_sequences: int = 1
    """Number of sequences for each prompt."""
    use_cache: bool = True
    """Keep keys and values between steps; otherwise every step computes the whole sequence."""

    temperature: float = 1.0
    """Divides the logits before sampling."""
    top_k: int = 50
    """Sample from the k most likely tokens; 0 for all."""
    top_p: float = 1.0
    """Sample from the most likely tokens whose probabilities sum to this."""
    top_h: float | None = None
    """Sample from the most likely tokens that have this share of the entropy."""
    min_p: float | None = None
    """Sample from tokens with at least this fraction of the highest probability."""
    typical_p: float = 1.0
    """Sample from the tokens with the most typical information whose probabilities sum to this."""
    epsilon_cutoff: float = 0.0
    """Sample from tokens with at least this probability."""
    eta_cutoff: float = 0.0
    """Sample from tokens with at least a probability that depends on this and the entropy."""

    repetition_penalty: float = 1.0
    """Divides the scores of tokens that have occurred."""
    encoder_repetition_penalty: float = 1.0
    """Values above 1 favor tokens of the prompt."""
    no_repeat_ngram_size: int = 0
    """No n-gram of this size occurs twice."""
    encoder_no_repeat_ngram_size: int = 0
    """No n-gram of this size of the prompt occurs."""
    bad_words_ids: list[list[int]] | None = None
    """Token sequences that are never generated."""
    sequence_bias: list[tuple[list[int], float]] | None = None
    """Added to the score of the last token of a sequence; pairs, or a mapping from tuples."""
    suppress_tokens: list[int] | None = None
    """Tokens that are never generated."""
    begin_suppress_tokens: list[int] | None = None
    """Tokens that are not generated first."""
    forced_bos_token_id: int | None = None
    """The token after the decoder's start token."""
    forced_eos_token_id: int | list[int] | None = None
    """The last token of a sequence that max_length ends."""
    exponential_decay_length_penalty: tuple[int, float] | None = None
    """(start, factor): after `start` new tokens, the end token becomes likelier exponentially with
    this factor.
    """
    watermarking_config: dict[str, Any] | None = None
    """Marks the text by preferring a part of the vocabulary, as transformers' object or its dict says.
    """
    remove_invalid_values: bool = False
    """Replace infinities and NaN in the scores."""
    renormalize_logits: bool = False
    """Normalize the processed scores to log-probabilities."""

    pad_token_id: int | None = None
    """Fills sequences after their end; by default the model's, or its first end-of-sequence token.
    """
    bos_token_id: int | None = None
    """Starts an empty prompt; by default the model's."""
    eos_token_id: int | list[int] | None = None
    """Ends a sequence; by default the model's."""
    decoder_start_token_id: int | None = None
    """Starts an encoder-decoder's output; by default the model's."""

    def __post_init__(self) -> None:
        for name, kinds in _setting_types().items():
            value = getattr(self, name)
            if not _is_allowed(value, kinds):
                raise ValueError(f"{name} must be {_describe(kinds)}, not {shown(value)}")
        for name, least in (
            ("max_new_tokens", 0),
            ("max_length", 1),
            ("num_beams", 1),
            ("num_beam_groups", 1),
            ("num_return_sequences", 1),
        ):
            self._check_least(name, least)
        # As in transformers, a top_k that is not used may be anything; some folders have -1.
        if self.do_sample:
            self._check_least("top_k", 0)
        if self.early_stopping not in (True, False, "never"):
            raise ValueError(
                f"early_stopping must be true, false or 'never', not {self.early_stopping!r}"
            )
        draws_one_beam = self.do_sample and self.num_beams == 1
        if not draws_one_beam and self.num_return_sequences > self.num_beams:
            raise ValueError(
                f"num_return_sequences={self.num_return_sequences} must not exceed "
                f"num_beams={self.num_beams}; raise num_beams, or sample with do_sample=True"
            )
        self._check_groups()

    def _check_least(self, name: str, least: int) -> None:
        value = getattr(self, name)
        if value is not None and value < least:
            raise ValueError(f"{name} must be at least {least}, not {value}")

    def _check_groups(self) -> None:
        beams = self.num_beams
        groups = self.num_beam_groups
        if beams % groups:
            fitting = [n for n in range(1, beams + 1) if beams % n == 0]
            raise ValueError(
                f"num_beams={beams} cannot form {groups} groups; use num_beam_groups from {fitting}"
            )
        if groups > 1 and (self.do_sample or self.diversity_penalty <= 0):
            raise ValueError(
                "num_beam_groups > 1 needs do_sample=False and a diversity_penalty above 0, "
                "without which all groups would choose the same tokens"
            )
        if groups == 1 and self.diversity_penalty:
            raise ValueError(
                f"diversity_penalty={self.diversity_penalty} needs num_beam_groups > 1"
            )

    @classmethod
    def from_values(
        cls, values: Mapping[str, Any], arguments: Mapping[str, Any]
    ) -> GenerationSettings:
        """Returns settings from values by name, and the arguments of a call, which come first.

        An argument that is None unsets a value. Without a padding token, the first end token pads.

        Raises:
            ValueError: An argument is unknown, or a value is not possible.
        """
        chosen = dict(values)
        for name, value in arguments.items():
            if name not in setting_names():
                hint = suggest_name(name, setting_names())
                raise ValueError(f"generation has no argument {name!r}{hint}")
            if value is None:
                chosen.pop(name, None)
            else:
                chosen[name] = value
        settings = cls(**chosen)
        if settings.pad_token_id is None and settings.eos_token_ids:
            settings = replace(settings, pad_token_id=settings.eos_token_ids[0])
        return settings

    def named_values(self) -> dict[str, Any]:
        """Returns the settings that are not None by name."""
        found: dict[str, Any] = {}
        for name in setting_names():
            value = getattr(self, name)
            if value is not None:
                found[name] = value
        return found

    @property
    def eos_token_ids(self) -> list[int]:
        if self.eos_token_id is None:
            return []
        if isinstance(self.eos_token_id, int):
            return [self.eos_token_id]
        return list(self.eos_token_id)

    def length_limit(self, prompt: int) -> int:
        """Returns the maximum length of a sequence with this prompt length.

        Raises:
            ValueError: It leaves no new token.
        """
        if self.max_new_tokens is not None:
            return prompt + self.max_new_tokens
        if self.max_length is None:
            return prompt + DEFAULT_NEW_TOKENS
        if self.max_length <= prompt:
            raise ValueError(
                f"the prompt has {prompt} tokens, and max_length={self.max_length} leaves none to "
                "generate; raise it, or use max_new_tokens"
            )
        return self.max_length


@lru_cache
def setting_names() -> tuple[str, ...]:
    """Returns the names of all settings."""
    return tuple(field.name for field in fields(GenerationSettings))


def select_settings(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the entries of a `generation_config.json` that decide the tokens.

    Raises:
        ValueError: One of them is not supported.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name in REFUSALS and name not in _CHANGE_NO_TOKEN:
            check_refused(name, value)
        if name in setting_names() and value is not None:
            found[name] = value
    return found


def check_refused(name: str, value: Any) -> None:
    """Raises ValueError unless the value of a setting that is not supported changes nothing."""
    neutral, reason = REFUSALS[name]
    if value is None or value is False or value in neutral:
        return
    raise ValueError(f"generation has no argument {name!r} with the value {shown(value)}: {reason}")


def suggest_name(name: str, names: Iterable[str]) -> str:
    """Returns the end of a message that says which of `names` a wrong one may mean."""
    close = difflib.get_close_matches(name, list(names), n=1)
    return f"; did you mean {close[0]}?" if close else ""


@lru_cache
def _setting_types() -> dict[str, tuple[Any, ...]]:
    """Returns the types that each setting may have.

    early_stopping is left out; it is checked by its three values.
    """
    found: dict[str, tuple[Any, ...]] = {}
    for name, hint in get_type_hints(GenerationSettings).items():
        if name != "early_stopping":
            found[name] = get_args(hint) or (hint,)
    return found


def _is_allowed(value: Any, kinds: tuple[Any, ...]) -> bool:
    """Returns whether a value of a JSON file fits a setting.

    Other objects, such as NumPy's numbers, always do.
    """
    if isinstance(value, list | tuple | dict):
        items: list[Any] = list(cast(Any, value))
        for kind in kinds:
            if get_origin(kind) not in (list, tuple, dict):
                continue
            item_kinds = get_args(kind)
            # Only lists of one simple type are checked item by item.
            if item_kinds not in ((int,), (str,)):
                return True
            if all(_is_allowed(item, item_kinds) for item in items):
                return True
        return False
    if isinstance(value, float):
        return float in kinds or (int in kinds and value.is_integer())
    if isinstance(value, int):
        return bool({int, float, bool} & set(kinds))
    return type(value) in kinds or not isinstance(value, str | NoneType)


def _describe(kinds: tuple[Any, ...]) -> str:
    names = {
        int: "an integer",
        float: "a number",
        bool: "true or false",
        str: "a string",
        NoneType: "null",
    }
    return " or ".join(names.get(kind) or str(kind) for kind in kinds)
