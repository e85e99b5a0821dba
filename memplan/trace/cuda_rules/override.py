"""Torch operators given another kernel for a while."""

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import library as torch_library


@contextmanager
def overridden(dispatch_key: str, kernels: Mapping[str, Callable[..., Any]]) -> Iterator[None]:
    """Registers `kernels` (aten name with overload -> function) on `dispatch_key`; torch's own are back at exit."""
    library: Any = torch_library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch warns once that a kernel is overridden, which is meant
            for name, kernel in kernels.items():
                library.impl(name, kernel, dispatch_key)
        yield
    finally:
        library._destroy()
