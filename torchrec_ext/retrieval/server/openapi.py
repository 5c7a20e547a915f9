"""OpenAPI description of the server: ``static/openapi.json`` with the columns, ids and limits of the live bundle.

In that file ``{"$live": NAME}`` stands for a value of the live bundle or of its limits, with any other keys added.
"""

from __future__ import annotations

import json
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
_INT64: Schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_KINDS: dict[str, Schema] = {
    "int64": _INT64,
    "float32": {"type": "number"},
    "float64": {"type": "number"},
    "bool": {"type": "boolean"},
    "string": {"type": "string"},
    "str": {"type": "string"},  # of an id map
}


def document(bundle: Bundle, settings: ServerConfig) -> Schema:
    """Returns the OpenAPI 3.1 description of a server with ``bundle``."""
    template = json.loads((files("torchrec_ext.retrieval.server") / "static" / "openapi.json").read_text())
    live = _live(bundle, settings.limits)
    error = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    for status, description in template["statuses"].items():
        live[f"error {status}"] = {"description": description, "content": error}
    live["errors"] = {status: live[f"error {status}"] for status in template["statuses"]}
    described: Schema = _fill(template["document"], live)
    if settings.token is not None:
        described["components"]["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, operations in described["paths"].items():
            if path.startswith("/v1/") or path == "/metrics":
                for operation in operations.values():
                    operation["security"] = [{"token": []}]
    return described


def _live(bundle: Bundle, limits: Limits) -> Schema:
    """Returns the values that the file names by ``$live``."""
    item_id = _column(bundle.store.ids.kind)
    ids = {"type": "array", "items": item_id, "maxItems": limits.candidates}
    attributes: Schema = {name: _values(attribute, limits) for name, attribute in bundle.items.attributes.items()}
    filters: Schema = {name: {**values, "minItems": 1} for name, values in {**attributes, NOT: ids}.items()}
    return {
        **vars(limits),
        "max_liked": MAX_LIKED,
        "id": item_id,
        "ids": ids,
        "categories": attributes.get(CATEGORIES, {"type": "array", "items": {"type": "string"}, "maxItems": 0}),
        "filter": {"type": "object", "properties": filters, "additionalProperties": False},
        "user": _user(bundle),
    }


def _values(attribute: Attribute, limits: Limits) -> Schema:
    """Returns the schema of a list of an attribute's values, which are named if they are few."""
    value = _column(attribute.values.kind)
    if len(attribute.values) <= _MOST_NAMED:
        value = {"enum": attribute.values.ids().tolist()}
    return {"type": "array", "items": value, "maxItems": limits.candidates}


def _user(bundle: Bundle) -> Schema:
    """Returns the schema of raw features; only the id is required if the bundle has a table of users."""
    columns = {name: _column(kind) for name, kind in bundle.request_columns.items()}
    described: Schema = {"type": "object", "properties": columns, "additionalProperties": False}
    required = list(columns)
    if bundle.users is not None:
        columns[bundle.users.key] = _column(bundle.users.ids.kind)
        required = [bundle.users.key]
        described["description"] = "The id alone, or with features, which then take the place of those that are known."
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
    return {**part, **filled} if filled else part
