"""attach(): the names that a package exports stand once, in its ``__init__.pyi``, and are imported when first used.

Type checkers read the ``.pyi``. Standard library only: ``torchrec_ext.doctor`` runs where nothing is installed yet.
"""

import ast
import importlib.util
import sys
from collections.abc import Callable, Collection
from types import ModuleType
from typing import Any


def attach(
    package: str, file: str, without_torch: Collection[str] = ()
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns ``__getattr__``, ``__dir__`` and ``__all__`` of a package, for the names in its ``__init__.pyi``.

    The first name that is used checks the installed stack, before anything imports torch.

    Args:
        package: ``__name__`` of the package.
        file: ``__file__`` of the package.
        without_torch: modules of the package that import no torch, such as ``validation``: their names need no stack.
    """
    with open(f"{file.removesuffix('.py')}.pyi") as stream:
        # Parsed and not imported, because the modules in it import torch.
        imports = [
            node
            for node in ast.parse(stream.read()).body
            if isinstance(node, ast.ImportFrom)
        ]
    modules = {
        alias.name: importlib.util.resolve_name(
            f"{'.' * node.level}{node.module}", package
        )
        for node in imports
        for alias in node.names
    }
    names = sorted(modules)

    def load(name: str) -> Any:
        if name not in modules:
            raise AttributeError(
                f"module {package!r} has no attribute {name!r}; it has {', '.join(names)}"
            )
        if modules[name].removeprefix(f"{package}.") not in without_torch:
            importlib.import_module("torchrec_ext.needs_torch")
        value = getattr(importlib.import_module(modules[name]), name)
        # A subpackage of the same name can be called (:class:`CallableModule`), and
        # stays what the name stands for.
        value = sys.modules.get(f"{package}.{name}", value)
        setattr(sys.modules[package], name, value)
        return value

    return load, lambda: sorted({*vars(sys.modules[package]), *names}), names


class CallableModule(ModuleType):
    """A module with a call to its function of the same name: ``adopt(...)`` for ``adopt.adopt(...)``.

    So ``from torchrec_ext import adopt`` gives a function, as a reader expects, and ``from torchrec_ext.adopt import
    Rows`` works beside it.
    """

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        """Calls the function."""
        return getattr(self, self.__name__.rpartition(".")[2])(*arguments, **options)
