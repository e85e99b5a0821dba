"""What an error of a step says about the rung: by its type, then by its code, then by known texts (torch 2.9 to 2.14).

Whatever is not known is `error`, never `oom`: a ladder skips larger rungs behind an `oom`.
"""

import re
from collections.abc import Iterator

from memplan.backends.base import Room
from memplan.units import parse_bytes

CUDA_OUT_OF_MEMORY = 2
"""`cudaErrorMemoryAllocation` of the CUDA runtime."""
INVALID_CONFIGURATION = 9
"""`cudaErrorInvalidConfiguration`: a grid that is too large for a kernel."""
POISONING_CODES = frozenset((214, 700, 702, 710, 714, 715, 716, 717, 718, 719))
"""Codes of the CUDA runtime behind which "the process must be terminated" (driver_types.h, CUDA 13): uncorrectable ECC
error, illegal address, launch timeout, assert, and those of illegal instructions, addresses and launches."""

_DEVICE_TEXTS = re.compile(r"CUDA (driver )?error: out of memory|NCCL.*out of memory|HIP out of memory", re.DOTALL)
_HOST_TEXTS = re.compile(r"DefaultCPUAllocator: (can't allocate|not enough) memory|std::bad_alloc")
_SUSPECT_TEXTS = re.compile(
    r"CUBLAS_STATUS_(ALLOC_FAILED|NOT_INITIALIZED)|CUDNN_STATUS_(NOT_SUPPORTED|ALLOC_FAILED|NOT_INITIALIZED)"
    r"|handles_\.at\(i\)|CUDA driver error: device not ready"
)
"""What libraries say where they find no memory, and at other times too: `NOT_INITIALIZED` also of an index out of
range, `NOT_SUPPORTED` of a shape."""
_LIMIT_TEXTS = re.compile(
    r"invalid configuration argument|canUse32BitIndexMath|INT_MAX|\bint32_t\b.*max|\b65,?535\b|\b2,?147,?483,?647\b"
    r"|without overflow|(tensor|input|grid|batch|index)\b[^.]* too large|too many elements"
)
"""What kernels say of sizes that they have no numbers for."""
_POISONING_TEXTS = re.compile(
    r"illegal memory access|device-side assert|misaligned address|unspecified launch failure|illegal instruction"
    r"|launch timed out|uncorrectable ECC|invalid program counter|hardware stack error"
)
_REQUESTED = re.compile(r"[Tt]ried to allocate ([\d.]+ ?(?:[KMGT]iB|bytes)?)")
_FREE = re.compile(r"of which ([\d.]+ ?(?:[KMGT]iB|bytes)?) is free")

MOST_LETTERS = 1000
"""Where the line that explains an error is cut: it stands in tables."""
MOST_TEXT = 20_000
"""Where an error's whole text is cut: it stands in the row, which is a line of a file."""

ADVICE_ON_RECOMPUTATION = (
    "the recomputation was not its forward: another attention kernel, autocast, cache or graph; pin the kernel with "
    "torch.nn.attention.sdpa_kernel around the whole step, and ask memplan verify which tensor differs"
)


class NotTraining(ArithmeticError):
    """The steps run and train nothing: a loss or gradient that is not finite, no gradient, or nothing that changes."""


def status_of(error: BaseException, *, on_cuda: bool, room: Room | None) -> str:
    """How the rung ended: `oom`, `oom_suspect`, `host_oom`, `ac_error`, `numerics_fail`, `error:kernel_limit` or
    `error`. `room` is what the device still had. An error that was raised from another is what that one was."""
    return next((status for one in causes(error) if (status := _status(one, on_cuda, room)) != "error"), "error")


def _status(error: BaseException, on_cuda: bool, room: Room | None) -> str:
    names, text, code = kinds(error), text_of(error), code_of(error)
    out_of_host = "host_oom" if on_cuda else "oom"
    if isinstance(error, MemoryError):
        return out_of_host
    if isinstance(error, NotTraining):
        return "numerics_fail"
    if "CheckpointError" in names:
        return "ac_error"
    if not isinstance(error, RuntimeError):
        return "error"
    if "OutOfMemoryError" in names:
        return "oom"
    if code is not None:
        return {CUDA_OUT_OF_MEMORY: "oom", INVALID_CONFIGURATION: "error:kernel_limit"}.get(code, "error")
    if _HOST_TEXTS.search(text):
        return out_of_host
    if _SUSPECT_TEXTS.search(text):
        return "oom_suspect" if on_cuda and room is not None and room.nearly_full else "error"
    if _DEVICE_TEXTS.search(text):
        return "oom"
    return "error:kernel_limit" if _LIMIT_TEXTS.search(text) and not is_poisoning(error) else "error"


def causes(error: BaseException) -> Iterator[BaseException]:
    """`error`, and what it was raised from."""
    seen: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in seen:
        yield one
        seen.append(one)
        one = one.__cause__


def kinds(error: BaseException) -> frozenset[str]:
    """Names of the types that `error` is of."""
    return frozenset(kind.__name__ for kind in type(error).__mro__)


def code_of(error: BaseException) -> int | None:
    """The CUDA runtime's code that `error` carries, or None."""
    if "AcceleratorError" not in kinds(error):
        return None
    code = getattr(error, "error_code", None)
    if code is None and callable(ask := getattr(error, "get_error_code", None)):
        code = ask()
    return code if isinstance(code, int) else None


def is_poisoning(error: BaseException) -> bool:
    """Whether the device answers nothing more in this process, so that it should be looked at before the next."""
    return any(
        isinstance(one, RuntimeError) and (code_of(one) in POISONING_CODES or _POISONING_TEXTS.search(text_of(one)))
        for one in causes(error)
    )


def requested_bytes(error: BaseException) -> int | None:
    """Bytes that were asked for in vain, as the error's text tells them, rounded as the text is."""
    return _first_size(_REQUESTED, error)


def free_bytes(error: BaseException) -> int | None:
    """Bytes that the device still had, as the error's text tells them."""
    return _first_size(_FREE, error)


def _first_size(pattern: re.Pattern[str], error: BaseException) -> int | None:
    for one in causes(error):
        if match := pattern.search(text_of(one)):
            text = match[1].removesuffix("bytes").strip().rstrip(".")
            return parse_bytes(text) if text.strip("0. ") else 0
    return None


def text_of(error: BaseException) -> str:
    """What `error` says; where saying it fails, that."""
    try:
        return str(error)
    except Exception as fault:
        return f"(its text cannot be told: {type(fault).__name__})"


def shortened(text: str, most: int) -> str:
    """`text`, and where it is longer than `most` letters, these and how many are left out."""
    return text if len(text) <= most else f"{text[:most]}... ({len(text) - most:,} more characters)"


def explain(error: BaseException) -> str:
    """`error` in one line that is not too long: its type unless it is one of memplan's, its first line, and what to do
    about it."""
    return shortened(_explained(error), MOST_LETTERS)


def _explained(error: BaseException) -> str:
    lines = [line.strip() for line in text_of(error).splitlines() if line.strip()]
    text = lines[0] if lines else ""
    if "MemplanError" in kinds(error) or isinstance(error, NotTraining):
        return " ".join(lines)
    if "CheckpointError" in kinds(error):
        text = " ".join((_metadata(lines) or text, f"({ADVICE_ON_RECOMPUTATION})"))
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _metadata(lines: list[str]) -> str:
    """What torch says about the first tensor that was recomputed otherwise, in one line."""
    told = [line for line in lines if line.startswith(("saved metadata", "recomputed metadata", "Number of tensors"))]
    return "; ".join(told[:2])
