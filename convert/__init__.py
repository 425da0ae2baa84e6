"""Checkpoints on disk: shards, their manifest, and Hugging Face folders."""
