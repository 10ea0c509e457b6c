"""Streaming training of the example models: optimizers, metrics of windows, checkpoints, the loop."""
