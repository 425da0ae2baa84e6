"""The engines that run a model's training steps, each a file: PyTorch, DDP, DeepSpeed, DeepSpeed's
pipelines.

`registry.py` lists them, `engine.py` says what an engine does. The other files are what engines
share, and what makes a model, an optimizer and a learning rate ready for them.
"""
