"""Holds several LoRA adapters of a model that is split over ranks, with the calls of peft's
`PeftModel`.

One adapter at a time is a part of the model's layers. The others wait beside it, and `set_adapter`
exchanges them. The methods that add, load or save adapters are collective: each rank of the mesh
calls them alike.
"""

# pyright: reportUnknownMemberType=false
# (torch does not annotate many of its methods)
from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

from torch import nn

from ..checkpoint.hub import find_model
from ..mpu.initialization import draw_model_seed
from .blocks.lora import Adapter, attach, detach
from .lora import (
    Lora,
    adapters_disabled,
    attach_factors,
    check_lora_config,
    find_adapters,
    initialize_factors,
    load_weights,
    merge_lora,
    read_adapter_config,
    save_adapter,
)
from .sizes import full_size

DEFAULT_NAME = "default"


class InactiveAdapter(nn.Module):
    """What belongs to an adapter while another one is active.

    Attributes:
        lora: Its description, which the model has as its attribute `lora` while it is active.
        layers: The paths of the layers that it adapts on this rank.
        factors: The factors of each of these layers.
        saved: The names of the parameters that it trains whole (`modules_to_save`).
        values: Its values of these parameters.
        is_trained: Whether it is trained when it is active again.
    """

    def __init__(
        self,
        lora: Lora,
        adapters: dict[str, Adapter],
        values: dict[str, nn.Parameter],
        is_trained: bool,
    ) -> None:
        super().__init__()
        self.is_trained = is_trained
        self.lora = lora
        self.layers = list(adapters)
        self.factors = nn.ModuleList(adapters.values())
        self.saved = list(values)
        self.values = nn.ParameterList(values.values())


