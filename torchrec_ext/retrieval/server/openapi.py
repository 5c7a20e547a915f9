"""OpenAPI description of the server: ``static/openapi.json`` with the columns, ids and limits of the live bundle.

In that file ``{"$live": NAME}`` stands for a value of the live bundle or of its limits, with any other keys added.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from torchrec_ext.retrieval.bundle.tables import CATEGORIES, NOT, Attribute
from torchrec_ext.retrieval.server.parsing import MAX_LIKED
from torchrec_ext.retrieval.server.settings import Limits, ServerConfig

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

Schema = dict[str, Any]
_LIVE = "$live"
_MOST_NAMED = 1_000  # most values of an attribute to list
_FEW = 100  # most values of a column of a user, unless its values are items: others may be ids of people
_EXAMPLES = 20  # most values of a column in the description
_INT64: Schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_KINDS: dict[str, Schema] = {
    "int64": _INT64,
    "float32": {"type": "number"},
    "float64": {"type": "number"},
    "bool": {"type": "boolean"},
    "string": {"type": "string"},
    "str": {"type": "string"},  # of an id map
}
_NEUTRAL: Mapping[str, Any] = {
    "int64": 0,
    "float32": 0.0,
    "float64": 0.0,
    "bool": False,
    "string": "",
}
_A_DAY = "2024-01-01"  # of a column of times


def document(bundle: Bundle, settings: ServerConfig) -> Schema:
    """Returns the OpenAPI 3.1 description of a server with ``bundle``."""
    template = json.loads(
        (files("torchrec_ext.retrieval.server") / "static" / "openapi.json").read_text()
    )
    live = _live(bundle, settings)
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    live["errors"] = {}
    for status, description in template["statuses"].items():
        answer = {"description": description, "content": error}
        live[f"error {status}"] = answer
        live["errors"][status] = answer
    described: Schema = _fill(template["document"], live)
    # The file describes a server without a token.
    if settings.token is not None:
        described["components"]["securitySchemes"] = {
            "token": {"type": "http", "scheme": "bearer"}
        }
        for path, operations in described["paths"].items():
            if path.startswith("/v1/") or path == "/metrics":
                for operation in operations.values():
                    operation["security"] = [{"token": []}]
    return described


def known_values(bundle: Bundle, *, private: bool) -> dict[str, list[Any]]:
    """Returns the known values of a user's raw columns of ids, by column, where they are few or are items.

    Other values are accepted as well, and count as unknown.

    Args:
        bundle: live bundle.
        private: whether no stranger reads them. Without a table of users any column may hold ids of people.
    """
    columns = {}
    for name, kind in bundle.request_columns.items():
        if _holds_users(bundle, name):
            continue
        values = bundle.encoders[0].columns.known_values(name, _MOST_NAMED)
        are_few = 0 < len(values) <= _FEW and (private or bundle.users is not None)
        # Only lists of them: a single number may be the id of a person, although an
        # item has it too.
        are_items = kind.startswith("list<") and bool(item_titles(bundle, values))
        if are_few or are_items:
            columns[name] = values
    return columns


def _holds_users(bundle: Bundle, name: str) -> bool:
    """Returns whether a raw column holds ids of the bundle's users."""
    if bundle.users is None:
        return False
    return name == bundle.users.key or bundle.encoders[0].columns.share_ids(
        name, bundle.users.key
    )


def item_titles(bundle: Bundle, values: Sequence[Any]) -> list[str]:
    """Returns the titles of a column's known values, if these are ids of the catalogue; else an empty list."""
    kind = str if bundle.store.ids.kind == "str" else int
    # Other columns have whole numbers too, such as a code of two values: those are no
    # items.
    is_whole = 2 * len(values) > min(len(bundle.store.ids), _MOST_NAMED)
    if not is_whole or set(map(type, values)) != {kind}:
        return []
    positions = bundle.store.ids.positions(values)
    if positions.min() < 0:
        return []
    return bundle.items.titles_of(positions)


