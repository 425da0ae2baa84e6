"""Trains with DeepSpeed, and converts its optimizer state from and to whole tensors."""

from __future__ import annotations

import io
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager, redirect_stdout
from typing import Any, cast

import deepspeed
import torch
import torch.distributed as dist
from deepspeed.runtime import compiler
from deepspeed.runtime.constants import BFLOAT16
from deepspeed.runtime.zero.config import ZERO_OPTIMIZATION
from deepspeed.runtime.zero.utils import ZERO_SUPPORTED_OPTIMIZERS
from deepspeed.utils import (
    groups,
    safe_get_local_fp32_param,
    safe_get_local_optimizer_state,
    safe_set_full_fp32_param,
    safe_set_full_optimizer_state,
    safe_set_local_fp32_param,
    safe_set_local_optimizer_state,
)
from torch import Tensor, nn
from torch.nn import functional

from ...checkpoint.rank_files import MASTER_WEIGHT, TensorPart
from ...models.outputs import ModelOutput
from ...mpu import ParallelMesh
from ...mpu.mesh import EXPERT_REPLICA_AXES
from ..arguments.training_arguments import TrainingArguments
from ..launch.phase import phase
from ..launch.ranks import Ranks
from ..optimizers.adamw import AdamW, clip_gradients
from ..optimizers.registry import ELEMENTWISE_CLASSES
from ..optimizers.whole_matrix import WholeMatrixOptimizer
from .buckets import OrderedGradients
from .deepspeed_config import deepspeed_config, zero_stage
from .engine import Forward, StepOutcome
from .optimizers import name_expert_groups, show_whole_matrix_names
from .state import load_state_tensors, model_tensors, persistent_buffers, state_tensors

ZERO_SUPPORTED_OPTIMIZERS.append(AdamW)  # like the class that it extends; ZeRO warns of others


