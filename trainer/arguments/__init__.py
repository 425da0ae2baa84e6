"""The arguments of a training run, and their aliases."""
