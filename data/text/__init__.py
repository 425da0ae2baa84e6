"""Text in: sources, their documents, and preparing them as corpora."""
