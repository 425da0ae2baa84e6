"""Splits a model's parameters over data-parallel ranks by torch's `fully_shard` (FSDP2; Zhao et al.
2023, arXiv:2304.11277).

A parameter is cut along its first dimension, and is whole only while the block that it belongs to
runs. What tensor parallelism has split is cut again: a parallel layer's own part of a weight is an
ordinary parameter to `fully_shard`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)

from ...checkpoint.rank_files import TensorPart
from ...models.config import ModelConfig
from ...models.outputs import ModelOutput
from ...models.sizes import find_blocks
from ...mpu import ParallelExperts, ParallelMesh
from ...mpu.collectives import gather_rows
from ...mpu.mesh import EXPERT_REPLICA_AXES, REPLICA_AXES, Axis
from ..arguments.training_arguments import TrainingArguments
from ..launch.ranks import Ranks
from ..precisions import PRECISIONS
from .host_collectives import use_host_collectives
from .state import persistent_buffers

MOST_NAMES = 3  # of parameters in a message


@dataclass(frozen=True)
class ShardedParameter:
    """A parameter of which this rank keeps a part: consecutive rows.

    Attributes:
        name: Its name in the model.
        parameter: The model's parameter between forward passes, a DTensor. It has the attributes
            that the parameter had before, such as `shard`.
        local: This rank's rows, in the same memory. It is what the optimizer updates.
        whole: A parameter of the shape of all rows, without storage, with the same attributes.
        start: The number of elements before the first of these rows.
        stored_dtype: The type of the parameter in the model's files and while its block runs.
        counts: Whether this rank writes its part: the first of the ranks that have it.
    """

    name: str
    parameter: Any
    local: nn.Parameter
    whole: nn.Parameter
    start: int
    stored_dtype: torch.dtype
    counts: bool

    def cut(self, whole: Tensor) -> Tensor:
        """Returns this rank's part of a tensor that has the parameter's shape, as a view."""
        rows = prod(self.local.shape[1:])
        first = self.start // rows if rows else 0
        return whole[first : first + self.local.shape[0]]

    @torch.no_grad()
    def fill(self, whole: Tensor) -> None:
        """Sets this rank's rows to those of a tensor that has the parameter's shape."""
        self.local.copy_(self.cut(whole))

    def describe(self, values: Tensor) -> TensorPart:
        """Returns values of this rank's rows as a part of a file's tensor."""
        if not self.counts:
            values = values.new_empty(0)
        return TensorPart(tuple(self.whole.shape), self.start, values)


class ShardedModel:
    """A model whose parameters are split over the data-parallel ranks.

    Attributes:
        module: The model itself, changed in place.
        parameters: The parts of this rank; shared parameters once.
        group: The ranks that together have each parameter, experts that are dealt over ranks
            excepted: fewer ranks have the same ones.
        unsplit: The parameters that stay whole, in fp32 and without a gradient.

    Args:
        optimizer: One that the caller has made for the model's parameters, which are replaced in
            it.
        rows: What `take_rows` returned, of a model that was split over the same ranks before.
    """

    def __init__(
        self,
        model: nn.Module,
        arguments: TrainingArguments,
        ranks: Ranks,
        optimizer: torch.optim.Optimizer | None = None,
        rows: Mapping[str, Tensor] | None = None,
    ) -> None:
        self.module = model
        self.replicas = arguments.fsdp_replicas
        mesh = ranks.mesh
        assert mesh is not None
        replicas = arguments.fsdp_replicas
        if mesh.size("data") % replicas:
            among = ""
            if ranks.ep_size > 1:
                among = f" of each of {ranks.ep_size} expert-parallel parts"
            raise ValueError(
                f"fsdp_replicas={replicas} must divide the {mesh.size('data')} data-parallel ranks"
                f"{among}"
            )
        self.group, device_mesh = _make_device_mesh(mesh, replicas, REPLICA_AXES)
        experts_mesh = device_mesh
        if ranks.ep_size > 1:
            _, experts_mesh = _make_device_mesh(mesh, replicas, EXPERT_REPLICA_AXES)
        self._is_first_replica = ranks.replica_rank < ranks.replica_size // replicas

        without_values = {name for name, p in model.named_parameters() if p.is_meta}
        before = dict(model.named_parameters())
        ties = _find_ties(model)
        _refuse_unsuitable(before)
        self.unsplit: dict[str, nn.Parameter] = {}
        for name, parameter in before.items():
            if hasattr(parameter, "keeps_fp32"):
                self.unsplit[name] = parameter
        self._blocks = find_blocks(model)
        # Experts that are dealt over ranks: other ranks have the same ones than have a block's rest.
        self._experts: list[nn.Module] = []
        if ranks.ep_size > 1:
            self._experts = [each for each in model.modules() if isinstance(each, ParallelExperts)]
        self._hooks: list[Any] = []
        self._shard(device_mesh, experts_mesh, arguments)
        if without_values:
            # Each rank gets storage for its own rows only.
            device = torch.device("cpu")
            if mesh.device_type != "cpu" and not arguments.offload_optimizer:
                device = torch.device(mesh.device_type, torch.cuda.current_device())
            model._apply(
                lambda value: torch.empty_like(value, device=device) if value.is_meta else value
            )
            self.unsplit = {name: model.get_parameter(name) for name in self.unsplit}
        if _find_ties(model) != ties:
            raise ValueError(
                "env_type='fsdp' cannot split a parameter that a block shares with what is outside "
                "of it; use 'pytorchDDP' or 'deepspeed'"
            )

        dtype = getattr(torch, PRECISIONS[arguments.precision].dtype)
        self.parameters = tuple(self._describe_parameters(before, dtype))
        if rows is not None:
            with torch.no_grad():
                for part in self.parameters:
                    part.local.copy_(rows[part.name])
        elif without_values:
            self._fill(without_values)
        if optimizer is not None:
            replaced = {before[part.name]: part.parameter for part in self.parameters}
            replace_parameters(optimizer, replaced)
        found: Any = model
        found.sharded_model = self
        if hasattr(model, "generate"):
            # It calls parts of the model besides the model itself.
            register_fsdp_forward_method(model, "generate")

    def _fill(self, names: set[str]) -> None:
        """Sets the values of a model that was made on the meta device, one parameter after
        another.
        """
        fill: Any = getattr(self.module, "fill_parameters", None)
        if fill is None:
            raise ValueError(
                "the model is on the meta device and does not know its weights; make it with "
                "shardzoo.from_pretrained(path, mesh, device='meta') or from_config"
            )
        parts = {part.name: part for part in self.parameters}
        filled: set[str] = set()

        def receive(name: str, value: Tensor) -> None:
            if name in parts:
                parts[name].fill(value)
            else:
                with torch.no_grad():
                    self.unsplit[name].copy_(value)
            filled.add(name)

        fill(receive)
        if names - filled:
            missing = ", ".join(sorted(names - filled)[:MOST_NAMES])
            raise ValueError(f"the model is on the meta device, and {missing} got no value")

    def _shard(
        self, device_mesh: DeviceMesh, experts_mesh: DeviceMesh, arguments: TrainingArguments
    ) -> None:
        """Splits dealt experts, the rest of each block, and then what is outside of the blocks.

        Args:
            device_mesh: The ranks that a parameter is split over.
            experts_mesh: Those that an expert is split over.
        """
        is_native = isinstance(getattr(self.module, "config", None), ModelConfig)
        precision = MixedPrecisionPolicy(cast_forward_inputs=not is_native)
        if arguments.precision != "fp32":
            precision = MixedPrecisionPolicy(
                param_dtype=getattr(torch, PRECISIONS[arguments.precision].dtype),
                reduce_dtype=torch.float32,
                # Blocks of the zoo compute some of their inputs in fp32 on purpose.
                cast_forward_inputs=not is_native,
            )
        offload = OffloadPolicy()
        on_host = device_mesh.device_type == "cpu"
        if arguments.offload_optimizer:
            offload = CPUOffloadPolicy(pin_memory=not on_host)
        options: dict[str, Any] = {
            "mp_policy": precision,
            "offload_policy": offload,
            "ignored_params": set(self.unsplit.values()),
        }
        frees = arguments.fsdp_reshard_after_forward
        for experts in self._experts:
            fully_shard(experts, mesh=experts_mesh, reshard_after_forward=frees, **options)
        for block in self._blocks:
            fully_shard(block, mesh=device_mesh, reshard_after_forward=frees, **options)
        # What is outside of the blocks is used again at once, when the backward pass begins.
        self._hooks.append(self.module.register_forward_hook(_hide_lazy_values))
        fully_shard(self.module, mesh=device_mesh, reshard_after_forward=False, **options)
        self._hooks.append(self.module.register_forward_hook(_show_lazy_values))
        for module in self._fsdp_modules():
            # The losses of the ranks add up to the mean, so gradients are summed and not averaged.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            if on_host:
                use_host_collectives(module)
        self._prefetch(arguments.fsdp_prefetch, on_host=on_host)

    def _prefetch(self, count: int | None, *, on_host: bool) -> None:
        """Sets how many blocks are gathered before they are needed."""
        if count is None:
            # Nothing overlaps on a CPU, so a second block would only take memory.
            count = 0 if on_host else 1
        blocks: list[Any] = self._blocks
        root: Any = self.module
        for number, block in enumerate(blocks):
            following = blocks[number + 1 : number + 1 + count]
            preceding = blocks[max(0, number - count) : number][::-1]
            if following:
                block.set_modules_to_forward_prefetch(following)
            # By default torch gathers the preceding block. The model itself is whole already.
            block.set_modules_to_backward_prefetch(preceding or [root])
        experts: Any
        for experts in self._experts:
            experts.set_modules_to_backward_prefetch([root])

    def _describe_parameters(
        self, before: dict[str, nn.Parameter], dtype: torch.dtype
    ) -> Iterator[ShardedParameter]:
        names = set()
        parameter: Any
        for name, parameter in self.module.named_parameters():
            names.add(name)
            if name in self.unsplit:
                continue
            old = before[name]
            # The last dimension of its mesh is that of the ranks that share a replica.
            shards = parameter.device_mesh.size(-1)
            shard_rank = parameter.device_mesh.get_local_rank(parameter.device_mesh.ndim - 1)
            vars(parameter).update(vars(old))
            local = nn.Parameter(parameter.to_local().detach(), requires_grad=old.requires_grad)
            vars(local).update(vars(old))
            without_storage = torch.empty(old.shape, dtype=old.dtype, device="meta")
            whole = type(old)(without_storage, requires_grad=old.requires_grad)
            vars(whole).update(vars(old))
            rows_of_first = -(-old.shape[0] // shards)
            start = min(old.shape[0], shard_rank * rows_of_first) * prod(old.shape[1:])
            stored = dtype if old.is_floating_point() else old.dtype
            part = ShardedParameter(
                name, parameter, local, whole, start, stored, self._is_first_replica
            )
            parameter.sharded = part
            yield part
        assert names == before.keys()

    def _fsdp_modules(self) -> Iterator[FSDPModule]:
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                yield module

    def model_tensors(self) -> dict[str, Tensor | TensorPart]:
        """Returns this rank's parts of the parameters, in the type of the model's files, and copies
        of the persistent buffers.
        """
        tensors: dict[str, Tensor | TensorPart] = {}
        for part in self.parameters:
            tensors[part.name] = part.describe(part.local.detach().to(part.stored_dtype))
        for name, value in {**self.unsplit, **persistent_buffers(self.module)}.items():
            tensors[name] = value.detach().clone()
        return tensors

    def sync_gradients(self, enabled: bool) -> None:
        """Sets whether the next backward pass exchanges gradients."""
        root: Any = self.module
        root.set_requires_gradient_sync(enabled)

    def reshard(self) -> None:
        """Frees what a forward pass without a backward pass has left whole."""
        root: Any = self.module
        root.reshard()

    def release(self) -> None:
        """Takes off what `fully_shard` has added. The parameters stay as they are."""
        for module in list(self._fsdp_modules()):
            _remove_hooks(module)
        for hook in self._hooks:
            hook.remove()
        vars(self.module).pop("sharded_model", None)
        vars(self.module).pop("generate", None)

    def gather(self) -> None:
        """Makes the model an ordinary one again, with whole parameters on every rank. Collective."""
        self.reshard()
        whole: dict[str, nn.Parameter] = {}
        for part in self.parameters:
            value = gather_rows(part.parameter)
            renewed = type(part.whole)(value, requires_grad=part.whole.requires_grad)
            vars(renewed).update(vars(part.whole))
            whole[part.name] = renewed
        self._replace(whole)

    def take_rows(self) -> dict[str, Tensor]:
        """Returns this rank's rows by name, and leaves the model without storage."""
        self.reshard()
        rows = {part.name: part.local.detach() for part in self.parameters}
        self._replace({part.name: part.whole for part in self.parameters})
        return rows

    def _replace(self, parameters: dict[str, nn.Parameter]) -> None:
        """Makes the model an ordinary one with other parameters."""
        places: dict[Any, list[tuple[nn.Module, str]]] = {}
        for module in self.module.modules():
            for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
                places.setdefault(parameter, []).append((module, name))
        self.release()
        for part in self.parameters:
            for module, name in places[part.parameter]:
                module._parameters[name] = parameters[part.name]


