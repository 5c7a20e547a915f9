"""The command line of the apps: which recipe, with which changes, shown how."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import importlib.util
import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn, cast

from torchx_apps.cli.overrides import apply_overrides, field_hint, is_group, nearest, type_name

__all__ = ["apply_overrides", "build_parser", "describe_keys", "list_recipes", "load_recipe"]

_BUILT_IN = "torchx_apps.recipes"


def load_recipe(spec: str) -> Any:
    """The Job of a recipe.

    Args:
        spec: the name of a built-in recipe, `my_recipe.py:job`, or `my.module:job`.

    Raises:
        ValueError: there is no such recipe (the message names the nearest one and the list), Python cannot read its
            file, it needs an argument, ends the program, or returns no dataclass.

    Example:
        >>> load_recipe("two_tower").name
        'two_tower'
        >>> load_recipe("two_towr")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: --recipe two_towr: there is no such recipe; did you mean 'two_tower'? Built in: ...two_tower...
        >>> load_recipe("missing.py:job")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: --recipe missing.py:job: there is no file missing.py in ...
    """
    where, colon, name = spec.rpartition(":")
    try:
        recipe = _from_module(_import(where, spec), name, spec) if colon else _built_in(spec)
        _check_callable_bare(recipe, spec)
        job = recipe()
    except SyntaxError as error:
        at = f"{error.filename}, line {error.lineno}: {error.msg}: {(error.text or '').strip()}"
        raise ValueError(f"--recipe {spec}: {at}; correct the file") from None
    except SystemExit as end:
        # Its status may be 0, and would say that the job has been trained.
        raise ValueError(
            f"--recipe {spec}: it ends the program with exit({end.code}); a recipe returns one Job"
        ) from None
    if not is_group(job):
        raise ValueError(f"--recipe {spec}: it returned {job!r}; a recipe returns one Job")
    return job


def built_in_recipes() -> dict[str, Callable[[], Any]]:
    """Every public function of torchx_apps.recipes that needs no argument and is annotated `-> Job`, by its name.

    Example:
        >>> "two_tower" in built_in_recipes()
        True
    """
    module = importlib.import_module(_BUILT_IN)
    return {
        name: function
        for name, function in inspect.getmembers(module, inspect.isfunction)
        if not name.startswith("_") and _returns_a_job(function, module)
    }


def list_recipes() -> str:
    """One line for each built-in recipe: its name, and the first line of its docstring."""
    recipes = built_in_recipes()
    width = max(map(len, recipes))
    return "\n".join(f"{name:{width}}  {(inspect.getdoc(f) or '').split(chr(10))[0]}" for name, f in recipes.items())


def describe_keys(config: Any) -> str:
    """Every key of a config as `--set` takes it, with its type, value and meaning.

    Example:
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Loader:
        ...     '''How batches are cut.
        ...
        ...     Attributes:
        ...         batch_size: B, rows per rank and step.
        ...     '''
        ...     batch_size: int = 1024
        >>> print(describe_keys(Loader()))
        key         type    value    meaning
        ----------  ------  -------  --------------------------
        batch_size  int     1024     B, rows per rank and step.
    """
    from tabulate import tabulate

    rows = list(_rows(config, ""))
    if sys.stdout.isatty():  # a file or a pipe has a line for each key
        rows = _broken(rows)
    return str(tabulate(rows, headers=["key", "type", "value", "meaning"], disable_numparse=True))


def build_parser(prog: str, description: str | None) -> argparse.ArgumentParser:
    """The flags that every app with a recipe has.

    A wrong flag raises ValueError, so that it is told once and not by every rank.

    Example:
        >>> options = build_parser("train", None).parse_args(["--recipe", "ncf", "--set", "a=1", "--set", "b=2"])
        >>> options.recipe, options.set, options.run_dir
        ('ncf', ['a=1', 'b=2'], None)
        >>> build_parser("train", None).parse_args(["--recipee", "ncf"])
        Traceback (most recent call last):
        ...
        ValueError: unrecognized arguments: --recipee ncf; `python -m train --help` lists the flags
    """
    parser = _Parser(prog=f"python -m {prog}", description=description, allow_abbrev=False)
    parser.add_argument("--recipe", default="two_tower", help="a built-in name, my_recipe.py:job or my.module:job")
    parser.add_argument(
        "--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of the recipe; repeat at will"
    )
    parser.add_argument("--run-dir", type=_folder, help="folder for checkpoints, metrics and plan")
    parser.add_argument(
        "--resume",
        default="never",
        metavar="auto|PATH",
        help="go on from the last good checkpoint of --run-dir (or of the recipe's newest run), or from that of another run",
    )
    parser.add_argument("--dry-run", action="store_true", help="print the recipe as changed by --set, and exit")
    parser.add_argument("--list-recipes", action="store_true", help="print the built-in recipes, and exit")
    return parser


def _folder(text: str) -> Path:
    """The path; JSON, protobuf and manifests hold it as UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(f"{text!a} is not UTF-8; choose another name") from None
    return Path(text)