class DeepSpeedEngine:
    """An `Engine` that uses DeepSpeed, with any ZeRO stage.

    ZeRO's partitions are flat. Each rank saves its own; DeepSpeed's functions read those of stage
    3, and load the states of all three stages.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        arguments: TrainingArguments,
        ranks: Ranks,
    ) -> None:
        self.module = model
        self.optimizer = optimizer
        self.applied_steps = 0
        self._replicas = ranks.replica_size
        self._mesh = ranks.mesh
        self._rank = ranks.replica_rank
        self._zero = zero_stage(arguments)
        self._saves_state = arguments.save_optim
        self._keeps_master_weights = arguments.precision != "fp32"
        self._needs_whole_matrices = isinstance(optimizer, WholeMatrixOptimizer)
        # The states that ZeRO splits like the parameters.
        self._states: tuple[str, ...] = ()
        self._counts_steps_by_group = self._needs_whole_matrices
        entry = ELEMENTWISE_CLASSES.get(type(optimizer).__name__)
        if isinstance(optimizer, WholeMatrixOptimizer):
            self._states = optimizer.element_states
        elif entry is not None:
            self._states = entry.element_states
            self._counts_steps_by_group = entry.counts_steps_by_group
        self.takes_found_inf = False  # DeepSpeed's optimizers read on the host what they decide by
        self.updates_in_backward = False

        _check_device(arguments)
        if self._zero and entry is None and not self._needs_whole_matrices:
            raise ValueError(
                f"ZeRO stage {self._zero} splits single parameters, and {type(optimizer).__name__} "
                f"may need whole ones; use zero_stage=0, {', '.join(ELEMENTWISE_CLASSES)}, or the "
                f"arguments optimizer={show_whole_matrix_names()}"
            )
        self._names: dict[Any, str] = {}
        self._owners: dict[Any, str] = {}  # the trained ones
        for name, parameter in model.named_parameters():
            self._names[parameter] = name
            if parameter.requires_grad:
                self._owners[parameter] = name
        if self._zero:
            _check_groups(optimizer, self._zero, set(self._owners))

        self._linear = functional.linear  # DeepSpeed replaces it under stage 3
        self._hooks: list[Any] = []
        if self._zero == 3:
            self._hooks.append(model.register_forward_hook(_as_dict))
        # DeepSpeed would compile this CPU collective at run time, with a lock file that a killed
        # run leaves behind.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        _import_muon()
        trained = sum(parameter.numel() for parameter in self._owners)
        if ranks.ep_size > 1:
            # Ranks may have unequal numbers of experts, but must cut other gradients at equal places.
            trained = max(ranks.gather(trained))
        config = deepspeed_config(arguments, ranks.replica_size, trained)
        # Only one of the two clips.
        self._clip_grad = arguments.clip_grad
        if config["gradient_clipping"]:
            self._clip_grad = 0.0
        self._engine: Any = self._initialize(model, arguments, ranks, config)

        # A forward pass updates buffers from its own samples. As in DDP, those of the first replica
        # are broadcast.
        self._buffers: list[Tensor] = []
        if ranks.replica_size > 1:
            self._buffers = list(persistent_buffers(model).values())
        self._replica_group = ranks.mesh.get_data_parallel_group() if ranks.mesh else None
        if self._zero and self._states:
            self._create_element_states()
        if self._zero and isinstance(optimizer, WholeMatrixOptimizer):
            # A parameter of this rank's share -> where each of its parameters begins in the share.
            partitions: dict[Any, list[tuple[Any, int]]] = {}
            for own, parameters, group in self._partitions():
                start = group.rank() * own.numel()
                partitions[own] = [(each, each.storage_offset() - start) for each in parameters]
            shard_group = self._replica_group if ranks.replica_size > 1 else None
            optimizer.set_partitions(partitions, ranks.mesh, shard_group)
        if self._zero == 3:
            self._hooks.append(model.register_forward_hook(_as_output))

    def _initialize(
        self, model: nn.Module, arguments: TrainingArguments, ranks: Ranks, config: dict[str, Any]
    ) -> Any:
        """Returns DeepSpeed's engine, and sets `model`, which runs the forward passes."""
        if ranks.mesh is not None and ranks.ep_size > 1:
            mark_experts(model, ranks.mesh)
        mpu = ranks.mesh if arguments.env_type == "deepspeed+mpu" else None
        overlaps = self._zero in (1, 2) and config["zero_optimization"].get("overlap_comm", False)
        with own_choices(buckets=overlaps, experts=has_dealt_experts(model)), quiet_setup():
            self.model = deepspeed.initialize(
                model=model, optimizer=self.optimizer, config=config, mpu=mpu
            )[0]
        if overlaps:
            OrderedGradients(self.model.optimizer, model)
        # Without an optimizer of its own, DeepSpeed reduces those that are marked.
        if ranks.ep_size > 1:
            self.model.has_moe_layers = True
        return self.model

    @property
    def loss_scale(self) -> float | None:
        scaler = getattr(self._engine.optimizer, "loss_scaler", None)
        if scaler is None or not self._engine.fp16_enabled():
            return None
        return float(scaler.cur_scale)

    def forward_backward(self, forward: Forward, micro_batches: int) -> Tensor:
        losses: list[Tensor] = []
        for k in range(micro_batches):
            # DeepSpeed would tell its optimizer in a hook on the model's output, which it does not
            # find in a `ModelOutput`; the optimizer would then reduce the gradients of the wrong
            # micro-batch.
            self._engine.set_gradient_accumulation_boundary(k == micro_batches - 1)
            loss = forward(k)
            if hasattr(self._engine.optimizer, "clear_lp_grads"):
                # In bf16, ZeRO 1 adds the gradients of each pass to sums in fp32. DeepSpeed clears
                # them in a hook on the model's output, which it does not find in a `ModelOutput`.
                self._engine.optimizer.clear_lp_grads()
            # DeepSpeed averages over the data-parallel ranks, but the ranks' losses already add up
            # to the mean.
            with phase("backward"):
                self._engine.backward(loss * self._replicas, scale_wrt_gas=False)
            if not self._engine.is_gradient_accumulation_boundary():
                self._engine.step()  # here it only counts the micro-batch
            losses.append(loss.detach().view(()))
        return torch.stack(losses)

    def step(self, found_inf: Tensor | None = None) -> StepOutcome:
        skipped = self._engine.skipped_steps
        norm: Any = None
        if not self._zero:
            norm = clip_gradients(list(self._owners), self._clip_grad, self.optimizer, self._mesh)
        self._engine.step()
        for buffer in self._buffers:
            dist.broadcast(buffer, group=self._replica_group, group_src=0)
        # ZeRO also skips a step if gradients are not finite in other precisions, where no loss
        # scale is to blame.
        applied = self._engine.skipped_steps == skipped or self.loss_scale is None
        self.applied_steps += applied
        if self.applied_steps == 1 and self._saves_state and not self._zero:
            state_tensors(self.optimizer, self._names)  # raises now if the states cannot be saved
        if norm is None:
            norm = self._engine.get_global_grad_norm()
        return StepOutcome(None if norm is None else torch.as_tensor(norm), applied)

    def model_tensors(self) -> dict[str, Tensor | TensorPart]:
        tensors: dict[str, Tensor | TensorPart] = dict(model_tensors(self.module))
        if self._zero == 3:
            parameters: Any = dict(self.module.named_parameters())
            tensors |= {
                name: self._part(whole, whole.ds_tensor.detach())
                for name, whole in parameters.items()
            }
        return tensors

    def optimizer_tensors(self) -> dict[str, Tensor | TensorPart]:
        if not self._zero:
            return dict(state_tensors(self.optimizer, self._names))
        if self._zero == 3:
            return self._tensors_split_by_parameter()
        # What is kept of whole matrices, such as Adafactor's statistics of rows, is the same on all
        # ranks.
        tensors: dict[str, Tensor | TensorPart] = {}
        tensors |= {} if self._states else state_tensors(self.optimizer, self._names)
        for own, parameters, ranks in self._partitions():
            states = self.optimizer.state[own]
            parts = {state: states[state] for state in self._states if state in states}
            if self._keeps_master_weights:
                parts[MASTER_WEIGHT] = own.detach()
            share = ranks.rank() * own.numel()
            for parameter in parameters:
                # DeepSpeed has made the parameters views of one tensor with the same layout.
                start = max(0, share - parameter.storage_offset())
                place = max(0, parameter.storage_offset() - share)
                count = max(0, min(parameter.numel() - start, own.numel() - place))
                for state, part in parts.items():
                    values = part.narrow(0, min(place, own.numel()), count)
                    tensors[f"{state}/{self._owners[parameter]}"] = TensorPart(
                        tuple(parameter.shape), start, values
                    )
        return tensors

    def _partitions(self) -> Iterator[tuple[Any, list[Any], dist.ProcessGroup]]:
        """Yields of each parameter group, under ZeRO 1 and 2: this rank's share of the parameters,
        concatenated; the parameters; the ranks that share them.
        """
        zero = self._engine.optimizer
        if hasattr(zero, "bf16_groups"):
            groups_of_parameters = zero.bf16_groups
        else:
            groups_of_parameters = zero.bit16_groups
        for group, parameters, ranks in zip(
            self.optimizer.param_groups,
            groups_of_parameters,
            zero.real_dp_process_group,
            strict=True,
        ):
            [own] = group["params"]
            yield own, parameters, ranks

    def _tensors_split_by_parameter(self) -> dict[str, Tensor | TensorPart]:
        tensors: dict[str, Tensor | TensorPart] = {}
        for parameter, name in self._owners.items():
            for state in self._states:
                part = cast(Tensor, safe_get_local_optimizer_state(parameter, state))
                tensors[f"{state}/{name}"] = self._part(parameter, part)
            if self._keeps_master_weights:
                part = cast(Tensor, safe_get_local_fp32_param(parameter))
                tensors[f"{MASTER_WEIGHT}/{name}"] = self._part(parameter, part)
        return tensors

    def _part(self, parameter: Any, partition: Tensor) -> TensorPart:
        """Returns this rank's part of a parameter that ZeRO 3 has split, without its padding."""
        start = self._rank * partition.numel()
        count = min(max(0, parameter.ds_numel - start), partition.numel())
        return TensorPart(tuple(parameter.ds_shape), start, partition.reshape(-1)[:count])

    def load_optimizer_tensors(self, tensors: Mapping[str, Tensor]) -> None:
        if not self._zero or not self._states:
            load_state_tensors(self.optimizer, self._names, tensors, self.applied_steps)
        if not self._zero:
            return
        for parameter, name in self._owners.items():
            for state in self._states:
                if f"{state}/{name}" in tensors:
                    self._set(parameter, tensors[f"{state}/{name}"], state)
            if f"{MASTER_WEIGHT}/{name}" in tensors and self._keeps_master_weights:
                self._set(parameter, tensors[f"{MASTER_WEIGHT}/{name}"])
        if self._states:
            self._set_steps(self.applied_steps)

    def counters(self) -> dict[str, float]:
        counters: dict[str, float] = {"applied_steps": self.applied_steps}
        if self.loss_scale is not None:
            scaler = self._engine.optimizer.loss_scaler
            counters |= {name: float(getattr(scaler, name)) for name in SCALER_FIELDS}
        return counters

    def load_counters(self, counters: dict[str, float]) -> None:
        self.applied_steps = int(counters["applied_steps"])
        if self.loss_scale is None or not all(name in counters for name in SCALER_FIELDS):
            return
        scaler = self._engine.optimizer.loss_scaler
        for name in SCALER_FIELDS:
            kind = type(getattr(scaler, name))
            setattr(scaler, name, kind(counters[name]))

    def close(self, *, whole: bool) -> None:
        parameters: dict[str, Tensor] = {}
        if whole and self._zero == 3:
            with deepspeed.zero.GatheredParameters(list(self.module.parameters())):
                for name, value in self.module.named_parameters():
                    parameters[name] = value.detach().clone()
        self._engine.destroy()
        for hook in self._hooks:
            hook.remove()
        # For the next engine of this process.
        functional.linear = self._linear
        groups.mpu = None
        for known in (
            groups._EXPERT_PARALLEL_GROUP,
            groups._EXPERT_PARALLEL_GROUP_RANKS,
            groups._EXPERT_DATA_PARALLEL_GROUP,
            groups._EXPERT_DATA_PARALLEL_GROUP_RANKS,
        ):
            known.clear()
        for name, value in parameters.items():
            self.module.get_parameter(name).data = value

    def _set(self, parameter: Any, value: Tensor, state: str | None = None) -> None:
        """Sets a state of a parameter, or its fp32 value if `state` is None."""
        if self._zero == 3:
            # DeepSpeed 0.19 can set a whole tensor only if its elements divide evenly, but
            # partitions are padded.
            size = parameter.ds_tensor.numel()
            padded = torch.zeros(size * self._replicas, dtype=value.dtype)
            padded[: value.numel()] = value.flatten()
            own = padded.narrow(0, size * self._rank, size)
            if state is None:
                safe_set_local_fp32_param(parameter, own)
            else:
                safe_set_local_optimizer_state(parameter, own, state)
        elif state is None:
            safe_set_full_fp32_param(parameter, value)
        else:
            safe_set_full_optimizer_state(parameter, value, state)

    def _set_steps(self, step: int) -> None:
        """Sets the optimizer's step counts, which are kept for each parameter or each group."""
        for state in self.optimizer.state.values():
            if "step" in state:
                state["step"].fill_(step)
        for group in self.optimizer.param_groups:
            if "step" in group:
                group["step"] = step

    def _create_element_states(self) -> None:
        """Creates the optimizer's states, as its first step would.

        DeepSpeed 0.19 would then link only the states of the first parameter group to the
        parameters. At this point ZeRO has put its flat partitions into the parameter groups.
        """
        groups = self.optimizer.param_groups
        partitions: list[tuple[Any, tuple[str, ...]]] = []
        if self._zero == 3:
            for partition in self._engine.optimizer.fp32_partitioned_groups_flat:
                partitions.append((partition, self._states))
        else:
            for group in groups:
                names = self._states
                if isinstance(self.optimizer, WholeMatrixOptimizer):
                    names = self.optimizer.list_element_states(group)
                for partition in group["params"]:
                    partitions.append((partition, names))
        for partition, names in partitions:
            state: dict[str, Any] = {name: torch.zeros_like(partition) for name in names}
            if not self._counts_steps_by_group:
                state["step"] = torch.tensor(0.0)
            self.optimizer.state[partition] = state
        if self._counts_steps_by_group:
            for group in groups:
                group["step"] = 0
        if self._zero < 3:
            self._engine.optimizer._lazy_init_hp_params_optimizer_state()


