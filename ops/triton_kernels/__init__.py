"""Implements the Triton variant: a file for each op, whose `launch_…` functions take prepared
arguments and outputs.

A program computes one row, or one chunk of rows if columns are summed; of attention, a block of
rows. Partial sums are added in a fixed order. Everything is computed in fp32. The reference
computes fp64 and rows longer than `registration.LONGEST_TRITON_ROW`.

Triton is an optional dependency, so the ops import these files when a kernel is first launched.
"""
