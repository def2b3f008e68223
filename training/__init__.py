"""Model, optimizer, batches, loop, checkpoints and tracking."""