def example_user(bundle: Bundle, *, private: bool) -> dict[str, Any]:
    """Returns raw features of a person whom the model has never seen, as a request gives them without an id.

    Args:
        bundle: live bundle.
        private: see :func:`known_values`.
    """
    query = bundle.encoders[0]
    features: dict[str, Any] = {}
    if bundle.users is not None:
        features = {name: column[0] for name, column in bundle.users.rows([-1]).items()}
    example = {}
    for name, kind in bundle.request_columns.items():
        if bundle.users is not None and name == bundle.users.key:
            continue
        value = features.get(name)
        if value is None:
            value = _NEUTRAL.get(kind, _A_DAY)
            if kind.startswith("list<"):
                # A bag may be empty, other lists have one length.
                value = [0] * query.list_widths.get(name, 0)
            is_shown = not _holds_users(bundle, name) and (
                private or bundle.users is not None
            )
            if is_shown and kind in ("int64", "string"):
                value = next(iter(query.columns.known_values(name, 1)), value)
        example[name] = value
    return example


def _live(bundle: Bundle, settings: ServerConfig) -> Schema:
    """Returns the values that the file names by ``$live``."""
    limits = settings.limits
    item_id = _column(bundle.store.ids.kind)
    ids = {"type": "array", "items": item_id, "maxItems": limits.candidates}
    attributes: Schema = {
        name: _values(attribute, limits)
        for name, attribute in bundle.items.attributes.items()
    }
    filters: Schema = {
        name: {**values, "minItems": 1}
        for name, values in {**attributes, NOT: ids}.items()
    }
    return {
        **vars(limits),
        "max_liked": MAX_LIKED,
        "id": item_id,
        "ids": ids,
        "categories": attributes.get(
            CATEGORIES, {"type": "array", "items": {"type": "string"}, "maxItems": 0}
        ),
        "filter": {
            "type": "object",
            "properties": filters,
            "additionalProperties": False,
        },
        "user": _user(bundle, settings.is_private),
        "example user": example_user(bundle, private=settings.is_private),
        "example items": bundle.store.ids.ids(
            range(min(2, len(bundle.store.ids)))
        ).tolist(),
        "example item": bundle.store.ids.ids([0]).tolist()[0],
    }


def _values(attribute: Attribute, limits: Limits) -> Schema:
    """Returns the schema of a list of an attribute's values, which are named if they are few."""
    value = _column(attribute.values.kind)
    if len(attribute.values) <= _MOST_NAMED:
        value = {"enum": attribute.values.ids().tolist()}
    return {"type": "array", "items": value, "maxItems": limits.candidates}


def _user(bundle: Bundle, private: bool) -> Schema:
    """Returns the schema of raw features: all columns, or the id alone if the bundle has a table of users."""
    columns = {name: _column(kind) for name, kind in bundle.request_columns.items()}
    for name, values in known_values(bundle, private=private).items():
        column = {**columns[name], "description": "Other values count as unknown."}
        if "items" in column:
            # A copy: all columns of a type share its schema.
            column["items"] = {**column["items"], "examples": values[:_EXAMPLES]}
        else:
            column["examples"] = values[:_EXAMPLES]
        columns[name] = column
    described: Schema = {
        "type": "object",
        "properties": columns,
        "additionalProperties": False,
    }
    required = list(columns)
    if bundle.users is not None:
        key = bundle.users.key
        columns[key] = _column(bundle.users.ids.kind)
        others = [name for name in required if name != key]
        described["anyOf"] = [{"required": [key]}, {"required": others}]
        required = []
        described["description"] = (
            "The id alone, or with features, which then take the place of those that are known. Without an id, all "
            "features of someone new."
        )
    if required:
        described["required"] = required
    return described


def _column(kind: str) -> Schema:
    if kind.startswith("list<"):
        return {"type": "array", "items": _column(kind[5:-1])}
    return _KINDS.get(kind, {})


def _fill(value: Any, live: Schema) -> Any:
    """Replaces each ``{"$live": NAME}`` in JSON values by ``live[NAME]``."""
    if isinstance(value, list):
        return [_fill(each, live) for each in value]
    if not isinstance(value, dict):
        return value
    filled = {name: _fill(each, live) for name, each in value.items() if name != _LIVE}
    if _LIVE not in value:
        return filled
    part = live[value[_LIVE]]
    if filled:
        part = {**part, **filled}
    return part
