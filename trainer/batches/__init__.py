"""Micro-batches from samples, and the normalization of their loss."""
