"""What was trained is what is served: HR@10 of a model's held-out items through the service, to the last hit."""

from __future__ import annotations

import http.client
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from tests.retrieval.server.running import running_server
from torchrec_ext.data.datasets.catalog import load_config
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe

pytestmark = pytest.mark.skipif(
    "TORCHREC_EXT_DATA" not in os.environ,
    reason="needs MovieLens 100K in $TORCHREC_EXT_DATA",
)


def trained(folder: Path, *changes: str) -> dict[str, Any]:
    """Trains two_tower on MovieLens 100K briefly, and returns its summary; the bundle is in ``folder``."""
    settings = ["train.epochs=1", "train.eval_every=1", "export=require", *changes]
    run_training(apply_overrides(load_recipe("two_tower"), settings), folder)
    return json.loads((folder / "summary.json").read_text())  # type: ignore[no-any-return]


@pytest.mark.slow
@pytest.mark.parametrize("interaction", ["top_nn", "dot"])
def test_hit_rate_through_the_service_is_the_trained_models_to_the_last_hit(
    interaction: str, tmp_path: Path
) -> None:
    summary = trained(tmp_path / "run", f"model.interaction={interaction}")
    data = load_config(load_recipe("two_tower").data)
    users, targets = (data.test[name].values for name in ("user_id", "item_id"))
    bundle = Bundle.load(tmp_path / "run" / "bundle")
    with running_server(bundle, log_requests=False) as running:
        connection = http.client.HTTPConnection("127.0.0.1", running.port, timeout=30)
        hits = 0
        for row, (user, target) in enumerate(
            zip(users.tolist(), targets.tolist(), strict=True)
        ):
            asked = {"user": {"user_id": user}, "k": 10}
            connection.request(
                "POST",
                "/v1/recommend",
                json.dumps(asked),
                {"Content-Type": "application/json"},
            )
            answer = json.loads(connection.getresponse().read())
            hits += target in answer["items"]
            assert not np.isin(
                answer["items"],
                data.seen(users[row : row + 1], "train", "validation").values,
            ).any()
    assert hits / len(users) == pytest.approx(summary["test"]["hr@10"], abs=1e-9)
