"""OpenAPI description of the server, with the columns, ids and limits of the live bundle."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torchrec_ext.retrieval.server.parsing import MAX_LIKED
from torchrec_ext.retrieval.server.settings import Limits, ServerConfig

if TYPE_CHECKING:
    from torchrec_ext.retrieval.bundle.bundle import Bundle

Schema = dict[str, Any]
_INT64: Schema = {"type": "integer", "minimum": -(2**63), "maximum": 2**63 - 1}
_KINDS: dict[str, Schema] = {
    "int64": _INT64,
    "float32": {"type": "number"},
    "float64": {"type": "number"},
    "bool": {"type": "boolean"},
    "string": {"type": "string"},
}
_STATUSES = {
    "400": "The body is not JSON.",
    "401": "The token is missing or wrong.",
    "408": "The body has not come in time.",
    "413": "The body is too long, or a search of the whole catalogue takes longer than the time limit.",
    "415": "The body is of another type.",
    "422": "A field is wrong, or a limit is passed; the answer names it.",
    "429": "As many requests wait as may, or as can be answered in time. Come back after `Retry-After` seconds.",
    "503": "No answer in time, something out of reach, or the server is about to end. Come back after `Retry-After` "
    "seconds.",
}


def document(bundle: Bundle, settings: ServerConfig) -> Schema:
    """Returns the OpenAPI 3.1 description of a server with ``bundle``."""
    limits = settings.limits
    digest = {"type": "string", "description": "Digest of the bundle that answered."}
    paths: Schema = {
        "/v1/recommend": _post("The best items of a user", _recommend(bundle, limits), "Recommendation"),
        "/v1/score": _post("The model's logits of a user and some items", _score(bundle, limits), "Scores"),
        "/v1/embed": _post("Outputs of the towers", _embed(limits), "Vectors"),
        "/v1/bundle": _get(
            "What is served: the manifest with parity, recall and coverage", {"type": "object"}, token=True
        ),
        "/healthz": _get("The process runs", _object({"status": {"type": "string"}})),
        "/readyz": _get("Whether to send requests here, and what is served", {"type": "object"}, draining=True),
        "/openapi.json": _get("This description", {"type": "object"}),
    }
    paths["/metrics"] = {
        "get": {"summary": "Prometheus metrics of all workers", "responses": {**_text(), **_errors("401")}}
    }
    components: Schema = {"schemas": {**_answers(bundle, digest), "Error": _ERROR}}
    described: Schema = {
        "openapi": "3.1.0",
        "info": {"title": "torchrec_ext", "version": "1", "description": "Recommendations from a certified bundle."},
        "paths": paths,
        "components": components,
    }
    if settings.token is not None:
        components["securitySchemes"] = {"token": {"type": "http", "scheme": "bearer"}}
        for path, operations in paths.items():
            if path.startswith("/v1/") or path == "/metrics":
                for operation in operations.values():
                    operation["security"] = [{"token": []}]
    return described


def _recommend(bundle: Bundle, limits: Limits) -> Schema:
    ids = _ids(bundle, limits)
    return _object(
        {
            "user": _user(bundle),
            "k": {
                "type": "integer",
                "minimum": 1,
                "maximum": limits.k,
                "default": 10,
                "description": "Items to answer.",
            },
            "candidates": {**ids, "minItems": 1, "uniqueItems": True, "description": "Choose among these alone."},
            "retrieve": {
                "type": "integer",
                "minimum": 1,
                "maximum": limits.candidates,
                "description": "Items that the index hands to the top NN.",
            },
            "exclude": {**ids, "description": "Leave these out."},
            "allowed": {**ids, "minItems": 1, "description": "Answer these alone."},
            "categories": {
                "type": "array",
                "items": {"enum": list(bundle.items.categories)} if bundle.items.categories else {"type": "string"},
                "maxItems": limits.candidates if bundle.items.categories else 0,
                "description": "Answer items of one of these alone.",
            },
            "exclude_seen": {"type": "boolean", "default": True, "description": "Leave out what the user has taken."},
            "vector": _VECTOR,
            "titles": {"type": "boolean", "default": False, "description": "Answer titles too."},
            "liked": {
                "type": "integer",
                "minimum": 0,
                "maximum": MAX_LIKED,
                "default": 0,
                "description": "Liked items to answer.",
            },
        },
        required=["user"],
    )


def _score(bundle: Bundle, limits: Limits) -> Schema:
    properties = {"user": _user(bundle), "items": {**_ids(bundle, limits), "minItems": 1}, "vector": _VECTOR}
    return _object(properties, required=["user", "items"])


def _embed(limits: Limits) -> Schema:
    row = {"type": "object", "description": "Raw features by column."}
    rows = {"type": "array", "items": row, "minItems": 1, "maxItems": limits.rows}
    return _object({"rows": rows, "side": {"enum": ["query", "candidate"], "default": "query"}}, required=["rows"])


def _user(bundle: Bundle) -> Schema:
    """Returns the schema of raw features; only the id is required if the bundle has a table of users."""
    columns = {name: _column(kind) for name, kind in bundle.request_columns.items()}
    if bundle.users is None:
        return _object(columns, required=list(columns))
    described = _object({**columns, bundle.users.key: _id(bundle.users.ids.kind)}, required=[bundle.users.key])
    return {
        **described,
        "description": "The id alone, or with features, which then take the place of those that are known.",
    }


def _column(kind: str) -> Schema:
    if kind.startswith("list<"):
        return {"type": "array", "items": _column(kind[5:-1])}
    return _KINDS.get(kind, {})


def _id(kind: str) -> Schema:
    return _INT64 if kind == "int64" else {"type": "string"}


def _ids(bundle: Bundle, limits: Limits) -> Schema:
    return {"type": "array", "items": _id(bundle.store.ids.kind), "maxItems": limits.candidates}


def _answers(bundle: Bundle, digest: Schema) -> Schema:
    names: Schema = {"type": "array", "items": {"type": "string"}}
    ids: Schema = {"type": "array", "items": _id(bundle.store.ids.kind)}
    scores: Schema = {
        "type": "array",
        "items": {"type": "number"},
        "description": "The model's logits, one for each item.",
    }
    best: Schema = {**ids, "description": "Ids, best first."}
    common: Schema = {
        "scores": scores,
        "unknown_user": {"type": "boolean", "description": "The id is unknown, or none was given."},
        "unknown_features": {**names, "description": "Columns that took the out-of-vocabulary row."},
        "vector": {"enum": ["live", "store", "redis"], "description": "Where the user's vector came from."},
        "unknown_items": {
            **ids,
            "description": "Ids that the catalogue does not have; as candidates scored as the unknown item.",
        },
        "bundle": digest,
    }
    counts: Schema = {
        "asked": {"type": "integer", "description": "k of the request."},
        "answered": {"type": "integer", "description": "Fewer where no more are left."},
    }
    optional: Schema = {"titles": names, "liked": ids, "liked_titles": names}
    vectors: Schema = {"type": "array", "items": {"type": "array", "items": {"type": "number"}}}
    unknown = {"type": "array", "items": names}
    return {
        "Scores": _object(common, required=list(common)),
        "Recommendation": _object(
            {"items": best, **common, **counts, **optional}, required=["items", *common, *counts]
        ),
        "Vectors": _object(
            {"vectors": vectors, "unknown_features": unknown, "bundle": digest},
            required=["vectors", "unknown_features", "bundle"],
        ),
    }


def _object(properties: Schema, required: list[str] | None = None) -> Schema:
    described: Schema = {"type": "object", "properties": properties, "additionalProperties": False}
    return described | ({"required": required} if required else {})


def _post(summary: str, body: Schema, answer: str) -> Schema:
    content = {"application/json": {"schema": {"$ref": f"#/components/schemas/{answer}"}}}
    responses = {"200": {"description": "The answer.", "content": content}, **_errors(*_STATUSES)}
    request = {"required": True, "content": {"application/json": {"schema": body}}}
    return {"post": {"summary": summary, "requestBody": request, "responses": responses}}


def _get(summary: str, schema: Schema, *, token: bool = False, draining: bool = False) -> Schema:
    content = {"application/json": {"schema": schema}}
    responses: Schema = {"200": {"description": "The answer.", "content": content}}
    if draining:
        responses["503"] = {"description": "The server is about to end.", "content": content}
    return {"get": {"summary": summary, "responses": {**responses, **(_errors("401", "503") if token else {})}}}


def _errors(*statuses: str) -> Schema:
    content = {"application/json": {"schema": {"$ref": "#/components/schemas/Error"}}}
    return {status: {"description": _STATUSES[status], "content": content} for status in statuses}


def _text() -> Schema:
    return {"200": {"description": "Prometheus' text form.", "content": {"text/plain": {"schema": {"type": "string"}}}}}


_VECTOR: Schema = {
    "enum": ["auto", "live"],
    "default": "auto",
    "description": "`auto` takes a stored vector of the user where there is one and no feature is given.",
}
_ERROR: Schema = _object(
    {
        "error": _object(
            {
                "code": {"type": "string"},
                "message": {"type": "string", "description": "What is wrong, and what helps."},
                "field": {"type": "string"},
                "limit": _object({"name": {"type": "string"}, "value": {"type": "number"}}, required=["name", "value"]),
            },
            required=["code", "message"],
        )
    },
    required=["error"],
)
