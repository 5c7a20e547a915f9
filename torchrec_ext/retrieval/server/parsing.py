"""Parses JSON bodies into requests. Checks every field's name, type and limit, without a loop over candidates."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from torchrec_ext.retrieval.scorer.requests import (
    EmbedRequest,
    Id,
    NearestRequest,
    RecommendRequest,
    Request,
    RequestError,
    ScoreRequest,
)
from torchrec_ext.retrieval.server.responses import Refusal, over_limit
from torchrec_ext.retrieval.server.settings import Limits
from torchrec_ext.schema.validation import did_you_mean

Body = Mapping[str, Any]
_Value = TypeVar("_Value")
_INT64 = 2**63
MAX_LIKED = 100
_NAME = 200  # characters of a field's or a column's name
_VECTOR = ("auto", "live")
_KINDS = {
    bool: "true or false",
    int: "a whole number",
    float: "a number",
    str: "a string",
    list: "a list",
    dict: "an object",
    type(None): "null",
}


def read_object(content: bytes) -> Body:
    """Returns the JSON object of a body.

    Raises:
        Refusal: 400, the body is not JSON; 422, it is not an object.
    """
    try:
        body = json.loads(content)
    except (ValueError, RecursionError) as error:
        why = str(error)
        if isinstance(error, RecursionError):
            why = "it is nested too deeply"
        raise Refusal(
            400, "not_json", f"the body is not JSON: {why[:200]}; send a JSON object"
        ) from None
    if not isinstance(body, dict):
        raise Refusal(
            422,
            "invalid",
            f'the body: {_kind(body)}; send a JSON object, such as {{"user": {{...}}}}',
        )
    return body


def request_of(kind: Callable[..., Request], body: Body, limits: Limits) -> Request:
    """Returns the request of a kind in a body.

    Raises:
        Refusal: 422; the message names the field, the value and the rule, or the limit.
    """
    readers = _READERS[kind]
    for name in body:
        if name not in readers:
            remedy = did_you_mean(
                name[:_NAME], readers, f"there are {', '.join(readers)}", cutoff=0.5
            )
            raise _invalid(name[:_NAME], f"there is no such field; {remedy}")
    values = {name: readers[name](name, value, limits) for name, value in body.items()}
    for name in _REQUIRED[kind]:
        if name not in values:
            raise _invalid(name, "it is missing; give it")
    try:
        return kind(**values)
    except RequestError as error:
        raise Refusal(422, "invalid", str(error), field=error.field) from None


def _invalid(field: str, problem: str) -> Refusal:
    return Refusal(422, "invalid", f"{field}: {problem}", field=field)


def _typed(name: str, value: object, kind: type[_Value], rule: str) -> _Value:
    """Returns a value of exactly one type; a bool is an int to isinstance."""
    if type(value) is not kind:
        raise _invalid(name, f"{_kind(value)}; must be {rule}")
    return value


def _kind(value: object) -> str:
    if value is None:
        return "null"
    return f"it is {_KINDS[type(value)]}"


def _number(limit: str, fixed: int | None = None) -> Callable[[str, Any, Limits], int]:
    """Returns the reader of a whole number up to a fixed limit, or the server's limit of that name."""

    def read(name: str, value: Any, limits: Limits) -> int:
        most = fixed
        if most is None:
            most = getattr(limits, limit)
        number = _typed(name, value, int, "a whole number")
        if number > most:
            message = f"{name}: {number}; the limit is {most}: ask for fewer"
            raise over_limit(limit, most, message, field=name)
        return number

    return read


def _flag(name: str, value: Any, limits: Limits) -> bool:
    return _typed(name, value, bool, "true or false")


def _list(name: str, value: Any, most: int, limit: str, what: str) -> list[Any]:
    entries = _typed(name, value, list, f"a list of {what}")
    if len(entries) > most:
        message = f"{name}: {len(entries)} entries; the limit is {most}: send fewer, in several requests"
        raise over_limit(limit, most, message, field=name)
    return entries


