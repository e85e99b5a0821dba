"""Rows that say everything a row can say, and rows that mean harm."""

import dataclasses
from typing import Any

from samples import row_of

from memplan.record import RungResult, WindowPeak
from memplan.record.outcome import Failure
from memplan.record.trace import LiveTensor
from memplan.units import GIB, MIB

GATE = 71 * GIB
HOSTILE = (
    "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>$x^{2}$ =1+1 | [a](javascript:b) "
    "\u202egpj.exe \x00\x1b[31m\n"
)
"""A name that breaks out of HTML, Markdown, formulas, terminals and the direction of reading."""


def rich(rung: str, peak: float, speed: float | None, **values: Any) -> RungResult:
    """A row of a GPU with every number."""
    size = int(peak * GIB)
    shares = {"params": 0.24, "optimizer": 0.35, "grads": 0.12, "activations": 0.17, "logits": 0.08, "other": 0.01}
    parts = {name: int(size * share) for name, share in shares.items()}
    batch = int(rung[1 : rung.index("c")])
    known: dict[str, Any] = {
        "rung": rung,
        "run_id": f"{rung:*<12}"[:12],
        "model": "molmo2-4b",
        "step": {
            "batch": batch,
            "ckpt": rung.partition("@")[2],
            "seq": 1100,
            "loss": "full",
            "precision": "bf16-mixed",
            "optimizer": "adamw",
        },
        "peak_allocated_bytes": size,
        "peak_reserved_bytes": size + 2 * GIB,
        "estimated_bytes": int(size * 0.99),
        "traced_bytes": int(size * 1.002),
        "gate_bytes": GATE,
        "verdict": "pass" if size <= GATE else "fail",
        "status": "ok" if size <= GATE else "over_gate",
        "breakdown": parts | {"temps": size - sum(parts.values())},
        "windows": {"first_step": WindowPeak(allocated_bytes=int(size * 0.8))},
        "phase_peaks": {
            "init": int(0.3 * size),
            "forward": int(0.8 * size),
            "loss": int(0.97 * size),
            "backward": size,
            "optimizer": int(0.7 * size),
        },
        "step_ns": () if speed is None else tuple(int(batch / speed * 1e9 * (1 + 0.01 * k)) for k in range(6)),
        "model_flops": 10**14,
        "hardware_flops": 13 * 10**13,
        "peak_flops": 989e12,
        "attention": {"flash": 36},
        "telemetry": {"sm_clock_mhz": 1755.0, "power_w": 655.4, "temperature_c": 61, "throttled": []},
        "parity": {"same": True, "rung": "B4c1@none", "says": "same"},
        "environment": {
            "gpu": "NVIDIA H100 80GB HBM3",
            "driver": "570.1",
            "torch": "2.13.0",
            "device": "cuda",
            "commit": "abc1234",
            "settings": {"PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        },
        "command": f"memplan ladder {rung} --model molmo2-4b --gate 71GiB --device cuda",
    }
    return row_of(**known | values)


def failed(rung: str = "B16c4@none", **values: Any) -> RungResult:
    """A row that ran out of memory and says how."""
    tensor = LiveTensor(
        num_bytes=256 * MIB, count=36, category="activations", module="decoder.blocks.*.mlp", op="aten.mm.default",
        shape=(4, 1100, 9728), dtype="bfloat16",
    )  # fmt: skip
    failure = Failure(
        window="first_step", phase="backward", requested_bytes=2 * GIB, allocated_bytes=77 * GIB,
        reserved_bytes=78 * GIB, free_bytes=512 * MIB, cap_bytes=79 * GIB, alive=(tensor,), snapshot="B16c4.pickle",
        text="CUDA out of memory.\nTried to allocate 2.00 GiB.",
    )  # fmt: skip
    known: dict[str, Any] = {
        "status": "oom", "verdict": "fail", "peak_allocated_bytes": None, "peak_reserved_bytes": None, "breakdown": {},
        "phase_peaks": {}, "windows": {}, "attention": {}, "telemetry": {}, "parity": {}, "failure": failure,
        "error": "CUDA out of memory. Tried to allocate 2.00 GiB.",
    }  # fmt: skip
    return rich(rung, 90, None, **known | values)


def ladder() -> list[RungResult]:
    """A ladder of a GPU: repeats, a rung over the gate, one that failed, one that was skipped, warnings."""
    return [
        failed(),
        rich("B12c6@none", 74.2, 5.1),
        *(rich("B12c6@full", 68.37, 4.4 + 0.02 * number, repeat=number) for number in (1, 2, 3)),
        rich("B8c4@none", 69.4, 4.6, warnings=("The GPU throttled while steps were timed.",)),
        rich("B8c4@full", 60.1, 3.9),
        rich("B6c3@full", 57.2, 3.95),
        row_of(
            rung="B16c8@none",
            run_id="skipped",
            model="molmo2-4b",
            status="skipped:dominated_by B16c4@none",
            peak_allocated_bytes=None,
            estimated_bytes=None,
            windows={},
            phase_peaks={},
            step_ns=(),
            step={"batch": 16, "seq": 1100, "loss": "full", "precision": "bf16-mixed", "optimizer": "adamw"},
            gate_bytes=GATE,
            environment={},
        ),
    ]


def hostile(name: str = HOSTILE) -> list[RungResult]:
    """Rows whose every text is `name`."""
    environment = {name: name, "note": name, "gpu": name, "device": "cuda"}
    said: dict[str, Any] = {
        "rung": name,
        "model": name,
        "environment": environment,
        "command": name,
        "warnings": (name,),
    }
    failure = Failure(window=name, phase=name, snapshot=name, text=name)
    fails: dict[str, Any] = {"error": name, "status": f"error:{name}", "verdict": "inconclusive", "failure": failure}
    return [
        dataclasses.replace(rich("B4c2@none", 10, 2.0, attention={name: 1}, telemetry={"throttled": [name]}), **said),
        dataclasses.replace(failed("B4c2@full"), **said | fails),
    ]