class _HiddenOutput:
    """An output of the zoo, into which `fully_shard` does not look."""

    def __init__(self, output: ModelOutput) -> None:
        self.output = output


def _hide_lazy_values(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Returns the zoo's output as a dict of the tensors that it has; a forward hook.

    `fully_shard` looks for outputs that need a gradient in every field of a dataclass, and reading
    the logits of a training pass would compute them.
    """
    if not isinstance(output, ModelOutput):
        return None
    loss = getattr(output, "loss", None)
    if isinstance(loss, Tensor):
        # `fully_shard` warns of outputs that are views, because these must not be changed in place.
        vars(output)["loss"] = loss.clone()
    shown: dict[str, Any] = {"output": _HiddenOutput(output)}
    for name, value in vars(output).items():
        if not name.startswith("_"):
            shown[name] = value
    return shown


def _show_lazy_values(module: nn.Module, inputs: Any, shown: Any) -> Any:
    """Reverses `_hide_lazy_values`."""
    if isinstance(shown, dict) and isinstance(shown.get("output"), _HiddenOutput):
        return shown["output"].output
    return None


def find_model_class(model: nn.Module) -> type[nn.Module]:
    """Returns the model's own class: `fully_shard` gives it a subclass of the same methods."""
    kind = type(model)
    if isinstance(model, FSDPModule):
        return kind.__mro__[2]
    return kind


def replace_parameters(
    optimizer: torch.optim.Optimizer, replaced: dict[Any, Any], cut: Any = None
) -> None:
    """Puts other parameters into an optimizer's groups.

    Args:
        replaced: Parameters of the optimizer -> those in their place.
        cut: Makes a state of the new parameter from (the old parameter, a state in its shape); by
            default it is the same. Some optimizers create their states before the first step.
    """
    for group in optimizer.param_groups:
        group["params"] = [replaced.get(old, old) for old in group["params"]]
    for old in list(optimizer.state):
        if old not in replaced:
            continue
        states = optimizer.state.pop(old)
        for name, value in states.items():
            if cut is not None and isinstance(value, Tensor) and value.shape == old.shape:
                states[name] = cut(old, value)
        optimizer.state[replaced[old]] = states


def _find_ties(model: nn.Module) -> list[list[str]]:
    """Returns the names of each parameter that has several."""
    names: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(parameter, []).append(name)
    return [shared for shared in names.values() if len(shared) > 1]


def _refuse_unsuitable(parameters: dict[str, nn.Parameter]) -> None:
    scalars = [name for name, parameter in parameters.items() if not parameter.dim()]
    if scalars:
        raise ValueError(
            f"env_type='fsdp' splits parameters along their first dimension, and "
            f"{', '.join(scalars[:MOST_NAMES])} has none; use 'pytorchDDP' or 'deepspeed'"
        )
    fixed = [name for name, each in parameters.items() if hasattr(each, "keeps_fp32")]
    trained = [name for name in fixed if parameters[name].requires_grad]
    if trained:
        raise ValueError(
            f"env_type='fsdp' would round {trained[0]}, which is trained in fp32; use 'pytorchDDP', "
            "'deepspeed' or 'deepspeed+mpu'"
        )


def _make_device_mesh(
    mesh: ParallelMesh, replicas: int, holders: tuple[Axis, ...]
) -> tuple[dist.ProcessGroup, DeviceMesh]:
    """Returns the ranks that split one replica's parameters, and the mesh of all that hold them:
    [ranks], or [replicas, ranks]. Collective.

    Args:
        holders: The axes of the ranks that hold the same parameters.
    """
    replicate_group, group = mesh.split_data_axis(replicas, holders)
    if replicate_group is None:
        return group, DeviceMesh.from_group(group, mesh.device_type)
    ranks = torch.tensor(dist.get_process_group_ranks(mesh.group(*holders)))
    return group, DeviceMesh.from_group(
        [replicate_group, group],
        mesh.device_type,
        mesh=ranks.view(replicas, -1),
        mesh_dim_names=("replicate", "shard"),
    )


def _remove_hooks(module: Any) -> None:
    """Reverses `fully_shard` of one module, for which torch 2.13 has no function."""
    from torch.distributed._composable.contract import REGISTRY_KEY, STATE_KEY
    from torch.distributed._composable_state import _module_state_mapping

    state = module._get_fsdp_state()
    state._pre_forward_hook_handle.remove()
    state._post_forward_hook_handle.remove()
    for group in state._fsdp_param_groups:
        for handles in (
            group._module_to_pre_save_state_dict_hook_handle,
            group._module_to_pre_load_state_dict_hook_handle,
        ):
            for handle in handles.values():
                handle.remove()
        for parameter in group.fsdp_params:
            parameter._post_load_hook_handle.remove()
    _module_state_mapping.pop(module)
    module.__class__ = find_model_class(module)
    for key in (STATE_KEY, REGISTRY_KEY):
        vars(module).pop(key, None)
