"""Measures and traces every kernel, a line each: python tests/gpu/validate_kernels.py OUT.jsonl CARD|cpu SCALE"""

import json
import sys
from pathlib import Path

import torch
from gpu_kernels import KERNELS, Kernel, measured_bytes, traced_bytes


def finding(one: Kernel, card: str | None, scale: float) -> dict[str, object]:
    """The row of `one`, as `Finding` takes it. An error of the kernel itself is its status."""
    row: dict[str, object] = {"kind": "kernel", "name": one.name, "rule": one.rule, "note": one.unknown}
    row["judged"] = card is not None and not one.unknown
    try:
        row["traced_bytes"] = traced_bytes(one, card, scale)
        row["measured_bytes"] = measured_bytes(one, "cpu" if card is None else "cuda", scale)
    except torch.OutOfMemoryError:
        row |= {"status": "oom", "note": "too large for this card", "judged": False}
    except Exception as error:
        row |= {
            "status": f"error:{type(error).__name__}",
            "note": str(error).splitlines()[0][:200] if str(error) else "",
        }
    return row


def main(arguments: list[str]) -> int:
    """0: what a kernel raised stands in its row."""
    path, name, scale = Path(arguments[0]), arguments[1], float(arguments[2])
    card = None if name == "cpu" else name
    with path.open("a", encoding="utf-8") as file:
        for one in KERNELS:
            if card is None and one.cuda_only:
                continue
            file.write(json.dumps(finding(one, card, scale)) + "\n")
            file.flush()
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
