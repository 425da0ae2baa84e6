"""Blocks shared by the families."""