def _as_dict(module: nn.Module, inputs: Any, output: Any) -> Any:
    """Returns the zoo's output as a dict; a forward hook.

    When a gradient of an output arrives, DeepSpeed gathers the parameters that the model uses
    outside its layers. It finds outputs only in tensors, tuples and dicts.
    """
    if not isinstance(output, ModelOutput):
        return None
    shown: dict[str, Any] = {"output": output}
    for name, value in vars(output).items():
        if isinstance(value, Tensor):
            shown[name] = value
    return shown


def _as_output(module: nn.Module, inputs: Any, results: Any) -> Any:
    """Reverses `_as_dict`."""
    if not isinstance(results, dict) or not isinstance(results.get("output"), ModelOutput):
        return None
    output = results.pop("output")
    vars(output).update(results)
    return output


def mark_experts(model: nn.Module, mesh: ParallelMesh) -> None:
    """Marks the experts as DeepSpeed's convention is, and names the groups that hold them.

    DeepSpeed reduces the gradients of marked parameters over the ranks of `expert_data_parallel`
    alone, and divides the sum by the number of all data-parallel ranks, as it does for the others.
    """
    name = name_expert_groups(mesh.size("expert"))
    groups._EXPERT_PARALLEL_GROUP[name] = mesh.group("expert")
    groups._EXPERT_PARALLEL_GROUP_RANKS[name] = dist.get_process_group_ranks(mesh.group("expert"))
    replicas = mesh.group(*EXPERT_REPLICA_AXES)
    groups._EXPERT_DATA_PARALLEL_GROUP[name] = replicas
    groups._EXPERT_DATA_PARALLEL_GROUP_RANKS[name] = dist.get_process_group_ranks(replicas)
    for parameter in model.parameters():
        if getattr(parameter, "expert_parallel", False):
            marked: Any = parameter
            marked.allreduce = False
            marked.group_name = name


