"""Reads and writes the tensors of checkpoints on disk; the whole package uses this one reader and writer."""
