"""Creates the optimizer that a run's arguments name, and checks those that the user passes."""

from __future__ import annotations

from typing import Any

from torch import nn, optim
from torch.optim import Optimizer

from ...models.pipeline import find_copied_parameters
from ...models.sizes import find_hidden_matrices
from ...mpu import tp_size
from ..arguments.training_arguments import TrainingArguments
from ..environments import ENVIRONMENTS
from ..launch.ranks import Ranks
from ..optimizers.registry import (
    ELEMENTWISE_CLASSES,
    WHOLE_MATRIX_NAMES,
    OptimizerSettings,
    find_optimizer,
)
from ..optimizers.whole_matrix import WholeMatrixOptimizer
from .deepspeed_config import zero_stage

# torch's optimizers whose update of an element depends on that element alone.
ELEMENTWISE_OPTIMIZERS = (
    optim.Adam,
    optim.AdamW,
    optim.SGD,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.Rprop,
    optim.ASGD,
)


def make_optimizer(model: nn.Module, arguments: TrainingArguments) -> Optimizer:
    """Returns the optimizer that `arguments` name, over the parameters that require gradients.

    Raises ValueError if no parameter requires gradients.
    """
    entry = find_optimizer(arguments.optimizer)
    in_parts = _is_split(model, arguments) or (entry.padding_matters and _is_padded(model))
    settings = OptimizerSettings(
        lr=arguments.lr,
        beta1=arguments.beta1,
        beta2=arguments.beta2,
        adam_eps=arguments.adam_eps,
        relative_step=arguments.relative_step,
        scale_parameter=arguments.scale_parameter,
        muon_momentum=arguments.muon_momentum,
        muon_scaling=arguments.muon_scaling,
        in_parts=in_parts,
        mesh=getattr(model, "mesh", None),
    )
    groups = weight_decay_groups(model, arguments.weight_decay)
    if entry.hidden_matrix_states is not None:
        groups = separate_hidden_matrices(model, groups)
    environment = ENVIRONMENTS[arguments.env_type]
    if environment.uses_deepspeed and zero_stage(arguments) > 0:
        groups = separate_experts(groups, arguments.expert_parallel_size)
    return entry.build(groups, settings)


def separate_experts(
    groups: list[dict[str, Any]], expert_parallel_size: int
) -> list[dict[str, Any]]:
    """Returns parameter groups in which experts that are dealt over ranks are apart from all else, as
    ZeRO needs them.

    Fewer ranks hold the same experts than the same other parameters. DeepSpeed finds the groups of
    experts by `moe` and their ranks by `name`. `split_from` is the number of the group that they
    would otherwise be in, whose rate and other values they follow. They come last, since the ranks
    may have unequal numbers of them.
    """
    others: list[dict[str, Any]] = []
    experts: list[dict[str, Any]] = []
    for number, group in enumerate(groups):
        dealt = [each for each in group["params"] if getattr(each, "expert_parallel", False)]
        kept = [each for each in group["params"] if not getattr(each, "expert_parallel", False)]
        others.append({**group, "params": kept})
        if dealt:
            name = name_expert_groups(expert_parallel_size)
            marks = {"moe": True, "name": name, "split_from": number}
            experts.append({**group, "params": dealt, **marks})
    return others + experts


