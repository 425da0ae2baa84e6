"""Training checkpoints: saving while training continues, and resuming."""
