"""Prepares a model for training: checks that it fits; sets device, precision and recomputation;
compiles it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ...models.blocks.stack import Block, BlockList
from ...models.config import ModelConfig
from ...models.parallel_config import Recompute
from ...mpu import context_size, tp_size
from ..arguments.training_arguments import TrainingArguments
from ..environments import ENVIRONMENTS
from ..launch.ranks import Ranks
from ..precisions import PRECISIONS

# The graphs of one function that a run makes besides one a block: for batches of other sizes.
DEFAULT_GRAPHS = 8

DTYPES = {name: getattr(torch, precision.dtype) for name, precision in PRECISIONS.items()}


def prepare_model(
    model: nn.Module, device: torch.device, arguments: TrainingArguments, ranks: Ranks
) -> None:
    """Moves and casts the model in place, switches recomputation on, and compiles it.

    Raises ValueError if `model` is no module, has another tensor-parallel size than `arguments`, or
    cannot be split.
    """
    if not isinstance(model, nn.Module):
        raise ValueError(
            "model must be a torch.nn.Module, such as shardzoo.from_pretrained(path), not "
            f"{model!r}"
        )
    wrapper = type(model).__name__
    if wrapper in ("OptimizedModule", "DataParallel", "DistributedDataParallel"):
        raise ValueError(
            f"the model is wrapped in a {wrapper}, which would change its checkpoints; pass the "
            "model itself"
            + (", compiled in place by model.compile()" if wrapper == "OptimizedModule" else "")
        )
    native = isinstance(getattr(model, "config", None), ModelConfig)
    size = tp_size(getattr(model, "mesh", None))
    if ranks.tp_size > 1 and not native:
        raise ValueError(
            f"a {type(model).__name__} cannot be split over {ranks.tp_size} processes; build a "
            "model of the zoo with shardzoo.from_pretrained(path, mesh=trainer.mesh)"
        )
    if native and size != ranks.tp_size:
        raise ValueError(
            f"the model is split over {size} processes, but model_parallel_size is "
            f"{ranks.tp_size}; build it with mesh=trainer.mesh"
        )
    mesh = getattr(model, "mesh", None)
    dealt = 1 if mesh is None else mesh.size("expert")
    if native and dealt != ranks.ep_size:
        raise ValueError(
            f"the model deals experts over {dealt} processes, but expert_parallel_size is "
            f"{ranks.ep_size}; build it with mesh=trainer.mesh"
        )
    if ranks.ep_size > 1:
        _check_experts(model, arguments, ranks)
    shared = context_size(getattr(model, "mesh", None))
    if ranks.cp_size > 1 and not native:
        raise ValueError(
            f"the sequences of a {type(model).__name__} cannot be split over {ranks.cp_size} "
            "processes; build a model of the zoo with shardzoo.from_pretrained(path, "
            "mesh=trainer.mesh)"
        )
    if native and shared != ranks.cp_size:
        raise ValueError(
            f"the model splits sequences over {shared} processes, but context_parallel_size is "
            f"{ranks.cp_size}; build it with mesh=trainer.mesh"
        )
    stages = getattr(getattr(model, "stage", None), "counts", (1,))
    if len(stages) != ranks.pp_size:
        raise ValueError(
            f"the model is cut into {len(stages)} pipeline stages, but pipeline_parallel_size is "
            f"{ranks.pp_size}; build a model of the zoo with mesh=trainer.mesh"
        )
    dtype = DTYPES[arguments.precision]
    if ENVIRONMENTS[arguments.env_type].uses_fsdp:
        # It rounds the parameters when it gathers them; what each rank keeps of them is fp32. A
        # model without storage gets it when it is split.
        is_on_meta = any(parameter.is_meta for parameter in model.parameters())
        model.to(None if is_on_meta else device, torch.float32)
        for buffer in model.buffers():
            if buffer.is_floating_point():
                buffer.data = buffer.data.to(dtype)
    elif any(parameter.is_meta for parameter in model.parameters()):
        raise ValueError(
            "the model is on the meta device, so it has no weights; only env_type='fsdp' gives it "
            "some"
        )
    else:
        model.to(device, dtype)
    if arguments.recompute != "none":
        _recompute(model, arguments.recompute)
    if arguments.torch_compile:
        uses_fsdp = ENVIRONMENTS[arguments.env_type].uses_fsdp
        compile_model(model, arguments.torch_compile_backend, keeps_hooks_outside=uses_fsdp)


def _check_experts(model: nn.Module, arguments: TrainingArguments, ranks: Ranks) -> None:
    """Raises ValueError on every rank if a model has no experts to deal, or not where it needs them."""
    has_experts = any(getattr(each, "expert_parallel", False) for each in model.parameters())
    stages = ranks.gather((ranks.pp_rank, has_experts))
    if not any(has for _, has in stages):
        raise ValueError(
            f"expert_parallel_size={ranks.ep_size} deals experts over processes, and a "
            f"{type(model).__name__} has none; use expert_parallel_size=1"
        )
    trains_others = False
    for parameter in model.parameters():
        if parameter.requires_grad and not getattr(parameter, "expert_parallel", False):
            trains_others = True
    needs_others = ranks.pp_size == 1 and not ENVIRONMENTS[arguments.env_type].uses_fsdp
    if needs_others and not trains_others:
        raise ValueError(
            f"only experts that are dealt over ranks are trained, and env_type={arguments.env_type!r} "
            "needs another trained parameter; let lora_target_modules name some, use env_type='fsdp', "
            "or expert_parallel_size=1"
        )
    without = sorted({stage for stage, has in stages if not has})
    if without and arguments.precision != "fp32":
        # DeepSpeed's bf16 optimizer of pipelines sums the norms of experts over the stages.
        raise ValueError(
            f"pipeline stage {', '.join(map(str, without))} has no experts, which expert_parallel_size="
            f"{ranks.ep_size} needs in every stage with precision={arguments.precision!r}; use fewer "
            "stages, or 'fp32'"
        )


def compile_model(model: nn.Module, backend: str, *, keeps_hooks_outside: bool = False) -> None:
    """Compiles the blocks of a model of the zoo, each as one graph, or another model as a whole.

    Blocks of a stack that differ in nothing but their parameters and dropout sites share a graph.

    Args:
        keeps_hooks_outside: Whether the hooks of a block run beside its graph instead of in it.
    """
    if not isinstance(getattr(model, "config", None), ModelConfig):
        if keeps_hooks_outside:
            raise ValueError(
                f"torch_compile with env_type='fsdp' is for models of the zoo, and this is a "
                f"{type(model).__name__}; use torch_compile=False, or env_type='pytorchDDP'"
            )
        model.compile(backend=backend)
        return
    blocks = [module for module in model.modules() if isinstance(module, Block)]
    _allow_graphs(DEFAULT_GRAPHS + len(blocks))
    for block in blocks:
        if keeps_hooks_outside:
            block.compile_compute(backend)
        else:
            block.compile(backend=backend, fullgraph=True)


def _allow_graphs(count: int) -> None:
    """Lets PyTorch compile one function into so many graphs.

    It refuses the ninth by default, as a sign of a mistake. Blocks can differ on purpose, such as
    those of a GPT-2 with `scale_attn_by_inverse_layer_idx`, each of which needs a graph.
    """
    import torch._dynamo.config as limits  # late: it takes longer to import than PyTorch

    limits.recompile_limit = max(limits.recompile_limit, count)
    most = max(limits.accumulated_recompile_limit, limits.recompile_limit)
    limits.accumulated_recompile_limit = most


def _recompute(model: Any, mode: Recompute) -> None:
    if isinstance(getattr(model, "config", None), ModelConfig):
        set_recompute(model, mode)
    elif mode == "offload":
        raise ValueError(
            f"recompute='offload' is for models of the zoo, and this is a {type(model).__name__}; use "
            "recompute='full'"
        )
    elif hasattr(model, "gradient_checkpointing_enable"):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    else:
        raise ValueError(
            f"recompute={mode!r}: {type(model).__name__} cannot recompute activations; use "
            "recompute='none'"
        )


def set_recompute(model: nn.Module, mode: Recompute) -> None:
    """Sets which activations a model of the zoo recomputes, as `ParallelConfig.recompute` says."""
    for blocks in model.modules():
        if isinstance(blocks, BlockList):
            blocks.set_recompute(mode)
    module: Any
    for module in model.modules():
        if isinstance(getattr(module, "recompute", None), bool):
            module.recompute = mode == "selective"