def _ids(name: str, value: Any, limits: Limits, what: str = "ids") -> list[Id]:
    ids = _list(
        name,
        value,
        limits.candidates,
        "candidates",
        f"{what}, all whole numbers or all strings",
    )
    kinds = set(map(type, ids))  # without a Python loop over up to 10,000 ids
    if kinds - {int} and kinds - {str}:
        listed = " and ".join(sorted(_KINDS[kind] for kind in kinds))
        raise _invalid(
            name, f"it holds {listed}; must be {what}, all whole numbers or all strings"
        )
    if kinds == {int} and (max(ids) >= _INT64 or min(ids) < -_INT64):
        raise _invalid(name, "an id is beyond 64 bits; no id of a catalogue is")
    return ids


def _id(name: str, value: Any, limits: Limits) -> Id:
    if type(value) is not str:
        _typed(name, value, int, "an id, a whole number or a string")
    return _ids(name, [value], limits)[0]


def _filter(name: str, value: Any, limits: Limits) -> Mapping[str, list[Id]]:
    rule = 'an object of lists of values by attribute, such as {"genre": ["Comedy"]}'
    lists = _typed(name, value, dict, rule)
    for attribute in lists:
        _check_length(name, attribute)
    return {
        attribute: _ids(f"{name}.{attribute}", values, limits, "values")
        for attribute, values in lists.items()
    }


def _names(name: str, value: Any, limits: Limits) -> list[str]:
    names = _list(name, value, limits.candidates, "candidates", "names")
    if set(map(type, names)) - {str}:
        raise _invalid(name, "must be a list of strings")
    return list(dict.fromkeys(names))


def _features(name: str, value: Any, limits: Limits) -> Mapping[str, Any]:
    rule = 'an object of features by column, such as {"user_id": 1}'
    features = _typed(name, value, dict, rule)
    for column, feature in features.items():
        _check_length(name, column)
        is_nested = type(feature) is list and set(map(type, feature)) & {dict, list}
        if type(feature) is dict or is_nested:
            raise _invalid(f"{name}.{column}", "must be a value or a list of values")
    return features


def _check_length(name: str, column: str) -> None:
    # The search for similar names slows down with the length.
    if len(column) > _NAME:
        raise _invalid(
            f"{name}.{column[:_NAME]}",
            f"a name of {len(column)} characters; the limit is {_NAME}",
        )


def _rows(name: str, value: Any, limits: Limits) -> list[Mapping[str, Any]]:
    rows = _list(name, value, limits.rows, "rows", "objects")
    return [
        _features(f"{name}[{index}]", row, limits) for index, row in enumerate(rows)
    ]


def _one_of(*words: str) -> Callable[[str, Any, Limits], str]:
    def read(name: str, value: Any, limits: Limits) -> str:
        rule = " or ".join(map(repr, words))
        word = _typed(name, value, str, rule)
        if word not in words:
            raise _invalid(name, f"{word[:100]!r}; must be {rule}")
        return word

    return read


_READERS: Mapping[object, Mapping[str, Callable[[str, Any, Limits], Any]]] = {
    RecommendRequest: {
        "user": _features,
        "k": _number("k"),
        "candidates": _ids,
        "retrieve": _number("candidates"),
        "filter": _filter,
        "exclude": _ids,
        "allowed": _ids,
        "categories": _names,
        "exclude_seen": _flag,
        "vector": _one_of(*_VECTOR),
        "titles": _flag,
        "liked": _number("liked", MAX_LIKED),
    },
    ScoreRequest: {"user": _features, "items": _ids, "vector": _one_of(*_VECTOR)},
    EmbedRequest: {"rows": _rows, "side": _one_of("query", "candidate")},
    NearestRequest: {"item": _id, "k": _number("k"), "titles": _flag},
}
_REQUIRED: Mapping[object, tuple[str, ...]] = {
    RecommendRequest: ("user",),
    ScoreRequest: ("user", "items"),
    EmbedRequest: ("rows",),
    NearestRequest: ("item",),
}
