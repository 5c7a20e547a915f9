"""What the server says of a bundle: a page's values, and the OpenAPI description."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec
from msgspec import Struct

from torchrec_ext.data.preprocess.columns import element, is_list_column
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.catalogue import NOT
from torchrec_ext.retrieval.server.settings import ServerConfig

_SAMPLE = 200  # number of user ids offered by the page
_NEUTRAL: Mapping[str, Any] = {
    "int64": 0,
    "float32": 0.0,
    "float64": 0.0,
    "bool": False,
    "string": "",
}
_A_DAY = "2024-01-01"  # of a column of times
_TYPES = {
    "int64": "integer",
    "float32": "number",
    "float64": "number",
    "bool": "boolean",
    "string": "string",
}
_TIME = {"type": "string", "description": "a time in ISO 8601"}


def bundle_page(bundle: Bundle, settings: ServerConfig) -> dict[str, Any]:
    """Describes a bundle for people and the page; ids of users only on a private server."""
    users: dict[str, Any] = {
        "user_key": None,
        "user_kind": None,
        "users": 0,
        "sample_users": [],
    }
    if bundle.users is not None:
        ids = bundle.users.ids
        users.update(user_key=bundle.users.key, user_kind=ids.kind, users=len(ids))
        if settings.is_private:
            users["sample_users"] = ids.ids(range(min(_SAMPLE, len(ids))))
    return {
        "digest": bundle.digest,
        "manifest": bundle.manifest.as_json(),
        "items": len(bundle.items),
        **users,
        "columns": dict(bundle.query.columns.raw),
        "example_user": example_user(bundle),
        "most_items": settings.max_k,
    }


def example_user(bundle: Bundle) -> dict[str, Any]:
    """Returns raw features of a person whom the model has never seen, as a request gives them without an id."""
    features: Mapping[str, Any] = {}
    key = None
    if bundle.users is not None:
        features, key = bundle.users.features(-1), bundle.users.key
    columns = bundle.query.columns.columns
    example = {}
    for name, kind in bundle.query.columns.raw.items():
        neutral: Any = _NEUTRAL.get(element(kind), _A_DAY)
        if is_list_column(kind):
            # A bag may be empty, other lists have one length.
            width = columns[name].width if name in columns else 0
            neutral = [neutral] * (width or 0)
        value = features.get(name)
        if name != key:
            example[name] = neutral if value is None else value
    return example


def openapi(
    bundle: Bundle,
    routes: Mapping[str, tuple[type[Struct], type[Struct], str]],
    settings: ServerConfig,
) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 description of a server.

    Args:
        bundle: live bundle.
        routes: by path, the struct of a request, that of its answer, and what it does.
        settings: settings of the server.
    """
    template = "#/components/schemas/{name}"
    structs = [each for route in routes.values() for each in route[:2]]
    found, parts = msgspec.json.schema_components(structs, ref_template=template)
    schemas = dict(zip(structs, found, strict=True))
    user = dict(bundle.query.columns.raw)
    if bundle.users is not None:
        user[bundle.users.key] = bundle.users.ids.kind.replace("str", "string")
    of_user = _rows(user)
    either = {"anyOf": [of_user, _rows(bundle.candidate.columns.raw)]}
    # What the bundle's columns and attributes say of a field, beside its type.
    fields = {
        "user": {"anyOf": [of_user, {"type": "null"}]},
        "filter": _rows(dict.fromkeys([*bundle.items.attributes, NOT], "list<>")),
        "rows": {"type": "array", "items": either},
    }
    paths: dict[str, Any] = {}
    for path, (kind, answer, summary) in routes.items():
        properties = parts[kind.__name__]["properties"]
        properties.update({name: fields[name] for name in fields if name in properties})
        body, answers = (
            {"application/json": {"schema": schemas[each]}} for each in (kind, answer)
        )
        paths[path] = {
            "post": {
                "summary": summary.partition(";")[0].partition("\n")[0].strip(),
                "requestBody": {"required": True, "content": body},
                "responses": {"200": {"description": "the answer", "content": answers}},
            }
        }
    return {
        "openapi": "3.1.0",
        "info": {"title": "torchrec_ext", "version": "2"},
        "paths": paths,
        "components": {
            "schemas": parts,
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
        },
        "security": [{"token": []}] if settings.token is not None else [],
    }


def _rows(raw: Mapping[str, str]) -> dict[str, Any]:
    """Returns the schema of an object with these columns."""
    properties = {}
    for name, kind in raw.items():
        plain = _TYPES.get(element(kind))
        schema: Any = {"type": plain} if plain else _TIME
        if is_list_column(kind):
            schema = {"type": "array", "items": schema}
        properties[name] = schema
    return {"type": "object", "properties": properties, "additionalProperties": False}
