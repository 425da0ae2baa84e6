"""AdamW whose two states take a byte an element (Dettmers et al. 2022, arXiv:2110.02861), by
torchao.
"""

from __future__ import annotations

from typing import Any

import torch

from ...ops.device import computes_on_host

try:
    from torchao.optim import AdamW8bit as TorchaoAdamW8bit
    from torchao.optim.adam import single_param_adam
    from torchao.optim.subclass_8bit import OptimState8bit
except ImportError as error:
    raise ValueError(
        "optimizer='adamw8bit' needs the package torchao: pip install \"shardzoo[torchao]\""
    ) from error


class AdamW8bit(TorchaoAdamW8bit):
    """torchao's AdamW8bit, whose rate is a number as that of other optimizers, and which compiles
    its update on accelerators only.

    States are quantized in blocks of 256 elements. Parameters with fewer than 4,096 elements, and
    those that such blocks do not divide, have fp32 states.
    """

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        group["lr"] = float(group["lr"])

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # pyright: ignore[reportIncompatibleMethodOverride]
        for group in self.param_groups:
            rate = torch.tensor(group["lr"])
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = self._new_buffer(parameter, signed=True)
                    state["exp_avg_sq"] = self._new_buffer(parameter, signed=False)
                state["step"] += 1
                update: Any = single_param_adam
                if not computes_on_host(parameter.device):
                    update = torch.compile(single_param_adam, fullgraph=True, dynamic=False)
                update(
                    parameter.detach(),
                    parameter.grad,
                    state["step"],
                    state["exp_avg"],
                    state["exp_avg_sq"],
                    None,  # no AMSGrad
                    rate,
                    *group["betas"],
                    group["weight_decay"],
                    group["eps"],
                    True,  # AdamW's weight decay
                    False,  # no stochastic rounding
                )

    def join_states(self) -> None:
        """Makes quantized states of their parts, which a checkpoint has as `exp_avg.codes`,
        `exp_avg.scale` and `exp_avg.qmap`.
        """
        for state in self.state.values():
            for name in ("exp_avg", "exp_avg_sq"):
                if f"{name}.codes" not in state:
                    continue
                state[name] = OptimState8bit(
                    codes=state.pop(f"{name}.codes"),
                    scale=state.pop(f"{name}.scale"),
                    qmap=state.pop(f"{name}.qmap"),
                    signed=name == "exp_avg",
                    dtype=torch.float32,
                )
