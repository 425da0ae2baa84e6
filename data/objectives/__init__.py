"""Pretraining objectives: from tokens to samples."""
