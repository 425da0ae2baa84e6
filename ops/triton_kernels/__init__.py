"""The Triton variant: KERNELS maps an operator's name to a function that takes its prepared arguments and
outputs.

A program computes one row, or one chunk of rows where columns are summed; partial sums are added in a fixed
order. Everything is calculated in fp32. fp64 and rows beyond `LONGEST_ROW` are left to the reference.
"""

from . import activation, cross_entropy, dropout, norm, softmax

KERNELS = {**softmax.KERNELS, **norm.KERNELS, **activation.KERNELS, **dropout.KERNELS, **cross_entropy.KERNELS}
