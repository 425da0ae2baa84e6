"""Finds the module or parameter where the first value that is not finite appears."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..engines.engine import Engine, ForwardStep


@torch.no_grad()
def diagnose_non_finite(engine: Engine, forward_step: ForwardStep, batch: dict[str, Any]) -> str:
    """Repeats a forward pass. Returns a message that names the parameter or module output that is not finite."""
    for name, parameter in engine.module.named_parameters():
        if not torch.isfinite(parameter).all():
            return f"the parameter {name} is not finite"
    found: list[str] = []
    hooks = [
        module.register_forward_hook(_look_at(name, found)) for name, module in engine.module.named_modules() if name
    ]
    try:
        forward_step(batch, engine.model, None)
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else "the loss alone is not finite; the outputs of all modules are"


def _look_at(name: str, found: list[str]) -> Any:
    def hook(module: nn.Module, inputs: Any, output: Any) -> None:
        for value in output if isinstance(output, (tuple, list)) else (output,):
            if isinstance(value, Tensor) and value.is_floating_point() and not torch.isfinite(value).all():
                found.append(f"{name} ({type(module).__name__}) is the first module whose output is not finite")

    return hook
