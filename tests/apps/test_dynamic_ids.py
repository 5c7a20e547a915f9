"""--ids.features.COLUMN.capacity: an id means itself on any day; what is served is what was trained and evaluated."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torch import Tensor

from tests.files import records, summary
from tests.settings import with_settings
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.ids.index import EMPTY
from torchrec_ext.retrieval.bundle import PREPROCESSOR, Bundle
from torchrec_ext.retrieval.scorer import (
    EmbedRequest,
    RecommendRequest,
    Scorer,
    ScoreRequest,
)
from torchrec_ext.retrieval.store import Store
from torchrec_ext.train.checkpoint.storage import CheckpointError
from torchx_apps import embed, export
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.tasks.dynamic_ids import numbered

KINDS = 4
# By number; a day has some of them, and half of the items of a day are new.
USERS = np.random.default_rng(1).integers(1, 2**62, 50)
ITEMS = np.random.default_rng(2).integers(1, 2**62, 42)
DAYS = {
    "one": (np.arange(40), np.arange(28)),
    "two": (np.arange(10, 50), np.arange(14, 42)),
}
FIRST_DAY_ALONE = USERS[:10]


def write_day(root: Path, day: str, texts: bool = False) -> None:
    """Writes pairs of users with a taste and items with a kind; a user's last two items are those held out."""
    users, items = DAYS[day]
    rng = np.random.default_rng(len(day))
    train = {(users[item % len(users)], item) for item in items}
    validation, test = set(), set()
    for user in users:
        first, second, *others = rng.permutation(items[items % KINDS == user % KINDS])
        test.add((user, first))
        validation.add((user, second))
        train |= {(user, item) for item in others}
    rows = [*sorted(train - validation - test), *sorted(validation), *sorted(test)]
    user, item = np.array(rows).T
    ids: dict[str, Any] = {"user": USERS[user], "item": ITEMS[item]}
    if texts:
        ids = {name: [f"{one:x}" for one in of] for name, of in ids.items()}
    table = pa.table({**ids, "time": np.arange(len(rows))})
    folder = root / "sets" / day
    folder.mkdir(parents=True)
    pq.write_table(table, folder / "inter.parquet")
    pq.write_table(table.slice(len(rows) - len(test)), folder / "test.parquet")


def trained(
    root: Path,
    day: str,
    name: str,
    *settings: str,
    recipe: str = "two_tower",
) -> Path:
    sets = [
        f"data.name={day}",
        f"data.folder={root / 'sets'}",
        "train.epochs=1",
        "loader.batch_size=32",
        "device=cpu",
    ]
    sets += [
        "optimizer.tables_lr=0.3",
        "train.log_every=4",
        "ids.every=2",
        "train.compile=off",
    ]
    run_training(
        with_settings(load_recipe(recipe), [*sets, *settings]),
        root / name,
    )
    return root / name


def rows_of(bundle: Path, column: str) -> dict[Any, Tensor]:
    """Returns the bundle's row of each id that it knows."""
    preprocessor = FittedPreprocessor.load(bundle / PREPROCESSOR)
    state: Any = preprocessor.state_of(column)
    files = Bundle.load(bundle).manifest.content["tables"]
    table = np.load(bundle / files[column])
    rows = torch.from_numpy(table.copy())
    assert len(rows) == len(state.values) + 1
    return dict(zip(state.values.to_pylist(), rows[1:], strict=True))


DYNAMIC = ("ids.features.item_id.capacity=36", "ids.features.user_id.capacity=64")


def hit_rate(root: Path, day: str, bundle: Bundle) -> float:
    """Returns the expected share of test items among the first ten that the service recommends, by raw ids.

    Items without a row of their own tie.
    """
    scorer = Scorer(bundle)
    folder = root / "sets" / day
    test = pq.read_table(folder / "test.parquet").to_pydict()
    log = pq.read_table(folder / "inter.parquet").to_pydict()
    pairs = set(zip(log["user"], log["item"], strict=True))
    hits = []
    for user, item in zip(test["user"], test["item"], strict=True):
        # The service knows the held-out row too, and would leave its item out.
        taken = {other for other in log["item"] if (user, other) in pairs} - {item}
        request = RecommendRequest(
            user={"user_id": user},
            k=len(ITEMS),
            candidates=[*(set(log["item"]) - taken)],
            exclude_seen=False,
        )
        answer = scorer.recommend(request)
        own = answer.scores[answer.items.index(item)]
        better = sum(score > own for score in answer.scores)
        hits.append(min(max((10 - better) / answer.scores.count(own), 0.0), 1.0))
    return float(np.mean(hits))


