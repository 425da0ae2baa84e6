"""Reads and trains tokenizers, and adds the special tokens that objectives need."""
