"""Sizes and times as text. The only divisors in the package live here."""

import re

from memplan.errors import MemplanError

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_SIZE = re.compile(r"\s*(?P<number>\d+(?:\.\d+)?)\s*(?P<unit>[A-Za-z]*)\s*")
_BINARY = {"": 1, "b": 1, "kib": KIB, "mib": MIB, "gib": GIB, "tib": GIB * KIB}
_DECIMAL = {"kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12}
_NS_UNITS = ((3600 * 10**9, "h"), (60 * 10**9, "min"), (10**9, "s"), (10**6, "ms"), (10**3, "us"), (1, "ns"))


def parse_bytes(text: str) -> int:
    """Bytes for `71GiB`, `71 GiB`, `73728MiB`, `71GB` (decimal) or plain bytes; MemplanError otherwise."""
    match = _SIZE.fullmatch(text)
    scale = None
    if match:
        unit = match["unit"].lower()
        scale = _BINARY.get(unit, _DECIMAL.get(unit))
    if match is None or scale is None:
        raise MemplanError(f"{text!r} is not a size.", "Type it like 71GiB, 512MiB or plain bytes.")
    whole, _, decimals = match["number"].partition(".")
    num_bytes: int = int(whole + decimals) * scale // 10 ** len(decimals)
    if num_bytes <= 0:
        raise MemplanError(f"{text!r} is not a size above zero.", "Type it like 71GiB.")
    return num_bytes


def decimal_note(text: str) -> str | None:
    """A sentence when `text` was read as a decimal size (71GB is 66.12 GiB), else None."""
    match = _SIZE.fullmatch(text)
    if match is None or match["unit"].lower() not in _DECIMAL:
        return None
    binary = match["unit"][0].upper() + "iB"
    return f"{text.strip()} is decimal: {format_bytes(parse_bytes(text))}. Type {binary} for the binary unit."


def format_bytes(num_bytes: int, digits: int = 2) -> str:
    """`num_bytes` as text in the largest binary unit that keeps it at 1 or above: 71.00 GiB, 512.00 MiB, 17 B."""
    for scale, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if abs(num_bytes) >= scale:
            return f"{num_bytes / scale:.{digits}f} {unit}"
    return f"{num_bytes} B"


def format_exact_bytes(num_bytes: int) -> str:
    """`num_bytes` as text that `parse_bytes` reads back to the same number: 6GiB, 6145MiB or 6442450945."""
    for scale, unit in ((GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")):
        if num_bytes >= scale and num_bytes % scale == 0:
            return f"{num_bytes // scale}{unit}"
    return str(num_bytes)


def format_flops(num_flops: int) -> str:
    """`num_flops` floating-point operations as text: 1.50 TFLOP, 320 FLOP."""
    for scale, unit in ((10**15, "P"), (10**12, "T"), (10**9, "G"), (10**6, "M")):
        if num_flops >= scale:
            return f"{num_flops / scale:.2f} {unit}FLOP"
    return f"{num_flops} FLOP"


def gib(num_bytes: int) -> float:
    """`num_bytes` in GiB, for the axis of a plot."""
    return num_bytes / GIB


def mib(num_bytes: int) -> float:
    """`num_bytes` in MiB, for a column of a table."""
    return num_bytes / MIB


def format_ns(time_ns: int, digits: int = 2) -> str:
    """`time_ns` nanoseconds as text in the largest unit that keeps it at 1 or above: 1.50 s, 3.20 ms."""
    for scale, unit in _NS_UNITS:
        if abs(time_ns) >= scale:
            return f"{time_ns / scale:.{digits}f} {unit}"
    return f"{time_ns} ns"


def seconds(time_ns: int) -> float:
    """`time_ns` nanoseconds in seconds."""
    return time_ns / 10**9


def parse_percent(text: str) -> float:
    """The fraction that `2%` or `0.02` names; MemplanError otherwise."""
    number = text.strip().removesuffix("%")
    try:
        value = float(number) / (100 if text.strip().endswith("%") else 1)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise MemplanError(f"{text!r} is not a share of 0% or more and less than 100%.", "Type it like 2% or 0.02.")
    return value


def format_percent(frac: float, digits: int = 2) -> str:
    """`frac` as a signed percentage: +1.25 %."""
    return f"{round(frac * 100, digits) + 0.0:+.{digits}f} %"
