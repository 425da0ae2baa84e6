"""The methods of transformers' models that do not run the model: what programs ask a model for, and
change in it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from ..mpu import ParallelMesh, VocabParallelEmbedding, VocabParallelHead, tp_size
from .blocks.relative_bias import RelativeBias
from .blocks.stack import BlockList
from .family_table import find_architecture
from .hf_state import hf_state_dict, is_hf_state, load_hf_state_dict
from .huggingface import LARGEST_FILE
from .loading_options import check_attention
from .parallel_config import Recompute
from .resizing import resize_token_embeddings
from .saving import push_to_hub, save_pretrained
from .sizes import full_size, is_embedding
from .unpadded_head import UnpaddedHead


class BaseModelName:
    """Makes an attribute that is `base_model` in the families that call it so, such as `bert`."""

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, model: Any, owner: type | None = None) -> Any:
        if model is None or model.base_model_prefix != self.name or model.base_model is model:
            raise AttributeError(self.name)
        return model.base_model


class ConfigClass:
    """Makes `config_class`, the class of a model's configuration, of the model and of its class."""

    def __get__(self, model: Any, owner: type[Any]) -> Any:
        if model is not None:
            return model.config.__class__
        facts, _ = find_architecture(owner)
        return None if facts is None else facts.config


class StackView(nn.Module):
    """A stack of an encoder-decoder, as a module that is called like transformers'.

    Its parameters are those of the model.
    """

    main_input_name = "input_ids"

    def __init__(self, model: Any, stack: nn.Module) -> None:
        super().__init__()
        own = getattr(stack, "word_embeddings", None)
        self.embed_tokens = model.embedding if own is None else own
        self.stack = stack
        self.config = model.config
        self.training = model.training

    @property
    def device(self) -> torch.device:
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype


class EncoderView(StackView):
    """The encoder of an encoder-decoder."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.encoder)
        # The model is no module of its own encoder.
        self._encode = model.encode

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> Any:
        """Returns the encoder's output, which the model takes as `encoder_outputs`."""
        given = {name: value for name, value in options.items() if value is not None}
        if output_hidden_states is None:
            output_hidden_states = bool(self.config.output_hidden_states)
        output = self._encode(
            input_ids, attention_mask, output_hidden_states=output_hidden_states, **given
        )
        if return_dict is False:
            return output.to_tuple()
        return output


