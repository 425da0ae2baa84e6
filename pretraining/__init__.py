"""Pretrains a model: from arguments and text to a trained, exported and checked model."""
