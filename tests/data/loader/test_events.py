"""EventLoader: batches depend on the log alone, whoever writes it and whenever a run is resumed."""

import json
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.batch import ENDLESS, TowerBatch
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.files.events_config import EventsConfig
from torchrec_ext.data.loader.events import EventLoader, EventRows
from torchrec_ext.models.tower_model import two_tower

pytestmark = pytest.mark.unit


def schema() -> Any:
    tables = [
        EmbeddingBagConfig(
            name=name, feature_names=[name], num_embeddings=9, embedding_dim=4
        )
        for name in ("user_id", "item_id")
    ]
    model = two_tower(
        tables[:1], tables[1:], shared=["user"], device=torch.device("meta")
    )
    return model.schema().with_dynamic(["user_id", "item_id"])


def loader(
    folder: Path, *, stop: Any = lambda: False, negatives: int = 2, **settings: Any
) -> EventLoader:
    config = EventsConfig(folder=str(folder), until_idle_s=0.05, **settings)
    return EventLoader(
        config, schema(), batch_size=10, negatives=negatives, seed=1, stop=stop
    )


def write(folder: Path, count: int, name: str = "a") -> None:
    lines = []
    for number in range(count):
        lines.append(json.dumps({"user_id": number, "item_id": number % 4}))
    (folder / "_hidden").write_text("\n".join(lines))
    (folder / "_hidden").rename(folder / f"{name}.jsonl")


def rows(batch: TowerBatch) -> list[Any]:
    items = batch.ids("item_id").tolist()
    return [
        batch.ids("user_id").tolist(),
        items,
        batch.labels.tolist(),
        batch.weights.tolist(),
    ]


def test_a_resumed_loader_goes_on_where_it_was_saved(tmp_path: Path) -> None:
    write(tmp_path, 34)
    first = loader(tmp_path)
    assert len(first) == ENDLESS
    batches = [rows(batch) for batch in first]
    assert len(first) == len(batches) == 4
    users = [user for batch in batches for user in batch[0]]
    assert users == list(range(34))
    again = loader(tmp_path)
    iterator = iter(again)
    next(iterator)
    next(iterator)
    state = json.loads(json.dumps(again.state_dict(step=2)))
    with pytest.raises(ValueError, match="step=1: the log is at batch 2"):
        again.state_dict(step=1)
    resumed = loader(tmp_path)
    resumed.load_state_dict(state)
    assert [rows(batch) for batch in resumed] == batches[2:]


def test_negatives_are_items_of_the_batch_and_never_the_events_own(
    tmp_path: Path,
) -> None:
    write(tmp_path, 10)
    (batch,) = loader(tmp_path)
    items = batch.ids("item_id").view(10, 3)
    weights = batch.weights.view(10, 3)
    assert batch.labels.view(10, 3).tolist() == [[1.0, 0.0, 0.0]] * 10
    assert (
        (weights == 0) == (items == items[:, :1]) & torch.tensor([False, True, True])
    ).all()
    assert items.max() < 4


def test_how_likely_a_candidate_is_drawn_is_its_share_of_the_batch() -> None:
    items = np.array([5, 5, 5, 8])
    columns = {"user": items, "item": items, "label": np.ones(4), "time": np.ones(4)}
    events = Chunk({name: Column(values) for name, values in columns.items()})
    drawn = EventRows.drawn(events, 50, (1, 2))
    share = np.where(drawn.items == 5, 0.75, 0.25)
    np.testing.assert_allclose(np.exp(drawn.log_q), share, rtol=1e-6)
    assert abs((drawn.items[:, 1:] == 5).mean() - 0.75) < 0.1


def test_a_run_ends_after_a_number_of_events_or_when_it_is_asked_to(
    tmp_path: Path,
) -> None:
    write(tmp_path, 34)
    assert [len(rows(batch)[0]) for batch in loader(tmp_path, events=25)] == [10, 10, 5]
    asked: list[int] = []
    ending = loader(tmp_path, stop=lambda: len(asked) == 2)
    for batch in ending:
        asked.append(len(batch))
    assert (len(asked), ending.events) == (2, 20)


def test_a_batch_of_two_reads_is_no_larger_than_asked_for(tmp_path: Path) -> None:
    write(tmp_path, 3)
    slow = loader(tmp_path)
    further = iter([12])

    def more_come() -> None:
        for count in further:
            write(tmp_path, count, "b")

    slow.waiting = more_come
    assert [len(rows(batch)[0]) for batch in slow] == [10, 5]


def test_a_batch_is_cut_after_some_seconds(tmp_path: Path) -> None:
    write(tmp_path, 3)
    late = threading.Timer(0.15, write, (tmp_path, 12, "b"))
    late.start()
    begin = time.monotonic()
    cut = EventLoader(
        EventsConfig(folder=str(tmp_path), batch_s=0.05, until_idle_s=0.4),
        schema(),
        batch_size=10,
    )
    sizes = [len(batch) for batch in cut]
    assert sizes[0] == 3
    assert sum(sizes) == 15
    assert time.monotonic() - begin < 5
