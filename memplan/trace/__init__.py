"""Witness 2: the real step on fake tensors under a device's rules, its allocations and frees noted and replayed.

Known limits
    One stream. The workspace that cuDNN's attention takes inside itself is not known and not counted. A value that the
    step reads is taken as 1, or as 0 where it tells of NaN or infinity, and each such place is named; a result whose
    shape depends on values is refused. An optimizer made before a module is converted keeps the old parameters.
    Private pools and CUDA graphs are not modelled.
"""
