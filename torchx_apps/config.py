"""The settings of a job: a recipe's dataclass, changed by a TOML file and the command line (tyro). Imports no torch.

A recipe is a function that returns a frozen dataclass; every field is a flag, ``--train.epochs 5``. Values are checked
by the dataclasses themselves, in ``__post_init__``.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import importlib
import io
import json
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, TypeVar

from torchrec_ext.schema.validation import check_least

if typing.TYPE_CHECKING:
    from tyro.constructors import PrimitiveConstructorSpec, PrimitiveTypeInfo

ConfigT = TypeVar("ConfigT")
OptionsT = TypeVar("OptionsT")

# Parts of a tuple: a command line gives several words, numbers also with commas.
_ITEMS = (str, int, float, Path)
_UNREADABLE = "import the type of a setting outside of TYPE_CHECKING"
_NO = ("false", "no", "off", "0")
_YES = ("true", "yes", "on", "1")


@dataclass(frozen=True, kw_only=True)
class RecipeOptions:
    """Flags of every app with a recipe.

    Args:
        recipe: a built-in name, my_recipe.py:job or my.module:job.
        settings: a TOML file of settings; flags come after it.
        dry_run: print all settings as such a file, and exit.
        list_recipes: print the built-in recipes, and exit.
    """

    recipe: str = "two_tower"
    settings: Path | None = None
    dry_run: bool = False
    list_recipes: bool = False


@dataclass(frozen=True, kw_only=True)
class RunOptions(RecipeOptions):
    """Flags of an app that trains.

    Args:
        run_dir: folder for checkpoints, metrics and plan; a run that is there goes on from its last good checkpoint.
    """

    run_dir: Path | None = None

    def __post_init__(self) -> None:
        # JSON, protobuf and manifests need the path as UTF-8.
        if self.run_dir is not None and not _is_utf8(str(self.run_dir)):
            raise ValueError(f"{str(self.run_dir)!a} is not UTF-8; choose another name")


@dataclass(frozen=True, kw_only=True)
class StreamOptions(RunOptions):
    """Flags of training on a log that grows; its folder is ``--data.folder``.

    Args:
        publish_s: seconds between two bundles; 0 for one at the end.
        bundles: folder of the bundles, instead of run_dir's; its file current names the newest.
        keep: bundles to keep.
    """

    publish_s: float = 10.0
    bundles: Path | None = None
    keep: int = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.publish_s >= 0:
            raise ValueError(f"--publish_s {self.publish_s}: must be 0 or more seconds")
        check_least("--keep", self.keep)


def parse_options(
    kind: type[OptionsT], prog: str, words: Sequence[str] | None
) -> OptionsT:
    """Returns an app's options as the command line gives them.

    Args:
        kind: frozen dataclass of the options.
        prog: name of the app's module.
        words: the command line; that of the process if None.

    Raises:
        ValueError: a word is wrong; the message is one line.
    """
    flags = _flags(kind, "FlagCreatePairsOff")
    return typing.cast(OptionsT, _cli(flags, prog, words))


def parse_known_options(
    kind: type[OptionsT], prog: str, words: Sequence[str] | None
) -> tuple[OptionsT, list[str]]:
    """Returns an app's options, and the words of the command line that are none of them."""
    flags = _flags(kind, "FlagCreatePairsOff")
    options, rest = _cli(flags, prog, words, return_unknown_args=True)
    return options, rest


def parse_job(
    options: OptionsT,
    prog: str,
    words: Sequence[str],
    load: Callable[[str], Any],
) -> tuple[OptionsT, Any]:
    """Returns an app's options and the job of its recipe, both as the command line gives them.

    Args:
        options: the defaults, :class:`RecipeOptions` or a dataclass that extends it.
        prog: name of the app's module.
        words: the command line.
        load: returns the job of a recipe by its name.

    Raises:
        ValueError: a word, the file of settings or a value is wrong; the message is one line.
    """
    words = list(words)
    job = load(_value_of(words, "recipe") or getattr(options, "recipe", ""))
    file = _value_of(words, "settings")
    if file:
        job = changed(job, read_settings(file), f"--settings {file}: ")
    job, words = _with_entries(job, words)
    # Both in one parser, so that --help, unknown words and completion know both.
    fields: list[tuple[str, Any]] = [
        ("options", _flags(type(options), "FlagCreatePairsOff", name="")),
        ("job", _flags(type(job), "FlagConversionOff", name="")),
    ]
    both = dataclasses.make_dataclass("Command", fields, frozen=True)
    try:
        parsed: Any = _cli(both, prog, words, default=both(options, job))
    except ValueError as error:
        _, is_unknown, unknown = str(error).partition("Unrecognized options: ")
        if not is_unknown or unknown.startswith("-"):
            raise
        name = unknown.split(",")[0]
        raise ValueError(f"{error}; name a recipe by --recipe {name}") from None
    return parsed.options, parsed.job


