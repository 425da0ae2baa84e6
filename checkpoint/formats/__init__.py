"""Reads the formats of other programs that are made of files of `torch.save`."""