class DecoderView(StackView):
    """The decoder of an encoder-decoder."""

    def __init__(self, model: Any) -> None:
        super().__init__(model, model.decoder)
        # The model is no module of its own decoder.
        self._decode = model.decode

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        encoder_hidden_states: Tensor | None = None,
        encoder_attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        return_dict: bool | None = None,
        **options: Any,
    ) -> Any:
        """Returns the decoder's output; see `Seq2SeqBackbone.decode`."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("a decoder needs input_ids or inputs_embeds, and not both")
        if use_cache is None:
            use_cache = bool(self.config.use_cache) and not self.training
        given = {name: value for name, value in options.items() if value is not None}
        for name in ("output_attentions", "output_hidden_states"):
            given.setdefault(name, bool(getattr(self.config, name)))
        output = self._decode(
            inputs_embeds if input_ids is None else input_ids,
            attention_mask,
            encoder_hidden_states,
            encoder_attention_mask,
            past_key_values=past_key_values,
            use_cache=use_cache,
            **given,
        )
        if return_dict is False:
            return output.to_tuple()
        return output


class ModelMethods(nn.Module):
    """A base of all models, with the methods that code written for transformers calls."""

    config: Any
    mesh: ParallelMesh | None

    is_bare: ClassVar[bool] = False
    """Whether the class is its family's model without a head."""
    main_input_name: ClassVar[str] = "input_ids"
    framework: ClassVar[str] = "pt"
    input_modalities: ClassVar[tuple[str, ...]] = ("text",)
    output_modalities: ClassVar[tuple[str, ...]] = ("text",)
    supports_gradient_checkpointing: ClassVar[bool] = True
    is_parallelizable: ClassVar[bool] = False
    config_class = ConfigClass()
    # What transformers' Trainer, its tests, accelerate and peft look up in a class.
    _keys_to_ignore_on_save: ClassVar[None] = None
    _keys_to_ignore_on_load_missing: ClassVar[None] = None
    _keys_to_ignore_on_load_unexpected: ClassVar[None] = None
    _keep_in_fp32_modules: ClassVar[frozenset[str]] = frozenset()
    _keep_in_fp32_modules_strict: ClassVar[frozenset[str]] = frozenset()
    _is_stateful: ClassVar[bool] = False
    _auto_class: ClassVar[None] = None
    _supports_sdpa: ClassVar[bool] = True
    _supports_flash_attn: ClassVar[bool] = False
    _supports_flex_attn: ClassVar[bool] = False
    _supports_attention_backend: ClassVar[bool] = True
    _can_compile_fullgraph: ClassVar[bool] = True
    model_tags: list[str] | None = None

    bert = BaseModelName()
    roberta = BaseModelName()
    distilbert = BaseModelName()
    electra = BaseModelName()
    transformer = BaseModelName()
    model = BaseModelName()

    @property
    def device(self) -> torch.device:
        """The device of the parameters."""
        return next(self.parameters()).device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the parameters, on every stage of a pipeline."""
        return next(self.parameters()).dtype

    @property
    def embedding(self) -> VocabParallelEmbedding:
        """The word embedding, to which a head may be tied."""
        raise NotImplementedError

    @property
    def warnings_issued(self) -> dict[str, bool]:
        """Which warnings a program has given, by name: transformers' Trainer sets them."""
        return vars(self).setdefault("_warnings_issued", {})

    @property
    def base_model_prefix(self) -> str:
        """The name that transformers' classes give to the model without the head."""
        facts, _ = find_architecture(type(self))
        prefix = "" if facts is None else facts.name_map.prefix.removesuffix(".")
        return prefix or "transformer"

    @property
    def base_model(self) -> Any:
        """The family's model without a head, which shares this model's modules.

        A model without a head is its own. A head's pooler counts as part of it where the family's
        bare model has one.
        """
        facts, _ = find_architecture(type(self))
        body = _find_body(type(self))
        if facts is None or self.is_bare:
            return self
        for name, architecture in facts.architectures.items():
            if getattr(architecture, "is_bare", False) and _find_body(architecture) is body:
                return self._share_modules(architecture, name)
        return self

    def _share_modules(self, architecture: Any, name: str) -> Any:
        """Returns a model of another architecture of the family that has this model's modules."""
        bare = cast(ModelMethods, architecture.__new__(architecture))
        state = dict(vars(self))
        # Programs such as TRL and accelerate put a forward of their own on a model.
        state.pop("forward", None)
        head_modules: tuple[str, ...] = state.get("head_modules", ())
        pooler: str | None = getattr(architecture, "pooler_name", None)
        modules = dict(self.named_children())
        state["_modules"] = {
            child: module
            for child, module in modules.items()
            if child not in head_modules or child == pooler
        }
        vars(bare).update(state)
        changes: dict[str, Any] = {"architecture": name}
        if pooler is not None:
            changes["add_pooling_layer"] = pooler in modules
        bare.config = self.config.copy_for_model(name, **changes)
        return bare

    def get_input_embeddings(self) -> VocabParallelEmbedding:
        """Returns the word embedding."""
        return self.embedding

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replaces the word embedding, and the weight of a head that is tied to it.

        Args:
            value: An embedding of the zoo; or torch's, of which this rank takes its part.

        Raises:
            ValueError: It is no embedding, or of another width.
        """
        if self.config.has_own_embeddings:
            raise ValueError(
                "encoder and decoder have word embeddings of their own: copy the values into "
                "encoder.word_embeddings.weight and decoder.word_embeddings.weight"
            )
        old = self.embedding
        new = value
        if isinstance(value, nn.Embedding):
            count, width = value.weight.shape
            new = VocabParallelEmbedding(
                count,
                width,
                padding_idx=value.padding_idx,
                pad_multiple=old.shard.pad_multiple,
                sequence_parallel=old.sequence_parallel,
                mesh=self.mesh,
            )
            rank = 0 if self.mesh is None else self.mesh.tp_rank
            size = 1 if self.mesh is None else self.mesh.tp_size
            new.weight.data = new.shard.slice(value.weight.detach(), rank, size)
        if not isinstance(new, VocabParallelEmbedding) or new.embedding_dim != old.embedding_dim:
            raise ValueError(
                f"the word embedding must be an embedding of width {old.embedding_dim}, not {value}"
            )
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if child is old:
                    setattr(module, name, new)
            if isinstance(module, VocabParallelHead) and module.tied:
                module.weight = new.weight
                module.shard = new.shard
                module.num_embeddings = new.num_embeddings
        self.config.change_built(vocab_size=new.num_embeddings)

    def find_vocabulary_head(self) -> VocabParallelHead | None:
        """Returns the head that predicts tokens, or None if the model has none."""
        for module in self.modules():
            if isinstance(module, VocabParallelHead):
                return module
        return None

    def get_output_embeddings(self) -> VocabParallelHead | UnpaddedHead | None:
        """Returns the head that predicts tokens, or None if the model has none.

        Its `weight` is [V, H] in an unsplit model, and this rank's rows [Vp, H] in a split one.
        """
        head = self.find_vocabulary_head()
        if head is None or tp_size(self.mesh) > 1 or len(head.weight) == head.num_embeddings:
            return head
        return UnpaddedHead(head)

    def set_output_embeddings(self, new_embeddings: nn.Module) -> None:
        """Replaces the head that predicts tokens.

        Raises:
            ValueError: The model has none, or it is no such head of the zoo.
        """
        old = self.find_vocabulary_head()
        if isinstance(new_embeddings, UnpaddedHead):
            new_embeddings = new_embeddings.padded
        if old is None or not isinstance(new_embeddings, VocabParallelHead):
            raise ValueError(
                f"{type(self).__name__} takes a VocabParallelHead in the place of the one that it has"
            )
        for module in list(self.modules()):
            for name, child in list(module.named_children()):
                if child is old:
                    setattr(module, name, new_embeddings)

    def resize_token_embeddings(
        self,
        new_num_tokens: int | None = None,
        pad_to_multiple_of: int | None = None,
        mean_resizing: bool = True,
    ) -> VocabParallelEmbedding:
        """Adds or removes the last tokens; see `shardzoo.models.resizing`."""
        return resize_token_embeddings(self, new_num_tokens, pad_to_multiple_of, mean_resizing)

    def tie_weights(self, *arguments: Any, **options: Any) -> None:
        """Ties the head to the word embedding, if the configuration says so.

        Models are built with their ties, so this matters only after a module was replaced.
        """
        head = self.find_vocabulary_head()
        if head is None or not head.tied or not getattr(self.config, "tie_word_embeddings", True):
            return
        if head.num_embeddings == self.embedding.num_embeddings:
            head.weight = self.embedding.weight

    def get_encoder(self, modality: str | None = None) -> Any:
        """Returns the encoder of an encoder-decoder as a module; of other models the model itself."""
        if self.config.is_encoder_decoder and hasattr(self, "encode"):
            return EncoderView(self)
        return self

    def get_decoder(self) -> Any:
        """Returns the decoder of an encoder-decoder as a module; of other models the model without
        its head.
        """
        if self.config.is_encoder_decoder and hasattr(self, "decode"):
            return DecoderView(self)
        return self.base_model

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Returns the number of parameters of the whole model, as transformers counts them.

        Under a mesh these are the parameters of all tensor-parallel ranks, without padding.
        """
        left_out: set[nn.Parameter] = set()
        head = self.find_vocabulary_head()
        if head is not None and head.fixed_bias is not None:
            left_out.add(head.fixed_bias)  # a buffer in transformers
        if exclude_embeddings:
            for module in self.modules():
                if is_embedding(module) or isinstance(module, RelativeBias):
                    left_out.update(module.parameters(recurse=False))
        total = 0
        for parameter in self.parameters():
            if parameter not in left_out and (parameter.requires_grad or not only_trainable):
                total += full_size(parameter)
        return total

    def get_memory_footprint(self, return_buffers: bool = True) -> int:
        """Returns the bytes of this rank's parameters and buffers."""
        tensors = list(self.parameters())
        total = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
        if return_buffers:
            total += sum(buffer.numel() * buffer.element_size() for buffer in self.buffers())
        return total

    @property
    def dummy_inputs(self) -> dict[str, Tensor]:
        """Tokens for a first call, [2, 5], as programs that trace a model ask for them."""
        ids = torch.arange(10, device=self.device).view(2, 5)
        if self.config.is_encoder_decoder:
            return {"input_ids": ids, "decoder_input_ids": ids}
        return {"input_ids": ids}

    @classmethod
    def can_generate(cls) -> bool:
        """Returns whether the model generates text from left to right."""
        return getattr(cls, "generates", None) in ("continuation", "answer", "blanks")

    @property
    def is_distributed_loading_by_transformers(self) -> bool:
        """False: what transformers' Trainer asks of a model when it is made.

        Raises:
            ValueError: The model is split. The Trainer would save one rank's part of it.
        """
        if getattr(self, "mesh", None) is not None:
            raise ValueError(
                f"transformers' Trainer cannot save a {type(self).__name__} that is split over "
                "ranks; use shardzoo.trainer.Trainer"
            )
        return False

    @property
    def is_gradient_checkpointing(self) -> bool:
        """Whether the backward pass computes the blocks again."""
        lists = [module for module in self.modules() if isinstance(module, BlockList)]
        return any(blocks.recompute_blocks for blocks in lists)

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: Any = None, **options: Any
    ) -> None:
        """Keeps only each block's input for the backward pass, which computes the block again.

        Raises:
            ValueError: `every_n_layers` asks for something else.
        """
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    def gradient_checkpointing_disable(self) -> None:
        """Keeps all activations for the backward pass."""
        self.activation_checkpointing_disable()

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: Any = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """The name of `gradient_checkpointing_enable` since transformers 5.23."""
        if every_n_layers != 1:
            raise ValueError(
                "models of the zoo recompute all blocks: leave out "
                f"every_n_layers={every_n_layers} of the activation checkpointing"
            )
        self._set_recompute("offload" if offload else "full")

    def activation_checkpointing_disable(self) -> None:
        """The name of `gradient_checkpointing_disable` since transformers 5.23."""
        self._set_recompute("none")

    def _set_recompute(self, recompute: Recompute) -> None:
        for module in self.modules():
            if isinstance(module, BlockList):
                module.set_recompute(recompute)

    def enable_input_require_grads(self) -> None:
        """Does nothing: recomputation here needs no gradient of its input (it is not reentrant)."""

    def disable_input_require_grads(self) -> None:
        """Does nothing; see `enable_input_require_grads`."""

    def post_init(self) -> None:
        """Does nothing: constructors of the zoo initialize their own parameters. A user's class that
        was written for transformers calls it last.
        """

    def add_model_tags(self, tags: list[str] | str) -> None:
        """Notes tags, which transformers' Trainer writes into a model card."""
        wanted = [tags] if isinstance(tags, str) else list(tags)
        known = self.model_tags or []
        self.model_tags = known + [tag for tag in wanted if tag not in known]

    def is_remote_code(self) -> bool:
        """Returns False: no code of a repository ever runs."""
        return False

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Returns True: names of attention implementations are taken, and change nothing."""
        return True

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """Returns False: no family has experts."""
        return False

    def set_attn_implementation(self, attn_implementation: Any) -> None:
        """Notes how transformers would compute attention; the zoo chooses the kernel.

        Raises:
            ValueError: transformers has no such implementation.
        """
        check_attention(attn_implementation)
        self.config._attn_implementation = attn_implementation

    @property
    def _tied_weights_keys(self) -> dict[str, str] | None:
        """The names of tied parameters in the model's own state dict; None if there are none."""
        return self.all_tied_weights_keys or None

    def _shift_right(self, input_ids: Tensor) -> Tensor:
        """Returns the decoder's input for labels, by T5's name in transformers."""
        return cast(Any, self).prepare_decoder_input_ids_from_labels(input_ids)

    @property
    def all_tied_weights_keys(self) -> dict[str, str]:
        """The names of tied parameters, which a state dict repeats -> the first name of each."""
        first: dict[int, str] = {}
        tied: dict[str, str] = {}
        for name, parameter in self.named_parameters(remove_duplicate=False):
            kept = first.setdefault(id(parameter), name)
            if kept != name:
                tied[name] = kept
        return tied

    @property
    def _no_split_modules(self) -> list[str]:
        """The names of the classes of blocks, which FSDP and accelerate keep in one piece."""
        names: list[str] = []
        for module in self.modules():
            if isinstance(module, BlockList) and len(module):
                names.append(type(module[0]).__name__)
        return sorted(set(names))

    def hf_state_dict(self, *, gather: bool = True) -> dict[str, Tensor]:
        """Returns the parameters under transformers' names; see `shardzoo.models.hf_state`."""
        return hf_state_dict(self, gather=gather)

    def load_state_dict(
        self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False
    ) -> Any:
        """Loads the model's own `state_dict`, or whole tensors under transformers' names, of which
        each rank takes its part.

        Raises:
            ValueError: Tensors under transformers' names do not fit the model.
        """
        own = self.state_dict()
        if not is_hf_state(self, state_dict, own):
            return super().load_state_dict(state_dict, strict, assign)
        from torch.nn.modules.module import _IncompatibleKeys  # type: ignore[reportPrivateUsage]

        return _IncompatibleKeys(*load_hf_state_dict(self, state_dict, strict))

    def save_pretrained(
        self,
        save_directory: str | Path,
        is_main_process: bool = True,
        state_dict: Mapping[str, Tensor] | None = None,
        *,
        max_shard_size: int | str = LARGEST_FILE,
        safe_serialization: bool = True,
        push_to_hub: bool = False,
        variant: str | None = None,
        token: str | None = None,
        repo_id: str | None = None,
        commit_message: str = "Upload model",
        private: bool | None = None,
        **options: Any,
    ) -> None:
        """Writes a Hugging Face folder; see `shardzoo.models.save_pretrained`.

        Args:
            is_main_process: Whether a process that holds the whole model writes. A model on a mesh
                of several ranks is written by all of them, so there it changes nothing.
            state_dict: Other values, under the model's own names or transformers'.
            push_to_hub: Also commit the model to `repo_id`, by default the folder's name.
            options: `save_function`, `save_peft_format` and `save_original_format` change nothing.

        Raises:
            ValueError: An argument is refused, or the folder cannot be written.
        """
        if not safe_serialization:
            raise ValueError("safe_serialization must be True: the zoo writes safetensors alone")
        if variant is not None:
            raise ValueError(f"variant={variant!r} is not supported; name another folder for it")
        known = ("save_function", "save_peft_format", "save_original_format")
        for name in options:
            if name not in known:
                raise ValueError(f"save_pretrained has no argument {name!r}")
        is_alone = self.mesh is None or self.mesh.world_size == 1
        if is_alone and not is_main_process:
            return
        saved = self
        if state_dict is not None and not self._owns(state_dict):
            saved = copy.deepcopy(self)
            saved.load_state_dict(state_dict)
        save_pretrained(saved, save_directory, max_shard_size=max_shard_size)
        if push_to_hub:
            name = repo_id or Path(save_directory).name
            saved.push_to_hub(name, token=token, commit_message=commit_message, private=private)

    def _owns(self, state_dict: Mapping[str, Tensor]) -> bool:
        """Returns whether all tensors of a state dict are this model's own memory."""
        own = self.state_dict()
        for name, tensor in state_dict.items():
            if name not in own or own[name].data_ptr() != tensor.data_ptr():
                return False
        return True

    def push_to_hub(self, repo_id: str, **options: Any) -> str | None:
        """Commits the model to the Hub; see `shardzoo.models.push_to_hub` for the options."""
        return push_to_hub(self, repo_id, **options)


def _find_body(architecture: type[Any]) -> type[Any] | None:
    """Returns the class of an architecture that runs the model without its head."""
    for base in architecture.__mro__:
        if "run_backbone" in vars(base):
            return base
    return None
