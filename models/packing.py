"""Packs the linear layers of a model while it is loaded, and unpacks them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from ..mpu import ColumnParallelLinear, ParallelMesh, RowParallelLinear, materialize
from ..mpu.initialization import Receive
from ..mpu.packed import PackedParameter, PackedWriter
from ..mpu.parameter import SplitParameter
from ..ops.packing import PackedFormat
from .blocks.mlp import GateUpLinear

PACKED_LAYERS = (ColumnParallelLinear, RowParallelLinear, GateUpLinear)


def find_packed_matrices(model: Any) -> dict[str, tuple[nn.Module, str]]:
    """Returns the matrices that are packed: name -> (the layer, its attribute).

    They are those of the linear layers that ranks split, in blocks and not in heads. Embeddings,
    heads, norms, biases, routers and stacked experts keep their type.
    """
    heads = {*getattr(model, "head_modules", ()), getattr(model, "pooler_name", None)}
    found: dict[str, tuple[nn.Module, str]] = {}
    modules: dict[str, nn.Module] = dict(model.named_modules())
    for path, module in modules.items():
        if not isinstance(module, PACKED_LAYERS) or path.partition(".")[0] in heads:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            if parameter.dim() == 2:
                found[f"{path}.{name}"] = (module, name)
    return found


def fill_packed(
    model: nn.Module,
    fill: Callable[[Receive], None],
    format: PackedFormat,
    mesh: ParallelMesh | None,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    """Gives a model on the meta device its values, and packs its linear layers one after another.

    So no more than one of them is in memory unpacked. Collective.

    Args:
        fill: Sends the value of each parameter.
        dtype: The type of the parameters that are not packed, and of unpacked ones.
    """
    packed = find_packed_matrices(model)
    model.to(dtype)
    materialize(model, device, dtype, skip=packed)
    parameters = dict(model.named_parameters())
    writer = PackedWriter(format, mesh, device)

    def receive(name: str, value: Tensor) -> None:
        parameter = parameters[name]
        if name not in packed:
            with torch.no_grad():
                parameter.copy_(value)
            return
        layer, attribute = packed[name]
        assert isinstance(parameter, SplitParameter)
        setattr(layer, attribute, writer.pack(value.to(dtype), parameter))

    fill(receive)
    writer.finish()


def find_packed_parameters(model: nn.Module) -> dict[str, PackedParameter]:
    """Returns the packed parameters of a model by name."""
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if isinstance(parameter, PackedParameter)
    }


def unpack_parameters(model: nn.Module) -> None:
    """Replaces the packed parameters of a model by frozen ones of their own type, in place."""
    for name, packed in find_packed_parameters(model).items():
        path, _, attribute = name.rpartition(".")
        unpacked = SplitParameter(packed.unpack(), requires_grad=False)
        attributes = {key: value for key, value in vars(packed).items() if key != "packing"}
        vars(unpacked).update(attributes)
        setattr(model.get_submodule(path), attribute, unpacked)
