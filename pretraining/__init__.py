"""Pretraining: from arguments and text to a trained, exported, checked model."""
