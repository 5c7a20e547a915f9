"""The command line of the apps: which recipe, with which changes, shown how."""

from __future__ import annotations

import argparse
import dataclasses
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from torchx_apps.cli.overrides import field_hint, is_group, read_settings, type_name

# Width of output to a file or a pipe.
_PIPE_COLUMNS = 80
# The first five that a recipe has are in the component's help.
_MOST_USED = (
    *(
        "data.name",
        "data.folder",
        "config.folder",
        "loader.batch_size",
        "train.epochs",
        "optimizer.dense_lr",
    ),
    *(
        "model.embedding_dim",
        "model.tower_widths",
        "loader.negatives",
        "optimizer.tables",
        "optimizer.tables_lr",
    ),
    *(
        "train.eval_every",
        "train.early_stop.metric",
        "train.seed",
        "plan.towers",
        "checkpoint.steps",
        "export",
    ),
    *("device", "out", "engine"),
)
_SECTIONS = (
    *(
        "data",
        "model",
        "loader",
        "optimizer",
        "train",
        "evaluation",
        "sync",
        "plan",
        "checkpoint",
        "start",
        "config",
    ),
)
# Section of the keys that belong to no group.
_JOB = "job"


@dataclass(frozen=True, kw_only=True)
class SettingKey:
    """A key of a config, as ``--set`` takes it.

    Args:
        path: dotted path, such as ``loader.batch_size``.
        section: the group that the key belongs to, such as ``loader``; ``job`` for keys of the job itself.
        type: type of the value, as a reader writes it.
        value: the value, as Python writes it.
        meaning: what the value sets, as plain text.
    """

    path: str
    section: str
    type: str
    value: str
    meaning: str


def setting_keys(config: Any) -> list[SettingKey]:
    """Returns every key of a config, by section and within it in the order of the config's fields.

    Example:
        >>> from torchx_apps.recipes.by_name import load_recipe
        >>> [key.path for key in setting_keys(load_recipe("two_tower"))][:2]
        ['data.name', 'data.history_length']
    """
    keys = list(_keys(config, ""))
    # Known sections first, then a user's own, and the keys of no group at the end.
    names = list(
        dict.fromkeys(
            [*_SECTIONS, *(key.section for key in keys if key.section != _JOB), _JOB]
        )
    )
    return sorted(keys, key=lambda key: names.index(key.section))


def most_used_keys(config: Any, count: int = 5) -> list[SettingKey]:
    """Returns a config's keys that users change most, the most used first.

    Example:
        >>> from torchx_apps.recipes.by_name import load_recipe
        >>> [key.path for key in most_used_keys(load_recipe("two_tower"), 2)]
        ['data.name', 'data.folder']
    """
    keys = {key.path: key for key in setting_keys(config)}
    return [keys[path] for path in _MOST_USED if path in keys][:count]


def describe_keys(config: Any) -> str:
    """Describes every key of a config, as `--set` takes it: its value, type and meaning, the most used keys first.

    Lines are as wide as the terminal; in a file or a pipe they have 80 columns.

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
        job
        ---
        batch_size  1024
            int: B, rows per rank and step.
    """
    keys = setting_keys(config)
    column = max(len(key.path) for key in keys) + 2
    most_used = most_used_keys(config, len(_MOST_USED))
    sections = {"most used": most_used} if most_used else {}
    for key in keys:
        if key not in most_used:
            sections.setdefault(key.section, []).append(key)
    blocks = []
    for title, section in sections.items():
        lines = [title, "-" * len(title), *(_described(key, column) for key in section)]
        blocks.append("\n".join(lines))
    return "\n\n".join(blocks)


def _described(key: SettingKey, column: int) -> str:
    meaning = " ".join([f"{key.type}:", key.meaning]).rstrip(": ")
    return f"{fill(f'{key.path:{column}}{key.value}', column)}\n{fill(f'    {meaning}', 4)}"


