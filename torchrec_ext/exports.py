"""attach(): the names that a package exports stand once, in its ``__init__.pyi``, and are imported when first used.

Registry: names that settings can have, with the objects that they stand for, which are imported when first used.

Type checkers read the ``.pyi``. Standard library only: ``torchrec_ext.doctor`` runs where nothing is installed yet.
"""

import ast
import importlib.util
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pkgutil import resolve_name
from types import ModuleType, SimpleNamespace
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


@dataclass(frozen=True)
class Entry:
    """A line of a registry.

    Args:
        path: ``module:name`` of the object.
        facts: attributes of the object that are known before its import, if they differ from the usual ones.
    """

    path: str
    facts: Mapping[str, Any]


def entry(path: str, **facts: Any) -> Entry:
    """Returns a line of a registry: ``module:name`` of an object, and the attributes that are not as usual."""
    return Entry(path, facts)


class Registry(Mapping[str, Any]):
    """Objects by name, each imported when it is looked up first.

    So a config can check a name, and a few attributes of its object, before torch is imported.

    Args:
        entries: lines by name: the place of each object, and those of its ``usual`` attributes that differ.
        usual: attributes that are known before an import, with their usual values.

    Example:
        >>> entries = {"int": entry("builtins:int"), "root": entry("math:sqrt", __name__="sqrt")}
        >>> registry = Registry(entries, __name__="int")
        >>> list(registry), registry.facts("root").__name__, registry["root"](9)
        (['int', 'root'], 'sqrt', 3.0)
    """

    def __init__(self, entries: Mapping[str, Entry], **usual: Any) -> None:
        self._entries = entries
        self._usual = usual
        self._objects: dict[str, Any] = {}

    def facts(self, name: str) -> SimpleNamespace:
        """Returns an object's known attributes without importing it.

        Raises:
            KeyError: there is no such name.
        """
        return SimpleNamespace(**{**self._usual, **self._entries[name].facts})

    def __getitem__(self, name: str) -> Any:
        """Returns the object.

        Raises:
            KeyError: there is no such name.
            TypeError: the object has other attributes than its line says.
        """
        if name not in self._objects:
            path = self._entries[name].path
            value = resolve_name(path)
            for fact, expected in vars(self.facts(name)).items():
                if getattr(value, fact) != expected:
                    raise TypeError(
                        f"{path}: {fact} is {getattr(value, fact)!r}, and its line in the registry says {expected!r}; "
                        "write the same in both"
                    )
            self._objects[name] = value
        return self._objects[name]

    def __contains__(self, name: object) -> bool:
        # Mapping's own would import the object.
        return name in self._entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)
