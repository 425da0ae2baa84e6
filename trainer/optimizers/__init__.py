"""Optimizers: their registry, and those that the trainer computes itself.

`registry.py` lists all of them. `adamw.py` is AdamW in one pass over memory; `adafactor.py` and
`lamb.py` are versions for parameters that are split over ranks, on the parts of matrices that
`whole_matrix.py` describes.
"""
