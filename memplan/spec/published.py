"""A peak that somebody else measured and printed, with the step that made it. Comes from a TOML file."""

import string
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memplan.errors import MemplanError, near_names
from memplan.spec.device import DeviceSpec, card
from memplan.spec.ladder import Ladder
from memplan.units import parse_bytes

READS = ("allocated", "active", "reserved")
WINDOWS = ("first_step", "steady")


@dataclass(frozen=True, slots=True, kw_only=True)
class Published:
    """One printed figure."""

    name: str
    """The file's name without its ending."""
    source: str
    """Where it is printed."""
    figure_bytes: int
    """The figure."""
    rounding_bytes: int
    """Half of the last digit that was printed."""
    reads: str
    """Which peak it is: `allocated`, `active` or `reserved`."""
    window: str
    """`first_step`, everything from the start of the process to the end of one step, or `steady`, a later step."""
    compiled: bool
    """Whether the step was compiled: an eager trace is then an upper bound."""
    longest: bool
    """Whether the source does not say how long the samples at the peak were: with the longest of all, a witness is an
    upper bound too."""
    device: DeviceSpec
    """Card that it was measured on."""
    step: tuple[Path, str] | None
    """File and function that builds the step and returns it, to be called without arguments; None where the step is
    that of the question, or where nothing is traced."""
    arguments: dict[str, Any]
    """What the function is called with."""
    question: Ladder | None
    """The step as a ladder of one rung, for the estimate, and for the trace where nobody wrote it for torch; None where
    no built-in model is like it, or `sizes` says all."""
    sizes: tuple[Path, str] | None
    """File and function that write the same step over the estimate's ledger: called with a ledger and the arguments, it
    returns the step; None where there is none. Alone, it is judged by the estimate."""
    above_start: bool
    """Whether the figure leaves out what was alive when its window began."""

    @property
    def is_bounded(self) -> bool:
        """Whether a witness of it is an upper bound."""
        return self.compiled or self.longest

    @property
    def traceable(self) -> bool:
        """Whether there is a step to trace."""
        return self.step is not None or self.question is not None

    @staticmethod
    def from_toml(path: Path) -> "Published":
        """The figure that a file describes; MemplanError names what is missing, unknown or of a wrong kind."""
        try:
            data = tomllib.loads(path.read_text(encoding="utf-8"))
        except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
            raise MemplanError(f"{path} cannot be read: {error}.") from None
        for key in data:
            if key not in KINDS:
                raise MemplanError(f"{path}: unknown key {key!r}.", near_names(key, KINDS))
        for key, kind in KINDS.items():
            if not isinstance(data.setdefault(key, DEFAULTS.get(key)), kind):
                raise MemplanError(f"{path}: {key} is {data[key]!r}; it must be a {kind.__name__}.")
        for key, known in (("reads", READS), ("window", WINDOWS)):
            if data[key] not in known:
                raise MemplanError(f"{path}: unknown {key} {data[key]!r}.", near_names(data[key], known))
        question = data["question"]
        if not data["step"] and not question and not data["sizes"]:
            raise MemplanError(
                f"{path} says neither step nor question nor sizes.", 'Write step = "torchtune.py:full_finetune".'
            )
        return Published(
            name=path.stem,
            source=data["source"],
            figure_bytes=parse_bytes(data["figure"]),
            rounding_bytes=rounding_of(data["figure"]),
            reads=data["reads"],
            window=data["window"],
            compiled=data["compiled"],
            longest=data["longest"],
            device=card(data["gpu"]),
            step=entry(path, "step", data["step"]) if data["step"] else None,
            arguments=data["arguments"],
            question=Ladder.from_dict(question, name=path.stem, origin=str(path)) if question else None,
            sizes=entry(path, "sizes", data["sizes"]) if data["sizes"] else None,
            above_start=data["above_start"],
        )


def rounding_of(text: str) -> int:
    """Bytes of half the last digit of a size as text; of `1.1MiB` those of 0.05 MiB, of plain bytes none."""
    number = text.strip().rstrip(string.ascii_letters + " ")
    _, _, decimals = number.partition(".")
    digits: int = 10 ** len(decimals)
    return parse_bytes(text.replace(number, "1", 1)) // (2 * digits)


def entry(path: Path, key: str, text: str) -> tuple[Path, str]:
    """File and function of `text`, `torchtune.py:full_finetune`, beside the file at `path`."""
    script, colon, function = text.partition(":")
    if not colon:
        raise MemplanError(f"{path}: {key} is {text!r}.", "Write it like torchtune.py:full_finetune.")
    return path.parent / script, function


KINDS: dict[str, type] = {
    "source": str,
    "figure": str,
    "reads": str,
    "window": str,
    "compiled": bool,
    "longest": bool,
    "gpu": str,
    "step": str,
    "arguments": dict,
    "question": dict,
    "sizes": str,
    "above_start": bool,
}
DEFAULTS: dict[str, Any] = {
    "reads": "allocated",
    "window": "steady",
    "compiled": False,
    "longest": False,
    "step": "",
    "arguments": {},
    "question": {},
    "sizes": "",
    "above_start": False,
}


def read_published(folder: Path) -> tuple[Published, ...]:
    """The figures of a folder's TOML files, by name; MemplanError when there are none."""
    paths = sorted(folder.glob("*.toml"))
    if not paths:
        raise MemplanError(
            f"There is no published figure in {folder}.", "Name the folder that holds their .toml files."
        )
    return tuple(Published.from_toml(path) for path in paths)