def changed(config: ConfigT, words: Sequence[str], place: str = "") -> ConfigT:
    """Returns a copy of a config with the changes of a command line, such as ``["--train.epochs", "5"]``.

    All changes to one dataclass are made at once, so that its checks see the result and no state in between.

    Args:
        config: a frozen dataclass, whose groups are dataclasses again.
        words: the command line.
        place: where the words are from, for messages.

    Raises:
        ValueError: a key is unknown, or a value is wrong.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Loader:
        ...     batch_size: int = 1024
        ...     shuffle: bool = True
        >>> changed(Loader(), ["--batch_size", "4e3", "--shuffle", "off"])
        Loader(batch_size=4000, shuffle=False)
        >>> changed(Loader(), ["--batch_siz", "4096"])
        Traceback (most recent call last):
        ...
        ValueError: Unrecognized options: --batch_siz, 4096; did you mean --batch_size?

        A mapping's keys are the user's names; its flags have them in their path.

        >>> @dataclass(frozen=True, kw_only=True)
        ... class Plan:
        ...     rows: Mapping[str, int] = dataclasses.field(default_factory=dict)
        >>> changed(Plan(), ["--rows.item_id", "1e6", "--rows.user_id", "10"])
        Plan(rows={'item_id': 1000000, 'user_id': 10})
    """
    if not words:
        return config
    try:
        config, words = _with_entries(config, words)
        flags = _flags(type(config), "FlagConversionOff")
        return typing.cast(ConfigT, _cli(flags, "settings", words, default=config))
    except ValueError as error:
        raise ValueError(f"{place}{error}") from None


def read_settings(file: str) -> list[str]:
    """Returns the settings of a TOML file as words of a command line; a list is several words.

    Raises:
        ValueError: the file cannot be read, is no TOML, or a value is neither text, a number, true, false nor a list.
    """
    try:
        tomllib: Any = importlib.import_module("tomllib")
    except ModuleNotFoundError:
        raise ValueError(
            f"--settings {file}: Python 3.10 reads no TOML; use Python 3.11, or flags such as --train.epochs 5"
        ) from None
    try:
        with open(file, "rb") as stream:
            return list(_flat(tomllib.load(stream), ""))
    except OSError as error:
        raise ValueError(
            f"--settings {file}: cannot be read: {error.strerror}; check the path"
        ) from None
    except ValueError as error:
        raise ValueError(f"--settings {file}: {error}") from None


