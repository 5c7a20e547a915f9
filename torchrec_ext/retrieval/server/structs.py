"""Requests and answers as msgspec structs, made of a bundle's own columns, and the OpenAPI description of them."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import UNSET, Meta, Struct, UnsetType

from torchrec_ext.data.preprocess.columns import element, is_list_column
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.catalogue import NOT
from torchrec_ext.retrieval.scorer import (
    Embedded,
    EmbedRequest,
    Nearest,
    NearestRequest,
    Recommendation,
    RecommendRequest,
    ScoreRequest,
    Scores,
)
from torchrec_ext.retrieval.server.settings import Limits, ServerConfig

Whole = Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)]
_MAX_LIKED = 100
# A name of a field is the caller's text.
_PLACE = re.compile(r"^(.*?) - at `\$\.?(.*)`$", re.DOTALL)
_TYPES: Mapping[str, Any] = {
    "int64": Whole,
    "float32": float,
    "float64": float,
    "bool": bool,
    "string": str,
}
# A time is ISO 8601, or a whole number in the column's own unit.
_TIME = (
    Annotated[
        str, Meta(description="a time in ISO 8601", examples=["2024-02-29T18:30:00Z"])
    ]
    | int
)


class RecommendAnswer(Struct, kw_only=True):
    """The best items, the best first, with the model's logits."""

    items: list[int | str]
    scores: list[float]
    asked: int
    answered: int
    user: str
    unknown_user: bool
    unknown_features: Sequence[str]
    vector: str
    bundle: str
    unknown_items: list[int | str]
    titles: list[str] | UnsetType = UNSET
    liked: list[int | str] | UnsetType = UNSET
    liked_titles: list[str] | UnsetType = UNSET


class ScoreAnswer(Struct, kw_only=True):
    """The model's logits, in the order of the items."""

    scores: list[float]
    user: str
    unknown_user: bool
    unknown_features: Sequence[str]
    vector: str
    bundle: str
    unknown_items: list[int | str]


class NearestAnswer(Struct, kw_only=True):
    """The nearest items, the nearest first, with their cosines."""

    items: list[int | str]
    scores: list[float]
    bundle: str
    titles: list[str] | UnsetType = UNSET


class EmbedAnswer(Struct, kw_only=True):
    """A vector for each row."""

    vectors: list[list[float]]
    unknown_features: list[list[str]]
    bundle: str


class ErrorBody(Struct, kw_only=True, omit_defaults=True):
    """Why a request was refused: a word for programs, a line for people, and the wrong field."""

    code: str
    message: str
    field: str | None = None


class ErrorAnswer(Struct, kw_only=True):
    """The answer to a refused request."""

    error: ErrorBody


def answer_struct(answer: Recommendation | Scores | Nearest | Embedded) -> Struct:
    """Returns the struct of a scorer's answer."""
    if isinstance(answer, Embedded):
        return EmbedAnswer(
            vectors=answer.vectors.tolist(),
            unknown_features=answer.unknown_features,
            bundle=answer.bundle,
        )
    if isinstance(answer, Nearest):
        return NearestAnswer(
            items=answer.items,
            scores=answer.scores,
            bundle=answer.bundle,
            titles=answer.titles or UNSET,
        )
    values: dict[str, Any] = {**vars(answer), **vars(answer.cold)}
    del values["cold"]
    if isinstance(answer, Scores):
        return ScoreAnswer(**values)
    values["answered"] = len(answer.items)
    for name in ("titles", "liked", "liked_titles"):
        values[name] = values[name] or UNSET
    return RecommendAnswer(**values)


class Operation(NamedTuple):
    """A kind of request of one bundle.

    Args:
        summary: what it does, for the description.
        body: struct of the body.
        answer: struct of the answer.
        example: a body.
        request: converts a body to a scorer's request.
        rows: structs of the rows of a body, whose columns depend on its side.
    """

    summary: str
    body: type[Struct]
    answer: type[Struct]
    example: Mapping[str, Any]
    request: Any
    rows: Sequence[type[Struct]] = ()


