"""Turns tokens into samples of the pretraining objectives."""
