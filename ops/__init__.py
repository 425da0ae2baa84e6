"""Fused operators, each with a PyTorch reference and C++, CUDA and Triton variants behind one dispatch.

They compute on one rank's tensors and know nothing of ranks: offsets into unsplit tensors are passed as
numbers.
"""

from .bias_dropout_residual import bias_dropout_residual, dropout
from .bias_gelu import bias_gelu
from .cross_entropy import cross_entropy, cross_entropy_grad, cross_entropy_loss, cross_entropy_stats
from .dispatch import current_choice, kernels
from .dropout_mask import dropout_keep, dropout_keys, use_key
from .embedding import embedding
from .glu import geglu, swiglu
from .inference import in_inference_mode
from .layer_norm import add_layer_norm, layer_norm
from .linear import linear
from .product import multiply, multiply_add, product
from .relu import relu
from .rms_norm import add_rms_norm, rms_norm
from .softmax import masked_softmax

__all__ = [
    "add_layer_norm",
    "add_rms_norm",
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
    "embedding",
    "geglu",
    "in_inference_mode",
    "kernels",
    "layer_norm",
    "linear",
    "masked_softmax",
    "multiply",
    "multiply_add",
    "product",
    "relu",
    "rms_norm",
    "swiglu",
    "use_key",
]
