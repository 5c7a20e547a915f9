"""The server against its own description: whatever schemathesis makes of it, nothing is a 5xx."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torchrec.modules.embedding_configs import EmbeddingBagConfig

pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from tests.retrieval.server.running import Running, running_server
from tests.retrieval.small_bundle import SmallBundle
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.bundle.request_columns import Columns
from torchrec_ext.retrieval.server import openapi
from torchrec_ext.retrieval.server.openapi import document
from torchrec_ext.retrieval.server.settings import Limits, ServerConfig
from torchrec_ext.schema import BatchSchema

LIMITS = Limits(k=50, candidates=40, rows=4)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return SmallBundle(tmp_path_factory.mktemp("made") / "bundle").bundle


@pytest.mark.unit
def test_the_description_has_the_columns_ids_and_limits_of_the_bundle(
    bundle: Bundle,
) -> None:
    found = document(
        bundle, ServerConfig(bundle=Path("b"), limits=LIMITS, token="t" * 32)
    )
    body = found["paths"]["/v1/recommend"]["post"]["requestBody"]["content"][
        "application/json"
    ]["schema"]
    assert set(body["properties"]["user"]["properties"]) == {
        "user_id",
        "age",
        "history",
    }
    assert body["properties"]["candidates"]["maxItems"] == 40
    assert body["properties"]["categories"]["items"]["enum"] == [
        "Comedy",
        "Drama",
        "War",
    ]
    filters = body["properties"]["filter"]["properties"]
    assert list(filters) == ["categories", "year", "studio", "not"]
    assert filters["year"] == {
        "type": "array",
        "items": {"enum": list(range(1990, 1995))},
        "maxItems": 40,
        "minItems": 1,
    }
    assert found["paths"]["/v1/score"]["post"]["security"] == [{"token": []}]
    assert "security" not in found["paths"]["/healthz"]["get"]


def fuzz(running: Running, examples: int) -> int:
    """Schemathesis' cases for every operation; how many were sent."""
    schemathesis = pytest.importorskip("schemathesis", reason="needs schemathesis")
    from hypothesis import HealthCheck, Phase, given, settings
    from schemathesis import GenerationMode
    from schemathesis.checks import not_a_server_error
    from schemathesis.specs.openapi.checks import (
        content_type_conformance,
        response_schema_conformance,
        status_code_conformance,
    )

    logging.getLogger("urllib3").setLevel(logging.ERROR)
    url = f"http://127.0.0.1:{running.port}"
    schema = schemathesis.openapi.from_url(f"{url}/openapi.json")
    checks = [
        not_a_server_error,
        status_code_conformance,
        content_type_conformance,
        response_schema_conformance,
    ]
    sent = 0
    for result in schema.get_all_operations():
        operation = result.ok()
        for mode in (GenerationMode.POSITIVE, GenerationMode.NEGATIVE):
            if operation.body or mode is GenerationMode.POSITIVE:

                @settings(
                    max_examples=examples if operation.body else 2,
                    deadline=None,
                    database=None,
                    derandomize=True,
                    suppress_health_check=list(HealthCheck),
                    phases=[Phase.generate],
                )
                @given(case=operation.as_strategy(generation_mode=mode))
                def check(case: Any) -> None:
                    nonlocal sent
                    case.call_and_validate(base_url=url, checks=checks, timeout=20)
                    sent += 1

                check()
    return sent


@pytest.mark.parametrize("examples", [25, pytest.param(200, marks=pytest.mark.slow)])
def test_schemathesis_finds_no_5xx_and_no_answer_that_is_not_described(
    bundle: Bundle, examples: int
) -> None:
    with running_server(bundle, limits=LIMITS) as running:
        assert fuzz(running, examples) > examples
        assert '"status": 5' not in running.log.getvalue()


@pytest.mark.unit
def test_ids_of_people_are_not_told_although_items_have_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As of a log of clicks: its bundle has no table of users, and both kinds of ids count from 1."""
    columns = SimpleNamespace(known_values=lambda name, most: list(range(1, 201)))
    kinds = {"user_id": "int64", "history": "list<int64>"}
    bundle: Any = SimpleNamespace(
        users=None, request_columns=kinds, encoders=[SimpleNamespace(columns=columns)]
    )
    monkeypatch.setattr(
        openapi, "item_titles", lambda bundle, values: ["a title"] * len(values)
    )
    assert openapi.known_values(bundle, private=True) == {
        "history": list(range(1, 201))
    }


@pytest.mark.unit
def test_few_ids_of_people_are_not_told_to_strangers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of a small log: a bundle without a table of users does not say which column they are."""
    tables = [
        EmbeddingBagConfig(
            name="person",
            feature_names=["user", "friend"],
            num_embeddings=9,
            embedding_dim=4,
        ),
        EmbeddingBagConfig(
            name="city", feature_names=["city"], num_embeddings=4, embedding_dim=4
        ),
    ]
    kinds = dict.fromkeys(["user", "friend", "city"], "int64")
    columns = Columns(BatchSchema.from_tables(tables), kinds)
    query = SimpleNamespace(columns=columns, list_widths={})
    bundle: Any = SimpleNamespace(users=None, request_columns=kinds, encoders=[query])
    monkeypatch.setattr(openapi, "item_titles", lambda bundle, values: [])
    assert openapi.known_values(bundle, private=False) == {}
    assert openapi.example_user(bundle, private=False) == dict.fromkeys(kinds, 0)
    assert list(openapi.known_values(bundle, private=True)) == [
        "user",
        "friend",
        "city",
    ]
    bundle.users = SimpleNamespace(key="user", rows=lambda rows: {})
    assert openapi.known_values(bundle, private=False) == {"city": [1, 2, 3]}
    assert openapi.example_user(bundle, private=False) == {"friend": 0, "city": 1}
