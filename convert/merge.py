"""Merges a folder of shards into a Hugging Face folder."""

from .operations import merge

__all__ = ["merge"]
