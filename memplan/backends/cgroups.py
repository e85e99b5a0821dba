"""Linux control groups: how much memory ours may have, and how often its out-of-memory killer has struck."""

from pathlib import Path

OURS = Path("/proc/self/cgroup")
ROOT = Path("/sys/fs/cgroup")
NO_LIMIT_BYTES = 1 << 60
"""At and above this a number is no limit: version 1 writes the largest page-aligned 64-bit number for none."""


def limit_bytes(ours: Path = OURS, root: Path = ROOT) -> int | None:
    """Bytes that our group may hold, the groups above it counted in; None without a limit."""
    return min((limit for limit, _ in _limits(ours, root)), default=None)


def room_bytes(ours: Path = OURS, root: Path = ROOT) -> int | None:
    """Bytes that our group can still get: its limit less what it holds, but for the file cache, which gives way."""
    rooms = []
    for limit, folder in _limits(ours, root):
        used = _number(folder / "memory.current", folder / "memory.usage_in_bytes")
        stat = _table(folder / "memory.stat")
        prefix = "total_" if "total_active_file" in stat else ""
        cached = stat.get(f"{prefix}active_file", 0) + stat.get(f"{prefix}inactive_file", 0)
        if used is not None:
            rooms.append(limit - used + cached)
    return min(rooms, default=None)


def num_kills(ours: Path = OURS, root: Path = ROOT) -> int | None:
    """Processes of our group that an out-of-memory killer has ended so far; None where no group counts them."""
    for folder in _folders(ours, root):
        for name in ("memory.events", "memory.oom_control"):
            kills = _table(folder / name).get("oom_kill")
            if kills is not None:
                return kills
    return None


def _folders(ours: Path, root: Path) -> list[Path]:
    """The folder of our memory group and those of the groups above it, ours first."""
    try:
        lines = [line.split(":", 2) for line in ours.read_text(encoding="utf-8").splitlines()]
    except OSError:
        return []
    paths = {controllers: path.lstrip("/") for _, controllers, path in (line for line in lines if len(line) == 3)}
    first = next((path for controllers, path in paths.items() if "memory" in controllers.split(",")), None)
    base, path = (root / "memory", first) if first is not None else (root, paths.get("", ""))
    folder = base / path
    if ".." in folder.parts or not folder.is_dir():  # a container sees the path of its host, but its own group on top
        folder = base
    return [folder, *(above for above in folder.parents if above.is_relative_to(base))]


def _limits(ours: Path, root: Path) -> list[tuple[int, Path]]:
    found = []
    for folder in _folders(ours, root):
        limit = _number(folder / "memory.max", folder / "memory.limit_in_bytes")
        if limit is not None and limit < NO_LIMIT_BYTES:
            found.append((limit, folder))
    return found


def _number(*paths: Path) -> int | None:
    """The number in the first of `paths` that holds one."""
    for path in paths:
        try:
            return int(path.read_text(encoding="ascii"))
        except (OSError, ValueError):
            continue
    return None


def _table(path: Path) -> dict[str, int]:
    """The lines `name number` of `path`."""
    try:
        pairs = [line.split() for line in path.read_text(encoding="ascii").splitlines()]
    except (OSError, ValueError):
        return {}
    return {pair[0]: int(pair[1]) for pair in pairs if len(pair) == 2 and pair[1].isdigit()}