@pytest.mark.slow
def test_the_next_days_log_trains_new_ids_and_the_bundle_knows_the_live_ones(
    tmp_path: Path,
) -> None:
    for day in DAYS:
        write_day(tmp_path, day)
    first = trained(tmp_path, "one", "first", *DYNAMIC, "export=require")
    second = trained(
        tmp_path,
        "two",
        "second",
        *(*DYNAMIC, f"start.path={first}", "export=require"),
    )
    figures = records(second, "train")[-1]
    assert figures["ids_evicted"] > 0
    assert export.main([str(second), f"--out={tmp_path / 'exported'}"]) == 0
    assert (
        Bundle.load(tmp_path / "exported").manifest.digest
        == Bundle.load(second / "bundle").manifest.digest
    )
    assert 0 <= figures["ids_unknown"] < 0.5
    bundle = Bundle.load(second / "bundle")
    assert summary(second)["test"]["hr@10"] == pytest.approx(
        hit_rate(tmp_path, "two", bundle), abs=1e-9
    )
    # Users of both days have rows, those of the first as they were left.
    before, after = (rows_of(run / "bundle", "user_id") for run in (first, second))
    assert after.keys() == set(USERS.tolist())
    assert all(
        torch.equal(before[user], after[user]) for user in FIRST_DAY_ALONE.tolist()
    )
    items = rows_of(second / "bundle", "item_id").keys()
    assert len(items) <= 35
    assert items & set(ITEMS[28:].tolist())
    assert set(ITEMS[:14].tolist()) - items, "some are evicted"
    scorer = Scorer(bundle)
    some = [int(item) for item in bundle.items.ids.ids(range(3))]
    requests = {
        name: {"user_id": int(user)}
        for name, user in (("earlier", USERS[0]), ("new", 5), ("newer", 6))
    }
    answers = {
        name: scorer.score(ScoreRequest(user=user, items=some))
        for name, user in requests.items()
    }
    unknown = [answer.unknown_features for answer in answers.values()]
    assert unknown == [[], ["user_id"], ["user_id"]]
    assert answers["new"].scores == answers["newer"].scores != answers["earlier"].scores
    store = tmp_path / "users"
    assert embed.main([str(second), "--tower=query", f"--out={store}"]) == 0
    assert bundle.users is not None
    (user,) = bundle.users.ids.ids([0])
    (vector,) = scorer.embed(EmbedRequest(rows=[{"user_id": user}])).vectors
    np.testing.assert_allclose(Store.open(store).find(user), vector, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("texts", [False, True])
def test_a_new_run_begins_with_the_ids_of_another(tmp_path: Path, texts: bool) -> None:
    for day in DAYS:
        write_day(tmp_path, day, texts)
    first = trained(tmp_path, "one", "first", *DYNAMIC)
    larger = (
        "ids.features.item_id.capacity=50",
        "ids.features.user_id.capacity=64",
        "start.partial=true",
    )
    second = trained(
        tmp_path, "two", "second", *larger, f"start.path={first}", "export=require"
    )
    assert records(second, "train")[-1]["ids_evicted"] == 0
    users = rows_of(second / "bundle", "user_id")
    # Of texts a hash is live, so that a bundle knows those that its day has.
    assert len(users) == (40 if texts else 50)
    assert summary(second)["test"]["hr@10"] == pytest.approx(
        hit_rate(tmp_path, "two", Bundle.load(second / "bundle")), abs=1e-9
    )
    smaller = (
        "ids.features.item_id.capacity=20",
        "ids.features.user_id.capacity=64",
        "start.path=" + str(second),
    )
    with pytest.raises(CheckpointError, match=r"\(20, \d+\), saved as \(50, "):
        trained(tmp_path, "two", "refused", *smaller, "start.partial=true")


@pytest.mark.slow
def test_a_training_without_dynamic_ids_gives_none_and_takes_none(
    tmp_path: Path,
) -> None:
    write_day(tmp_path, "one")
    static = trained(tmp_path, "one", "static")
    same_rows = ("ids.features.item_id.capacity=29", "ids.features.user_id.capacity=41")
    for name, more in (
        ("static", ["train.epochs=2"]),
        ("new", [f"start.path={static}"]),
    ):
        with pytest.raises(ValueError, match="it was trained without dynamic ids"):
            trained(tmp_path, "one", name, *same_rows, *more)
    dynamic = trained(tmp_path, "one", "dynamic", *same_rows)
    with pytest.raises(ValueError, match=r"column '\w+' had dynamic ids in training"):
        trained(tmp_path, "one", dynamic.name)


@pytest.mark.unit
def test_a_text_has_one_id_in_every_vocabulary() -> None:
    first = numbered(pa.array(["a", None, "b"]))
    second = numbered(pa.array(["b", "c", "a"]).slice(0, 3))
    assert first.tolist() == [second[2], EMPTY, second[0]]
    assert numbered(pa.array(["x", "a"]).slice(1)).tolist() == first[:1].tolist()
    assert numbered(pa.array([3, None, -1])).tolist() == [3, EMPTY, -1]
