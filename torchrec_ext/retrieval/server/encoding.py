"""JSON answers."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response

_ENCODER = json.JSONEncoder(allow_nan=False, separators=(",", ":"))  # ASCII, so that a lone surrogate in an id cannot fail


def json_response(content: Any, *, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    """``content`` as compact JSON, never to be cached."""
    return Response(
        _ENCODER.encode(content).encode("ascii"),
        status_code=status,
        headers={"Cache-Control": "no-store", **(headers or {})},
        media_type="application/json",
    )
