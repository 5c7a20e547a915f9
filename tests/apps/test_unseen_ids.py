"""Ids that training never saw: what is evaluated is what is served, and a catalogue holds what can be recommended."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from torchrec_ext.data.columns import Int64
from torchrec_ext.data.datasets.catalog import DataConfig, load_config
from torchrec_ext.data.datasets.labelled import LabelledConfig, load_labelled
from torchrec_ext.data.loader.loader import LoaderConfig, training_negatives
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.scorer import RecommendRequest, Scorer, ScoreRequest
from torchrec_ext.retrieval.store import Store
from torchx_apps import embed, preprocess
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe

USERS, ITEMS, KINDS = 40, 35, 4
# By item: all but the last 7 are trained; 6 of these are described, and so in the
# catalogue; the last is in test.parquet alone.
TRAINED, DESCRIBED = 28, 34
NEW_USERS = 4  # whose rows are test rows alone


def hashes(count: int, seed: int) -> Int64:
    """Ids below 2**62 in no order."""
    return np.random.default_rng(seed).integers(1, 2**62, count)


def write_set(folder: Path) -> tuple[Int64, Int64]:
    """Writes pairs with hashed ids, users with a taste and items with a kind; returns the ids of users and items.

    Of the test items some are trained, some only described, and one of some users is neither.
    """
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    users, items = hashes(USERS, 1), hashes(ITEMS, 2)
    taste, kind = np.arange(USERS) % KINDS, np.arange(ITEMS) % KINDS
    rows: dict[str, list[tuple[int, int]]] = {"train": [], "validation": [], "test": []}
    for user in range(USERS):
        user_items = rng.permutation(np.flatnonzero(kind[:TRAINED] == taste[user]))
        new = np.flatnonzero(kind[:DESCRIBED] == taste[user])[-1 - user // 2 % 2]
        rows["test"].append(
            (
                user,
                ITEMS - 1 if user % 8 == 3 else int(new if user % 2 else user_items[0]),
            )
        )
        if user < USERS - NEW_USERS:
            rows["validation"].append((user, int(user_items[1])))
            rows["train"] += [(user, int(item)) for item in user_items[2:]]
    rows["train"] += [(item % (USERS - NEW_USERS), item) for item in range(TRAINED)]
    for split, pairs in rows.items():
        earlier = {
            pair
            for before in ("train", "validation")
            if before != split != "train"
            for pair in rows[before]
        }
        user, item = np.array(sorted(set(pairs) - earlier)).T
        pq.write_table(
            pa.table({"user": users[user], "item": items[item]}),
            folder / f"{split}.parquet",
        )
    pq.write_table(
        pa.table({"user": users, "taste": [f"t{one}" for one in taste]}),
        folder / "users.parquet",
    )
    described = np.arange(3, DESCRIBED)  # three that are trained have no row there
    table = {
        "item": items[described],
        "kind": [f"k{one}" for one in kind[described]],
        "price": rng.random(len(described)),
    }
    pq.write_table(pa.table(table), folder / "items.parquet")
    return users, items


def served_ranks(
    bundle: Bundle, asked: dict[int, dict[str, Any]], wanted: dict[int, set[int]]
) -> dict[int, dict[int, int]]:
    """Returns, by user, the rank from 0 of each wanted item among all that the service recommends, where it does."""
    scorer = Scorer(bundle)
    ranks = {}
    for user, request in asked.items():
        items = scorer.recommend(RecommendRequest(user=request, k=1_000)).items
        ranks[user] = {
            item: items.index(item) for item in wanted[user] if item in items
        }
    return ranks


@pytest.mark.parametrize(
    "dropout",
    [pytest.param((), marks=pytest.mark.slow), ("id_dropout=item_id=0.3,user_id=0.2",)],
    ids=["off", "on"],
)
def test_the_evaluation_ranks_what_is_served_where_users_and_items_are_new(
    tmp_path: Path, dropout: tuple[str, ...]
) -> None:
    users, items = write_set(tmp_path / "sets" / "cold")
    sets = [
        "data.name=cold",
        f"data.folder={tmp_path / 'sets'}",
        "train.epochs=2",
        "train.eval_every=2",
        "export=require",
    ]
    job = apply_overrides(load_recipe("two_tower"), [*sets, "device=cpu", *dropout])
    run_training(job, tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    bundle = Bundle.load(tmp_path / "run" / "bundle")
    assert sorted(bundle.items.ids.arrow().to_pylist()) == sorted(
        items[:DESCRIBED].tolist()
    ), "the catalogue: trained or described"
    assert bundle.users is not None
    assert set(bundle.users.ids.arrow().to_pylist()) == set(
        users[: USERS - NEW_USERS].tolist()
    ), "known is who had a training row"
    test = pq.read_table(tmp_path / "sets" / "cold" / "test.parquet").to_pydict()
    wanted: dict[int, set[int]] = {}
    for user, item in zip(test["user"], test["item"], strict=True):
        wanted.setdefault(user, set()).add(item)
    taste = {int(user): f"t{index % KINDS}" for index, user in enumerate(users)}
    known = set(bundle.users.ids.arrow().to_pylist())
    asked = {
        user: {
            "user_id": user,
            **({} if user in known else {"taste": taste[user], "history": []}),
        }
        for user in wanted
    }
    ranks = served_ranks(bundle, asked, wanted)
    hr = np.mean([any(rank < 10 for rank in ranks[user].values()) for user in wanted])
    gains = [
        sum(1 / math.log2(2 + rank) for rank in ranks[user].values() if rank < 10)
        for user in wanted
    ]
    assert {len(items) for items in wanted.values()} == {1}
    assert summary["test"]["hr@10"] == pytest.approx(hr, abs=1e-9)
    assert summary["test"]["ndcg@10"] == pytest.approx(np.mean(gains), abs=1e-6)
    assert any(not places for places in ranks.values()), (
        "an item outside of the catalogue is missed"
    )
    new = Scorer(bundle).recommend(
        RecommendRequest(user={"user_id": int(users[-1])}, k=3)
    )
    assert new.cold.unknown_user
    score = Scorer(bundle).score(
        ScoreRequest(
            user={"user_id": int(users[0])}, items=items[[0, DESCRIBED]].tolist()
        )
    )
    assert score.unknown_items == [items[DESCRIBED]]
    assert (
        embed.main(
            [str(tmp_path / "run"), "--tower=query", f"--out={tmp_path / 'users'}"]
        )
        == 0
    )
    assert set(Store.open(tmp_path / "users").ids.arrow().to_pylist()) == known


def test_negatives_and_the_popularity_ranking_are_of_the_catalogue(
    tmp_path: Path,
) -> None:
    users, items = write_set(tmp_path / "cold")
    data = load_config(DataConfig(name="cold", folder=str(tmp_path)))
    assert (data.num_items, data.outside, data.vocab["item_id"]) == (
        DESCRIBED,
        ITEMS - DESCRIBED,
        DESCRIBED + 1,
    )
    assert set(data.items_by_row[1 : DESCRIBED + 1].tolist()) == set(
        items[:DESCRIBED].tolist()
    )
    assert set(data.users_by_row[1:].tolist()) == set(users.tolist())
    for sampling in ("uniform", "popularity"):
        sampler: Any = training_negatives(data, LoaderConfig(sampling=sampling))
        owners = data.train["user_id"].values
        drawn = sampler.draw(owners, np.arange(len(owners)), 0, 50).ids
        assert set(np.unique(drawn).tolist()) == set(range(1, DESCRIBED + 1))
    mixed: Any = training_negatives(
        data,
        LoaderConfig(
            sampling="mixed", negatives=0, shared_negatives=500, batch_size=64
        ),
    )
    assert set(np.unique(mixed.draw(0, 0)).tolist()) == set(range(1, DESCRIBED + 1))


def write_labelled(
    folder: Path, ids: dict[str, Int64], unseen: dict[str, Int64]
) -> None:
    """Rows with labels; the validation and test rows also have ids that no training row has."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for split, rows in (("train", 600), ("validation", 80), ("test", 80)):
        columns = {}
        for name, known in ids.items():
            every = (
                known
                if split == "train"
                else np.concatenate([known, unseen.get(name, known[:0])])
            )
            columns[name] = np.concatenate(
                [every, rng.choice(every, rows - len(every))]
            )
        columns["label"] = (rng.random(rows) < 0.5).astype(np.float32)
        pq.write_table(pa.table(columns), folder / f"{split}.parquet")


