"""`--set loader.batch_size=4096`: typed changes to a tree of frozen dataclasses.

Text from a command line becomes a value of the annotated type. read_settings() reads the same changes from a TOML file.
"""

from __future__ import annotations

import dataclasses
import difflib
import enum
import importlib
import re
import sys
import types
import typing
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

from torchrec_ext.schema.validation import did_you_mean, listed

_BOOLS = {
    "true": True,
    "yes": True,
    "on": True,
    "1": True,
    "false": False,
    "no": False,
    "off": False,
    "0": False,
}
_EXAMPLES = {int: "4096, 4_096 or 4e3", float: "0.01 or 1e-2"}


def convert(text: str, hint: Any) -> object:
    """Converts a text to a value of the annotated type.

    Raises:
        ValueError: the text is no such value; the message says what was expected.

    Example:
        >>> convert("64,32", tuple[int, ...]), convert("none", int | None), convert("off", bool)
        ((64, 32), None, False)
        >>> convert("adm", Literal["adam", "sgd"])
        Traceback (most recent call last):
        ...
        ValueError: 'adm' is not one of adam, sgd; did you mean 'adam'?
    """
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return _one_of_types(text, typing.get_args(hint))
    if origin is Literal:
        return _one_of_values(
            text, {str(value): value for value in typing.get_args(hint)}
        )
    if origin in (tuple, list, Sequence) or hint in (tuple, list):
        return _several(text, origin or hint, typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _one_of_values(
            text,
            {str(member.value): member for member in hint} | dict(hint.__members__),
        )
    if hint is bool:
        return _one_of_values(text.lower(), _BOOLS)
    if hint in (int, float):
        return _number(text, hint)
    if hint in (str, Path):
        return hint(text)
    raise ValueError(
        f"a value of type {type_name(hint)} cannot be given as text; write a recipe file that sets it"
    )


def choices(hint: Any) -> list[str]:
    """Returns the texts that can be values of an annotated type, if they can be listed.

    Example:
        >>> choices(Literal["adam", "sgd"] | None), choices(bool), choices(int)
        (['adam', 'sgd', 'none'], ['true', 'false'], [])
    """
    if typing.get_origin(hint) in (Union, types.UnionType):
        texts = []
        for each in typing.get_args(hint):
            texts += choices(each)
        return texts
    if typing.get_origin(hint) is Literal:
        return [str(value) for value in typing.get_args(hint)]
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return [str(member.value) for member in hint]
    return {bool: ["true", "false"], type(None): ["none"]}.get(hint, [])


def type_name(hint: object) -> str:
    """Returns an annotation as a reader writes it.

    Example:
        >>> type_name(int), type_name(tuple[Path, ...]), type_name(Literal["a", "b"])
        ('int', 'tuple[Path, ...]', "'a' | 'b'")
    """
    if typing.get_origin(hint) is Literal:
        return " | ".join(repr(value) for value in typing.get_args(hint))
    if isinstance(hint, type) and not typing.get_args(hint):
        return hint.__name__
    return re.sub(r"\b(\w+\.)+(?=\w)", "", str(hint))


def nearest(name: str, names: Iterable[str]) -> str:
    """Asks whether the nearest of some names was meant; empty if none is near.

    Example:
        >>> nearest("two_towr", ["two_tower", "ncf"])
        "; did you mean 'two_tower'?"
        >>> nearest("bert", ["two_tower", "ncf"])
        ''
    """
    hint = did_you_mean(name, names, "", cutoff=0.5)
    return f"; {hint}" if hint else ""


def key_paths(config: object, prefix: str = "") -> Iterator[str]:
    """Yields the dotted path of every key of a config."""
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value = getattr(config, field.name)
        if is_group(value):
            yield from key_paths(value, f"{prefix}{field.name}.")
        elif field.init:
            yield f"{prefix}{field.name}"


# What other libraries call a key.
_ALIASES = dict.fromkeys(("mixed_precision", "autocast", "bf16", "fp16"), "amp")


def similar_keys(key: str, paths: Iterable[str]) -> str:
    """Asks whether one of up to three keys with a similar last part was meant; empty if there is none.

    Example:
        >>> paths = ["export", "train.epochs", "loader.batch_size", "optimizer.tables_lr", "optimizer.dense_lr"]
        >>> similar_keys("epochs", paths), similar_keys("batchsize", paths)
        ('; did you mean train.epochs?', '; did you mean loader.batch_size?')
        >>> similar_keys("lr", paths), similar_keys("colour", paths)
        ('; did you mean optimizer.dense_lr or optimizer.tables_lr?', '')
        >>> similar_keys("data.users", ["checkpoint.steps"])
        ''
        >>> similar_keys("train.mixed_precision", ["plan.forward_precision", "train.amp"])
        '; did you mean train.amp?'
    """
    name = key.rpartition(".")[2]
    by_leaf: dict[str, list[str]] = {}
    for path in paths:
        by_leaf.setdefault(path.rpartition(".")[2], []).append(path)
    alias = _ALIASES.get(name)
    # The same last part counts most, then another word for it, a word of it, a similar
    # spelling.
    if name in by_leaf:
        leaves = [name]
    elif alias in by_leaf:
        leaves = [alias]
    else:
        leaves = [leaf for leaf in by_leaf if name in leaf.split("_")]
        leaves = leaves or difflib.get_close_matches(name, by_leaf, n=1, cutoff=0.65)
    if not leaves:
        return ""
    matches: list[str] = []
    for leaf in leaves:
        matches += by_leaf[leaf]
    matches.sort(key=lambda path: -difflib.SequenceMatcher(None, key, path).ratio())
    return f"; did you mean {' or '.join(matches[:3])}?"


def _one_of_types(text: str, hints: tuple[Any, ...]) -> object:
    if type(None) in hints and text.lower() in ("none", "null"):
        return None
    errors = []
    for hint in hints:
        if hint is type(None):
            continue
        try:
            return convert(text, hint)
        except ValueError as error:
            errors.append(str(error))
    message = ", and ".join(errors)
    if type(None) in hints:
        message += ", or none"
    raise ValueError(message)


def _one_of_values(text: str, values: dict[str, Any]) -> object:
    if text in values:
        return values[text]
    raise ValueError(
        f"{text!r} is not one of {', '.join(values)}{nearest(text, values)}"
    )


def _several(text: str, kind: Any, hints: tuple[Any, ...]) -> object:
    # As typed, 64,32, or as Python prints it, (64, 32).
    inside = text.strip().strip("()[]").strip().rstrip(",")
    items: list[str] = []
    if inside:
        items = [item.strip().strip("'\"") for item in inside.split(",")]
    if kind is tuple and hints and hints[-1] is not Ellipsis:
        if len(items) != len(hints):
            raise ValueError(
                f"{text!r} has {len(items)} values; expected {len(hints)}, separated by commas"
            )
        return tuple(
            convert(item, hint) for item, hint in zip(items, hints, strict=True)
        )
    hint = hints[0] if hints else str
    values = [convert(item, hint) for item in items]
    return values if kind is list else tuple(values)


def _number(text: str, kind: type) -> object:
    try:
        # int() takes no 4e3.
        if kind is int and "e" in text.lower() and float(text).is_integer():
            return int(float(text))
        return kind(text)
    except (ValueError, OverflowError):
        article = "an" if kind is int else "a"
        raise ValueError(
            f"{text!r} is not {article} {kind.__name__}; write for example {_EXAMPLES[kind]}"
        ) from None


def numbers_by_name(key: str, texts: Iterable[str], rule: str) -> dict[str, float]:
    """Returns the numbers of a setting's ``name=number`` texts by name.

    Raises:
        ValueError: a text has no number; the message ends with ``rule``.
    """
    numbers = {}
    for text in texts:
        name, _, number = text.partition("=")
        try:
            numbers[name] = float(number)
        except ValueError:
            raise ValueError(f"{key}: {text!r} {rule}") from None
    return numbers


ConfigT = TypeVar("ConfigT")


class FileSetting(str):
    """A change ``key=value`` from a file of settings, which messages name as ``file``."""

    file = ""

    def removeprefix(self, prefix: str, /) -> FileSetting:
        """Returns the change of the key without a prefix."""
        # The method of str returns a plain text, which has no file.
        change = FileSetting(super().removeprefix(prefix))
        change.file = self.file
        return change


def read_settings(file: str) -> list[str]:
    """Returns the settings of a TOML file as ``key=value`` items; a table is a group of keys, a list has commas.

    Raises:
        ValueError: the file cannot be read, is no TOML, or a value is neither text, a number, true, false nor a list.
    """
    try:
        tomllib: Any = importlib.import_module("tomllib")
    except ModuleNotFoundError:
        raise ValueError(
            f"--settings {file}: Python 3.10 reads no TOML; use Python 3.11, or --set KEY=VALUE"
        ) from None
    try:
        with open(file, "rb") as stream:
            items = list(_flat(tomllib.load(stream), ""))
    except OSError as error:
        raise ValueError(
            f"--settings {file}: cannot be read: {error.strerror}; check the path"
        ) from None
    except ValueError as error:
        raise ValueError(f"--settings {file}: {error}") from None
    for item in items:
        item.file = file
    return list(items)


def _flat(table: Mapping[str, Any], prefix: str) -> Iterator[FileSetting]:
    for key, value in table.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{key}.")
            continue
        texts = []
        for each in value if isinstance(value, list) else [value]:
            if not isinstance(each, str | int | float):
                raise ValueError(
                    f"{prefix}{key} = {str(value)[:60]}: write a text, a number, true, false or a list of them"
                )
            # TOML's true and false, not Python's.
            texts.append(str(each).lower() if isinstance(each, bool) else str(each))
        yield FileSetting(f"{prefix}{key}={','.join(texts)}")


@dataclasses.dataclass(frozen=True)
class _Change:
    label: str
    value: object


# One level of the config: the changes to its keys, and a tree of its own for every
# group below it.
_Tree = dict[str, Union[_Change, "_Tree"]]


def apply_overrides(config: ConfigT, overrides: Iterable[str]) -> ConfigT:
    """Returns a copy of `config` with the given keys changed; of two changes to one key the later wins.

    All changes to one dataclass are made at once, so that its checks see the result and no state in between.

    Args:
        config: a frozen dataclass, whose groups are dataclasses again.
        overrides: `key=value` items, whose keys are dotted paths, as typed or from :func:`read_settings`.

    A field with ``metadata={"open": True}`` is a tuple of ``key=value`` texts, and takes the keys that its dataclass
    lacks.

    Raises:
        ValueError: a key is unknown (the message names the nearest one), a value has the wrong type, or a dataclass
            refuses it.

    Example:
        >>> @dataclasses.dataclass(frozen=True, kw_only=True)
        ... class Loader:
        ...     batch_size: int = 1024
        >>> apply_overrides(Loader(), ["batch_size=4_096"])
        Loader(batch_size=4096)
        >>> apply_overrides(Loader(), ["batch_siz=4096"])
        Traceback (most recent call last):
        ...
        ValueError: --set batch_siz=4096: there is no key 'batch_siz'; did you mean batch_size?
        >>> apply_overrides(Loader(), ["batch_size=many"])
        Traceback (most recent call last):
        ...
        ValueError: --set batch_size=many: 'many' is not an int; write for example 4096, 4_096 or 4e3
    """
    tree: _Tree = {}
    for item in overrides:
        label = (
            f"--settings {item.file}: {item}"
            if isinstance(item, FileSetting)
            else f"--set {item}"
        )
        key, equals, text = item.partition("=")
        if not equals or not key.strip():
            raise ValueError(
                f"{label}: write key=value, such as --set loader.batch_size=4096"
            )
        path = key.strip().split(".")
        try:
            _plant(tree, config, path, text.strip(), label)
        except KeyError as missing:
            paths = list(key_paths(config))
            group = key.strip().rpartition(".")[0] + "."
            keys = [each for each in paths if each.startswith(group)] or paths
            question = similar_keys(key.strip(), paths) or f"; keys are {listed(keys)}"
            raise ValueError(
                f"{label}: there is no key {missing.args[0]!r}{question}"
            ) from None
    return typing.cast(ConfigT, _rebuild(config, tree))


def field_hint(config: object, name: str) -> Any:
    """Returns the type of one field, without evaluating the others: they may need imports of type checkers."""
    for owner in type(config).__mro__:
        hint = vars(owner).get("__annotations__", {}).get(name)
        if hint is not None:
            holder = types.SimpleNamespace(__annotations__={name: hint})
            scope = {**vars(sys.modules[owner.__module__]), owner.__name__: owner}
            return typing.get_type_hints(holder, globalns=scope)[name]
    return Any


def is_group(value: object) -> bool:
    """Whether a value is itself a config with keys."""
    return dataclasses.is_dataclass(value) and not isinstance(value, type)


def _plant(tree: _Tree, config: object, keys: list[str], text: str, label: str) -> None:
    key, *below = keys
    fields = {field.name: field for field in dataclasses.fields(config) if field.init}  # type: ignore[arg-type]
    if key not in fields:
        # ids.item_id=dynamic,... is such a key: the columns are the user's.
        open_field = next(
            (name for name, field in fields.items() if field.metadata.get("open")), None
        )
        if below or open_field is None:
            raise KeyError(key)
        _plant_named(
            tree, open_field, getattr(config, open_field), f"{key}={text}", label
        )
        return
    value = getattr(config, key)
    if below and is_group(value):
        _plant(typing.cast(_Tree, tree.setdefault(key, {})), value, below, text, label)
    elif below:
        raise ValueError(
            f"{label}: {key!r} is {value!r} and has no keys of its own; write --set ...{key}=value"
        )
    elif is_group(value):
        inner = ", ".join(field.name for field in dataclasses.fields(value))
        raise ValueError(f"{label}: {key!r} is a group; set one of its keys: {inner}")
    else:
        tree[key] = _Change(label, _convert_for(label, text, config, key))


def _plant_named(
    tree: _Tree, name: str, texts: Sequence[str], text: str, label: str
) -> None:
    """Adds ``key=text`` to an open field, a tuple of such texts, in place of an earlier text of that key."""
    earlier = tree.get(name)
    if isinstance(earlier, _Change):
        texts = typing.cast(Sequence[str], earlier.value)
        label = f"{earlier.label} {label}"
    key = text.partition("=")[0]
    others = [other for other in texts if other.partition("=")[0] != key]
    tree[name] = _Change(label, (*others, text))


def _convert_for(label: str, text: str, config: object, key: str) -> object:
    try:
        return convert(text, field_hint(config, key))
    except NameError:
        raise ValueError(
            f"{label}: {key!r} cannot be given as text; write a recipe file that sets it"
        ) from None
    except ValueError as error:
        raise ValueError(f"{label}: {error}") from None


def _rebuild(config: object, tree: _Tree) -> object:
    changes: dict[str, Any] = {}
    for name, change in tree.items():
        if isinstance(change, dict):
            changes[name] = _rebuild(getattr(config, name), change)
        else:
            changes[name] = change.value
    if not changes:
        return config
    try:
        return dataclasses.replace(config, **changes)  # type: ignore[type-var]
    except ValueError as error:
        raise ValueError(f"{' '.join(_labels(tree))}: {error}") from error


def _labels(tree: _Tree) -> list[str]:
    labels = []
    for change in tree.values():
        if isinstance(change, dict):
            labels += _labels(change)
        else:
            labels.append(change.label)
    return labels
