"""Reads fine-tuning data: pairs of texts and blocks of plain text."""
