"""Samples to batches: orders, padding, resumable loaders and streams."""
