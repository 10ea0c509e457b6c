"""Recommendation models in plain PyTorch, written from their papers. Nothing of loka_compile is imported here."""