def name_expert_groups(expert_parallel_size: int) -> str:
    """Returns DeepSpeed's name of the process groups of experts that are dealt over so many ranks."""
    return f"ep_size_{expert_parallel_size}"


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns parameter groups: matrices decay, biases and norms (fewer than two dimensions) do
    not.

    Raises ValueError if no parameter requires gradients.
    """
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    matrices = [parameter for parameter in trained if parameter.dim() >= 2]
    vectors = [parameter for parameter in trained if parameter.dim() < 2]
    if not trained:
        raise ValueError(
            "no parameter of the model requires gradients, so there is nothing to train"
        )
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def separate_hidden_matrices(
    model: nn.Module, groups: list[dict[str, Any]]
) -> list[dict[str, Any]]:
    """Returns parameter groups with `is_hidden_matrix`, in which the matrices of hidden layers are
    apart from all else.
    """
    hidden = find_hidden_matrices(model)
    separated: list[dict[str, Any]] = []
    for group in groups:
        for is_hidden in (True, False):
            own = [each for each in group["params"] if (each in hidden) == is_hidden]
            if own:
                separated.append({**group, "params": own, "is_hidden_matrix": is_hidden})
    return separated


def _is_split(model: nn.Module, arguments: TrainingArguments) -> bool:
    """Returns whether the optimizer gets parts of parameters; the same on all ranks."""
    if tp_size(getattr(model, "mesh", None)) > 1:
        return True
    environment = ENVIRONMENTS[arguments.env_type]
    return environment.uses_fsdp or (environment.uses_deepspeed and zero_stage(arguments) > 0)


def _is_padded(model: nn.Module) -> bool:
    for parameter in model.parameters():
        shard = getattr(parameter, "shard", None)
        if shard is not None and tuple(parameter.shape) != shard.shape:
            return True
    return False


def check_stages(model: nn.Module, ranks: Ranks) -> None:
    """Raises ValueError on every rank if a pipeline stage has nothing to train, which DeepSpeed's
    engine needs.
    """
    copies = find_copied_parameters(model)
    trains = any(
        parameter.requires_grad
        for name, parameter in model.named_parameters()
        if name not in copies
    )
    stages = ranks.gather((ranks.pp_rank, trains))
    idle = sorted({stage for stage, stage_trains in stages if not stage_trains})
    if ranks.pp_size > 1 and 0 < len(idle) < ranks.pp_size:
        raise ValueError(
            f"all parameters of pipeline stage {', '.join(map(str, idle))} are frozen; freeze "
            "fewer, or use pipeline_parallel_size=1"
        )


def check_optimizer(optimizer: Any, model: nn.Module, tensor_parallel_size: int = 1) -> None:
    """Raises ValueError for an optimizer that the loop cannot step or save, or that does not train
    `model`.
    """
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            "optimizer must be a torch.optim.Optimizer over the model's parameters, not "
            f"{optimizer!r}"
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, optim.LBFGS):
        raise ValueError(
            "LBFGS recomputes the loss within a step, which the trainer does not support; use "
            "another optimizer"
        )
    if callable(getattr(optimizer, "train", None)):
        raise ValueError(
            f"{kind} keeps separate weights for training and for evaluation, and the trainer does "
            "not switch between them; use another optimizer"
        )
    has_own_state = type(optimizer).state_dict is not Optimizer.state_dict
    wraps_another = isinstance(vars(optimizer).get("optimizer"), Optimizer)
    if has_own_state or wraps_another:
        raise ValueError(
            f"{kind} keeps state that belongs to no parameter, which the trainer does not save; "
            "use another optimizer"
        )
    takes_parts = (
        isinstance(optimizer, (*ELEMENTWISE_OPTIMIZERS, WholeMatrixOptimizer))
        or kind in ELEMENTWISE_CLASSES
    )
    if tensor_parallel_size > 1 and not takes_parts:
        names = {known.__name__: None for known in ELEMENTWISE_OPTIMIZERS}
        known = ", ".join(names | dict.fromkeys(ELEMENTWISE_CLASSES))
        raise ValueError(
            f"{kind} may need whole parameters, which model_parallel_size={tensor_parallel_size} "
            f"splits; use {known}, the arguments optimizer={show_whole_matrix_names()}, or "
            "model_parallel_size=1"
        )
    own = set(model.parameters())
    foreign = sum(p not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ValueError(
            f"{foreign} parameters of the optimizer do not belong to the model; create it from "
            "model.parameters()"
        )


def show_whole_matrix_names() -> str:
    """Returns the names of the optimizers with versions for split matrices, for messages."""
    return " or ".join(repr(name) for name in WHOLE_MATRIX_NAMES)
