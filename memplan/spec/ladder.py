"""The ladder: rungs crossed with axes, and what they are held against. Comes from options or from a TOML file."""

import dataclasses
import itertools
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.errors import MemplanError, near_names
from memplan.spec.rung import Rung, parse_rungs
from memplan.units import parse_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Ladder:
    """What a person asks a ladder to climb. Every axis is a tuple; the cross product of them is run in order."""

    name: str
    """Names the results' folder."""
    rungs: tuple[Rung, ...]
    """Points to climb."""
    model: tuple[str, ...]
    """Model names."""
    impl: str | None = None
    """Whose modules train, `reference` (memplan's own) or `hf` (transformers'); None is each model's usual one."""
    ckpt: tuple[str, ...] = ("none",)
    """Checkpoint modes of the rungs that name none."""
    loss: tuple[str, ...] = ("full",)
    """Loss kinds."""
    precision: tuple[str | None, ...] = (None,)
    """Precisions; None is the model's usual one."""
    compile: tuple[str, ...] = ("off",)
    """Whether blocks are compiled: `off`, `on`."""
    seq: int | None = None
    """S of the rungs that name none; None is the model's usual one."""
    images: int | None = None
    """Crops a sample; None is the model's usual number."""
    optimizer: str = "adamw"
    """As in `StepSpec`."""
    update: str = "step"
    """As in `StepSpec`."""
    rows: str = "full"
    """As in `StepSpec`."""
    attention: str | None = None
    """As in `StepSpec`; None is the model's usual one."""
    norm: str = "eager"
    """As in `StepSpec`."""
    clip: float | None = None
    """As in `StepSpec`."""
    workload: str | None = None
    """As in `StepSpec`; None is `vlm` with images, `classify` for image classifiers and `lm` without."""
    suffix: int = 0
    """As in `StepSpec`."""
    blocks: str = ""
    """As in `StepSpec`."""
    dropout: float = 0.0
    """As in `StepSpec`."""
    lora: str = ""
    """As in `StepSpec`."""
    parallel: str = "single"
    """As in `StepSpec`."""
    world: int = 1
    """As in `StepSpec`."""
    freeze: str | None = None
    """Components that do not train, with `+` between them, or `none`; None is as the model is usually trained."""
    device: str = "auto"
    """`auto` (CUDA where there is a GPU, else simulated), `cuda`, `cpu` or `simulated`."""
    gpu: str | None = None
    """Card that a simulated climb imagines."""
    gate_bytes: int | None = None
    """A rung passes when its peak stays at or under this; None: no gate."""
    gate_on: str = "allocated"
    """Which peak the gate reads: `allocated`, `reserved` or `used`."""
    warmup: int = 1
    """Least steps between the first and the measured ones; more follow until they are steady."""
    steps: int = 3
    """Least timed steps."""
    min_time_s: float = 0.0
    """Least seconds of timed steps; more steps follow until then."""
    timeout_s: int = 1800
    """Seconds after which a rung's process is ended."""
    repeat: int = 1
    """Processes for each rung; the first of every rung come before the second."""
    entry: str | None = None
    """A step of the user's own, `pkg.mod:make_step`, which is climbed instead of a model's."""
    parity: bool = True
    """Whether what is checkpointed is first held against the plain step."""
    trace: bool = False
    """Whether each measured rung is traced too, so that its row has all three numbers."""
    allow_shared: bool = False
    """Whether to climb on a device that other processes use."""
    snapshot_on_oom: bool = False
    """Whether a rung that ran out of memory runs once more, with the allocator's history recorded."""

    def __post_init__(self) -> None:
        if not self.rungs:
            raise MemplanError("No rung was given.", "Type rungs like B12c6,B8c4.")
        for name, number in (("steps", self.steps), ("timeout", self.timeout_s), ("repeat", self.repeat)):
            if number < 1:
                raise MemplanError(f"{name} is {number}; it must be 1 or more.")
        if self.warmup < 0:
            raise MemplanError(f"warmup is {self.warmup}; it must be 0 or more.")
        if not 0 <= self.min_time_s < self.timeout_s:
            raise MemplanError(
                f"min-time is {self.min_time_s:g}; it must be 0 or more seconds, and less than the timeout."
            )
        if self.device not in DEVICES:
            raise MemplanError(f"Unknown device {self.device!r}.", near_names(self.device, DEVICES))
        if self.gate_on not in GATES:
            raise MemplanError(f"Unknown gate-on {self.gate_on!r}.", near_names(self.gate_on, GATES))

    def points(self) -> Iterator[tuple[str, str, str, str | None, str, Rung]]:
        """Model, compilation, loss, precision, checkpoint mode and rung of every point, in the order of the climb."""
        axes = (self.model, self.compile, self.precision, self.loss, self.rungs)
        for model, compiled, precision, loss, rung in itertools.product(*axes):
            for ckpt in (rung.ckpt,) if rung.ckpt is not None else self.ckpt:
                yield model, compiled, loss, precision, ckpt, dataclasses.replace(rung, ckpt=ckpt)

    @staticmethod
    def from_toml(path: Path, changes: dict[str, Any] | None = None) -> "Ladder":
        """The ladder that a file describes; its keys are the command line's options without dashes. The keys of
        `changes` count instead of the file's."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise MemplanError(
                f"There is no ladder file {path}.", "Type rungs like B12c6,B8c4 or a file's path."
            ) from None
        except OSError as error:
            raise MemplanError(f"{path} cannot be read: {error.strerror}.") from None
        except UnicodeDecodeError:
            raise MemplanError(f"{path} is not TOML: it is not text in UTF-8.") from None
        except tomllib.TOMLDecodeError as error:
            raise MemplanError(f"{path} is not TOML: {error}.", 'A line looks like: rungs = "B4c2,B2c1".') from None
        return Ladder.from_dict(data | (changes or {}), name=path.stem, origin=str(path))

    @staticmethod
    def from_dict(data: dict[str, Any], *, name: str, origin: str) -> "Ladder":
        """The ladder that the keys of `data` describe; MemplanError names a key that is unknown or of a wrong kind."""
        fields = {field.name for field in dataclasses.fields(Ladder)}
        known = fields - {"name", *RENAMED} | set(RENAMED.values())
        values: dict[str, Any] = {"name": name}
        for key, value in data.items():
            field = key.replace("-", "_")
            if field not in known:
                raise MemplanError(f"{origin}: unknown key {key!r}.", near_names(field, known))
            if field == "rungs":
                values[field] = parse_rungs(_texts(origin, key, value, joined=True)[0])
            elif field == "gate":
                values["gate_bytes"] = parse_bytes(_texts(origin, key, value, joined=True)[0])
            elif field in ("model", "ckpt", "loss", "precision", "compile"):
                texts = _texts(origin, key, value, joined=True)[0].split(",")
                values[field] = tuple(text.strip() for text in texts)
            elif field in ("seq", "images", "suffix", "world", "warmup", "steps", "timeout", "repeat"):
                if type(value) is not int:
                    raise MemplanError(f"{origin}: {key} must be a whole number, not {value!r}.")
                values["timeout_s" if field == "timeout" else field] = value
            elif field in ("clip", "dropout", "min_time"):
                if type(value) not in (int, float):
                    raise MemplanError(f"{origin}: {key} must be a number, not {value!r}.")
                values["min_time_s" if field == "min_time" else field] = float(value)
            elif field in ("parity", "trace", "allow_shared", "snapshot_on_oom"):
                if type(value) is not bool:
                    raise MemplanError(f"{origin}: {key} must be true or false, not {value!r}.")
                values[field] = value
            else:
                values[field] = _texts(origin, key, value, joined=True)[0]
        for key in ("rungs", "model"):
            if key not in values:
                raise MemplanError(f"{origin}: the key {key!r} is missing.", f"A ladder needs {key}.")
        return Ladder(**values)


DEVICES = ("auto", "cuda", "cpu", "simulated")
GATES = ("allocated", "reserved", "used")
RENAMED = {"gate_bytes": "gate", "timeout_s": "timeout", "min_time_s": "min_time"}
"""Fields whose unit their key leaves out."""


def _texts(origin: str, key: str, value: object, *, joined: bool = False) -> tuple[str, ...]:
    if value == "":
        raise MemplanError(f"{origin}: {key} is empty.")
    items: list[object] = value if isinstance(value, list) else [value]
    texts = tuple(item for item in items if isinstance(item, str) and item)
    if not texts or len(texts) != len(items):
        raise MemplanError(f"{origin}: {key} must be text or a list of texts, not {value!r}.")
    return (",".join(texts),) if joined else texts
