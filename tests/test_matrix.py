"""Every implementation at hand on every case chosen: harness/test_matrix.py, under a short name."""

from harness.test_matrix import test_matrix

__all__ = ["test_matrix"]
