"""What the source of a user's function says about it, before anything is run and anything heavy imported."""

import ast
import sys
from collections.abc import Sequence
from importlib.machinery import PathFinder
from pathlib import Path

from memplan.errors import MemplanError, near_names
from memplan.models.user_factory import EXAMPLE


def check_entry(entry: str, arguments: Sequence[str]) -> None:
    """MemplanError when `entry` is of another form, its module is not there or no Python, or when it plainly has no
    such function, or none that takes `arguments` by name. What only a run can tell is left to it."""
    module_name, colon, name = entry.partition(":")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in module_name.split(".")):
        raise MemplanError(f"{entry!r} names no function.", EXAMPLE)
    path = source_of(module_name)
    if path is None:
        raise MemplanError(f"There is no module {module_name!r} here.", EXAMPLE)
    if path.suffix != ".py":
        return
    try:
        body = ast.parse(path.read_bytes()).body
    except SyntaxError as error:
        raise MemplanError(f"{path.name}, line {error.lineno} is no Python: {error.msg}.", "Mend it first.") from None
    known = names_of(body)
    if known is not None and name not in known:
        raise MemplanError(f"{module_name} has no function {name!r}.", near_names(name, known))
    for node in body:
        if isinstance(node, ast.FunctionDef) and node.name == name and node.args.kwarg is None:
            taken = {one.arg for one in (*node.args.args, *node.args.kwonlyargs)}
            if missing := [argument for argument in arguments if argument not in taken]:
                raise MemplanError(
                    f"{entry} does not take {' and '.join(missing)}.",
                    f"A ladder calls it by name: def {name}({', '.join(arguments)}).",
                )


def names_of(body: Sequence[ast.stmt]) -> set[str] | None:
    """Names that a module's statements make; None where one cannot tell: a star, a branch, a name of its own making."""
    names: set[str] = set()
    for node in body:
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                names.add(node.name)
            case ast.Import() | ast.ImportFrom():
                names |= {alias.asname or alias.name.partition(".")[0] for alias in node.names}
            case ast.Assign() | ast.AnnAssign():
                names |= {one.id for one in ast.walk(node) if isinstance(one, ast.Name)}
            case ast.Expr():
                continue
            case _:
                return None
    return None if names & {"*", "__getattr__"} else names


def source_of(module_name: str) -> Path | None:
    """The file of a module, looked for from the current folder on, its packages not imported; None where there is
    none."""
    places: Sequence[str] | None = [str(Path.cwd()), *sys.path]
    found = None
    for part in module_name.split("."):
        found = PathFinder.find_spec(part, places)
        if found is None:
            return None
        places = found.submodule_search_locations
    return Path(found.origin) if found is not None and found.origin else None
