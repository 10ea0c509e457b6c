"""Every private torch API and every upstream work-around, each with its issue number and version range.

A file per subject; ``tests/test_compat*.py`` notice when one of them changes.
"""
