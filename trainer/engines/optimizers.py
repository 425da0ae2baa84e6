"""Creates optimizers by name, and checks those that the user passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn, optim
from torch.optim import Optimizer

from ...models.pipeline import copied_parameters
from ...mpu import tp_size
from ..arguments.training_arguments import TrainingArguments
from ..launch.ranks import Ranks
from .deepspeed_config import zero_stage
from .torch_engine import AdamW
from .whole_matrix import Adafactor, Lamb, WholeMatrixOptimizer

# Optimizers whose update of an element depends on that element alone.
ELEMENTWISE_OPTIMIZERS = (
    optim.Adam, optim.AdamW, optim.SGD, optim.RMSprop, optim.Adagrad, optim.Adadelta, optim.Adamax, optim.NAdam,
    optim.RAdam, optim.Rprop, optim.ASGD,
)  # fmt: skip
# The states that ZeRO splits like the parameter, by the name of the optimizer.
ELEMENT_STATES = {
    "AdamW": ("exp_avg", "exp_avg_sq"),
    "Adam": ("exp_avg", "exp_avg_sq"),
    "Lion": ("exp_avg",),
}


def check_stages(model: nn.Module, ranks: Ranks) -> None:
    """Raises ValueError on every rank if a pipeline stage has nothing to train, which DeepSpeed's engine needs."""
    copies = copied_parameters(model)
    trains = any(
        parameter.requires_grad
        for name, parameter in model.named_parameters()
        if name not in copies
    )
    idle = sorted(
        {stage for stage, trained in ranks.gather((ranks.pp_rank, trains)) if not trained}
    )
    if ranks.pp_size > 1 and 0 < len(idle) < ranks.pp_size:
        raise ValueError(
            f"all parameters of pipeline stage {', '.join(map(str, idle))} are frozen; freeze fewer, or use "
            "pipeline_parallel_size=1"
        )


def make_optimizer(model: nn.Module, arguments: TrainingArguments) -> torch.optim.Optimizer:
    """Returns the optimizer that `arguments` name, over the parameters that require gradients.

    "adam" is FlagAI's name for AdamW: the weight decay is decoupled (Loshchilov & Hutter 2019). "adafactor" (Shazeer &
    Stern 2018) comes from transformers; "lion" (Chen et al. 2023) and "lamb" (You et al. 2020) from pytorch_optimizer.
    Where parameters are split, or Adafactor's are padded, those of `whole_matrix.py` compute the same.
    """
    groups = weight_decay_groups(model, arguments.weight_decay)
    betas = (arguments.beta1, arguments.beta2)
    if arguments.optimizer in ("adamw", "adam"):
        return AdamW(groups, lr=arguments.lr, betas=betas, eps=arguments.adam_eps, fused=True)
    if arguments.optimizer == "adafactor":
        return _adafactor(groups, model, arguments)
    if arguments.optimizer == "lamb" and _is_split(model, arguments):
        return Lamb(groups, arguments.lr, betas, mesh=getattr(model, "mesh", None))
    import pytorch_optimizer

    kind: Any = pytorch_optimizer.Lion if arguments.optimizer == "lion" else pytorch_optimizer.Lamb
    return kind(groups, lr=arguments.lr, betas=betas)


def _adafactor(
    groups: Any, model: nn.Module, arguments: TrainingArguments
) -> torch.optim.Optimizer:
    relative, scale = arguments.relative_step, arguments.scale_parameter
    scale = relative if scale is None else scale
    lr = None if relative else arguments.lr
    if _is_split(model, arguments) or _is_padded(model):
        return Adafactor(
            groups,
            lr,
            relative_step=relative,
            scale_parameter=scale,
            mesh=getattr(model, "mesh", None),
        )
    from transformers.optimization import Adafactor as Unsplit

    return Unsplit(
        groups, lr=lr, relative_step=relative, scale_parameter=scale, warmup_init=relative
    )


def _is_split(model: nn.Module, arguments: TrainingArguments) -> bool:
    """Returns whether the optimizer gets parts of parameters; the same on all ranks."""
    if tp_size(getattr(model, "mesh", None)) > 1:
        return True
    return arguments.env_type.startswith("deepspeed") and zero_stage(arguments) > 0


def _is_padded(model: nn.Module) -> bool:
    shards = [
        (getattr(parameter, "shard", None), parameter.shape) for parameter in model.parameters()
    ]
    return any(shard is not None and tuple(shape) != shard.shape for shard, shape in shards)


def check_optimizer(optimizer: Any, model: nn.Module, tensor_parallel_size: int = 1) -> None:
    """Raises ValueError for an optimizer that the loop cannot step or save, or that does not train `model`."""
    if not isinstance(optimizer, Optimizer):
        raise ValueError(
            f"optimizer must be a torch.optim.Optimizer over the model's parameters, not {optimizer!r}"
        )
    kind = type(optimizer).__name__
    if isinstance(optimizer, torch.optim.LBFGS):
        raise ValueError(
            "LBFGS recomputes the loss within a step, which the trainer does not support; use another optimizer"
        )
    if callable(getattr(optimizer, "train", None)):
        raise ValueError(
            f"{kind} keeps separate weights for training and for evaluation, and the trainer does not switch between "
            "them; use another optimizer"
        )
    if type(optimizer).state_dict is not Optimizer.state_dict or isinstance(
        vars(optimizer).get("optimizer"), Optimizer
    ):
        raise ValueError(
            f"{kind} keeps state that belongs to no parameter, which the trainer does not save; use another optimizer"
        )
    splittable = (
        isinstance(optimizer, (*ELEMENTWISE_OPTIMIZERS, WholeMatrixOptimizer))
        or kind in ELEMENT_STATES
    )
    if tensor_parallel_size > 1 and not splittable:
        raise ValueError(
            f"{kind} may need whole parameters, which model_parallel_size={tensor_parallel_size} splits; use "
            f"{', '.join(known.__name__ for known in ELEMENTWISE_OPTIMIZERS)} or Lion, the arguments "
            "optimizer='adafactor' or 'lamb', or model_parallel_size=1"
        )
    own = set(model.parameters())
    foreign = sum(p not in own for group in optimizer.param_groups for p in group["params"])
    if foreign:
        raise ValueError(
            f"{foreign} parameters of the optimizer do not belong to the model; create it from model.parameters()"
        )


def weight_decay_groups(model: nn.Module, weight_decay: float) -> list[dict[str, Any]]:
    """Returns parameter groups: matrices decay, biases and norms (fewer than two dimensions) do not.

    Raises ValueError if no parameter requires gradients.
    """
    matrices = [p for p in model.parameters() if p.requires_grad and p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.dim() < 2]
    groups = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if not groups:
        raise ValueError(
            "no parameter of the model requires gradients, so there is nothing to train"
        )
    return groups
