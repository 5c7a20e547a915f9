"""Help of a component: `torchx run rec.train.hybrid --help`, and a check of its flags before TorchX reads them.

TorchX makes a component's parser from the signature and docstring of its function; so does this help, in 80 columns.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

# TorchX depends on this package.
from docstring_parser import parse
from torchx.specs import AppDef
from torchx.specs.finder import (
    ComponentNotFoundException,
    get_component,
    get_components,
)

from torchx_apps.cli.command_line import fill, most_used_keys
from torchx_apps.cli.overrides import nearest
from torchx_apps.recipes import RECIPES
from torchx_apps.recipes.by_name import Recipes, load_recipe
from torchx_apps.recipes.events import EVENT_RECIPES
from torchx_apps.recipes.preprocess import PREPROCESS_RECIPES

# Flags that say where and with what a job runs; they come last in a help, since the
# defaults do on this machine.
_WHERE = (
    "j",
    "threads",
    "max_retries",
    "name",
    "image",
    "h",
    "cpu",
    "gpu",
    "memMB",
    "env",
    "mounts",
    "rdzv_port",
    "debug",
)
_INDENT = 22


@dataclass(frozen=True, kw_only=True)
class Component:
    """A component of this package.

    Args:
        name: name of the component, such as ``rec.train.hybrid``.
        function: returns the AppDef.
    """

    name: str
    function: Callable[..., AppDef]

    @classmethod
    def named(cls, name: str) -> Component:
        """Finds a component.

        Raises:
            ValueError: there is no such component; the message names the nearest one.

        Example:
            >>> Component.named("rec.train.hybird")
            Traceback (most recent call last):
            ...
            ValueError: there is no component rec.train.hybird; did you mean 'rec.train.hybrid'? See `torchx builtins`
        """
        try:
            return cls(name=name, function=get_component(name).fn)
        except ComponentNotFoundException:
            question = nearest(name, component_names()) or "."
            message = f"there is no component {name}{question} See `torchx builtins`"
            raise ValueError(message) from None

    @property
    def parameters(self) -> Mapping[str, inspect.Parameter]:
        """The flags by name, without ``args``, which belong to the app."""
        parameters = inspect.signature(self.function).parameters.values()
        return {p.name: p for p in parameters if p.kind is not p.VAR_POSITIONAL}

    def check_flags(self, words: Sequence[str]) -> list[str]:
        """Returns the words with each flag as the function spells it: ``--run-dir`` becomes ``--run_dir``.

        Args:
            words: the flags, and behind ``--`` those of the app, which stay as they are.

        Raises:
            ValueError: there is no such flag.

        Example:
            >>> Component.named("rec.train.hybrid").check_flags(["--run-dir", "a", "--", "--dry-run"])
            ['--run_dir', 'a', '--', '--dry-run']
            >>> Component.named("rec.train.hybrid").check_flags(["--epochs", "3"])
            Traceback (most recent call last):
            ...
            ValueError: --epochs: rec.train.hybrid has no such flag; --help lists all; a setting is --set KEY=VALUE
        """
        count = words.index("--") if "--" in words else len(words)
        return [*map(self._spelled, words[:count]), *words[count:]]

    def _spelled(self, word: str) -> str:
        flag, equals, value = word.partition("=")
        name = flag.removeprefix("--").replace("-", "_")
        if not flag.startswith("--") or flag == "--help":
            return word
        if not any(parameter.startswith(name) for parameter in self.parameters):
            settings = (
                "; a setting is --set KEY=VALUE" if "set" in self.parameters else ""
            )
            question = nearest(name, self.parameters) or ";"
            raise ValueError(
                f"{flag}: {self.name} has no such flag{question} --help lists all{settings}"
            )
        return f"--{name}{equals}{value}"

    @property
    def required(self) -> list[str]:
        """The flags without a default."""
        return [
            name
            for name, parameter in self.parameters.items()
            if parameter.default is parameter.empty
        ]

    def app(self) -> AppDef:
        """Returns an AppDef of the component, with a placeholder for each flag without a default."""
        return self.function(**dict.fromkeys(self.required, "-"))

    def help(self) -> str:
        """Describes the component: what it does, an example, its flags, its most used settings, where the rest is."""
        documented = parse(self.function.__doc__ or "")
        meanings = {
            p.arg_name: " ".join((p.description or "").split())
            for p in documented.params
        }
        flags = ["flags:"]
        where = ["flags for where and how it runs:"]
        for name in self.parameters:
            block = where if name in _WHERE else flags
            block.append(self._flag(name, meanings))
        settings = "[--set KEY=VALUE ...] " if "set" in self.parameters else ""
        blocks = [
            fill(f"usage: torchx run {self.name} [FLAGS] {settings}[-- MORE FLAGS]", 4),
            fill(documented.short_description or "", 0),
            "\n".join(["example:", *_first_example(self.function.__doc__ or "")]),
            "\n".join(flags),
            *self._settings(),
            "\n".join(where),
            fill(f"more flags, behind --: torchx run {self.name} -- --help", 4),
        ]
        return "\n\n".join(blocks)

    def _flag(self, name: str, meanings: Mapping[str, str]) -> str:
        default = self.parameters[name].default
        # TorchX takes a name of one letter with one dash.
        dashes = "-" if len(name) == 1 else "--"
        note = ""
        if default is inspect.Parameter.empty:
            note = " (required)"
        elif default not in (None, "", "/", 0, False):
            note = f" (default: {default})"
        return _row(f"{dashes}{name}", meanings[name] + note)

    def _settings(self) -> Iterator[str]:
        """Yields a block with the most used keys of ``--set``, if the component takes a recipe."""
        if "set" not in self.parameters:
            return
        recipe = self.parameters["recipe"].default or "two_tower"
        rows = [f"most used settings, of recipe {recipe} (--set KEY=VALUE):"]
        for key in most_used_keys(load_recipe(recipe, recipes_of(self.name))):
            # The first sentence of a meaning; `--dry-run` prints it whole.
            meaning = key.meaning.partition(". ")[0].rstrip(".")
            rows.append(_row(key.path, f"{meaning} (default: {key.value})"))
        yield "\n".join(rows)
        flags = "".join(f"--{name} {name.upper()} " for name in self.required)
        yield fill(
            f"All settings of a recipe: torchx run {self.name} {flags}--recipe {recipe} -- --dry-run",
            4,
        )


def recipes_of(component: str) -> Recipes:
    """Returns the built-in recipes of a component, by name; by default those that train."""
    own_recipes: dict[str, Recipes] = {
        "rec.data.preprocess": PREPROCESS_RECIPES,
        "rec.train.stream": EVENT_RECIPES,
    }
    return own_recipes.get(component, RECIPES)


def component_names() -> list[str]:
    """Returns the names of the components of this package."""
    return [name for name in get_components() if name.startswith("rec.")]


def asks_for_help(words: Sequence[str]) -> bool:
    """Whether flags hold ``--help``, or a ``-h`` without a value; with one it is a named resource.

    Example:
        >>> asks_for_help(["--recipe", "ncf", "-h"]), asks_for_help(["-h", "gpu.small"]), asks_for_help(["--help"])
        (True, False, True)
    """
    followers = [*words[1:], "--"]
    pairs = zip(words, followers, strict=False)
    return any(
        word == "--help" or (word == "-h" and follower.startswith("-"))
        for word, follower in pairs
    )


def _row(name: str, meaning: str) -> str:
    label = f"  {name}"
    if len(label) < _INDENT:
        return fill(f"{label:{_INDENT}}{meaning}", _INDENT)
    return f"{label}\n{fill(' ' * _INDENT + meaning, _INDENT)}"


def _first_example(docstring: str) -> list[str]:
    """Returns the lines of a docstring's first command."""
    lines = iter(inspect.cleandoc(docstring).splitlines())
    line = next((line for line in lines if line.startswith("    torchx run ")), "")
    command = [line[2:]]
    while line.endswith("\\"):
        line = next(lines)
        command.append(line[2:])
    return command