def has_dealt_experts(model: nn.Module) -> bool:
    """Returns whether a model trains experts, or their adapters, that are dealt over ranks."""
    for parameter in model.parameters():
        if parameter.requires_grad and getattr(parameter, "expert_parallel", False):
            return True
    return False


SCALER_FIELDS = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")


def _check_device(arguments: TrainingArguments) -> None:
    """Raises ValueError if DeepSpeed does not support the precision on this machine."""
    from deepspeed.accelerator import get_accelerator

    accelerator: Any = get_accelerator()
    if arguments.precision == "fp16" and not accelerator.is_fp16_supported():
        raise ValueError(
            "precision='fp16': DeepSpeed does not compute in fp16 on this "
            f"{accelerator.device_name()}; use 'bf16' or 'fp32'"
        )


def _check_groups(optimizer: torch.optim.Optimizer, stage: int, trained: set[nn.Parameter]) -> None:
    """Raises ValueError for parameter groups that DeepSpeed 0.19 cannot split."""
    groups = [set(group["params"]) for group in optimizer.param_groups]
    if any(group.get("amsgrad") for group in optimizer.param_groups):
        raise ValueError(
            f"amsgrad keeps a state that ZeRO stage {stage} does not split; use zero_stage=0"
        )
    if any(not group & trained for group in groups):
        raise ValueError(
            f"a parameter group of the optimizer has no trained parameter, but ZeRO stage {stage} "
            "needs one in each; leave that group out"
        )
    for group in optimizer.param_groups:
        dealt = [getattr(each, "expert_parallel", False) for each in group["params"]]
        if any(dealt) and not (all(dealt) and group.get("moe")):
            raise ValueError(
                f"ZeRO stage {stage} needs experts that are dealt over ranks in parameter groups of "
                "their own; leave the optimizer to the arguments, or use zero_stage=0"
            )
    if stage == 3 and trained - set().union(*groups):
        raise ValueError(
            "ZeRO stage 3 updates all parameters that require gradients; freeze those not in the "
            "optimizer"
        )