@pytest.mark.parametrize(
    "kind",
    [
        "from 1",
        "hashed",
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("from 0", "holes")),
    ],
)
def test_known_of_labelled_rows_is_what_had_a_training_row(
    kind: str, tmp_path: Path
) -> None:
    shapes = {
        "from 0": (np.arange(20), np.arange(30), np.array([20, 21]), np.array([30])),
        "from 1": (
            np.arange(1, 21),
            np.arange(1, 31),
            np.array([0]),
            np.array([0, 31]),
        ),
        "hashed": (hashes(20, 1), hashes(30, 2), hashes(5, 3), hashes(5, 4)),
        "holes": (
            np.delete(np.arange(22), [3, 9]),
            np.delete(np.arange(31), [0]),
            np.array([3, 9]),
            np.array([0]),
        ),
    }
    users, items, new_users, new_items = shapes[kind]
    ids = {"user": users, "item": items, "hour": np.arange(6)}
    write_labelled(
        tmp_path / "sets" / "mine",
        ids,
        {"user": new_users, "item": new_items, "hour": np.array([9])},
    )
    sets = [
        "data.name=mine",
        f"data.folder={tmp_path / 'sets'}",
        "train.epochs=1",
        "device=cpu",
        "export=require",
    ]
    run_training(
        apply_overrides(
            load_recipe("contextual_ncf"), [*sets, "id_dropout=item_id=0.2,user_id=0.2"]
        ),
        tmp_path / "run",
    )
    bundle = Bundle.load(tmp_path / "run" / "bundle")
    assert bundle.items.ids.arrow().to_pylist() == sorted(items.tolist())
    assert bundle.users is not None
    assert bundle.users.ids.arrow().to_pylist() == sorted(users.tolist())
    hours = {"hour": [1] * len(users)}
    assert not any(
        found.any()
        for found in bundle.query.columns.read(
            {"user_id": users.tolist(), **hours}
        ).unknown.values()
    )
    new = {"user_id": new_users.tolist(), "hour": [9] * len(new_users)}
    assert all(found.all() for found in bundle.query.columns.read(new).unknown.values())
    scorer = Scorer(bundle)
    nobody = scorer.score(
        ScoreRequest(
            user={"user_id": 2**62 + 1, "hour": 1}, items=[int(new_items[0]), 2**62 + 1]
        )
    )
    for user in new_users.tolist():
        answer = scorer.score(
            ScoreRequest(
                user={"user_id": user, "hour": 1}, items=[int(new_items[0]), 2**62 + 1]
            )
        )
        assert answer.cold.unknown_user
        assert answer.scores == nobody.scores, "the model's row for the unknown"
        assert len(answer.unknown_items) == 2
    data = load_labelled(LabelledConfig(name="mine", folder=str(tmp_path / "sets")))
    for name in ("user_id", "item_id", "hour"):
        assert data.oov_ids[name] not in data.train[name].values
        assert data.oov_ids[name] in data.test[name].values