class SplitPeftModel(nn.Module):
    """Adapts a model that is split over ranks, as peft's `PeftModel` adapts an unsplit one.

    Args:
        model: A model of the zoo, without LoRA weights. It is changed in place, and all its
            parameters are frozen.
        config: peft's `LoraConfig` of the first adapter, with transformers' names of the modules.
        adapter_name: The first adapter's name.

    Attributes:
        base_model: The model.
        peft_config: The adapters' configurations by name.
        active_adapter: The name of the adapter with which the model computes, and which alone is
            trained. None before the first one is added.

    Raises:
        ValueError: The configuration asks for what split models do not follow, such as DoRA, or
            names modules that the model does not have.
    """

    def __init__(self, model: Any, config: Any = None, adapter_name: str = DEFAULT_NAME) -> None:
        super().__init__()
        if getattr(model, "lora", None) is not None:
            raise ValueError(
                "the model has LoRA weights already; load the base model without adapter="
            )
        self.base_model = model
        self.inactive = nn.ModuleDict()
        self.peft_config: dict[str, Any] = {}
        self.active_adapter: str | None = None
        # The base model's own values of the parameters that the active adapter trains whole.
        self.replaced_names: list[str] = []
        self.replaced = nn.ParameterList()
        for parameter in model.parameters():
            parameter.requires_grad = False
        if config is not None:
            self.add_adapter(adapter_name, config)

    @classmethod
    def from_pretrained(
        cls,
        model: Any,
        model_id: str | Path,
        adapter_name: str = DEFAULT_NAME,
        is_trainable: bool = False,
    ) -> SplitPeftModel:
        """Returns the model with an adapter that peft or `save_pretrained` wrote.

        Args:
            model: See the class.
            model_id: A folder, or a name on the Hub.
            adapter_name: The name that the adapter gets.
            is_trainable: Whether it is trained further.
        """
        adapted = cls(model)
        adapted.load_adapter(model_id, adapter_name, is_trainable)
        return adapted

    @property
    def active_adapters(self) -> list[str]:
        """The active adapter's name, as a list."""
        return [] if self.active_adapter is None else [self.active_adapter]

    @property
    def config(self) -> Any:
        """The base model's configuration."""
        return self.base_model.config

    @property
    def mesh(self) -> Any:
        """The base model's mesh."""
        return self.base_model.mesh

    @property
    def device(self) -> Any:
        """The device of the base model's parameters."""
        return self.base_model.device

    @property
    def dtype(self) -> Any:
        """The type of the base model's parameters."""
        return self.base_model.dtype

    def get_base_model(self) -> Any:
        """Returns the base model, whose layers have the active adapter."""
        return self.base_model

    def forward(self, *inputs: Any, **options: Any) -> Any:
        """Calls the model with the active adapter; see its `forward`."""
        return self.base_model(*inputs, **options)

    def generate(self, *inputs: Any, **settings: Any) -> Any:
        """Generates sequences with the active adapter; see `shardzoo.generate`."""
        return self.base_model.generate(*inputs, **settings)

    def add_adapter(self, adapter_name: str, peft_config: Any) -> None:
        """Adds an adapter with new weights. The first one becomes active. Collective.

        The initial values follow from PyTorch's generator, on all ranks from that of the first
        one, and do not depend on how the model is split.

        Raises:
            ValueError: There is an adapter of this name, or see the class.
        """
        self._check_new_name(adapter_name)
        check_lora_config(peft_config)
        seed = draw_model_seed(self.mesh)
        fill = partial(initialize_factors, self.base_model, seed=seed)
        self._attach(adapter_name, peft_config, fill)

    def load_adapter(
        self, model_id: str | Path, adapter_name: str, is_trainable: bool = False
    ) -> None:
        """Adds an adapter that peft or `save_pretrained` wrote. The first one becomes active.

        Args:
            model_id: A folder, or a name on the Hub.
            adapter_name: The name that the adapter gets.
            is_trainable: Whether it is trained further. `set_adapter` makes it so later.

        Raises:
            ValueError: There is an adapter of this name, or the folder is damaged or of another
                model.
        """
        self._check_new_name(adapter_name)
        folder = find_model(model_id, "model_id")
        config = read_adapter_config(folder)
        fill = partial(load_weights, self.base_model, folder)
        self._attach(adapter_name, config, fill, is_trainable)

    def set_adapter(self, adapter_name: str, inference_mode: bool = False) -> None:
        """Makes an adapter the active one, and unless `inference_mode` the one that is trained.

        An optimizer that is to train it must have been given its parameters, which this module has
        at all times.

        Raises:
            ValueError: There is no such adapter.
        """
        self._check_name(adapter_name)
        self._switch_to(adapter_name)
        self._set_trainable(not inference_mode)

    @contextmanager
    def disable_adapter(self) -> Generator[None]:
        """A context in which the base model computes by itself, with all its own parameters."""
        trained = self._put_parameters(self._name_replaced())
        try:
            with adapters_disabled(self.base_model):
                yield
        finally:
            self._put_parameters(trained)

    def delete_adapter(self, adapter_name: str) -> None:
        """Removes an adapter. If it was the active one, the oldest of the others becomes active.

        Raises:
            ValueError: There is no such adapter.
        """
        self._check_name(adapter_name)
        if adapter_name == self.active_adapter:
            self._deactivate()
        del self.inactive[adapter_name]
        del self.peft_config[adapter_name]
        if self.active_adapter is None and self.peft_config:
            self._activate(next(iter(self.peft_config)))

    def save_pretrained(
        self, save_directory: str | Path, selected_adapters: list[str] | None = None, **options: Any
    ) -> None:
        """Writes adapters as peft does: `default` into the folder, others into folders of their
        names in it. Collective; the first rank writes.

        Args:
            save_directory: A new or existing folder.
            selected_adapters: Names of adapters; by default all.
            options: peft's other options, of which `is_main_process` and `safe_serialization`
                change nothing here.

        Raises:
            ValueError: There is no such adapter, or an option asks for what is not written.
        """
        _check_saving_options(options)
        names = list(self.peft_config) if selected_adapters is None else selected_adapters
        for name in names:
            self._check_name(name)
        before = self.active_adapter
        for name in names:
            self._switch_to(name)
            folder = Path(save_directory)
            save_adapter(self.base_model, folder if name == DEFAULT_NAME else folder / name)
        if before is not None:
            self._switch_to(before)

    def merge_and_unload(self, adapter_names: list[str] | None = None) -> Any:
        """Returns the base model with the active adapter added to its weights, without adapters.

        Each weight is computed in fp32 and rounded once. This object cannot be used afterwards.

        Args:
            adapter_names: The adapter that is merged instead, as a list of one.

        Raises:
            ValueError: More than one adapter is named, or there is none.
        """
        if adapter_names is not None:
            if len(adapter_names) != 1:
                raise ValueError(
                    f"a split model merges one adapter, not {len(adapter_names)}: {adapter_names!r}"
                )
            self.set_adapter(adapter_names[0])
        if self.active_adapter is None:
            raise ValueError("there is no adapter to merge; add one with add_adapter")
        merge_lora(self.base_model)
        return self._release()

    def unload(self) -> Any:
        """Returns the base model as it was, without adapters. This object cannot be used
        afterwards.
        """
        if self.active_adapter is not None:
            self._deactivate()
        return self._release()

    def get_nb_trainable_parameters(self) -> tuple[int, int]:
        """Returns the number of parameters that are trained, and of all, of the unsplit model."""
        sizes = [(full_size(parameter), parameter.requires_grad) for parameter in self.parameters()]
        return sum(size for size, is_trained in sizes if is_trained), sum(size for size, _ in sizes)

    def print_trainable_parameters(self) -> None:
        """Prints both numbers as peft does, on the first rank."""
        trained, total = self.get_nb_trainable_parameters()
        if self.mesh is None or self.mesh.rank == 0:
            print(
                f"trainable params: {trained:,d} || all params: {total:,d} || "
                f"trainable%: {100 * trained / total:.4f}"
            )

    def _attach(
        self, name: str, config: Any, fill: Callable[[], None], is_trainable: bool = True
    ) -> None:
        """Gives the base model a further adapter, whose values `fill` sets.

        The adapter that was active is active again afterwards. If there was none, the new one is.
        If the new one is refused, nothing has changed.
        """
        model = self.base_model
        before = self.active_adapter
        self._deactivate()
        try:
            attach_factors(model, config)
            copies = {name: _copy(model.get_parameter(name)) for name in model.lora.saved}
            self._replace(copies)
            self.replaced.requires_grad_(False)
            fill()
            self._set_trainable(is_trainable)
        except BaseException:
            self._detach()
            for parameter in model.parameters():
                parameter.requires_grad = False
            if before is not None:
                self._activate(before)
            raise
        self.peft_config[name] = model.lora.config
        self.active_adapter = name
        if before is not None:
            self._switch_to(before)

    def _switch_to(self, name: str) -> None:
        """Makes an adapter the active one, which is trained if it was so when it was active."""
        if name != self.active_adapter:
            self._deactivate()
            self._activate(name)

    def _detach(self) -> InactiveAdapter | None:
        """Takes the adapter off the base model, which computes by itself again, and returns it."""
        model = self.base_model
        adapters = find_adapters(model)
        for path in adapters:
            detach(model.get_submodule(path))
        values = self._put_parameters(self._name_replaced())
        self._note_replaced({})
        lora = model.lora
        model.lora = None
        if lora is None:
            return None
        own = list(values.values())
        for adapter in adapters.values():
            own += adapter.parameters()
        is_trained = any(parameter.requires_grad for parameter in own)
        return InactiveAdapter(lora, adapters, values, is_trained)

    def _deactivate(self) -> None:
        """Puts the active adapter, if there is one, to the inactive ones, which are not trained."""
        if self.active_adapter is None:
            return
        stored = cast(InactiveAdapter, self._detach())
        stored.requires_grad_(False)
        self.inactive[self.active_adapter] = stored
        self.active_adapter = None

    def _activate(self, name: str) -> None:
        """Makes an inactive adapter a part of the base model's layers."""
        stored = cast(InactiveAdapter, self.inactive.pop(name))
        for path, adapter in zip(stored.layers, stored.factors, strict=True):
            attach(self.base_model.get_submodule(path), cast(Adapter, adapter))
        self._replace(dict(zip(stored.saved, stored.values, strict=True)))
        self.base_model.lora = stored.lora
        self.active_adapter = name
        self._set_trainable(stored.is_trained)

    def _replace(self, values: Mapping[str, nn.Parameter]) -> None:
        """Puts an adapter's parameters in the places of the base model's, and keeps these."""
        self._note_replaced(self._put_parameters(values))

    def _note_replaced(self, originals: Mapping[str, nn.Parameter]) -> None:
        self.replaced_names = list(originals)
        self.replaced = nn.ParameterList(originals.values())

    def _name_replaced(self) -> dict[str, nn.Parameter]:
        """Returns what `_note_replaced` has got."""
        return dict(zip(self.replaced_names, self.replaced, strict=True))

    def _put_parameters(self, values: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
        """Puts parameters in the places of the base model's, and returns those that were there."""
        before: dict[str, nn.Parameter] = {}
        for name, parameter in values.items():
            path, _, attribute = name.rpartition(".")
            layer = self.base_model.get_submodule(path)
            before[name] = getattr(layer, attribute)
            setattr(layer, attribute, parameter)
        return before

    def _set_trainable(self, is_trainable: bool) -> None:
        """Says whether gradients of the active adapter are computed."""
        for adapter in find_adapters(self.base_model).values():
            adapter.requires_grad_(is_trainable)
        for name in self.replaced_names:
            self.base_model.get_parameter(name).requires_grad = is_trainable

    def _release(self) -> Any:
        model = self.base_model
        self.inactive.clear()
        self.peft_config = {}
        self.active_adapter = None
        self._note_replaced({})
        return model

    def _check_new_name(self, name: str) -> None:
        if not name or "." in name:
            raise ValueError(f"adapter_name must be a text without periods, not {name!r}")
        if name in self.peft_config:
            raise ValueError(
                f"there is an adapter {name!r} already; delete_adapter({name!r}) removes it"
            )

    def _check_name(self, name: str) -> None:
        if name not in self.peft_config:
            known = ", ".join(self.peft_config) or "none"
            raise ValueError(f"there is no adapter {name!r}; there are: {known}")


def _copy(parameter: nn.Parameter) -> nn.Parameter:
    """Returns a parameter of the same value and split."""
    copied = nn.Parameter(parameter.detach().clone())
    for name, value in vars(parameter).items():
        setattr(copied, name, value)
    return copied


def _check_saving_options(options: dict[str, Any]) -> None:
    """Raises ValueError for an option of peft's `save_pretrained` that asks for another file."""
    harmless = {"is_main_process", "save_embedding_layers"}
    for name, value in options.items():
        if name == "safe_serialization" and value is False:
            raise ValueError("safe_serialization=False: adapters are written as safetensors alone")
        if name not in harmless and name != "safe_serialization":
            raise ValueError(f"save_pretrained of a split model takes no {name}")