def routes_of(
    bundle: Bundle, settings: ServerConfig, example_user: Mapping[str, Any]
) -> dict[str, Operation]:
    """Returns the kinds of requests of a bundle, by path."""
    limits = settings.limits
    user = _row_struct("User", bundle.query.columns.raw, _users_id(bundle))
    item_row = _row_struct("Item", bundle.candidate.columns.raw, {})
    item = _id(bundle.items.ids.kind)
    ids = Annotated[list[item], Meta(min_length=1, max_length=limits.candidates)]  # type: ignore[valid-type]
    filters = _filter_struct(bundle, ids, limits)
    vector = Literal["auto", "live"]
    k = Annotated[int, Meta(ge=1, le=limits.k)]
    liked = Annotated[int, Meta(ge=0, le=_MAX_LIKED)]

    def struct(name: str, *fields: Any) -> type[Struct]:
        return msgspec.defstruct(name, fields, kw_only=True, forbid_unknown_fields=True)

    recommend = struct(
        "Recommend",
        ("user", user),
        ("k", k, 10),
        ("candidates", ids | None, None),
        ("filter", filters | None, None),
        ("exclude_seen", bool, True),
        ("vector", vector, "auto"),
        ("titles", bool, False),
        ("liked", liked, 0),
    )
    score = struct("Score", ("user", user), ("items", ids), ("vector", vector, "auto"))
    nearest = struct("Nearest", ("item", item), ("k", k, 10), ("titles", bool, False))
    rows = Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=limits.rows)]
    embed = struct(
        "Embed", ("rows", rows), ("side", Literal["query", "candidate"], "query")
    )
    read_user = _reader(user)
    sides = {"query": _row_of(user), "candidate": _row_of(item_row)}
    read_filter = _reader(filters)

    def to_recommend(body: Any) -> RecommendRequest:
        return RecommendRequest(
            user=read_user(body.user),
            k=body.k,
            candidates=body.candidates,
            filter={} if body.filter is None else read_filter(body.filter),
            exclude_seen=body.exclude_seen,
            vector=body.vector,
            titles=body.titles,
            liked=body.liked,
        )

    def to_score(body: Any) -> ScoreRequest:
        user_row = read_user(body.user)
        return ScoreRequest(user=user_row, items=body.items, vector=body.vector)

    def to_nearest(body: Any) -> NearestRequest:
        return NearestRequest(item=body.item, k=body.k, titles=body.titles)

    def to_embed(body: Any) -> EmbedRequest:
        read = sides[body.side]
        rows = [read(row, index) for index, row in enumerate(body.rows)]
        return EmbedRequest(rows=rows, side=body.side)

    first = bundle.items.ids.ids(range(min(2, len(bundle.items))))
    known: Mapping[str, Any] = example_user
    # Ids of users are for private callers alone.
    if bundle.users is not None and settings.is_private and len(bundle.users):
        known = {bundle.users.key: bundle.users.ids.ids([0])[0]}
    of_user = {"user": dict(known)}
    return {
        "/v1/recommend": Operation(
            "Recommends the best items of a user.",
            recommend,
            RecommendAnswer,
            {**of_user, "k": 3},
            to_recommend,
        ),
        "/v1/score": Operation(
            "Scores items for a user.",
            score,
            ScoreAnswer,
            {**of_user, "items": first},
            to_score,
        ),
        "/v1/nearest": Operation(
            "Finds the items nearest to an item.",
            nearest,
            NearestAnswer,
            {"item": first[0], "k": 3},
            to_nearest,
        ),
        "/v1/embed": Operation(
            "Computes the vectors of users or of items.",
            embed,
            EmbedAnswer,
            {"rows": [dict(example_user)]},
            to_embed,
            [user, item_row],
        ),
    }


def _id(kind: str) -> Any:
    return str if kind == "str" else Whole


def _users_id(bundle: Bundle) -> Mapping[str, Any]:
    if bundle.users is None:
        return {}
    return {bundle.users.key: _id(bundle.users.ids.kind) | None}


def column_type(raw: str) -> Any:
    """Returns the type of a column's values in JSON: every value that a file can hold, and null."""
    kind = _TYPES.get(element(raw), _TIME)
    if is_list_column(raw):
        return list[kind | None] | None  # type: ignore[valid-type]
    return kind | None


def _row_struct(
    name: str, raw: Mapping[str, str], more: Mapping[str, Any]
) -> type[Struct]:
    columns = {column: column_type(kind) for column, kind in raw.items()}
    return _named(name, {**columns, **more})


def _filter_struct(bundle: Bundle, ids: Any, limits: Limits) -> type[Struct]:
    lists: dict[str, Any] = {}
    for name, attribute in bundle.items.attributes.items():
        value = _id(attribute.values.kind)
        lists[name] = Annotated[
            list[value],  # type: ignore[valid-type]
            Meta(min_length=1, max_length=limits.candidates),
        ]
    return _named("Filter", {**lists, NOT: ids})


