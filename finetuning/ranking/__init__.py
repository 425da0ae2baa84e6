"""Trains cross-encoders, which score a query with each document, to rank documents.

The losses and the data are those of sentence-transformers' CrossEncoder.
"""