def keys_of(config: Any, prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields path and value of every key of a config that a command line can set, as TOML writes them."""
    for key in dataclasses.fields(config):
        value = getattr(config, key.name)
        if is_group(value):
            yield from keys_of(value, f"{prefix}{key.name}.")
        elif isinstance(value, Mapping) and value:
            for name, entry in value.items():
                # As TOML writes a name that may have a dot or a star.
                path = f"{prefix}{key.name}.{json.dumps(name, ensure_ascii=False)}"
                if is_group(entry):
                    yield from keys_of(entry, f"{path}.")
                else:
                    yield path, entry
        elif key.init and not callable(value):
            yield f"{prefix}{key.name}", value


def as_toml(config: Any) -> str:
    """Returns a config as the text of a file of settings; what TOML has no word for, None, is a comment.

    Example:
        >>> @dataclass(frozen=True, kw_only=True)
        ... class Model:
        ...     widths: tuple[int, ...] = (64, 32)
        ...     device: str | None = None
        >>> print(as_toml(Model()))
        widths = [64, 32]
        # device = None
    """
    lines = []
    for path, value in keys_of(config):
        if value is None or value == {}:
            lines.append(f"# {path} = {value}")
        else:
            lines.append(
                f"{path} = {json.dumps(value, default=str, ensure_ascii=False)}"
            )
    return "\n".join(lines)


def refuse_mistakes(main: str, words: Sequence[str]) -> None:
    """Ends a launcher with one line if a command line of an app has a mistake, before any rank starts.

    A user's own recipe may import torch, and is left to the ranks; so is a file of settings that is not here.

    Args:
        main: the app's module, which has ``parse(words)``.
        words: the command line.
    """
    file = _value_of(words, "settings")
    if ":" in _value_of(words, "recipe") or (file and not Path(file).exists()):
        return
    try:
        importlib.import_module(main).parse(words)
    except ValueError as error:
        sys.exit(str(error))


def is_group(value: object) -> bool:
    """Whether a value is itself a config with keys."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _flags(kind: type, marker: str, name: str | None = None) -> Any:
    """Returns a dataclass with what tyro needs to know of its flags."""
    import tyro

    markers = [getattr(tyro.conf, marker), tyro.conf.AvoidSubcommands]
    # Functions of a recipe are no flags.
    markers += [tyro.conf.SuppressFixed, tyro.conf.EnumChoicesFromValues]
    if name is not None:
        markers.append(tyro.conf.arg(name=name))
    return Annotated.__class_getitem__((kind, *markers))  # type: ignore[attr-defined]


def _cli(kind: Any, prog: str, words: Sequence[str] | None, **more: Any) -> Any:
    import tyro

    words = sys.argv[1:] if words is None else words
    # A message must be one line, whatever the terminal's width.
    only_tells = not {"-h", "--help"}.isdisjoint(words)
    width = contextlib.nullcontext() if only_tells else _columns("100000")
    told = io.StringIO()
    try:
        with width, contextlib.redirect_stderr(told):
            return tyro.cli(
                kind,
                args=list(words),
                prog=f"python -m {prog}",
                use_underscores=True,
                registry=_registry(),
                **more,
            )
    except SystemExit as end:
        if not end.code:
            raise
    except NameError as error:
        raise ValueError(f"{_UNREADABLE}: {error}") from None
    raise ValueError(_message(told.getvalue()))


@contextlib.contextmanager
def _columns(number: str) -> Iterator[None]:
    before = os.environ.get("COLUMNS")
    os.environ["COLUMNS"] = number
    try:
        yield
    finally:
        os.environ.pop("COLUMNS")
        if before is not None:
            os.environ["COLUMNS"] = before


def _message(box: str) -> str:
    """Returns tyro's message, which has a frame and a help, as one line."""
    parts: list[list[str]] = [[]]
    # The first line is the title. Parts have a line between them, of dashes in a terminal
    # without Unicode.
    for line in box.splitlines()[1:]:
        text = line.strip("│ ")
        if not text.strip("╰╯─-"):
            parts.append([])
        else:
            parts[-1].append(text)
    parts = [part for part in parts if part]
    # Neither the name that this parser gives to the recipe's dataclass nor that of an
    # app's options is a user's.
    message = re.sub(
        r"^(Error parsing )?(job\.|value: |\w+Options: )?", "", " ".join(parts[0])
    )
    # Some groups name themselves in their messages.
    message = re.sub(r"^(\w+): \1\.", r"\1.", message)
    flags = []
    for line in parts[1] if len(parts) > 1 else []:
        if line.startswith("--"):
            flags.append(line.split()[0])
    if not flags or not message.startswith("Unrecognized"):
        return message
    return f"{message}; did you mean {' or '.join(flags[:3])}?"


def _registry() -> Any:
    """Returns how words become values where tyro's own way is not ours: 4e3 rows, on and off, 64,32."""
    import tyro

    registry = tyro.constructors.ConstructorRegistry()

    @registry.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type is bool:
            return _spec("true|false", bool, lambda words: _bool(words[0]), 1)
        if info.type is int:
            return _spec("INT", int, lambda words: _int(words[0]), 1)
        item, *rest = typing.get_args(info.type) or (None,)
        if typing.get_origin(info.type) is Mapping:
            return _spec(
                f"(.NAME{_fields_of(rest[0])} VALUE)",
                Mapping,
                lambda words: _refuse_words(words, rest[0]),
            )
        if typing.get_origin(info.type) is tuple and rest == [...] and item in _ITEMS:
            metavar = f"{getattr(item, '__name__', 'item').upper()} ..."
            return _spec(metavar, tuple, lambda words: _several(words, item))
        return None

    return registry


def _spec(
    metavar: str, kind: type, read: Callable[[list[str]], Any], nargs: Any = "*"
) -> PrimitiveConstructorSpec[Any]:
    import tyro

    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=nargs,
        metavar=metavar,
        instance_from_str=read,
        # A bool is an int to isinstance.
        is_instance=lambda value: (
            isinstance(value, kind) and isinstance(value, bool) == (kind is bool)
        ),
        str_from_instance=_words_of,
    )


def _words_of(value: Any) -> list[str]:
    """Returns a value as the words that a command line has for it."""
    if isinstance(value, tuple):
        return [str(each) for each in value]
    return [str(value).lower() if isinstance(value, bool) else str(value)]


def _fields_of(kind: Any) -> str:
    """Returns what follows the user's name in a flag of a mapping."""
    if not dataclasses.is_dataclass(kind):
        return ""
    return f".{{{','.join(each.name for each in dataclasses.fields(kind))}}}"


def _refuse_words(words: Sequence[str], kind: Any) -> Mapping[str, Any]:
    raise ValueError(
        f"{' '.join(words)!r}: put the name into the flag, --KEY.NAME{_fields_of(kind)} VALUE"
    )


