"""Witness 2: the real step on fake tensors, its allocations and frees noted and replayed."""
