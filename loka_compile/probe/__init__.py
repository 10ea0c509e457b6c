"""Learns what every GEMM of a model sees in training, and measures FP8 on exactly that."""