def _with_entries(config: Any, words: Sequence[str]) -> tuple[Any, list[str]]:
    """Takes the entries of mappings out of a command line, such as ``--plan.tables.item_id.sharding row_wise``.

    Returns:
        the config with these entries, not checked yet, and the other words.
    """
    # The type of each entry by the mapping's path and the user's name.
    entries: dict[tuple[str, str], Any] = {}
    for word in words:
        path = word.removeprefix("--").partition("=")[0]
        found = _mapping_in(config, path) if word.startswith("--") else None
        if found is None:
            continue
        mapping, kind, name = found
        if dataclasses.is_dataclass(kind):
            # A pattern for modules has dots of its own.
            name = name.rpartition(".")[0]
            if not name:
                raise ValueError(
                    f"--{path}: write --{mapping}.NAME{_fields_of(kind)} VALUE"
                )
        entries[mapping, name] = kind
    rest = list(words)
    for (mapping, name), kind in entries.items():
        config, rest = _with_entry(config, mapping, name, kind, rest)
    return config, rest


def _mapping_in(config: Any, path: str) -> tuple[str, Any, str] | None:
    """Returns the path of the mapping that a flag leads into, the type of its values, and the rest of the path."""
    parts = path.split(".")
    for number, part in enumerate(parts[:-1]):
        value = getattr(config, part, None)
        if isinstance(value, Mapping):
            try:
                hints = typing.get_type_hints(type(config))
            except NameError as error:
                raise ValueError(f"{_UNREADABLE}: {error}") from None
            kind = typing.get_args(hints[part])[1]
            return ".".join(parts[: number + 1]), kind, ".".join(parts[number + 1 :])
        if not is_group(value):
            return None
        config = value
    return None


def _with_entry(
    config: Any, path: str, name: str, kind: Any, words: Sequence[str]
) -> tuple[Any, list[str]]:
    """Returns a copy of a config, not checked, whose mapping at ``path`` has another entry, and the other words."""
    parts = path.split(".")
    owners = [config]
    for part in parts:
        owners.append(getattr(owners[-1], part))
    mapping = owners.pop()
    known = {"default": mapping[name]} if name in mapping else {}
    flag = f"{path}.{name}"
    value = ("value", _flags(kind, "FlagConversionOff", flag), field(**known))
    holder = dataclasses.make_dataclass("Entry", [value], frozen=True, kw_only=True)
    try:
        entry, rest = _cli(holder, "settings", words, return_unknown_args=True)
    except ValueError as error:
        place = "" if flag in str(error) else f"{flag}: "
        raise ValueError(f"{place}{error}") from None
    new: Any = {**mapping, name: entry.value}
    for owner, part in zip(owners[::-1], parts[::-1], strict=True):
        # dataclasses.replace() would check before the other words have been read.
        changed_owner = copy.copy(owner)
        object.__setattr__(changed_owner, part, new)
        new = changed_owner
    return new, rest


def _bool(word: str) -> bool:
    if word.lower() not in (*_YES, *_NO):
        raise ValueError(f"{word!r} is neither true nor false")
    return word.lower() in _YES


def _int(word: str) -> int:
    try:
        return int(word)
    except ValueError:
        pass
    try:
        # int() takes no 4e3.
        number = float(word)
    except ValueError:
        number = math.nan
    if number % 1 != 0:
        raise ValueError(f"{word!r} is not an int; write for example 4096 or 4e3")
    return int(number)


def _several(words: Sequence[str], item: Any) -> tuple[Any, ...]:
    # A text may have commas of its own.
    pieces = [*words] if item in (str, Path) else ",".join(words).split(",")
    kind = _int if item is int else item
    return tuple(kind(piece) for piece in pieces if piece)


def _value_of(words: Sequence[str], flag: str) -> str:
    """Returns the last value of a flag in a command line; empty if there is none."""
    value = ""
    for word, following in zip(words, [*words, ""][1:], strict=True):
        name, equals, text = word.partition("=")
        if name == f"--{flag}":
            value = text if equals else following
    return value


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
            continue
        values = value if isinstance(value, list) else [value]
        if not all(isinstance(each, str | int | float) for each in values):
            raise ValueError(
                f"{prefix}{key} = {str(value)[:60]}: write a text, a number, true, false or a list of them"
            )
        yield from _flag(f"--{prefix}{key}", *map(str, values))


def _flag(flag: str, *values: str) -> list[str]:
    """Returns a flag with its values as words; a value that begins with a dash is part of the flag's own word."""
    if len(values) == 1 and values[0].startswith("-"):
        return [f"{flag}={values[0]}"]
    return [flag, *values]


def _is_utf8(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
