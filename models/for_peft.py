"""Lets peft adapt a model of the zoo in one process, as it adapts transformers' model.

peft finds the modules that it adapts by their names and classes in transformers' model, where q, k
and v are layers of their own. `ModelForPeft` shows it such a tree of modules, whose parameters are
views of the zoo's. peft replaces modules of the tree, and the zoo's model computes: what peft adds
to the output of a linear layer is added by the layer's adapter, and what replaces a parameter (a
module trained whole, trained tokens, trained biases) is given to the forward pass instead of it.
"""

# pyright: basic, reportIncompatibleMethodOverride=false
# (transformers' methods and peft's are not fully annotated)
from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AutoConfig, PreTrainedModel
from transformers.pytorch_utils import Conv1D

from .blocks.lora import LINEARS, attach
from .blocks.stack import BlockList
from .for_transformers import Output
from .loading import from_pretrained
from .lora import import_peft, list_stacked_experts
from .mapping import NativeModel, compute_stacked_ranges
from .outputs import ModelOutput
from .split_peft import SplitPeftModel


class _Given:
    """The part of a layer's output that a linear module returns while its layer runs."""

    given: Tensor | None = None

    def take_given(self) -> Tensor | None:
        """Returns what the layer of the zoo has computed for this module; None outside of it."""
        return self.given


class ViewedLinear(nn.Linear, _Given):
    """A linear module of transformers' model, whose layer of the zoo's model computes its output.

    A copy that peft trains computes by itself.
    """

    def forward(self, input: Tensor) -> Tensor:
        given = self.take_given()
        return super().forward(input) if given is None else given


class ViewedConv1D(Conv1D, _Given):
    """The same for a GPT-2, whose weights are [in, out]."""

    def forward(self, x: Tensor) -> Tensor:
        given = self.take_given()
        return super().forward(x) if given is None else given


@dataclass
class Piece:
    """A parameter of the tree, and the part of the zoo's parameter that it shows.

    Attributes:
        path: The name of its module in the tree.
        module: The module, also after peft has put another in its place.
        attribute: weight or bias.
        native: The name of the zoo's parameter.
        rows: The range of the zoo's parameter along `dim`.
        transposed: Whether the tree has the weight, or that of each expert, transposed.
        experts: The number of experts whose matrices or vectors the tree has in one parameter,
            [E, ...], and the zoo one after the other; 0 for others.
    """

    path: str
    module: nn.Module
    attribute: str
    native: str
    dim: int
    rows: tuple[int, int]
    transposed: bool
    experts: int = 0

    def view(self, parameter: Tensor) -> Tensor:
        """Returns the part of a parameter of the zoo, as the tree shows it."""
        start, stop = self.rows
        part = parameter.detach()
        if self.experts:
            part = part.unflatten(0, (self.experts, -1))
        elif part.dim():
            part = part.narrow(self.dim, start, stop - start)
        return part.mT if self.transposed else part

    def restore(self, value: Tensor) -> Tensor:
        """Reverses `view`, of any value in the shape that the tree shows."""
        if self.transposed:
            value = value.mT
        return value.flatten(0, 1) if self.experts else value


class PeftAdapter(nn.Module):
    """Adds what peft's layers compute to the output of one linear layer of the zoo's model.

    Args:
        find: Returns the module that is at a place of the tree now.
        places: (place in the tree, start, stop) of each part of the output; for a layer with
            several outputs the number of the output, and -1.
    """

    def __init__(
        self, find: Callable[[str], nn.Module], places: list[tuple[Piece, int, int]]
    ) -> None:
        super().__init__()
        self.find = find
        self.places = places
        self.hook: Any = None  # of `attach`
        self.enabled = True  # peft's own layers know when they are disabled

    def forward(self, x: Tensor, output: Any) -> Any:
        peft = import_peft()
        tuner_layer = peft.tuners.tuners_utils.BaseTunerLayer
        wrapper = peft.tuners.lora.layer.ParamWrapper
        several = not isinstance(output, Tensor)
        parts: list[Tensor] = []
        changed = False
        for piece, start, stop in self.places:
            own = output[start] if several else output[..., start:stop]
            adapted: Any = self.find(piece.path)
            while isinstance(adapted, wrapper):  # It changes the parameter, as `_read_value` does.
                adapted = adapted.base_layer
            if isinstance(adapted, tuner_layer):
                changed = True
                leaf: Any = piece.module
                leaf.given = own
                try:
                    own = adapted(x)
                finally:
                    leaf.given = None
            parts.append(own)
        if not changed:
            return output
        if several:
            return tuple(parts)
        return parts[0] if len(parts) == 1 else torch.cat(parts, -1)