@contextmanager
def quiet_setup() -> Generator[None]:
    """Hides what DeepSpeed prints while it is set up: the memory in use, in bf16, and the layers of a
    pipeline, whose stages the trainer shows itself.
    """
    with redirect_stdout(io.StringIO()):
        yield


@contextmanager
def own_choices(*, buckets: bool, experts: bool) -> Generator[None]:
    """Decides two things for DeepSpeed 0.19 when it chooses an optimizer.

    Args:
        buckets: Let ZeRO 1 in bf16 use the optimizer of its other precisions, which reduces
            gradients in the backward pass. DeepSpeed would choose its BF16_Optimizer, which reduces
            all of them afterwards. Both add up micro-batches in fp32 and keep fp32 master weights.
        experts: Tell it that the model has experts, which it finds in layers of its own alone.
    """
    kind: Any = deepspeed.DeepSpeedEngine
    original = kind._do_optimizer_sanity_check

    def choose(engine: Any, optimizer: Any) -> Any:
        if experts:
            engine.has_moe_layers = True
        chosen = original(engine, optimizer)
        return ZERO_OPTIMIZATION if buckets and chosen == BFLOAT16 else chosen

    kind._do_optimizer_sanity_check = choose
    try:
        yield
    finally:
        kind._do_optimizer_sanity_check = original


def _import_muon() -> None:
    """Imports DeepSpeed's Muon, which DeepSpeed needs for any optimizer, without torch's compiler
    (saves a second).
    """
    original = compiler.compile
    compiler.compile = lambda: compiler.dummy_decorator
    try:
        import deepspeed.runtime.zero.muon.muon_optimizer  # noqa: F401
    finally:
        compiler.compile = original
