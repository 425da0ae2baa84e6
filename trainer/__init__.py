"""Training: arguments, processes, the loop, checkpoints and what a person sees."""
