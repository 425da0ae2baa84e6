"""Turns samples into batches: sample orders, padding, resumable loaders and streams."""
