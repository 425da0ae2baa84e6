"""From samples to the micro-batches of a step, and what the loss is divided by."""
