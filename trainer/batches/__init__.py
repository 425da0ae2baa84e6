"""From samples to the micro-batches of a step, and the normalization of their loss."""
