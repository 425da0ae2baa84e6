"""Implements the Triton variant. KERNELS maps an operator to a function of its prepared arguments and outputs.

A program computes one row, or one chunk of rows if columns are summed; of attention, a block of rows. Partial sums are
added in a fixed order.
Everything is computed in fp32. The reference computes fp64 and rows longer than `LONGEST_ROW`.
"""

from . import activation, attention, cross_entropy, dropout, norm, softmax

KERNELS = {
    **attention.KERNELS,
    **softmax.KERNELS,
    **norm.KERNELS,
    **activation.KERNELS,
    **dropout.KERNELS,
    **cross_entropy.KERNELS,
}
