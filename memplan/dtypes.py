"""Element sizes by dtype name, without torch."""

from memplan.errors import MemplanError, near_names

ELEMENT_BYTES = {
    "complex128": 16,
    "complex64": 8,
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "int64": 8,
    "int32": 4,
    "int16": 2,
    "int8": 1,
    "uint8": 1,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "bool": 1,
}


def element_bytes(dtype: str) -> int:
    """Bytes of one element of `dtype`; MemplanError when the name is unknown."""
    try:
        return ELEMENT_BYTES[dtype]
    except KeyError:
        raise MemplanError(f"Unknown dtype {dtype!r}.", near_names(dtype, ELEMENT_BYTES)) from None
