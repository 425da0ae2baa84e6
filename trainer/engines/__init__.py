"""The engines that run a model's training steps: PyTorch, DDP, DeepSpeed; optimizers, schedules, precision."""
