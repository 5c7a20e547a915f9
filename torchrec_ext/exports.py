"""The names that a package exports stand once, in its ``__init__.pyi``, and are imported when first used.

Type checkers read that file. Standard library only: ``torchrec_ext.doctor`` runs where nothing is installed yet.
"""

import ast
import importlib
import sys
from collections.abc import Callable
from typing import Any


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns ``__getattr__``, ``__dir__`` and ``__all__`` of a package, for the names in its ``__init__.pyi``.

    The first name that is used checks the installed stack, before anything imports torch.

    Args:
        package: ``__name__`` of the package.
        file: ``__file__`` of the package.
    """
    with open(f"{file.removesuffix('.py')}.pyi") as stream:
        imports = [node for node in ast.parse(stream.read()).body if isinstance(node, ast.ImportFrom)]
    modules = {alias.name: f"{package}.{node.module}" for node in imports for alias in node.names}
    names = sorted(modules)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}")
        importlib.import_module("torchrec_ext.needs_torch")
        value = getattr(importlib.import_module(modules[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *names}), names
