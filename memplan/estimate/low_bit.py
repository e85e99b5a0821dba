"""Optimizer states in 8 and 4 bits, as bitsandbytes and torchao keep them.

Source: bitsandbytes 0.50.2 (optim/optimizer.py: `init_state`, `get_state_buffer`) and torchao 0.18.0 (optim/adam.py,
subclass_8bit.py, subclass_4bit.py), read and written down anew; their tensors on the CPU, torch 2.13, are of these
sizes: tests/estimate/test_low_bit_estimated.py.
"""

import math

from memplan.dtypes import ELEMENT_BYTES
from memplan.estimate.tape import Parameter, Shape, Storage, Tape

SMALLEST = 4096
"""Elements from which on states are quantised, by both libraries."""
BLOCK = 256
"""Elements that share a scale in 8 bits, by both."""
BLOCK_4_BIT = 128
"""The same of torchao in 4 bits."""
PAGED_ELEMENTS = 100_000
"""From which on bitsandbytes pages. Source: `get_state_buffer`."""

Sizes = list[tuple[str, Shape, str]]
"""Name, shape and dtype of each tensor."""


def size_of(shape: Shape, dtype: str) -> int:
    """Bytes of a tensor."""
    return math.prod(shape) * ELEMENT_BYTES[dtype]


def is_large(parameter: Parameter) -> bool:
    """Whether bitsandbytes quantises its states."""
    return parameter.numel >= SMALLEST


def bitsandbytes_state(parameter: Parameter) -> Sizes:
    """Two moments of codes with an fp32 scale for each block, both fp32 where the parameter is small."""
    if not is_large(parameter):
        return [(name, parameter.shape, "float32") for name in ("state1", "state2")]
    blocks = -(-parameter.numel // BLOCK)
    codes: Sizes = [(name, parameter.shape, "uint8") for name in ("state1", "state2")]
    return codes + [(name, (blocks,), "float32") for name in ("absmax1", "absmax2")]


def is_paged(parameter: Parameter, name: str) -> bool:
    """Whether a state of bitsandbytes' paged optimizers lies in unified memory: `cudaMallocManaged`, which moves to the
    device for the step and which torch's allocator knows nothing of."""
    return name.startswith("state") and parameter.numel >= PAGED_ELEMENTS


def shared_maps(tape: Tape) -> list[Storage]:
    """The two tables of what 8-bit codes mean, one of either for all parameters."""
    return [tape.allocate(name, (256,), "float32", category="optimizer") for name in ("qmap1", "qmap2")]


def torchao_state(parameter: Parameter, bits: int) -> Sizes:
    """Two moments of codes with a scale for each block and a table each; like the parameter where blocks do not fit."""
    n, block = parameter.numel, BLOCK if bits == 8 else BLOCK_4_BIT
    if not fits(n, block):
        return [(name, parameter.shape, parameter.dtype) for name in ("exp_avg", "exp_avg_sq")]
    codes = parameter.shape if bits == 8 else (n // 2,)
    sizes: Sizes = []
    for name in ("exp_avg", "exp_avg_sq"):
        sizes += [
            (f"{name}.codes", codes, "uint8"),
            (f"{name}.scale", (n // block,), "float32"),
            (f"{name}.qmap", (2**bits,), "float32"),
        ]
    return sizes


def fits(numel: int, block: int) -> bool:
    """Whether torchao quantises a state."""
    return numel >= SMALLEST and numel % block == 0


def torchao_temps(parameter: Parameter, bits: int) -> tuple[int, ...]:
    """Bytes inside the compiled step of one tensor: both moments' scales and what their codes are searched by, in fp32;
    in 4 bits also their codes taken apart and those found, as int64. Nothing where they are not quantised.

    Read off inductor's code for the CPU, torch 2.13; a GPU's may fuse more.
    """
    n, block = parameter.numel, BLOCK if bits == 8 else BLOCK_4_BIT
    if not fits(n, block):
        return ()
    found = (4 * (n // block), 4 * n)
    return found * 2 if bits == 8 else (*found, n, 8 * n) * 2
