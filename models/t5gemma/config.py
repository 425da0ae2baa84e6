"""Defines T5Gemma's configuration, with the keys of Hugging Face's `config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, cast

from typing_extensions import Self

from ..config import HeadsConfig, Probability, TokenId, VocabSize, shown
from ..gemma2.config import Gemma2Config


@dataclass
class T5GemmaModuleConfig(Gemma2Config):
    """The sizes and constants of a stack, which are those of a Gemma 2."""

    model_type: ClassVar[str] = "t5_gemma_module"


@dataclass
class T5GemmaConfig(HeadsConfig):
    """The sizes and constants of a T5Gemma. Names, meanings and defaults are those of transformers.

    Attributes:
        encoder, decoder: Those of the stacks; keys of a `config.json` are read, too.
        vocab_size: Of both stacks. A `config.json` has it in both.
        dropout_rate: Of embeddings, outputs of the blocks' parts, and the inside of their MLPs.
        is_encoder_decoder: Whether there is a decoder. `T5GemmaEncoderModel` has none, and a
            classifier may have none; the other architectures need one.
        decoder_start_token_id: The decoder's `bos_token_id`, with which transformers' decoder
            begins, too.
    """

    model_type: ClassVar[str] = "t5gemma"
    stack_config: ClassVar[type[Gemma2Config]] = T5GemmaModuleConfig
    """The class of a stack's configuration."""

    vocab_size: VocabSize = 256000
    encoder: Gemma2Config | None = None
    decoder: Gemma2Config | None = None
    dropout_rate: Probability = 0.0
    classifier_dropout_rate: Probability = 0.0
    attention_dropout: Probability = 0.0
    tie_word_embeddings: bool = True
    is_encoder_decoder: bool = True  # type: ignore[misc] - a constant of most families
    pad_token_id: TokenId | None = None
    bos_token_id: TokenId | None = None
    eos_token_id: TokenId | list[TokenId] | None = None
    decoder_start_token_id: TokenId | None = None
    architecture: str = "T5GemmaForConditionalGeneration"

    def __post_init__(self) -> None:
        for name in ("encoder", "decoder"):
            own = self.read_stack(name, getattr(self, name))
            changes: dict[str, Any] = {"attention_dropout": self.attention_dropout}
            if own.vocab_size != self.vocab_size:
                changes["vocab_size"] = self.vocab_size
            object.__setattr__(self, name, own.with_changes(**changes))
        super().__post_init__()
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            if getattr(self, name) is None:
                object.__setattr__(self, name, getattr(self.decoder_config, name))
        if self.decoder_start_token_id is None:
            object.__setattr__(self, "decoder_start_token_id", self.decoder_config.bos_token_id)
        if self.architecture.endswith("EncoderModel"):
            # transformers' class refuses files that say something else.
            object.__setattr__(self, "is_encoder_decoder", False)
        elif not self.is_encoder_decoder and not self.architecture.endswith("Classification"):
            raise ValueError(
                "is_encoder_decoder=false leaves a T5Gemma its encoder alone, which "
                "T5GemmaEncoderModel, T5GemmaForSequenceClassification and "
                f"T5GemmaForTokenClassification may be; {self.architecture} needs "
                "is_encoder_decoder=true"
            )

    @property
    def encoder_config(self) -> Gemma2Config:
        assert self.encoder is not None  # `__post_init__` has set it.
        return self.encoder

    @property
    def decoder_config(self) -> Gemma2Config:
        assert self.decoder is not None
        return self.decoder

    @property
    def has_encoder_alone(self) -> bool:
        """Whether the model has no decoder."""
        return not self.is_encoder_decoder

    @property
    def hidden_size(self) -> int:
        """The width of what the model returns."""
        stack = self.encoder_config if self.has_encoder_alone else self.decoder_config
        return stack.hidden_size

    @property
    def num_hidden_layers(self) -> int:
        return self.encoder_config.num_hidden_layers

    @property
    def decoder_layers(self) -> int:
        return 0 if self.has_encoder_alone else self.decoder_config.num_hidden_layers

    @property
    def num_attention_heads(self) -> int:
        """The number of heads of the stack that has fewer."""
        heads = self.encoder_config.num_attention_heads
        return (
            heads if self.has_encoder_alone else min(heads, self.decoder_config.num_attention_heads)
        )

    @property
    def max_sequence_length(self) -> int:
        return self.encoder_config.max_position_embeddings

    @property
    def classifier_dropout_prob(self) -> float:
        return self.classifier_dropout_rate

    def with_changes(self, **changes: Any) -> Self:
        """Returns a copy with other values; the ids of tokens become those of both stacks."""
        names = ("pad_token_id", "bos_token_id", "eos_token_id")
        ids = {name: changes[name] for name in names if name in changes}
        start = changes.get("decoder_start_token_id")
        if start is not None:
            # Checked under its own name, not that of the decoder's key.
            super().with_changes(decoder_start_token_id=start)
        for name in ("encoder", "decoder"):
            own = dict(ids)
            if name == "decoder" and start is not None:
                own["bos_token_id"] = start
            if own:
                stack = self.read_stack(name, changes.get(name, getattr(self, name)))
                changes[name] = stack.with_changes(**own)
        return super().with_changes(**changes)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> Self:
        """Returns a configuration from a `config.json`.

        Raises:
            ValueError: The stacks have other vocabularies, or settings that are not allowed.
        """
        values = dict(values)
        stacks = {name: cls.read_stack(name, values.get(name)) for name in ("encoder", "decoder")}
        sizes = {name: stack.vocab_size for name, stack in stacks.items()}
        if len(set(sizes.values())) > 1:
            raise ValueError(f"both stacks must have the same vocab_size, not {shown(sizes)}")
        values.update(stacks)
        values["vocab_size"] = stacks["decoder"].vocab_size
        if values.get("decoder_start_token_id") is not None:
            super().from_dict(values)  # The key is checked, but transformers' decoder ignores it.
        values["decoder_start_token_id"] = stacks["decoder"].bos_token_id
        return super().from_dict(values)

    def to_dict(self) -> dict[str, Any]:
        values = super().to_dict()
        for name in ("encoder", "decoder"):
            stack = cast(Gemma2Config, getattr(self, name))
            stored = stack.to_dict()
            for key in ("architectures", "id2label", "label2id", "problem_type", "hidden_act"):
                stored.pop(key, None)
            stored["is_decoder"] = name == "decoder"
            values[name] = stored
        values["decoder"]["bos_token_id"] = self.decoder_start_token_id
        return values

    @classmethod
    def read_stack(cls, name: str, value: Any) -> Gemma2Config:
        """Returns the configuration of a stack from that or from the keys of a `config.json`."""
        if value is None:
            return cls.stack_config()
        if isinstance(value, cls.stack_config):
            return value
        if not isinstance(value, Mapping):
            raise ValueError(f"{name} must be an object, not {shown(value)}")
        keys = dict(cast(Mapping[str, Any], value))
        for key in ("is_decoder", "model_type", "architectures", "cross_attention_hidden_size"):
            keys.pop(key, None)
        return cls.stack_config.from_dict(keys)