def fill(text: str, indent: int) -> str:
    """Breaks a text into lines of the terminal's width; the lines after the first are indented."""
    columns = (
        shutil.get_terminal_size().columns if sys.stdout.isatty() else _PIPE_COLUMNS
    )
    width = max(columns, 2 * indent, 40)
    return textwrap.fill(
        text,
        width,
        subsequent_indent=" " * indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def build_parser(
    prog: str, description: str | None, *, trains: bool = True
) -> FlagParser:
    """Returns a parser with the flags common to all apps with a recipe.

    A wrong flag raises ValueError, so that the message is printed once and not by every rank.

    Args:
        prog: module of the app.
        description: docstring of the app's module, of which the help shows the first paragraph.
        trains: add the flags of a run: ``--run-dir`` and ``--resume``.

    Example:
        >>> options = build_parser("train", None).parse_args(["--recipe", "ncf", "--set", "a=1", "--set", "b=2"])
        >>> options.recipe, options.set, options.run_dir
        ('ncf', ['a=1', 'b=2'], None)
        >>> build_parser("train", None).parse_args(["--recipee", "ncf"])
        Traceback (most recent call last):
        ...
        ValueError: unrecognized arguments: --recipee ncf; `python -m train --help` lists the flags
    """
    summary = (description or "").partition("\n\n")[0]
    parser = _RecipeParser(
        prog=f"python -m {prog}", description=summary, allow_abbrev=False
    )
    parser.add_argument(
        "--recipe",
        default="two_tower",
        help="a built-in name, my_recipe.py:job or my.module:job",
    )
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="change one key of the recipe; repeat at will",
    )
    parser.add_argument(
        "--settings",
        metavar="FILE.toml",
        help="a file of such changes; those of --set come after it",
    )
    if trains:
        parser.add_argument(
            "--run-dir", type=_folder, help="folder for checkpoints, metrics and plan"
        )
        parser.add_argument(
            "--resume",
            default="never",
            metavar="auto|PATH",
            help="go on from the last good checkpoint of --run-dir (or of the recipe's newest run), or from that of "
            "another run",
        )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="list all settings with their values, and exit",
    )
    parser.add_argument(
        "--list-recipes",
        action="store_true",
        help="print the built-in recipes, and exit",
    )
    return parser


def _folder(text: str) -> Path:
    """Returns the path; refuses one that is not UTF-8, as JSON, protobuf and manifests need it."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError(
            f"{text!a} is not UTF-8; choose another name"
        ) from None
    return Path(text)


class FlagParser(argparse.ArgumentParser):
    """A parser with ``--run_dir`` accepted as ``--run-dir``: TorchX spells a component's flags with underscores.

    Example:
        >>> parser = FlagParser(allow_abbrev=False)
        >>> _ = parser.add_argument("--run-dir")
        >>> parser.parse_args(["--run_dir=a_b"])
        Namespace(run_dir='a_b')
    """

    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        """Parses the flags; see argparse."""
        words = sys.argv[1:] if args is None else args
        return super().parse_known_args(
            [_with_dashes(word) for word in words], namespace
        )

    def add_numbers(self, flags: Mapping[str, tuple[float, str]]) -> None:
        """Adds flags that take a number of the type of their default, by name: the default and the help."""
        for flag, (default, meaning) in flags.items():
            self.add_argument(flag, type=type(default), default=default, help=meaning)


def _with_dashes(word: str) -> str:
    flag, equals, value = word.partition("=")
    return f"{flag.replace('_', '-')}{equals}{value}" if flag.startswith("--") else word


class _RecipeParser(FlagParser):
    def parse_known_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: Any = None
    ) -> Any:
        options, others = super().parse_known_args(args, namespace)
        if options.settings:
            options.set = [*read_settings(options.settings), *options.set]
        return options, others

    def print_help(self, file: Any = None) -> None:
        # Printed once for all ranks.
        if os.environ.get("RANK", "0") == "0":
            super().print_help(file)

    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message}; `{self.prog} --help` lists the flags")


def _keys(config: Any, prefix: str) -> Iterator[SettingKey]:
    meanings = _meanings(config)
    for field in dataclasses.fields(config):
        value = getattr(config, field.name)
        path = f"{prefix}{field.name}"
        if is_group(value):
            yield from _keys(value, f"{path}.")
        elif field.init:
            yield SettingKey(
                path=path,
                section=prefix.partition(".")[0] or _JOB,
                type=_type_of(config, field),
                value=_shown(value),
                meaning=meanings.get(field.name, ""),
            )


def _type_of(config: Any, field: dataclasses.Field[Any]) -> str:
    try:
        return type_name(field_hint(config, field.name))
    except NameError:
        # The name is imported for type checkers alone.
        return str(field.type)


def _shown(value: object) -> str:
    return (
        str(getattr(value, "__qualname__", value)) if callable(value) else repr(value)
    )


def _meanings(config: Any) -> dict[str, str]:
    # comes with TorchX, which reads component docstrings with it
    from docstring_parser import parse

    meanings: dict[str, str] = {}
    # A config that extends another one documents only what it adds.
    for base in reversed(type(config).__mro__):
        for documented in parse(base.__doc__ or "").params:
            meanings[documented.arg_name] = _plain(documented.description or "")
    for field in dataclasses.fields(config):
        if "doc" in field.metadata:
            meanings[field.name] = field.metadata["doc"]
    return meanings


def _plain(text: str) -> str:
    """Removes Sphinx's markup, meaningless in a terminal."""
    without_roles = re.sub(
        r":[a-z]+:`[~!]?(?:[\w.]*\.)?(\w+)`", r"\1", " ".join(text.split())
    )
    return without_roles.replace("``", "")
