"""The blocks of a model, found by structure: lists of modules that run one after another."""

from torch import nn

from memplan.errors import MemplanError
from memplan.models.trainable import Trainable


def block_paths(model: nn.Module) -> tuple[str, ...]:
    """Path of the list of blocks that holds the most parameters. MemplanError where there is none."""
    sizes = stacks(model)
    if not sizes:
        raise MemplanError(
            f"{type(model).__name__} has no list of equal blocks.", "Name it: --blocks path.to.layers, or --ckpt none."
        )
    return (max(sizes, key=lambda path: sizes[path]),)


def stacks(model: nn.Module) -> dict[str, int]:
    """Parameters of each list of blocks by its path: a `ModuleList` or `Sequential` of two modules or more of one
    class, inside no other such list."""
    sizes: dict[str, int] = {}
    for path, module in model.named_modules():
        inside = any(path.startswith(f"{outer}.") for outer in sizes)
        if not inside and isinstance(module, nn.ModuleList | nn.Sequential) and is_stack(module):
            sizes[path] = sum(parameter.numel() for parameter in module.parameters())
    return sizes


def is_stack(container: nn.Module) -> bool:
    """Whether the children of `container` are two modules or more of one class, with parameters."""
    children = list(container.children())
    same = len({type(child) for child in children}) == 1
    return len(children) >= 2 and same and any(True for _ in children[0].parameters())


def find_blocks(model: nn.Module, paths: str = "") -> dict[str, nn.Module]:
    """Blocks by path, those of several lists one after another; `paths` names the lists, with `+` between them, and is
    empty where the model's own `block_paths` or its structure tells. MemplanError where a path leads nowhere."""
    own = model.block_paths if isinstance(model, Trainable) else ()
    named = tuple(paths.split("+")) if paths else own or block_paths(model)
    blocks: dict[str, nn.Module] = {}
    for path in named:
        path = full_path(model, path)
        container = model.get_submodule(path)
        children = dict(container.named_children())
        if not isinstance(container, nn.ModuleList | nn.Sequential) or not children:
            raise MemplanError(
                f"{path} is a {type(container).__name__}, not a list of blocks.", "Name the list itself."
            )
        blocks |= {f"{path}.{name}": child for name, child in children.items()}
    return blocks


def full_path(model: nn.Module, path: str) -> str:
    """The path from `model` that `path` means, which may start below the child that is somebody else's module.
    MemplanError where there is no such module."""
    inner = model.inner if isinstance(model, Trainable) else ""
    for full in (path, f"{inner}.{path}" if inner else path):
        try:
            model.get_submodule(full)
        except AttributeError:
            continue
        return full
    known = block_paths(model)[0].removeprefix(f"{inner}." if inner else "")
    raise MemplanError(f"{type(model).__name__} has no module {path!r}.", f"Its blocks are at {known}.")
