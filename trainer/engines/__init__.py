"""What drives a model through a step: PyTorch, DDP, DeepSpeed; optimizers, schedules, precision."""
