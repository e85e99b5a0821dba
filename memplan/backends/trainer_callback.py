"""Memory of each optimizer step of a transformers Trainer: `callbacks=[memplan.PeakWindowCallback()]`."""

import json
import warnings
from pathlib import Path
from typing import Any

from memplan.backends.base import Reading
from memplan.backends.peak_window import PeakWindow, as_dict, say
from memplan.errors import MemplanError
from memplan.units import gib

try:
    from transformers import TrainerCallback
except ImportError:
    raise MemplanError("transformers is not installed.", "Type: pip install 'memplan[hf]'") from None


class PeakWindowCallback(TrainerCallback):
    """A window from each optimizer step's beginning to its end; evaluation and saving between steps are left out.

    Phases are `forward`, `backward` and `optimizer`, told by hooks on the model; in a compiled step nobody sees where
    backward begins, and what comes before the optimizer is `forward`. The largest numbers since the last logging join
    the Trainer's logs as `peak_allocated_gib`, `peak_reserved_gib`, `peak_backward_gib`, ...; trackers of `report_to`
    stand before it and miss them unless `trainer.callback_handler.callbacks.insert(0, ...)` puts it first. Steps whose
    allocator had to give segments back and ask again are warned of once, at the next logging. With `path` each step is
    a line of JSON there; of several processes each writes a file of its own.
    """

    def __init__(self, path: str | Path | None = None, *, device: Any = None) -> None:
        self.path = None if path is None else Path(path)
        self.window: PeakWindow | None = None
        self._device = device
        self._since: list[Reading] = []
        self._unheard: list[Reading] = []
        self._hooks: list[Any] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Opens the window's device and listens to the model."""
        self._since.clear()
        self._unheard.clear()
        self.window = PeakWindow(_device_of(args) if self._device is None else self._device)
        if self.path is not None:
            if getattr(args, "world_size", 1) > 1:
                self.path = self.path.with_name(f"{self.path.stem}.rank{args.process_index}{self.path.suffix}")
            self.path.parent.mkdir(parents=True, exist_ok=True)
        if model is not None and not getattr(args, "torch_compile", False):
            self._hooks = [
                model.register_forward_pre_hook(lambda *_: self._mark("forward")),
                model.register_forward_hook(lambda *_: self._mark("backward")),
            ]

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Begins a step's window."""
        assert self.window is not None
        self.window.close()  # of a step that an error ended and the caller went on from
        self.window.open()
        self._mark("forward")

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Gradients are there and clipped."""
        self._mark("optimizer")

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Ends the step's window and writes it down."""
        assert self.window is not None
        self.window.close()
        reading = self.window.reading
        self._since.append(reading)
        self._unheard.append(reading)
        if self.path is not None:
            line = {"step": state.global_step} | as_dict(reading)
            line["lifetime_allocated_bytes"] = self.window.lifetime_allocated_bytes
            with self.path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **_: Any) -> None:
        """Adds the largest numbers since the last logging of a training step to `logs` and to the Trainer's history."""
        self._warn(state)
        if not self._since or logs is None or "loss" not in logs:
            return
        told = _logged(self._since)
        self._since.clear()
        logs.update(told)
        if state.log_history and state.log_history[-1].get("step") == state.global_step:
            state.log_history[-1].update(told)

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Lets the model go."""
        self._warn(state)
        self._since.clear()
        if self.window is not None:
            self.window.close()
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _mark(self, phase: str) -> None:
        if self.window is not None and self.window.is_open:
            self.window.mark(phase)

    def _warn(self, state: Any) -> None:
        unheard, self._unheard = self._unheard, []
        retries = [reading.peak.num_alloc_retries or 0 for reading in unheard]
        if any(retries):
            worst = max(unheard, key=lambda reading: reading.peak.num_alloc_retries or 0)
            warnings.warn(
                f"Up to step {state.global_step}, {sum(map(bool, retries))} of {len(retries)} steps found no room and"
                f" made the allocator give segments back {sum(retries)} times, which is slow: {say(worst)}.",
                stacklevel=2,
            )


def _logged(readings: list[Reading]) -> dict[str, Any]:
    """What the Trainer logs of some steps: the largest of each peak in GiB, and all retries."""
    peaks = [reading.peak for reading in readings]
    told: dict[str, Any] = {"peak_allocated_gib": _rounded(max(peak.allocated_bytes for peak in peaks))}
    reserved = [peak.reserved_bytes for peak in peaks if peak.reserved_bytes is not None]
    if reserved:
        told["peak_reserved_gib"] = _rounded(max(reserved))
    for phase in dict.fromkeys(phase for reading in readings for phase in reading.phase_peaks):
        largest = max(reading.phase_peaks.get(phase, 0) for reading in readings)
        told[f"peak_{phase}_gib"] = _rounded(largest)
    retries = [peak.num_alloc_retries for peak in peaks if peak.num_alloc_retries is not None]
    return told | ({"num_alloc_retries": sum(retries)} if retries else {})


def _rounded(num_bytes: int) -> float:
    """GiB to about a KiB, so that a small model's are no zero."""
    return round(gib(num_bytes), 6)


def _device_of(args: Any) -> Any:
    """Where the Trainer trains."""
    device = getattr(args, "device", None)
    return device if device is None or device.type in ("cuda", "cpu") else None