class _Runner(nn.Module):
    """Calls the model with other values for some of its parameters, and reads what it computes."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        output = self.model(*inputs, **options)
        if isinstance(output, ModelOutput):
            output.values()  # Logits beside a loss must be computed with these parameters.
        return output


class _Generator(_Runner):
    """The same for `generate`."""

    def forward(self, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        model: Any = self.model
        return model.generate(*inputs, **options)


class ModelForPeft(PreTrainedModel):
    """Wraps a model of the zoo for `peft.get_peft_model(ModelForPeft(model), LoraConfig(…))`.

    Its modules and parameters have the names, classes and shapes of transformers' model of this
    architecture. They share their memory with the zoo's model, whose parameters stay what they
    are: merged weights are its weights.

    Raises ValueError for a model that is split over ranks, which `models.lora` adapts.
    """

    supports_gradient_checkpointing = True

    def __init__(self, model: Any) -> None:
        if model.mesh is not None:
            raise ValueError(
                "peft's layers cannot be split: adapt a split model with get_peft_model of this "
                "module, or SplitPeftModel, whose files are peft's"
            )
        config = AutoConfig.for_model(**model.config.to_dict())
        super().__init__(config)
        # Outside the tree, which is all that peft looks at.
        self._outside: tuple[Any, ...] = (model, _Runner(model), _Generator(model))
        self._set_name(getattr(model, "name_or_path", "") or "")
        self._build_tree(config)
        self._watch_layers()
        self._blocks = self._count_lists()
        self.train(model.training)

    @classmethod
    def from_pretrained(cls, folder: str | Path, **options: Any) -> ModelForPeft:
        """Returns the model in a folder; see `shardzoo.from_pretrained` for the options."""
        made = cls(from_pretrained(folder, **options))
        made._set_name(str(folder))
        return made

    def _set_name(self, name: str) -> None:
        """Sets where the model comes from, which peft writes to an adapter's files."""
        self.name_or_path = name
        self.config.name_or_path = name

    @property
    def native(self) -> Any:
        """The zoo's model, with the weights of this one."""
        return self._outside[0]

    def _build_tree(self, config: Any) -> None:
        """Takes the modules of transformers' model, and gives them the zoo's parameters."""
        native = self.native
        described = NativeModel.from_config(native.config, native)
        with torch.device("meta"):
            theirs = getattr(transformers, native.config.architecture)(config)
        self._output_embeddings = _find_name(theirs, theirs.get_output_embeddings())
        self._input_embeddings = _find_name(theirs, theirs.get_input_embeddings())
        # peft wraps tied modules together.
        self._tied_weights_keys = theirs._tied_weights_keys
        self.all_tied_weights_keys = theirs.all_tied_weights_keys
        for name, child in list(theirs.named_children()):
            self.add_module(name, child)
        _replace_linears(self)

        entries = described.entries()
        parameters = dict(native.named_parameters())
        names = described.list_module_names().by_parameter
        stacked = {f"{each.layer}.{each.weight}": each for each in list_stacked_experts(described)}
        count = native.config.expert_count
        self._pieces: list[Piece] = []
        for name, entry in entries.items():
            spec = described.parameters[name]
            if name in stacked:
                places = [f"{stacked[name].module}.{stacked[name].key}"]
                ranges = [(0, spec.shape[0])]
            else:
                places = [self._find_place(stored) for stored in names[name]]
                ranges = compute_stacked_ranges(spec, entry)
            experts = count if name in stacked or entry.by_expert else 0
            for place, rows in zip(places, ranges, strict=True):
                path, _, attribute = place.rpartition(".")
                module = self.get_submodule(path)
                if attribute in module._buffers:  # Corrections of scores, which nothing trains.
                    continue
                piece = Piece(
                    path, module, attribute, name, spec.dim, rows, entry.transpose, experts
                )
                self._pieces.append(piece)
                viewed = nn.Parameter(piece.view(parameters[name]), parameters[name].requires_grad)
                setattr(module, attribute, viewed)
        # Tied parameters are one parameter in transformers' model, too.
        self._ties: list[tuple[str, str, str]] = []
        for alias, kept in described.name_map.aliases:
            path, _, attribute = _strip(alias, described).rpartition(".")
            kept_path, _, kept_attribute = _strip(kept, described).rpartition(".")
            module = _find_module(self, path)
            kept_module = _find_module(self, kept_path)
            if module is None or kept_module is None:
                continue
            held = getattr(module, attribute, None)
            if isinstance(held, nn.Parameter) and held.is_meta:
                setattr(module, attribute, getattr(kept_module, kept_attribute))
                self._ties.append((path, kept_path, attribute))
        # The modules never run, so they need no tables of their own.
        for module in self.modules():
            for name in module._buffers:
                module._buffers[name] = None
        missing = [name for name, parameter in self.named_parameters() if parameter.is_meta]
        if missing:
            raise ValueError(
                f"a {type(native).__name__} has no parameter for {missing[0]} of transformers' model"
            )

    def _find_place(self, stored: str) -> str:
        """Returns where the tree has what files call `stored`."""
        if _find_module(self, stored.rpartition(".")[0]) is not None:
            return stored
        # Mixtral's mixtures have another name in its files.
        return stored.replace(".block_sparse_moe.", ".mlp.")

    def _watch_layers(self) -> None:
        """Gives the linear layers an adapter that asks the tree for peft's layers."""
        native = self.native
        by_layer: dict[str, list[Piece]] = {}
        for piece in self._pieces:
            layer = piece.native.rpartition(".")[0]
            if piece.attribute == "weight" and isinstance(native.get_submodule(layer), LINEARS):
                by_layer.setdefault(layer, []).append(piece)
        for path, pieces in by_layer.items():
            layer = native.get_submodule(path)
            attributes = [name for name, _ in layer.named_parameters(recurse=False)]
            places: list[tuple[Piece, int, int]] = []
            for piece in pieces:
                if "weight" not in attributes:
                    own = attributes.index(piece.native.rpartition(".")[2])
                    places.append((piece, own, -1))
                elif piece.dim == 0:
                    places.append((piece, *piece.rows))
                else:
                    places.append((piece, 0, native.get_parameter(piece.native).shape[0]))
            attach(layer, cast(Any, PeftAdapter(self.find_module, places)))
        self._watched = set(by_layer)

    def _count_lists(self) -> dict[str, int]:
        """Returns the number of blocks in each list of the tree."""
        lists = {}
        for name, module in self.named_modules():
            if isinstance(module, nn.ModuleList):
                lists[name] = len(module)
        return lists

    def find_module(self, path: str) -> nn.Module:
        """Returns what is at a place of the tree now: transformers' module, or peft's around it."""
        return self.get_submodule(path)

    def share_memory(self) -> None:
        """Makes the tree's parameters views of the zoo's again, with the tree's values.

        Copies and moves of the tree, and a merge that checks its result, give them memory of their
        own.
        """
        parameters = dict(self.native.named_parameters())
        for piece in self._pieces:
            now = self.find_module(piece.path)
            if now is not piece.module and not _is_of_peft(now):
                piece.module = now  # What was trained whole stays when peft goes.
            held = getattr(piece.module, piece.attribute)
            view = piece.view(parameters[piece.native])
            if held.data_ptr() != view.data_ptr():
                view.copy_(held.data)
                held.data = view

    def _check_ties(self) -> None:
        """Raises ValueError if peft changes a parameter in one of the places that share it."""
        tokens = import_peft().utils.other.TrainableTokensWrapper
        for path, kept_path, attribute in self._ties:
            modules = [self.find_module(path), self.find_module(kept_path)]
            if all(isinstance(module, tokens) for module in modules):
                continue  # peft gives both the same tokens.
            (value, differs), (kept, kept_differs) = (
                _read_value(module, attribute, False) for module in modules
            )
            if (differs or kept_differs) and value is not kept:
                raise ValueError(
                    f"peft adapts one of {path} and {kept_path}, which share their weight here; use "
                    "a model with weights of their own (tie_word_embeddings=False)"
                )

    def _collect_replaced(self) -> dict[str, Tensor]:
        """Returns the parameters of the zoo for which the tree has other values, by name."""
        self._check_ties()
        by_parameter: dict[str, list[Piece]] = {}
        for piece in self._pieces:
            by_parameter.setdefault(piece.native, []).append(piece)
        replaced: dict[str, Tensor] = {}
        for name, pieces in by_parameter.items():
            parts: list[Tensor] = []
            changed = False
            for piece in pieces:
                layer = piece.native.rpartition(".")[0]
                value, differs = _read_value(
                    self.find_module(piece.path), piece.attribute, layer in self._watched
                )
                changed = changed or differs
                parts.append(piece.restore(value))
            if not changed:
                continue
            whole = parts[0] if len(parts) == 1 else torch.cat(parts, pieces[0].dim)
            own = self.native.get_parameter(name)
            if whole.shape != own.shape:  # The zoo's vocabulary ends with padding.
                whole = torch.cat([whole, own.detach()[len(whole) :]])
            replaced[f"model.{name}"] = whole
        return replaced

    def _call(self, runner: _Runner, inputs: tuple[Any, ...], options: dict[str, Any]) -> Any:
        for name, count in self._blocks.items():
            now = len(cast(nn.ModuleList, self.get_submodule(name)))
            if now != count:
                raise ValueError(
                    f"{name} has {now} blocks instead of {count}: a model "
                    "of the zoo does not repeat blocks; leave layer_replication out"
                )
        self.share_memory()
        replaced = self._collect_replaced()
        if not replaced:
            return runner(inputs, options)
        if torch.is_grad_enabled() and self.training:
            inner = [name for name in replaced if "blocks." in name]
            if inner and any(getattr(part, "recompute_blocks", False) for part in runner.modules()):
                raise ValueError(
                    f"peft changes {inner[0].removeprefix('model.')} itself, which cannot be "
                    "combined with recomputed activations: leave gradient checkpointing out"
                )
        return torch.func.functional_call(runner, replaced, (inputs, options))

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Calls the zoo's model; see its `forward`."""
        return_dict = options.pop("return_dict", None)
        given = {name: value for name, value in options.items() if value is not None}
        output = Output(self._call(self._outside[1], inputs, given))
        if return_dict is None:
            return_dict = self.config.return_dict is not False
        return output if return_dict else output.to_tuple()

    def generate(self, *inputs: Any, **settings: Any) -> Any:
        """Generates sequences; see `shardzoo.generate`."""
        if not hasattr(self.native, "generate"):
            raise ValueError(f"a {type(self.native).__name__} generates no text")
        return self._call(self._outside[2], inputs, settings)

    @property
    def generation_config(self) -> Any:
        return getattr(self.native, "generation_config", None)

    @generation_config.setter
    def generation_config(self, settings: Any) -> None:
        # transformers sets one before there is a model.
        is_ready = "_outside" in self.__dict__ and settings is not None
        if is_ready and hasattr(type(self.native), "generation_config"):
            self.native.generation_config = settings

    @classmethod
    def can_generate(cls) -> bool:
        """Returns whether there is a `generate`; that of a model that generates no text raises."""
        return True

    def prepare_inputs_for_generation(self, *inputs: Any, **options: Any) -> dict[str, Any]:
        """Returns the arguments of a forward pass. The zoo's `generate` prepares its own."""
        names = ("input_ids",) if inputs else ()
        return {**dict(zip(names, inputs, strict=False)), **options}

    def _prepare_encoder_decoder_kwargs_for_generation(
        self, inputs_tensor: Tensor, model_kwargs: dict[str, Any], *others: Any, **options: Any
    ) -> dict[str, Any]:
        encoded = self.native.encode(inputs_tensor, model_kwargs.get("attention_mask"))
        return {**model_kwargs, "encoder_outputs": encoded}

    def get_input_embeddings(self) -> nn.Module:
        return self.find_module(self._input_embeddings)

    def get_output_embeddings(self) -> nn.Module | None:
        return self.find_module(self._output_embeddings) if self._output_embeddings else None

    def prepare_decoder_input_ids_from_labels(self, labels: Tensor) -> Tensor:
        """Returns the decoder's input of an encoder-decoder, as transformers' collators ask."""
        return self.native.prepare_decoder_input_ids_from_labels(labels)

    def train(self, mode: bool = True) -> ModelForPeft:
        super().train(mode)
        self.native.train(mode)
        return self

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        """Moves or converts both, and shares their memory again."""
        super()._apply(fn, recurse)
        self.native._apply(fn)
        self.share_memory()
        return self

    def gradient_checkpointing_enable(self, *arguments: Any, **options: Any) -> None:
        """Recomputes the activations of all blocks in the backward pass."""
        self._set_recompute(True)

    def gradient_checkpointing_disable(self) -> None:
        """Keeps activations for the backward pass."""
        self._set_recompute(False)

    def _set_recompute(self, on: bool) -> None:
        for module in self.native.modules():
            if isinstance(module, BlockList):
                module.set_recompute("full" if on else "none")

    @property
    def is_gradient_checkpointing(self) -> bool:
        return any(getattr(part, "recompute_blocks", False) for part in self.native.modules())

    def tie_weights(self, *arguments: Any, **options: Any) -> None:
        """Does nothing: a model of the zoo is built with its ties."""

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Writes a Hugging Face folder with the weights, merged or not, but without adapters."""
        self.share_memory()
        self.native.save_pretrained(save_directory)


def get_peft_model(
    model: Any, peft_config: Any, adapter_name: str = "default", **options: Any
) -> Any:
    """Returns peft's `PeftModel` of an unsplit model of the zoo, or `SplitPeftModel` of a split one.

    Args:
        model: A model of the zoo, or a `ModelForPeft`.
        peft_config: peft's configuration; its modules have transformers' names.
        adapter_name: The name of the first adapter.
        options: See `peft.get_peft_model`; a split model takes none.
    """
    if getattr(model, "mesh", None) is not None:
        if options:
            raise ValueError(f"get_peft_model of a split model takes no {next(iter(options))}")
        return SplitPeftModel(model, peft_config, adapter_name)
    if not isinstance(model, PreTrainedModel):
        model = ModelForPeft(model)
    try:
        return import_peft().get_peft_model(model, peft_config, adapter_name, **options)
    except ValueError as error:
        if "not found in the base model" not in str(error):
            raise
        names = dict.fromkeys(name for _, name, _ in _iter_linears(model))
        raise ValueError(
            f"{str(error).partition('. ')[0]}; its linear modules are {', '.join(names)}"
        ) from None


def _is_of_peft(module: nn.Module) -> bool:
    peft = import_peft()
    kinds = (peft.utils.other.AuxiliaryTrainingWrapper, peft.tuners.tuners_utils.BaseTunerLayer)
    return isinstance(module, kinds)


def _find_name(root: nn.Module, wanted: nn.Module | None) -> str:
    for name, module in root.named_modules():
        if module is wanted:
            return name
    return ""


def _find_module(root: nn.Module, path: str) -> nn.Module | None:
    try:
        return root.get_submodule(path)
    except AttributeError:
        return None


def _strip(stored: str, native: NativeModel) -> str:
    return native.to_module_name(stored)


def _iter_linears(root: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """Yields the linear modules with their parents."""
    for parent in list(root.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, nn.Linear | Conv1D):
                yield parent, name, child


def _replace_linears(root: nn.Module) -> None:
    """Replaces the linear modules of transformers by those that their layers compute."""
    for parent, name, child in _iter_linears(root):
        has_bias = getattr(child, "bias", None) is not None
        with torch.device("meta"):
            if isinstance(child, nn.Linear):
                viewed: nn.Module = ViewedLinear(child.in_features, child.out_features, has_bias)
            else:
                viewed = ViewedConv1D(child.nf, child.nx)
        setattr(parent, name, viewed)


def _read_value(module: Any, attribute: str, is_watched: bool) -> tuple[Tensor, bool]:
    """Returns the value of a parameter that a module of the tree stands for, and whether it differs
    from the zoo's or has a gradient of its own.

    Args:
        module: transformers' module, or peft's around it.
        is_watched: Whether the layer of the zoo adds what peft's layer adds to the output.
    """
    peft = import_peft()
    if isinstance(module, peft.utils.other.AuxiliaryTrainingWrapper):
        if module.disable_adapters or not module.active_adapters:
            return _read_value(module.original_module, attribute, is_watched)
        if not module._hasattr_wrapped(attribute, module._modules):
            return _read_value(module.original_module, attribute, is_watched)
        return getattr(module, attribute), True
    if isinstance(module, peft.tuners.lora.layer.ParamWrapper):
        value, differs = _read_value(module.base_layer, attribute, is_watched)
        if module.parameter_name != attribute or module.disable_adapters or module.merged:
            return value, differs
        for adapter in module.active_adapters:
            if adapter in module.lora_A:
                value = value + module.get_delta_weight(adapter)
                differs = True
        return value, differs
    if isinstance(module, peft.tuners.tuners_utils.BaseTunerLayer):
        value, differs = _read_value(module.get_base_layer(), attribute, is_watched)
        if is_watched or attribute != "weight" or module.disable_adapters or module.merged:
            return value, differs
        for adapter in module.active_adapters:
            if not hasattr(module, "get_delta_weight") or adapter not in module.r:
                continue
            dropout = module.lora_dropout[adapter]
            is_head = not isinstance(module.get_base_layer(), nn.Embedding)
            if is_head and module.training and getattr(dropout, "p", 0):
                raise ValueError("LoRA on experts or on an output head needs lora_dropout=0")
            if module.use_dora.get(adapter):
                raise ValueError(
                    "DoRA adapts linear layers of the blocks, no embedding and no head"
                )
            value = value + module.get_delta_weight(adapter)
            differs = True
        return value, differs
    value = getattr(module, attribute)
    return value, value.requires_grad and torch.is_grad_enabled()
