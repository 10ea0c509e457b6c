"""Triton kernels, each beside the plain-torch twin (`*_ref`) that defines what it computes.

This room imports torch and triton only. Nothing here decides when a kernel runs: that is ``lowering``'s task.
"""
