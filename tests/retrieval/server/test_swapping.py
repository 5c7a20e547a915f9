"""A running server goes over to bundles of other shapes: other widths, catalogues, users, interactions and columns."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from tests.examples import ITEMS, USERS, redrawn, table
from tests.retrieval.bundles import bundle_of, contents
from tests.retrieval.server.launched import until
from tests.retrieval.server.running import Running, running_server
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import Interaction, interaction_layer
from torchrec_ext.modules.tower import Tower
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.exporting.export import export
from torchrec_ext.retrieval.scorer.requests import RecommendRequest
from torchrec_ext.retrieval.scorer.scorer import Scorer
from torchrec_ext.retrieval.server.worker import Watcher


def bundle_of_widths(
    folder: Path, user: int, item: int, items: int, interaction: Interaction
) -> Bundle:
    """Towers so wide over a catalogue of so many items, whose user tower reads the history alone."""
    torch.manual_seed(user)
    towers = {
        "user": Tower(
            [table("history", ITEMS)],
            (12, user),
            dense=["age"],
            device=torch.device("cpu"),
        ),
        "item": Tower(
            [table("item_id", ITEMS)],
            (item,),
            dense=["price"],
            device=torch.device("cpu"),
        ),
    }
    top = interaction_layer(interaction, [user, item], (6,))
    export(
        redrawn(TowerModel(towers, top), user, tables=user),
        folder,
        **contents(seed=user, items=items),
    )
    return Bundle.load(folder)


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Bundle]:
    root = tmp_path_factory.mktemp("bundles")
    return {
        "first": bundle_of(root / "first"),
        "wider": bundle_of_widths(root / "wider", 24, 24, 12, "top_nn"),
        "dot": bundle_of_widths(root / "dot", 5, 5, 30, "dot"),
        "uneven": bundle_of_widths(root / "uneven", 10, 4, 20, "top_nn"),
    }


class Pointed:
    """A server that watches a file with the path of its bundle, as a worker does."""

    def __init__(self, running: Running, pointer: Path) -> None:
        self.running, self.pointer = running, pointer
        queued = running.queued
        self.watcher = Watcher(
            pointer, Bundle.load, queued.swap, queued.refuse, lambda: None, 0.02
        )
        self.watcher.start()

    def at(self, bundle: Bundle) -> None:
        fresh = self.pointer.with_name("fresh")
        fresh.write_text(str(bundle.folder))
        fresh.replace(self.pointer)

    def serves(self, bundle: Bundle) -> bool:
        return bool(
            self.running.queued.scorer.bundle.manifest.digest == bundle.manifest.digest
        )


def check_answers(running: Running, bundle: Bundle, stage: Any) -> None:
    """What the server says now is what a scorer says that never had another bundle."""
    client, alone = running.client(), Scorer(bundle, stage=stage)
    for user in range(1, USERS, 17):
        answer = client.post(
            "/v1/recommend", {"user": {"user_id": user}, "k": 100}
        ).json
        expected = alone.recommend(RecommendRequest(user={"user_id": user}, k=100))
        assert (answer["bundle"], answer["items"]) == (
            bundle.manifest.digest,
            expected.items,
        )
        np.testing.assert_allclose(answer["scores"], expected.scores, atol=1e-5)
        scores = client.post(
            "/v1/score", {"user": {"user_id": user}, "items": expected.items}
        ).json["scores"]
        np.testing.assert_allclose(scores, expected.scores, atol=1e-5)


@pytest.mark.parametrize("stage", ["exact", "dot"])
def test_a_running_server_takes_bundles_of_other_shapes_or_says_why_not_and_goes_on(
    stage: Any, bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    pointer = tmp_path / "pointer"
    pointer.write_text(str(bundles["first"].folder))
    answers: list[tuple[int, str]] = []
    ending = threading.Event()
    with running_server(bundles["first"], stage=stage) as running:

        def ask() -> None:
            client = running.client()
            while not ending.is_set():
                answer = client.post("/v1/recommend", {"user": {"user_id": 3}, "k": 20})
                answers.append((answer.status, answer.json.get("bundle", "")))
                time.sleep(0.002)

        asking = threading.Thread(target=ask)
        asking.start()
        pointed, queued = Pointed(running, pointer), running.queued
        try:
            live = bundles["first"]
            for name in ("wider", "uneven", "dot", "uneven", "first"):
                pointed.at(bundles[name])
                if stage == "dot" and name == "uneven":
                    # has no product of both towers' outputs
                    until(lambda: queued.refused)
                    assert (
                        "the query towers' outputs are 10 wide, the candidate tower's 4"
                        in str(queued.refused)
                    )
                else:
                    live = bundles[name]
                    until(
                        lambda live=live: (
                            pointed.serves(live) and queued.refused is None
                        )
                    )
                assert pointed.watcher.is_alive()
                check_answers(running, live, stage)
        finally:
            ending.set()
            asking.join(20)
            pointed.watcher.end()
            pointed.watcher.join(20)
    served = {
        bundle.manifest.digest
        for name, bundle in bundles.items()
        if (stage, name) != ("dot", "uneven")
    }
    assert {status for status, _ in answers} == {200}
    assert {digest for _, digest in answers} <= served


def test_a_pointer_that_moves_on_while_the_first_bundle_loads_is_seen(
    bundles: dict[str, Bundle], tmp_path: Path
) -> None:
    from torchrec_ext.retrieval.server.worker import identity

    pointer = tmp_path / "pointer"
    pointer.write_text(str(bundles["first"].folder))
    before = identity(pointer)
    pointer.write_text(str(bundles["dot"].folder))
    served: list[Bundle] = []
    watcher = Watcher(
        pointer, Bundle.load, served.append, pytest.fail, lambda: None, 0.02, before
    )
    watcher.start()
    until(lambda: served)
    watcher.end()
    watcher.join(20)
    assert served[0].manifest.digest == bundles["dot"].manifest.digest