@pytest.mark.parametrize("min_count", [pytest.param(1, marks=pytest.mark.slow), 12])
def test_what_the_preprocessing_writes_is_trained_and_served_without_its_placeholder(
    min_count: int, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("ibis", reason="needs the extra `data`")
    from tests.small_sets import write_ml_100k

    write_ml_100k(tmp_path / "raw")
    ready = tmp_path / "sets" / "ready"
    flags = [
        f"--set=config.folder={tmp_path / 'raw' / 'ml-100k'}",
        "--set=pictures=false",
        f"--set=config.min_count={min_count}",
    ]
    assert preprocess.main(["--recipe=ml_100k", *flags, f"--out={ready}"]) == 0
    wanted = ("label", "user_id", "item_id", "gender", "age")
    for split, source in (("train", "train"), ("validation", "test"), ("test", "test")):
        table = pa.concat_tables(
            [pq.read_table(file) for file in sorted((ready / source).glob("*.parquet"))]
        )
        pq.write_table(table.select(wanted), ready / f"{split}.parquet")
    rows = pq.read_table(ready / "train.parquet").to_pydict()
    real = {
        name: sorted({one for one in rows[name] if one})
        for name in ("user_id", "item_id")
    }
    assert (0 in rows["item_id"]) == (min_count > 1), "rare ones are unknown"
    sets = [
        "data.name=ready",
        f"data.folder={tmp_path / 'sets'}",
        "train.epochs=1",
        "device=cpu",
        "export=require",
    ]
    run_training(apply_overrides(load_recipe("contextual_ncf"), sets), tmp_path / "run")
    output = capfd.readouterr().out
    assert f"{len(real['user_id']):,} users, {len(real['item_id']):,} items" in output
    assert (
        f"{len(real['item_id']):,} items and {len(real['user_id']):,} users" in output
    )
    bundle = Bundle.load(tmp_path / "run" / "bundle")
    assert bundle.items.ids.arrow().to_pylist() == real["item_id"]
    assert bundle.users is not None
    assert bundle.users.ids.arrow().to_pylist() == real["user_id"]
