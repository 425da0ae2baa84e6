"""Split parameters, and giving a meta-device model real storage."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .dropout import assign_dropout_sites
from .mesh import ParallelMesh, tp_size
from .shard import Shard


class SplitLayer(nn.Module):
    """A layer whose weight is split; it prints how."""

    shard: Shard
    sequence_parallel: bool
    mesh: ParallelMesh | None

    def extra_repr(self) -> str:
        return f"{self.shard.describe()}, sequence_parallel={self.sequence_parallel}"


class SplitParameter(nn.Parameter):
    """A parameter whose attributes, `.shard` and DeepSpeed's marks among them, survive `copy.deepcopy`."""

    def __deepcopy__(self, memo):
        copy = super().__deepcopy__(memo)
        vars(copy).update(vars(self))
        return copy


def split_parameter(shard: Shard, mesh: ParallelMesh | None) -> nn.Parameter:
    """A parameter that holds this rank's part of `shard`, filled with NaN until it is initialised or loaded.

    It carries `.shard`, and the two marks by which DeepSpeed counts it on every tensor-parallel rank.
    """
    parameter = SplitParameter(torch.full(shard.local_shape(tp_size(mesh)), float("nan")))
    parameter.shard = shard  # type: ignore[attr-defined]
    parameter.model_parallel = parameter.tensor_model_parallel = True  # type: ignore[attr-defined]
    return parameter


def materialize(model: nn.Module, device: torch.device | str, dtype: torch.dtype | None = None) -> nn.Module:
    """Give every parameter of a model built under `torch.device("meta")` real, uninitialised storage, in place.

    Unlike `nn.Module.to_empty`, ties stay ties and the attributes of a parameter (`.shard` and its like) survive.
    Parameters that already have storage keep their values. `dtype` applies to floating-point parameters. Buffers are
    constants: a module creates them with an explicit device, and they are moved as they are; one that is still on the
    meta device raises `ValueError`, because its values would be lost.
    """
    renewed: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in renewed:
                renewed[id(parameter)] = _with_storage(parameter, torch.device(device), dtype)
            module._parameters[name] = renewed[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise ValueError(
                    f"buffer {name!r} of {type(module).__name__} is on the meta device: its values are lost; "
                    'create it with an explicit device, e.g. torch.arange(n, device="cpu")'
                )
            module._buffers[name] = buffer.to(device)
    assign_dropout_sites(model)
    return model


def _with_storage(parameter: nn.Parameter, device: torch.device, dtype: torch.dtype | None) -> nn.Parameter:
    wanted = dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype
    values: Tensor = (
        torch.empty(parameter.shape, device=device, dtype=wanted)
        if parameter.is_meta
        else parameter.detach().to(device=device, dtype=wanted)
    )
    renewed = type(parameter)(values, requires_grad=parameter.requires_grad)
    for name, value in vars(parameter).items():
        setattr(renewed, name, value)
    return renewed
