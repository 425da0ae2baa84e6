"""Training checkpoints: saving while training goes on, and resuming."""
