"""The engines that run a model's training steps, each a file: PyTorch, DDP, FSDP2, DeepSpeed,
DeepSpeed's pipelines.

`factory.py` chooses one, `engine.py` says what an engine does. The other files are what engines
share, and what makes a model, an optimizer and a learning rate ready for them.
"""
