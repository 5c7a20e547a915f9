"""Text from a command line as a value of the annotated type."""

from __future__ import annotations

import difflib
import enum
import re
import types
import typing
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, Union

_BOOLS = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}
_EXAMPLES = {int: "4096, 4_096 or 4e3", float: "0.01 or 1e-2"}


def convert(text: str, hint: Any) -> object:
    """`text` as a value of the annotated type.

    Raises:
        ValueError: saying what was expected.

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
        return _one_of_values(text, {str(value): value for value in typing.get_args(hint)})
    if origin in (tuple, list, Sequence) or hint in (tuple, list):
        return _several(text, origin or hint, typing.get_args(hint))
    if isinstance(hint, type) and issubclass(hint, enum.Enum):
        return _one_of_values(text, {str(member.value): member for member in hint} | dict(hint.__members__))
    if hint is bool:
        return _one_of_values(text.lower(), _BOOLS)
    if hint in (int, float):
        return _number(text, hint)
    if hint in (str, Path):
        return hint(text)
    raise ValueError(f"a value of type {type_name(hint)} cannot be given as text; write a recipe file that sets it")


def type_name(hint: object) -> str:
    """The annotation as a reader writes it.

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
    """The question that helps against a typing mistake, or nothing.

    Example:
        >>> nearest("two_towr", ["two_tower", "ncf"])
        "; did you mean 'two_tower'?"
        >>> nearest("bert", ["two_tower", "ncf"])
        ''
    """
    match = difflib.get_close_matches(name, list(names), n=1, cutoff=0.5)
    return f"; did you mean {match[0]!r}?" if match else ""


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
    raise ValueError(", and ".join(errors) + (", or none" if type(None) in hints else ""))


def _one_of_values(text: str, values: dict[str, Any]) -> object:
    if text in values:
        return values[text]
    raise ValueError(f"{text!r} is not one of {', '.join(values)}{nearest(text, values)}")


def _several(text: str, kind: Any, hints: tuple[Any, ...]) -> object:
    inside = text.strip().strip("()[]").strip().rstrip(",")
    parts = [part.strip().strip("'\"") for part in inside.split(",")] if inside else []
    if kind is tuple and hints and hints[-1] is not Ellipsis:
        if len(parts) != len(hints):
            raise ValueError(f"{text!r} has {len(parts)} values; expected {len(hints)}, separated by commas")
        return tuple(convert(part, hint) for part, hint in zip(parts, hints, strict=True))
    values = [convert(part, hints[0] if hints else str) for part in parts]
    return values if kind is list else tuple(values)


def _number(text: str, kind: type) -> object:
    try:
        if kind is int and "e" in text.lower() and float(text).is_integer():
            return int(float(text))
        return kind(text)
    except (ValueError, OverflowError):
        article = "an" if kind is int else "a"
        raise ValueError(f"{text!r} is not {article} {kind.__name__}; write for example {_EXAMPLES[kind]}") from None
