"""Lets transformers' `Trainer` train a model of the zoo, in one or more data-parallel processes."""

# pyright: basic, reportIncompatibleMethodOverride=false
# (transformers' methods are not fully annotated)
from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping
from typing import Any, cast

from torch import Tensor
from transformers import AutoConfig, GenerationConfig, PreTrainedModel

from . import auto_classes
from .auto_classes import AutoModelClass

# transformers' Trainer reads a checkpoint by `load_state_dict` only if it is in one file.
LARGEST_FILE = "50GB"


# Settings that a script may change after the model is built, and the model reads in each call.
LIVE_SETTINGS = (
    "pad_token_id",
    "bos_token_id",
    "eos_token_id",
    "decoder_start_token_id",
    "problem_type",
    "id2label",
    "label2id",
)


class _Unread:
    """Stands in an `Output` for a value that has not been read yet."""


_UNREAD = _Unread()


class Output(dict[str, Any]):
    """An output as transformers has it: a dictionary, whose items are attributes too, and have an
    index.

    Logits beside a loss are computed when they are first read.
    """

    def __init__(self, values: Any) -> None:
        """Takes a `ModelOutput` of the zoo, or a mapping, as accelerate does."""
        super().__init__(dict.fromkeys(values.keys(), _UNREAD))
        self._values = values

    def __getitem__(self, key: int | slice | str) -> Any:
        if isinstance(key, slice):
            return tuple(self[name] for name in list(self)[key])
        if not isinstance(key, str):
            return self[list(self)[key]]
        value = super().__getitem__(key)
        if value is _UNREAD:
            value = self._values[key]
            self[key] = value
        return value

    def __getattr__(self, name: str) -> Any:
        if name in self:
            return self[name]
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self.__dict__["_values"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            self[name] = value
        super().__setattr__(name, value)

    def __iter__(self) -> Iterator[str]:
        # Python copies a subclass of dict without asking it for the values, unless this is defined.
        return iter(super().keys())

    def __reduce__(self) -> Any:
        return Output, (dict(self.items()),)

    def get(self, key: str, default: Any = None) -> Any:
        if key not in self:
            return default
        return self[key]

    def values(self) -> Any:
        return self.to_tuple()

    def items(self) -> Any:
        return tuple((name, self[name]) for name in self)

    def to_tuple(self) -> tuple[Any, ...]:
        return tuple(self[name] for name in self)


class SignedForward:
    """Makes the `forward` of a `TransformersModel`, with the signature of the zoo's model inside.

    transformers' Trainer leaves out the columns of a data set that are no parameters of the model's
    `forward`. Each architecture has its own, so the signature belongs to the model and not to the
    class.
    """

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        """Returns a function that calls `model.run`; of the class, `run` itself."""
        if model is None:
            return TransformersModel.run

        def forward(*inputs: Any, **options: Any) -> Any:
            return model.run(*inputs, **options)

        cast(Any, forward).__signature__ = model.signature
        return forward


class TransformersModel(PreTrainedModel):
    """Wraps a model of the zoo for `transformers.Trainer(TransformersModel(model), …)`.

    Checkpoints are Hugging Face folders, which transformers loads as its own class and
    `from_pretrained` as the zoo's. The Trainer decides by names which parameters decay; those of
    GPT-2's norms, `ln_1` and `ln_2`, do with it.

    Raises ValueError for a model that is split over ranks, which shardzoo's own `Trainer` trains.
    """

    supports_gradient_checkpointing = True
    forward: Any = SignedForward()

    def __init__(self, model: Any) -> None:
        if not hasattr(model, "mesh"):
            raise ValueError(
                f"TransformersModel wraps a model of the zoo, as in TransformersModel("
                f"shardzoo.from_pretrained('t5-small')), not {model!r:.40}"
            )
        if model.mesh is not None:
            raise ValueError(
                "transformers' Trainer cannot train a split model; use shardzoo.trainer.Trainer"
            )
        super().__init__(AutoConfig.for_model(**model.config.to_dict()))
        self.model = model
        if hasattr(model, "prepare_decoder_input_ids_from_labels"):
            # transformers' collators ask whether a model has it.
            prepare = model.prepare_decoder_input_ids_from_labels
            self.prepare_decoder_input_ids_from_labels = prepare
        parameters = _collect_parameters(model.forward)
        self.accepts_loss_kwargs = "num_items_in_batch" in parameters
        parameters.update(_collect_parameters(model.run_backbone))
        self.signature = inspect.Signature(list(parameters.values()))
        if getattr(model, "generates", None) in ("continuation", "answer"):
            self.generation_config = GenerationConfig.from_dict(model.generation_config.to_dict())
        self.train(model.training)

    def run(
        self,
        *inputs: Any,
        labels: Tensor | None = None,
        return_dict: bool | None = None,
        use_cache: bool | None = None,
        **options: Any,
    ) -> Output | tuple[Any, ...]:
        """Calls the model; see its `forward`.

        Args:
            return_dict: Whether to return an `Output` and not a tuple; by default as `config` says.
            use_cache: Not used: what a forward pass returns has no cache.
        """
        self._apply_settings()
        if labels is not None:
            options["labels"] = labels
        if options.get("output_hidden_states") is None:
            options["output_hidden_states"] = bool(self.config.output_hidden_states)
        if "use_cache" in self.model.call_names:
            options["use_cache"] = False
        output = Output(self.model(*inputs, **options))
        if return_dict is None:
            return_dict = self.config.return_dict is not False
        return output if return_dict else output.to_tuple()

    def _apply_settings(self) -> None:
        """Gives the model inside the settings of `config` that may have changed since it was built.

        As in transformers, sizes and rates of a model do not change after that.
        """
        for name in LIVE_SETTINGS:
            if not hasattr(self.model.config, name):
                continue
            value = getattr(self.config, name, None)
            if value != getattr(self.model.config, name):
                setattr(self.model.config, name, value)

    def generate(self, *inputs: Any, **settings: Any) -> Any:
        """Generates sequences; see `shardzoo.generate`."""
        # A batch of the Trainer has labels, and synced_gpus is for ZeRO 3 and FSDP.
        settings.pop("labels", None)
        settings.pop("synced_gpus", None)
        self._apply_settings()
        if settings.get("generation_config") is None:
            settings["generation_config"] = getattr(self, "generation_config", None)
        return self.model.generate(*inputs, **settings)

    @property
    def base_model(self) -> Any:
        """The zoo's model without a head, which shares this model's modules."""
        return self.model.base_model

    def get_input_embeddings(self) -> Any:
        """Returns the word embedding."""
        return self.model.get_input_embeddings()

    def get_output_embeddings(self) -> Any:
        """Returns the head that predicts tokens, or None if the model has none."""
        return self.model.get_output_embeddings()

    def resize_token_embeddings(self, *arguments: Any, **options: Any) -> Any:
        """Adds or removes the last tokens; see `shardzoo.models.resizing`."""
        embedding = self.model.resize_token_embeddings(*arguments, **options)
        self.config.vocab_size = self.model.config.vocab_size
        return embedding

    def tie_weights(self, *arguments: Any, **options: Any) -> None:
        """Does nothing: a model of the zoo is built with its ties."""

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Any = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Recomputes the activations of all blocks in the backward pass.

        Raises ValueError for settings that the zoo does not have.
        """
        self.model.activation_checkpointing_enable(
            activation_checkpointing_kwargs, every_n_layers, offload
        )

    def activation_checkpointing_disable(self) -> None:
        """Keeps activations for the backward pass."""
        self.model.activation_checkpointing_disable()

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Any = None, **options: Any
    ) -> None:
        """The name of `activation_checkpointing_enable` before transformers 5.23."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def save_pretrained(
        self,
        save_directory: Any,
        is_main_process: bool = True,
        state_dict: Any = None,
        **options: Any,
    ) -> None:
        """Writes a Hugging Face folder.

        Its weights are the model's, never those of `state_dict`.
        """
        if not is_main_process:
            return
        self._apply_settings()
        self.model.save_pretrained(save_directory, max_shard_size=LARGEST_FILE)
        settings = getattr(self, "generation_config", None)
        if settings is not None:
            settings.save_pretrained(save_directory)

    def load_state_dict(
        self, state_dict: Mapping[str, Tensor], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads this module's own state, or the tensors of a Hugging Face folder."""
        if state_dict.keys() <= self.state_dict().keys():
            return super().load_state_dict(state_dict, strict, assign)
        return self.model.load_state_dict(state_dict, strict)


def _collect_parameters(function: Any) -> dict[str, inspect.Parameter]:
    """Returns the parameters of a function that have a name, as keyword parameters."""
    found: dict[str, inspect.Parameter] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            found[name] = parameter.replace(kind=parameter.KEYWORD_ONLY)
    return found


class _WrappingAutoClass(AutoModelClass):
    """Base of the Auto classes that return a `TransformersModel` of what the zoo's return."""

    @classmethod
    def from_pretrained(cls, *arguments: Any, **options: Any) -> Any:
        return TransformersModel(super().from_pretrained(*arguments, **options))

    @classmethod
    def from_config(cls, *arguments: Any, **options: Any) -> Any:
        return TransformersModel(super().from_config(*arguments, **options))


class AutoModelForCausalLM(_WrappingAutoClass, auto_classes.AutoModelForCausalLM):
    """Loads a decoder that predicts tokens, for transformers' Trainer."""


class AutoModelForMaskedLM(_WrappingAutoClass, auto_classes.AutoModelForMaskedLM):
    """Loads an encoder that predicts masked tokens, for transformers' Trainer."""


class AutoModelForSeq2SeqLM(_WrappingAutoClass, auto_classes.AutoModelForSeq2SeqLM):
    """Loads an encoder-decoder, for transformers' Trainer."""


class AutoModelForSequenceClassification(
    _WrappingAutoClass, auto_classes.AutoModelForSequenceClassification
):
    """Loads a model that classifies texts, for transformers' Trainer."""


class AutoModelForTokenClassification(
    _WrappingAutoClass, auto_classes.AutoModelForTokenClassification
):
    """Loads a model that classifies tokens, for transformers' Trainer."""


class AutoModelForQuestionAnswering(_WrappingAutoClass, auto_classes.AutoModelForQuestionAnswering):
    """Loads a model that finds answers, for transformers' Trainer."""


class AutoModelForMultipleChoice(_WrappingAutoClass, auto_classes.AutoModelForMultipleChoice):
    """Loads a model that chooses among texts, for transformers' Trainer."""
