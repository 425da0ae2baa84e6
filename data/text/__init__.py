"""Reads text sources and their documents, and prepares them as tokenized corpora."""