class _Parser(argparse.ArgumentParser):
    def print_help(self, file: Any = None) -> None:
        if os.environ.get("RANK", "0") == "0":  # once for all ranks
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` lists the flags")


def _built_in(name: str) -> Callable[[], Any]:
    recipes = built_in_recipes()
    if name in recipes:
        return recipes[name]
    question = nearest(name, recipes) or "; write a built-in name, my_recipe.py:job or my.module:job."
    raise ValueError(f"--recipe {name}: there is no such recipe{question} Built in: {', '.join(recipes)}")


def _returns_a_job(function: Callable[..., Any], module: ModuleType) -> bool:
    signature = inspect.signature(function)
    optional = all(p.default is not p.empty for p in signature.parameters.values())
    return optional and signature.return_annotation in ("Job", module.Job)


def _import(where: str, spec: str) -> ModuleType:
    if where.endswith(".py"):
        return _import_file(Path(where), spec)
    try:
        return importlib.import_module(where)
    except ModuleNotFoundError as error:
        # A module that the recipe itself imports in vain is another story, told with its traceback.
        if not (where + ".").startswith(f"{error.name}."):
            raise
        remedy = "install it, or give the file as my_recipe.py:job"
        raise ValueError(f"--recipe {spec}: there is no module {error.name}; {remedy}") from None


def _import_file(file: Path, spec: str) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"--recipe {spec}: there is no file {file} in {Path.cwd()}")
    # Its neighbours can be imported, as with `python my_recipe.py`; its own name cannot hide an installed module.
    sys.path.insert(0, str(file.resolve().parent))
    name = f"_recipe_{file.stem}"
    found = importlib.util.spec_from_file_location(name, file)
    assert found is not None, "a .py file always has a loader"
    assert found.loader is not None
    module = importlib.util.module_from_spec(found)
    sys.modules[name] = module  # dataclasses look their module up there
    found.loader.exec_module(module)
    return module


def _check_callable_bare(recipe: Callable[[], Any], spec: str) -> None:
    parameters = inspect.signature(recipe).parameters.values()
    needed = [p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    if needed:
        raise ValueError(
            f"--recipe {spec}: it needs the argument {needed[0]!r}, and is called without any; give it a default"
        )


def _from_module(module: ModuleType, name: str, spec: str) -> Callable[[], Any]:
    recipe: Any = getattr(module, name, None)
    if callable(recipe):
        return cast("Callable[[], Any]", recipe)
    functions = [n for n, f in inspect.getmembers(module, inspect.isfunction) if f.__module__ == module.__name__]
    listed = ", ".join(functions) or "none"
    question = nearest(name, functions) or ";"
    raise ValueError(f"--recipe {spec}: there is no function {name!r}{question} Functions there: {listed}")


def _rows(config: Any, prefix: str) -> Iterator[Sequence[str]]:
    meanings = _meanings(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        if is_group(value):
            yield from _rows(value, f"{prefix}{field.name}.")
        elif field.init:
            yield f"{prefix}{field.name}", _type_of(config, field), _shown(value), meanings.get(field.name, "")


def _type_of(config: Any, field: dataclasses.Field[Any]) -> str:
    try:
        return type_name(field_hint(config, field.name))
    except NameError:  # imported for type checkers alone
        return str(field.type)


def _shown(value: object) -> str:
    return str(getattr(value, "__qualname__", value)) if callable(value) else repr(value)


def _meanings(config: Any) -> dict[str, str]:
    from docstring_parser import parse  # comes with TorchX, which reads component docstrings with it

    told = {p.arg_name: _plain(p.description or "") for p in parse(type(config).__doc__ or "").params}
    return told | {f.name: f.metadata["doc"] for f in dataclasses.fields(config) if "doc" in f.metadata}


def _plain(text: str) -> str:
    """Without Sphinx's markup, which means nothing in a terminal."""
    without_roles = re.sub(r":[a-z]+:`[~!]?(?:[\w.]*\.)?(\w+)`", r"\1", " ".join(text.split()))
    return without_roles.replace("``", "")


def _broken(rows: Sequence[Sequence[str]]) -> list[Sequence[str]]:
    """Type, value and meaning in lines that end where the terminal does; tabulate's own maxcolwidths makes 'False' True."""
    narrow = 24
    left = shutil.get_terminal_size().columns - max(len(row[0]) for row in rows) - 2 * narrow - 6
    widths = (narrow, narrow, max(left, narrow))
    return [
        (row[0], *(textwrap.fill(cell, width) for cell, width in zip(row[1:], widths, strict=True))) for row in rows
    ]
