"""Judging and timing built kernels on a GPU, and the rows that docs/measurements keep."""
