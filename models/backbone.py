"""Provides the base class of all models: embeddings and blocks, on which a head is put."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from ..mpu import (
    ParallelMesh,
    VocabParallelEmbedding,
    context_size,
    cut_sequence,
    draw_model_seed,
    draw_seed,
    dropout_state,
    gather_from_context,
    gather_sequence,
    initialize,
    scatter_sequence,
)
from ..mpu.mesh import SAMPLE_AXES
from .auto import as_config, from_config
from .blocks.attention import attention_record
from .calls import (
    FLASH_ATTENTION_INPUTS,
    SignedForward,
    collect_parameters,
    count_samples,
    list_keywords,
    name_inputs,
    resolve_inputs,
    take_cache,
)
from .config import ModelConfig
from .family_table import find_architecture
from .loading import from_pretrained
from .loading_options import note_attention
from .model_methods import ModelMethods
from .outputs import BackboneOutput, LazyPast, StageOutput
from .parallel_config import ParallelConfig
from .pipeline import PipelineStage, list_stacks

# transformers' names of losses, which the names of its classes contain.
LOSS_TYPES = (
    "ForCausalLM",
    "ForConditionalGeneration",
    "ForMaskedLM",
    "ForQuestionAnswering",
    "ForSequenceClassification",
    "ForTokenClassification",
)


class Backbone(ModelMethods, PipelineStage):
    """Base of the models: embeddings and blocks, without a head.

    A family's backbone sets the attributes and gives `run_backbone` and `initialize_parameter`.
    `run_backbone` has three parts: the embeddings, the blocks with what follows from the batch
    (masks, rotary positions, caches), and the final norm. Most families give all three to
    `run_stack`; encoder-decoders have `Seq2SeqBackbone.run_backbone`.
    """

    positional_inputs: ClassVar[tuple[str, ...]] = ("input_ids", "attention_mask")
    """The names of a call's arguments before the labels, in the order of transformers' class."""
    label_names: ClassVar[tuple[str, ...]] = ()
    """The names of the labels, which follow them there."""

    config: Any  # the family's ModelConfig
    mesh: ParallelMesh | None
    parallel_config: ParallelConfig
    word_embeddings: VocabParallelEmbedding

    forward: Any = SignedForward()
    parameter_names: ClassVar[tuple[str, ...]] = ()
    """The names of what `compute_outputs` takes."""
    call_names: ClassVar[frozenset[str]] = frozenset()
    """The names of what a call takes."""

    def __init_subclass__(cls, **options: Any) -> None:
        """Collects the names of what a call of this class takes."""
        super().__init_subclass__(**options)
        cls.parameter_names = collect_parameters(cls)
        own = (*cls.positional_inputs, *cls.label_names, *list_keywords(cls))
        cls.call_names = frozenset((*own, "cu_seq_lens_q", *FLASH_ATTENTION_INPUTS))

    def __call__(self, *inputs: Any, **options: Any) -> Any:
        """Calls the model. Arguments by position mean what they mean to transformers' class of this
        name; see `forward` for their names.

        Dropout masks follow from PyTorch's generator, unless `dropout_state.set` names a seed.
        """
        with dropout_state.drawing(lambda: self._draw_masks(inputs, options)):
            return super().__call__(*inputs, **options)

    def _draw_masks(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> tuple[int, int]:
        """Returns a seed, and the first of this rank's samples, which no other replica has."""
        replica = 0 if self.mesh is None else self.mesh.rank_in(*SAMPLE_AXES)
        return draw_seed(self.mesh), replica * count_samples((*inputs, *options.values()))

    def run_call(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        """Reads the arguments of a call, computes its outputs, and returns them in the form that
        was asked for.
        """
        named = name_inputs(self, inputs, options)
        settings = self.config
        returns_dict = named.pop("return_dict", None)
        if returns_dict is None:
            returns_dict = getattr(settings, "return_dict", True)
        records = named.pop("output_attentions", None)
        if records is None:
            records = getattr(settings, "output_attentions", False)
        if getattr(settings, "output_hidden_states", False):
            named.setdefault("output_hidden_states", True)
        if context_size(self.mesh) > 1:
            refuse_with_context(named)
        past = take_cache(self, named)
        resolve_inputs(self, named)
        with contextlib.ExitStack() as contexts:
            if not torch.compiler.is_compiling():
                # Compiled code runs within `__call__`, which has entered this context.
                draw = dropout_state.drawing(lambda: self._draw_masks(inputs, options))
                contexts.enter_context(draw)
            if records:
                record = contexts.enter_context(attention_record.recording())
                output = self.compute_outputs(**named)
                self._add_attentions(output, record, named.get("encoder_outputs"))
            else:
                output = self.compute_outputs(**named)
        if past is not None and "past_key_values" in vars(output):
            if isinstance(past, LazyPast):
                output.defer("past_key_values", past)
            else:
                output.past_key_values = past
        return output if returns_dict else output.to_tuple()

    @property
    def accepts_loss_kwargs(self) -> bool:
        """Whether a call takes `num_items_in_batch`, which transformers' Trainer asks."""
        return "num_items_in_batch" in self.call_names

    @property
    def loss_type(self) -> str | None:
        """transformers' name of the loss, by which its Trainer knows whether labels are shifted."""
        for name in LOSS_TYPES:
            if name in type(self).__name__:
                return name
        return None

    @property
    def attends_to_encoder(self) -> bool:
        """Whether the last stack of blocks attends to an encoder's output."""
        return False

    @property
    def keeps_cache(self) -> bool:
        """Whether `use_cache` makes a cache, of a model that takes one."""
        return True

    def compute_outputs(self, *inputs: Any, **options: Any) -> Any:
        """Computes the outputs of a call, whose arguments `run_call` has brought into one form."""
        raise NotImplementedError

    def _add_attentions(self, output: Any, record: dict[Any, Tensor], encoder_outputs: Any) -> None:
        """Sets the attention probabilities of an output, for all heads.

        Args:
            record: See `AttentionRecord`.
            encoder_outputs: See `read_encoder_outputs`.
        """
        if isinstance(output, StageOutput):
            return
        stacks = [blocks for _, blocks in list_stacks(self)]
        cross = stacks[-1].gather_attentions(record, "cross_attention")
        if len(stacks) == 1:
            output.attentions = stacks[0].gather_attentions(record, "attention")
            if cross is not None:
                output.cross_attentions = cross
            return
        output.encoder_attentions = stacks[0].gather_attentions(record, "attention")
        if encoder_outputs is not None:
            output.encoder_attentions = encoder_outputs[2]
        output.decoder_attentions = stacks[1].gather_attentions(record, "attention")
        output.cross_attentions = cross

    @classmethod
    def from_pretrained(
        cls,
        pretrained_model_name_or_path: str | Path,
        mesh: ParallelMesh | None = None,
        dtype: torch.dtype | str | None = None,
        **options: Any,
    ) -> Any:
        """Loads a model of this class; see `shardzoo.from_pretrained` for the options.

        What the folder lacks of the head is initialized, with a warning.
        """
        return from_pretrained(
            pretrained_model_name_or_path, mesh, dtype, architecture=cls, **options
        )

    @classmethod
    def from_config(cls, config: Any, mesh: ParallelMesh | None = None, **options: Any) -> Any:
        """Builds a model of this class with new weights; see `shardzoo.from_config`."""
        return from_config(cls.take_config(config), mesh, architecture=cls, **options)

    @classmethod
    def _from_config(cls, config: Any, **options: Any) -> Any:
        """Builds a model as transformers' method of this name does: PyTorch's generator governs."""
        options.setdefault("seed", draw_model_seed(options.get("mesh")))
        return cls.from_config(config, **options)

    @classmethod
    def take_config(cls, config: Any) -> Any:
        """Returns the copy of a configuration that a new model of this class keeps.

        Args:
            config: A family's configuration, the contents of a `config.json`, a preset's name, a
                path, or a configuration object of transformers. The class decides the architecture.

        Raises:
            ValueError: The configuration belongs to another family, or is not valid.
        """
        facts, architecture = find_architecture(cls)
        attention = None
        if not isinstance(config, ModelConfig):
            attention = getattr(config, "_attn_implementation", None)
        if not isinstance(config, (ModelConfig, str, Path)) and facts is not None:
            values: dict[str, Any] = {}
            values.update(cast(Any, config if isinstance(config, dict) else config.to_dict()))
            values.setdefault("model_type", facts.config.model_type)
            values["architectures"] = [architecture]
            config = values
        config = as_config(config)
        note_attention(config, attention)
        if facts is None:
            return config.copy_for_model(cls.__name__)
        if config.model_type != facts.config.model_type:
            raise ValueError(
                f"{cls.__name__} is built from a {facts.config.__name__}, not from a "
                f"{type(config).__name__}"
            )
        changes = {}
        # A family with one head has its name in a class variable.
        if config.architecture != architecture and "architecture" in vars(config):
            changes["architecture"] = architecture
        return config.copy_for_model(cls.__name__, **changes)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Sets the attributes of a copy, whose configuration belongs to it."""
        super().__setstate__(state)  # type: ignore[reportUnknownMemberType] - torch's
        self.config.bind_to_model(type(self).__name__)

    def init_parameters(self) -> None:
        """Initializes the parameters of a model that a user constructs; its constructor ends so.

        They follow from PyTorch's generator, and do not depend on the mesh. On the meta device,
        where `from_config` and `from_pretrained` build models, nothing happens. Collective over the
        mesh.

        Raises:
            ValueError: The mesh has several pipeline stages: this model has all blocks.
        """
        first = next(self.parameters(), None)
        if first is None or first.is_meta:
            return
        if self.mesh is not None and self.mesh.pp_size > 1:
            raise ValueError(
                f"{type(self).__name__}(config, mesh=…) has the blocks of all pipeline stages; use "
                "from_config, which builds this rank's stage"
            )
        self.init_weights()

    def init_weights(self) -> None:
        """Gives all parameters new values, for which PyTorch's generator governs."""
        initialize(self, self.initialize_parameter, draw_model_seed(self.mesh), self.mesh)

    def initialize_parameter(self, name: str, full: Tensor, generator: torch.Generator) -> None:
        """Initializes a parameter's unsplit value in place."""
        raise NotImplementedError

    def run_backbone(self, *inputs: Any, **options: Any) -> BackboneOutput | StageOutput:
        """Runs the embeddings and blocks.

        The first two arguments are `input_ids` and `attention_mask`.
        """
        raise NotImplementedError

    @property
    def hidden_size(self) -> int:
        """The width H of the hidden states."""
        return getattr(self.config, self.config.attribute_map.get("hidden_size", "hidden_size"))

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """The word embedding, to which a head may be tied."""
        return self.word_embeddings

    @classmethod
    def example_ids(cls, config: Any, ids: Tensor) -> Tensor:
        """Returns arbitrary token ids int64 [B, S] in the form that the head takes, to try it."""
        return ids

    def gather_logits(self, logits: Tensor) -> Tensor:
        """Returns the logits of all classes, for logits that are replicated: the same."""
        return logits

    def gather_hidden_states(self, x: Tensor) -> Tensor:
        """Returns the whole hidden states [B, S, H], of which each rank may hold a part [B, S/tp,
        H].
        """
        if self.parallel_config.sequence_parallel:
            x = gather_sequence(x, self.mesh, partial_grad=False)
        return gather_from_context(x, self.mesh)

    def gather_all_hidden_states(self, hidden_states: Iterable[Tensor]) -> tuple[Tensor, ...]:
        """Returns the whole hidden states of several blocks; see `gather_hidden_states`."""
        return tuple(self.gather_hidden_states(x) for x in hidden_states)

    def check_states_are_kept(self) -> None:
        """Raises ValueError if the states of all blocks are wanted of a pass that moves them to the
        host's memory.
        """
        moves = any(blocks.offloads_inputs for _, blocks in list_stacks(self))
        if moves and torch.is_grad_enabled():
            raise ValueError(
                "recompute='offload' moves the hidden states of the blocks to the host's memory, so "
                "they cannot be returned; use recompute='full', or torch.no_grad()"
            )

    def scatter_hidden_states(self, x: Tensor) -> Tensor:
        """Returns this rank's part of whole hidden states [B, S, H]."""
        x = cut_sequence(x, self.mesh)
        return scatter_sequence(x, self.mesh) if self.parallel_config.sequence_parallel else x

    def collect_hidden_states(
        self, hidden: BackboneOutput, output_hidden_states: bool
    ) -> dict[str, Any]:
        """Returns the fields of an output that hold hidden states.

        Args:
            output_hidden_states: Whether the caller wants those of all blocks; otherwise these
                fields are None.
        """
        states = None
        if output_hidden_states:
            self.check_states_are_kept()
            states = self.gather_all_hidden_states(hidden.states)
        if hidden.encoder_states is None:
            return {"hidden_states": states}

        encoder_states = hidden.encoder_states
        if hidden.encoder_tokens is not None:
            wanted = encoder_states if output_hidden_states else encoder_states[-1:]
            encoder_states = [hidden.encoder_tokens.pad(x) for x in wanted]
        # No rank should have to hold the states of a whole long sequence that nobody asked for.
        last = None
        if output_hidden_states or context_size(self.mesh) == 1:
            last = self.gather_hidden_states(encoder_states[-1])
        every = None
        if output_hidden_states:
            every = self.gather_all_hidden_states(encoder_states)
        return {
            "decoder_hidden_states": states,
            "encoder_last_hidden_state": last,
            "encoder_hidden_states": every,
        }


def refuse_with_context(named: dict[str, Any]) -> None:
    """Raises ValueError for an argument of a call that needs whole sequences on each rank."""
    for name in ("past_key_values", "cache", "mems", "use_cache", "logits_to_keep"):
        value = named.get(name)
        if value is not None and value is not False and not (isinstance(value, int) and not value):
            raise ValueError(
                f"{name} needs whole sequences on each rank; use a mesh with "
                "context_parallel_size=1"
            )


class Head(Backbone):
    """Base of the heads. An architecture inherits from a head and from its family's backbone.

    Attributes:
        head_modules: The names of the modules of the head that have parameters.
    """

    def __init__(
        self,
        config: Any,
        mesh: ParallelMesh | None = None,
        parallel_config: ParallelConfig | None = None,
    ) -> None:
        config = self.take_config(config)
        super().__init__(config, mesh, parallel_config)  # of the family's backbone
        backbone_modules = {name for name, _ in self.named_children()}
        self.add_head()
        names: list[str] = []
        for name, module in self.named_children():
            if name not in backbone_modules and any(True for _ in module.parameters()):
                names.append(name)
        self.head_modules = tuple(names)
        if getattr(config, "gradient_checkpointing", False):
            self.gradient_checkpointing_enable()
        self.init_parameters()

    def add_head(self) -> None:
        """Adds the modules of the head."""
