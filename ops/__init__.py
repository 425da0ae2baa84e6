"""Fused operators, each with a PyTorch reference and C++, CUDA and Triton variants behind one dispatch.

They compute on one rank's tensors and know nothing of ranks: offsets into unsplit tensors are passed as
numbers.
"""

from .activation import bias_gelu, geglu, relu, swiglu
from .cross_entropy import cross_entropy, cross_entropy_grad, cross_entropy_loss, cross_entropy_stats
from .dropout import bias_dropout_residual, dropout, dropout_keep, dropout_keys, use_key
from .library import current_choice, in_inference_mode, kernels
from .matmul import addmm, linear, matmul
from .norm import add_layer_norm, add_rms_norm, layer_norm, rms_norm
from .softmax import masked_softmax

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
    "addmm",
    "bias_dropout_residual",
    "bias_gelu",
    "cross_entropy",
    "cross_entropy_grad",
    "cross_entropy_loss",
    "cross_entropy_stats",
    "current_choice",
    "dropout",
    "dropout_keep",
    "dropout_keys",
    "geglu",
    "in_inference_mode",
    "kernels",
    "layer_norm",
    "linear",
    "masked_softmax",
    "matmul",
    "relu",
    "rms_norm",
    "swiglu",
    "use_key",
]