def _named(name: str, types: Mapping[str, Any]) -> type[Struct]:
    """Makes a struct of optional fields whose names may be any text."""
    names = [f"field{number}" for number in range(len(types))]
    fields = [
        (each, kind | UnsetType, UNSET)
        for each, kind in zip(names, types.values(), strict=True)
    ]
    return msgspec.defstruct(
        name,
        fields,
        rename=dict(zip(names, types, strict=True)),
        kw_only=True,
        forbid_unknown_fields=True,
    )


def _reader(struct: type[Struct]) -> Any:
    """Returns a function from a struct to a dict of the fields that were sent."""
    names = struct.__struct_encode_fields__

    def read(value: Struct) -> dict[str, Any]:
        values = msgspec.structs.astuple(value)
        return {
            name: each
            for name, each in zip(names, values, strict=True)
            if each is not UNSET
        }

    return read


def _row_of(struct: type[Struct]) -> Any:
    """Returns a function that checks a row of a request to embed by its side's struct."""
    read = _reader(struct)

    def convert(row: Mapping[str, Any], index: int) -> dict[str, Any]:
        try:
            return read(msgspec.convert(row, struct))  # type: ignore[no-any-return]
        except msgspec.ValidationError as error:
            message, place = field_of(error)
            at = f"rows[{index}]" + (f".{place}" if place else "")
            raise msgspec.ValidationError(f"{message} - at `$.{at}`") from None

    return convert


def field_of(error: msgspec.ValidationError) -> tuple[str, str]:
    """Returns what is wrong, and the path of the field, such as ``user.age``."""
    found = _PLACE.match(str(error))
    if found is None:
        return str(error), ""
    return found[1], found[2]


def openapi(routes: Mapping[str, Operation], settings: ServerConfig) -> dict[str, Any]:
    """Returns the OpenAPI 3.1 description of a server with these kinds of requests."""
    structs: list[type[Struct]] = [ErrorAnswer]
    for route in routes.values():
        structs += [route.body, route.answer, *route.rows]
    found, parts = msgspec.json.schema_components(
        structs, ref_template="#/components/schemas/{name}"
    )
    schemas = dict(zip(structs, found, strict=True))
    for route in routes.values():
        if route.rows:
            # Which side's rows they are, another field says: no type of msgspec's can.
            columns = parts[route.body.__name__]["properties"]["rows"]
            columns["items"] = {"anyOf": [schemas[struct] for struct in route.rows]}
    error = {"application/json": {"schema": schemas[ErrorAnswer]}}
    statuses = {
        "400": "the body is not JSON",
        "401": "the token is missing or wrong",
        "413": "the body is too long",
        "422": "a field is wrong; the message names it",
        "503": "the worker has too many connections; ask again",
    }
    refusals = {
        status: {"description": why, "content": error}
        for status, why in statuses.items()
    }
    paths: dict[str, Any] = {}
    for path, route in routes.items():
        body = {"schema": schemas[route.body], "example": route.example}
        answer = {"application/json": {"schema": schemas[route.answer]}}
        operation: dict[str, Any] = {
            "summary": route.summary,
            "requestBody": {"required": True, "content": {"application/json": body}},
            "responses": {
                "200": {"description": "the answer", "content": answer},
                **refusals,
            },
        }
        if settings.token is not None:
            operation["security"] = [{"token": []}]
        paths[path] = {"post": operation}
    for path, summary in (
        ("/v1/bundle", "Describes the live bundle."),
        ("/healthz", "Says that the process runs."),
        ("/readyz", "Says which bundle answers, and whether a newer one was refused."),
        ("/metrics", "Figures for Prometheus, summed over workers."),
    ):
        paths[path] = {
            "get": {"summary": summary, "responses": {"200": {"description": "it"}}}
        }
    described: dict[str, Any] = {
        "openapi": "3.1.0",
        "info": {"title": "torchrec_ext", "version": "2"},
        "paths": paths,
        "components": {"schemas": parts},
    }
    if settings.token is not None:
        token = {"token": {"type": "http", "scheme": "bearer"}}
        described["components"]["securitySchemes"] = token
    # Examples may hold what msgspec leaves as it is, such as tuples.
    plain: dict[str, Any] = json.loads(msgspec.json.encode(described))
    return plain
