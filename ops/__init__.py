"""Provides the fused operators, one file each.

Each has a PyTorch reference, which is its ground truth, and C++, CUDA and Triton variants behind
one dispatch. They compute on one rank's tensors and do not communicate. Callers pass offsets into
unsplit tensors as numbers. docs/kernels.md describes the kernels.

A file of an operator has its public functions first, then the definition and its gradient in
PyTorch, the gradient formula for autograd, and the registration. The other files are:

    registration.py    registers an operator, and calls one of its variants
    variants.py        chooses the variant
    library.py         loads the compiled kernels
    dispatcher.py      tells whether a call may bypass PyTorch's dispatcher
    device.py          answers what the layers ask about a device
    compiling.py       tells PyTorch's compiler what not to trace
    autograd.py        types of `torch.autograd.Function`
    dropout_mask.py    which elements dropout keeps
    cpu/               what only a CPU needs
    triton_kernels/    the Triton variants
    bench/             measures the operators (`shardzoo bench`)
"""

from .activation import bias_gelu, clamped_swiglu, geglu, relu, swiglu
from .attention import attention
from .attention_sinks import attention_with_sinks
from .cpu.few_rows import few_queries_attention
from .cpu.pool import empty_pooled
from .cross_entropy import (
    cross_entropy,
    cross_entropy_grad,
    cross_entropy_loss,
    cross_entropy_stats,
    token_cross_entropy,
)
from .dispatcher import in_inference_mode
from .dropout import bias_dropout_residual, dropout
from .dropout_mask import dropout_keep, dropout_keys, use_key
from .experts import (
    combine_tokens,
    grouped_linear,
    grouped_product,
    mix_experts,
    permute_tokens,
    route_by_corrected_scores,
    route_tokens,
    route_twice_within_capacity,
    route_within_capacity,
    sort_by_expert,
)
from .linear_cross_entropy import linear_cross_entropy
from .matmul import addmm, autocast_arguments, linear, matmul
from .norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .softmax import masked_softmax
from .variants import current_choice, kernels
from .varlen_attention import varlen_attention

# fmt: off
__all__ = [
    "add_layer_norm", "add_rms_norm", "addmm", "attention", "attention_with_sinks", "autocast_arguments",
    "bias_dropout_residual", "bias_gelu", "clamped_swiglu", "combine_tokens", "cross_entropy", "cross_entropy_grad",
    "cross_entropy_loss", "cross_entropy_stats", "current_choice", "dropout", "dropout_keep", "dropout_keys",
    "empty_pooled", "few_queries_attention", "geglu", "grouped_linear", "grouped_product", "in_inference_mode",
    "kernels", "layer_norm", "linear", "linear_cross_entropy", "masked_softmax", "matmul", "mix_experts",
    "permute_tokens", "relu", "rms_norm", "route_by_corrected_scores", "route_tokens", "route_twice_within_capacity",
    "route_within_capacity", "sort_by_expert", "swiglu", "token_cross_entropy", "use_key", "varlen_attention",
]
# fmt: on
