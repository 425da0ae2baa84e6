"""Tokenizers: reading, training, and the special tokens that objectives need."""
