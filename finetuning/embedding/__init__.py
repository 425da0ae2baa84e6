"""Trains models that embed texts, and cross-encoders that rank them.

The losses, poolings and folders are those of the library sentence-transformers, so that its users
find what they know. Other than there the model may be split over tensor-parallel ranks, and the
texts of all data-parallel ranks are negatives of each other.
"""
