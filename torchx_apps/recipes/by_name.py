"""The recipe that `--recipe` names: a built-in one, a function of a file, or a function of a module."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, cast

from torchrec_ext.schema.validation import did_you_mean
from torchx_apps.config import as_toml
from torchx_apps.process import say_once
from torchx_apps.recipes import RECIPES
from torchx_apps.tasks.job import Job

Recipes = Mapping[str, Callable[[], Any]]


def load_recipe(spec: str, built_in: Recipes = RECIPES, kind: type = Job) -> Any:
    """Returns the job of a recipe.

    Args:
        spec: name of a built-in recipe, `my_recipe.py:job`, or `my.module:job`.
        built_in: built-in recipes by name; by default those that train.
        kind: type of its job.

    Raises:
        ValueError: there is no such recipe (the message names the nearest one and the list), Python cannot read its
            file, it needs an argument, ends the program, or returns something else.

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
    module, colon, name = spec.rpartition(":")
    try:
        recipe = (
            _from_module(_import(module, spec), name, spec)
            if colon
            else _built_in(spec, built_in)
        )
        _check_callable_bare(recipe, spec)
        job = recipe()
    except SyntaxError as error:
        raise ValueError(f"--recipe {spec}: {error}; correct the file") from None
    except SystemExit as end:
        # Its status may be 0, which would say that the job has been trained.
        raise ValueError(
            f"--recipe {spec}: it ends the program with exit({end.code}); a recipe returns one Job"
        ) from None
    if not isinstance(job, kind):
        raise ValueError(
            f"--recipe {spec}: it returned a {type(job).__name__}; here a recipe returns a {kind.__name__} of "
            f"{kind.__module__}"
        )
    return job


def list_recipes(recipes: Recipes = RECIPES) -> str:
    """Lists each built-in recipe with the first line of its docstring below.

    Args:
        recipes: recipes by name; by default those that train.
    """
    lines = []
    for name, recipe in recipes.items():
        summary = (inspect.getdoc(recipe) or "").splitlines()[0]
        lines += [name, textwrap.indent(textwrap.fill(summary, 76), "    ")]
    return "\n".join(lines)


def run_recipe(
    parse: Callable[[Sequence[str]], tuple[Any, Any]],
    run: Callable[[Any, Any], None],
    argv: Sequence[str] | None,
    recipes: Recipes = RECIPES,
) -> int:
    """Does what a command line of a recipe asks for: lists the recipes, prints the settings, or runs the job.

    Args:
        parse: returns the options and the job of a command line.
        run: takes the options and the job.
        argv: the flags; the command line when None.
        recipes: recipes to list, by name.

    Returns:
        The exit code 0.
    """
    options, job = parse(sys.argv[1:] if argv is None else argv)
    if options.list_recipes:
        return say_once(list_recipes(recipes))
    if options.dry_run:
        return say_once(as_toml(job))
    run(options, job)
    return 0


def _built_in(name: str, recipes: Recipes) -> Callable[[], Any]:
    if name in recipes:
        return recipes[name]
    forms = "write a built-in name, my_recipe.py:job or my.module:job."
    question = did_you_mean(name, recipes, forms, cutoff=0.5)
    raise ValueError(
        f"--recipe {name}: there is no such recipe; {question} Built in: {', '.join(recipes)}"
    )


def _import(module: str, spec: str) -> ModuleType:
    if module.endswith(".py"):
        return _import_file(Path(module), spec)
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        # Where the recipe itself imports a module that is missing, the traceback says
        # where.
        if not (module + ".").startswith(f"{error.name}."):
            raise
        remedy = "install it, or give the file as my_recipe.py:job"
        raise ValueError(
            f"--recipe {spec}: there is no module {error.name}; {remedy}"
        ) from None


def _import_file(file: Path, spec: str) -> ModuleType:
    if not file.is_file():
        raise ValueError(f"--recipe {spec}: there is no file {file} in {Path.cwd()}")
    # Its neighbours can be imported, as with `python my_recipe.py`; its own name cannot
    # hide an installed module.
    sys.path.insert(0, str(file.resolve().parent))
    name = f"_recipe_{file.stem}"
    module_spec = importlib.util.spec_from_file_location(name, file)
    assert module_spec is not None, "a .py file always has a loader"
    assert module_spec.loader is not None
    module = importlib.util.module_from_spec(module_spec)
    # dataclasses look their module up there.
    sys.modules[name] = module
    module_spec.loader.exec_module(module)
    return module


def _check_callable_bare(recipe: Callable[[], Any], spec: str) -> None:
    try:
        inspect.signature(recipe).bind()
    except TypeError as error:
        raise ValueError(
            f"--recipe {spec}: {error}, and a recipe is called without any; give it a default"
        ) from None


def _from_module(module: ModuleType, name: str, spec: str) -> Callable[[], Any]:
    recipe: Any = getattr(module, name, None)
    if callable(recipe):
        return cast("Callable[[], Any]", recipe)
    functions = [name for name, _ in inspect.getmembers(module, inspect.isfunction)]
    question = did_you_mean(name, functions, "name a function of the file", cutoff=0.5)
    raise ValueError(f"--recipe {spec}: there is no function {name!r}; {question}")
