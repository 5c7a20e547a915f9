"""Laws of every loader: a resumed stream is the uninterrupted one, and seed and epoch alone decide the order."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.data import stream_sets
from tests.data.loader import test_places
from tests.data.loader import test_session_loader as sessions
from tests.data.loader.test_loader import rows_of
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.negatives.samplers import PopularityNegatives

pytestmark = pytest.mark.unit
Make = Callable[..., Any]


CASES: dict[str, dict[str, Any]] = {
    "uniform": {},
    "popularity": {"kind": PopularityNegatives},
    "catalogue": test_places.CASES["catalogue"],
    "dropout": test_places.CASES["dropout"],
    "files": {"buffer_rows": 40},
    "device": {},
    "popularity on a device": test_places.CASES["popularity"],
    "sessions": {},
}


@pytest.fixture(params=CASES)
def make(request: pytest.FixtureRequest, tmp_path: Path, device: torch.device) -> Make:
    """A loader of about 40 rows by rank, world size and settings."""
    name = request.param
    rows = rows_of(test_places.SIZE)
    source: Any = test_places.written(rows, tmp_path) if name == "files" else rows

    def made(rank: int = 0, world_size: int = 1, **options: Any) -> Any:
        place: dict[str, Any] = {"rank": rank, "world_size": world_size}
        if name == "sessions":
            return sessions.loader_of(40, **place, **options)
        if "device" in name:
            place["device"] = device.type
        options = {**CASES[name], **options}
        return test_places.loader_of(source, rows, **place, **options)

    return made


def equal(left: list[TowerBatch], right: list[TowerBatch]) -> bool:
    return len(left) == len(right) and all(map(stream_sets.equal, left, right))


@pytest.mark.parametrize("ahead", [0, 2])
@pytest.mark.parametrize("stop", [0, 3, 5])
@pytest.mark.parametrize(("before", "after"), [(1, 2), (3, 2), (2, 1)])
def test_a_resumed_stream_equals_the_uninterrupted_one_on_any_number_of_ranks(
    make: Make, before: int, after: int, stop: int, ahead: int
) -> None:
    whole = make(after - 1, after)
    whole.set_epoch(2)
    expected = list(whole)
    whole.set_epoch(3)
    following = list(whole)
    first = make(before - 1, before, read_ahead=ahead)
    first.depth = ahead
    first.set_epoch(2)
    batches = iter(first)
    for _ in zip(range(stop), batches, strict=False):
        pass
    file = io.BytesIO()
    torch.save(first.state_dict(), file)
    second = make(after - 1, after, read_ahead=ahead)
    second.depth = ahead
    second.load_state_dict(torch.load(io.BytesIO(file.getvalue()), weights_only=True))
    assert equal(list(second), expected[stop:])
    second.set_epoch(3)
    assert equal(list(second), following), "the next pass is a whole epoch again"


def test_the_order_depends_on_seed_and_epoch_only(make: Make) -> None:
    def epoch(number: int = 0, **options: Any) -> list[TowerBatch]:
        loader = make(**options)
        loader.set_epoch(number)
        return list(loader)

    assert equal(epoch(), epoch())
    assert not equal(epoch(), epoch(1))
    assert not equal(epoch(), epoch(seed=1))


def test_a_batch_is_no_larger_than_the_epoch(make: Make) -> None:
    few, many = (list(make(1, 2, batch_size=rows)) for rows in (60, 1_000_000))
    assert len(few) == len(many) == 1
    assert equal(few, many)


def test_a_state_of_another_stream_is_refused(make: Make) -> None:
    state = make().state_dict()
    with pytest.raises(
        ValueError, match=r"cannot resume .*batch_size was 8 and is 4.*; put"
    ):
        make(batch_size=4).load_state_dict(state)
