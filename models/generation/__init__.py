"""Decodes sequences under tensor parallelism: the `generate` of every language model, and its
parts.
"""
