"""JSON answers, and Refusal: an answer with a status of 400 or more."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

# ASCII, because a lone surrogate in an id could not be encoded otherwise; NaN is no
# JSON.
_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))


def json_response(
    content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None
) -> Response:
    """Returns an uncacheable response of compact JSON."""
    return Response(
        _ENCODER.encode(content).encode("ascii"),
        status_code=status,
        headers={"Cache-Control": "no-store", **(headers or {})},
        media_type="application/json",
    )


RETRY_AFTER_S = 1
_LATER = (429, 503)  # statuses after which the same request may succeed later


class Refusal(Exception):  # noqa: N818  (an answer to a caller is not an error of ours)
    """The answer to a refused request.

    Args:
        status: HTTP status.
        code: one word for programs.
        message: problem and remedy, for people.
        field: wrong field of the request, or None.
        limit: name and value of the exceeded limit, or None.
        headers: further headers. 429 and 503 also have ``Retry-After``.
    """

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        *,
        field: str | None = None,
        limit: tuple[str, float] | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body: dict[str, Any] = {"code": code, "message": message}
        if field is not None:
            self.body["field"] = field
        if limit is not None:
            self.body["limit"] = {"name": limit[0], "value": limit[1]}
        self.headers = dict(headers or {})
        if status in _LATER:
            self.headers["Retry-After"] = str(RETRY_AFTER_S)

    def response(self) -> Response:
        """Returns the response ``{"error": {"code", "message", "field", "limit"}}``."""
        return json_response(
            {"error": self.body}, status=self.status, headers=self.headers
        )


def over_limit(
    name: str,
    value: float,
    message: str,
    *,
    status: int = 422,
    field: str | None = None,
    headers: Mapping[str, str] | None = None,
) -> Refusal:
    """Returns the refusal of a request beyond a limit of the server."""
    return Refusal(
        status,
        "over_limit",
        message,
        field=field,
        limit=(name, value),
        headers=headers,
    )


class ClientGoneError(Exception):
    """The client has disconnected and needs no answer."""
