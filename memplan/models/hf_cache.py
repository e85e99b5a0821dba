"""The configuration of a model that was once downloaded, in the local hub cache. No network.

Source: the layout of huggingface_hub 1.x: `models--ORG--NAME/refs/main` names a folder of `snapshots/`.
"""

import os
import re
from pathlib import Path

NAME = re.compile(r"[\w.-]+/[\w.-]+", re.ASCII)
"""`org/name`."""


def hub_folder() -> Path:
    """The hub cache: `HF_HUB_CACHE`, else `hub` below `HF_HOME`, else below the user's cache folder."""
    for variable in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if os.environ.get(variable):
            return Path(os.environ[variable]).expanduser()
    if os.environ.get("HF_HOME"):
        return Path(os.environ["HF_HOME"]).expanduser() / "hub"
    caches = os.environ.get("XDG_CACHE_HOME")
    return (Path(caches).expanduser() if caches else Path.home() / ".cache") / "huggingface" / "hub"


def cached_config(name: str) -> Path | None:
    """`config.json` of `org/name`: of the branch main, else of the newest snapshot that has one; None where there is
    none."""
    folder = hub_folder() / ("models--" + name.replace("/", "--"))
    reference = folder / "refs" / "main"
    if reference.is_file():
        commit = reference.read_text(encoding="utf-8", errors="replace").strip()
        path = folder / "snapshots" / commit / "config.json"
        if re.fullmatch(r"\w+", commit) and path.is_file():
            return path
    found = [path for path in folder.glob("snapshots/*/config.json") if path.is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def cached_names() -> list[str]:
    """`org/name` of every model in the cache that has a configuration."""
    folders = hub_folder().glob("models--*--*")
    names = [folder.name.removeprefix("models--").replace("--", "/", 1) for folder in folders]
    return sorted(name for name in names if cached_config(name) is not None)
