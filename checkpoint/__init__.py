"""Tensors on disk: the one reader and writer of checkpoints."""
