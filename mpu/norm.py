"""Implements the norms. Under sequence parallelism their parameters' gradients are summed."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..ops.autograd import Function, once_differentiable
from ..ops.device import can_overwrite_gradients
from ..ops.norm import apply_norm
from ..ops.registration import OPS
from .collectives import start_all_reduce
from .mesh import ParallelMesh


class _Norm(nn.Module):
    """What the norms share. A subclass names its operator, and what that takes after the epsilon."""

    operator: str
    settings: tuple[float, ...] = ()

    def __init__(
        self, hidden_size: int, eps: float, sequence_parallel: bool, mesh: ParallelMesh | None
    ):
        super().__init__()
        self.hidden_size = hidden_size
        self.eps = eps
        self.sequence_parallel = sequence_parallel
        self.mesh = mesh
        self.weight = nn.Parameter(torch.ones(hidden_size))
        self.bias: nn.Parameter | None = None

    def affine(self) -> tuple[Tensor | None, ...]:
        """Returns the parameters that the operator takes."""
        return (self.weight,)

    def forward(
        self, tensor: Tensor, residual: Tensor | None = None, *, return_residual: bool = False
    ) -> Any:
        """Returns norm(h) with h = tensor + residual in one pass over memory, or h = tensor.

        The gradient of the returned h is added within the norm's own backward pass.

        Args:
            tensor: [..., H].
            residual: In the shape of tensor.
            return_residual: Return (norm(h), h), for the next residual addition.
        """
        fits = residual is None or residual.shape == tensor.shape
        if not fits or tensor.shape[-1] != self.hidden_size:
            got = str(tuple(tensor.shape))
            if residual is not None:
                got += f" and {tuple(residual.shape)}"
            raise ValueError(
                f"a norm of {self.hidden_size} features needs equal shapes "
                f"[..., {self.hidden_size}]; got {got}"
            )
        if residual is not None and residual.dtype != tensor.dtype:  # under autocast
            tensor = residual + tensor
            residual = None
        group = None
        if self.sequence_parallel and self.mesh is not None and self.mesh.tp_size > 1:
            group = self.mesh.tp_group

        # A norm that returns its own input has to add the two gradients of it by hand. A compiler
        # fuses the sum of the two gradients itself, and cannot trace an output that is the input.
        returns_input = return_residual and residual is None
        adds_by_hand = returns_input and can_overwrite_gradients() and torch.is_grad_enabled()
        if group is not None or adds_by_hand:
            output, h = _NormWithResidual.apply(
                self.operator,
                group,
                (self.eps, *self.settings),
                adds_by_hand,
                tensor,
                residual,
                *self.affine(),
            )
        else:
            output, h = apply_norm(
                tensor, residual, self.weight, self.bias, self.eps, self.operator, *self.settings
            )
        if not return_residual:
            return output
        if returns_input and not adds_by_hand:
            return output, tensor
        return output, h

    def extra_repr(self) -> str:
        return f"{self.hidden_size}, eps={self.eps}, sequence_parallel={self.sequence_parallel}"


class LayerNorm(_Norm):
    """Layer normalization over the last dimension (Ba et al. 2016, arXiv:1607.06450).

    Input and output [..., H].

    Args:
        sequence_parallel: The input is this rank's part of the sequence, so the parameters'
            gradients are summed over the tensor-parallel ranks. Autograd does this, so it works
            with every training engine.
    """

    operator = "layer_norm"

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__(hidden_size, eps, sequence_parallel, mesh)
        self.bias = nn.Parameter(torch.zeros(hidden_size)) if bias else None

    def affine(self) -> tuple[Tensor | None, ...]:
        return self.weight, self.bias


class RMSNorm(_Norm):
    """Root-mean-square normalization over the last dimension (Zhang & Sennrich, arXiv:1910.07467).

    It rounds in the same order as transformers: it normalizes in fp32, casts to the input's dtype,
    then multiplies by the weight. Input and output [..., H].

    Args:
        offset: Added to the weight in fp32. The product is then rounded once, after it; as in Gemma,
            whose offset is 1, and in OLMo 2, whose offset is 0.
        sequence_parallel: See `LayerNorm`.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        offset: float | None = None,
        sequence_parallel: bool = False,
        mesh: ParallelMesh | None = None,
    ):
        super().__init__(hidden_size, eps, sequence_parallel, mesh)
        self.offset = offset
        self.operator = "rms_norm" if offset is None else "offset_rms_norm"
        self.settings = () if offset is None else (offset,)
        if offset:
            self.weight = nn.Parameter(torch.full((hidden_size,), 1.0 - offset))


class _NormWithResidual(Function):
    """Returns the norm of h and h itself, whose gradient the backward operator adds to its own.

    With a group, the input is this rank's part of the sequence. The ranks' gradients of the weight
    and the bias, if there is one, are summed in fp32 (fp64 for fp64) and rounded once. If they were
    rounded before the sum too, 16-bit gradients would have one and a half times the error.
    """

    @staticmethod
    def forward(
        ctx: Any,
        operator: str,
        group: dist.ProcessGroup | None,
        settings: tuple[float, ...],
        returns_input: bool,
        tensor: Tensor,
        residual: Tensor | None,
        *parameters: Tensor | None,
    ):
        output, summed, *statistics = OPS[operator](tensor, residual, *parameters, *settings)
        h = tensor if residual is None else summed
        ctx.save_for_backward(h, parameters[0], *statistics)
        ctx.operator = OPS[f"{operator}_backward"]
        ctx.group = group
        ctx.settings = settings[1:]  # without the epsilon
        ctx.has_residual = residual is not None
        ctx.has_bias = [parameter is not None for parameter in parameters[1:]]
        # Without h, a compiler still passes zeros as its gradient.
        ctx.returns_h = returns_input or residual is not None
        ctx.set_materialize_grads(False)  # h may have no gradient
        return output, tensor.view_as(tensor) if returns_input else summed

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None):
        h, weight, *statistics = ctx.saved_tensors
        grad = torch.zeros_like(h) if grads[0] is None else grads[0]
        grad_h = grads[1] if ctx.returns_h else None
        is_summed = ctx.group is not None
        flags = (*ctx.has_bias, *ctx.settings, is_summed)
        own, *parts = ctx.operator(grad, grad_h, h, weight, *statistics, *flags)
        parts = parts[: 1 + sum(ctx.has_bias)]  # the gradients of the weight and the bias
        if ctx.group is not None:
            parts = start_all_reduce(torch.stack(parts), ctx.group)()  # one all-reduce for both
            parts = [part.to(weight.dtype) for part in parts]

        residual_grad = own if ctx.has_residual else None
        missing = [None] * ctx.has_bias.count(False)
        return None, None, None, None, own, residual_grad, *parts, *missing
