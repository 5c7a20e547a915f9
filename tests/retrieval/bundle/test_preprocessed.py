"""A request's raw rows become what the rows of the training files became, by the preprocessor in the bundle alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.data.preprocess import (
    Categorify,
    FittedPreprocessor,
    History,
    Normalize,
    Preprocessor,
    TimeFeatures,
)
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.exporting.content import Catalogue, NamedUsers
from torchrec_ext.retrieval.exporting.export import export
from torchrec_ext.schema import DataError, Jagged

pytest.importorskip("ibis", reason="needs the extra `data`")

ROWS, ITEMS = 60, 12


@pytest.fixture(scope="module")
def log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rng = np.random.default_rng(0)
    file = tmp_path_factory.mktemp("log") / "log.parquet"
    columns = {
        "user": [f"u{number}" for number in rng.integers(0, 8, ROWS)],
        "item": rng.integers(100, 100 + ITEMS, ROWS),
        "time": 880_000_000 + 3600 * np.arange(ROWS),
        "age": rng.integers(20, 60, ROWS).astype(np.float32),
        "label": np.ones(ROWS, np.float32),
    }
    pq.write_table(pa.table(columns), file)
    return file


@pytest.fixture(scope="module")
def fitted(log: Path) -> FittedPreprocessor:
    steps = [
        History(user="user", item="item", time="time", length=3),
        Categorify(column="item", also=("history",)),
        TimeFeatures(column="time", zone="Europe/Berlin", features=("weekday",)),
        Normalize(column="age"),
        Categorify(column="user"),
    ]
    return Preprocessor(steps, keep=["label"]).fit(str(log))


def model_of(fitted: FittedPreprocessor) -> TowerModel:
    def table(name: str) -> EmbeddingBagConfig:
        rows = fitted.vocab[name]
        return EmbeddingBagConfig(
            name=name,
            feature_names=[name],
            num_embeddings=rows,
            embedding_dim=4,
            pooling=PoolingType.MEAN,
        )

    torch.manual_seed(0)
    users = [table("user"), table("history"), table("time_weekday")]
    return two_tower(users, [table("item")], user_dense=["age"], tower_widths=(6,))


def requests(log: Path) -> dict[str, list[Any]]:
    """What is known when each row of the log comes in."""
    rows = pq.read_table(log).to_pydict()
    before = [
        [at for at in range(row) if rows["user"][at] == rows["user"][row]]
        for row in range(ROWS)
    ]
    return {
        "user": rows["user"],
        "time": rows["time"],
        "age": rows["age"],
        "history_items": [[rows["item"][at] for at in places] for places in before],
        "history_times": [[rows["time"][at] for at in places] for places in before],
    }


@pytest.fixture(scope="module")
def bundle(
    fitted: FittedPreprocessor, log: Path, tmp_path_factory: pytest.TempPathFactory
) -> Bundle:
    folder = tmp_path_factory.mktemp("bundle") / "bundle"
    asked = pa.table(requests(log))
    ids = np.unique(pq.read_table(log)["item"].to_numpy())
    export(
        model_of(fitted),
        folder,
        catalogue=Catalogue(ids=ids, features=pa.table({"item": ids})),
        queries=asked,
        preprocessor=fitted,
    )
    return Bundle.load(folder)


def test_a_request_is_embedded_as_the_row_of_the_file(
    bundle: Bundle, fitted: FittedPreprocessor, log: Path, tmp_path: Path
) -> None:
    fitted.transform(str(log), tmp_path / "ready", order_by=["time"])
    made = pq.read_table(tmp_path / "ready").to_pydict()
    model = model_of(fitted).eval()
    lengths = torch.tensor([len(history) for history in made["history"]])
    history = torch.tensor(
        [item for items in made["history"] for item in items], dtype=torch.int64
    )
    ids = {
        name: Jagged(torch.tensor(made[name]))
        for name in ("user", "time_weekday", "item")
    } | {"history": Jagged(history, lengths)}
    batch = model.schema().assemble(
        ids, {"age": torch.tensor(made["age"])}, labels=torch.ones(ROWS)
    )
    with torch.no_grad():
        user, item = model.outputs(batch)
    torch.testing.assert_close(
        bundle.embed_query(requests(log)), user, rtol=0, atol=1e-6
    )
    items = pq.read_table(log)["item"].to_numpy()
    torch.testing.assert_close(
        bundle.embed_candidates({"item": items}), item, rtol=0, atol=1e-6
    )
    torch.testing.assert_close(
        bundle.store.rows(torch.from_numpy(bundle.store.ids.positions(items))),
        item,
        rtol=0,
        atol=1e-6,
    )


def test_neither_side_asks_for_the_columns_of_the_other(bundle: Bundle) -> None:
    assert set(bundle.request_columns) == {
        "user",
        "time",
        "age",
        "history_items",
        "history_times",
    }
    assert set(bundle.candidate_columns) == {"item"}


def test_names_that_were_never_seen_are_said(bundle: Bundle) -> None:
    row = {
        "user": ["stranger"],
        "time": [880_000_000],
        "age": [30.0],
        "history_items": [[100, 999]],
        "history_times": [[1, 2]],
    }
    assert {name: bool(found[0]) for name, found in bundle.unknown(row).items()} == {
        "user": True,
        "history": True,
        "time_weekday": False,
    }
    with pytest.raises(DataError, match=r"column 'user' is missing.*did you mean"):
        bundle.embed_query(
            {
                **{name: value for name, value in row.items() if name != "user"},
                "usr": ["x"],
            }
        )


def test_another_preprocessing_is_refused(
    fitted: FittedPreprocessor, log: Path, tmp_path: Path
) -> None:
    """Fitted on half of the rows: the same columns and sizes, other ids for the same names."""
    import shutil

    from tests.retrieval.bundle.test_bundle import sealed

    ids = np.unique(pq.read_table(log)["item"].to_numpy())
    catalogue = Catalogue(ids=ids, features=pa.table({"item": ids}))
    export(
        model_of(fitted),
        tmp_path / "bundle",
        catalogue=catalogue,
        queries=pa.table(requests(log)),
        preprocessor=fitted,
    )
    pq.write_table(pq.read_table(log).slice(ROWS // 2), tmp_path / "half.parquet")
    other = Preprocessor(fitted.steps, keep=["label"]).fit(
        str(tmp_path / "half.parquet")
    )
    shutil.rmtree(tmp_path / "bundle/preprocessor")
    other.save(tmp_path / "bundle/preprocessor")
    sealed(tmp_path / "bundle")
    with pytest.raises(BundleError, match="is not that of the manifest"):
        Bundle.load(tmp_path / "bundle")


def test_an_export_without_its_preprocessor_is_told(
    fitted: FittedPreprocessor, log: Path, tmp_path: Path
) -> None:
    ids = np.unique(pq.read_table(log)["item"].to_numpy())
    catalogue = Catalogue(ids=ids, features=pa.table({"item": ids}))
    with pytest.raises(
        DataError, match="the rows of the export: column 'history' is missing"
    ):
        export(
            model_of(fitted),
            tmp_path / "bundle",
            catalogue=catalogue,
            queries=pa.table(requests(log)),
        )


def test_users_of_a_preprocessed_bundle_are_raw_rows(
    fitted: FittedPreprocessor, log: Path, tmp_path: Path
) -> None:
    asked = pa.table(requests(log)).take(pa.array(range(ROWS - 8, ROWS)))
    ids = np.unique(pq.read_table(log)["item"].to_numpy())
    none = pa.array([[]] * 8, type=pa.list_(pa.int64()))
    nobody = {
        "user": "",
        "time": 880_000_000,
        "age": 30.0,
        "history_items": [],
        "history_times": [],
    }
    users = NamedUsers(
        key="user",
        ids=np.array([f"p{at}" for at in range(8)]),
        features=asked,
        unknown=nobody,
        seen=none,
        liked=none,
    )
    catalogue = Catalogue(ids=ids, features=pa.table({"item": ids}))
    export(
        model_of(fitted),
        tmp_path / "bundle",
        catalogue=catalogue,
        users=users,
        preprocessor=fitted,
    )
    bundle = Bundle.load(tmp_path / "bundle")
    assert bundle.users is not None
    known = bundle.users.rows(bundle.users.ids.positions(["p3"]))
    expected = bundle.embed_query(
        {
            name: [column[3].as_py()]
            for name, column in zip(asked.column_names, asked.columns, strict=True)
        }
    )
    assert torch.equal(bundle.embed_query(known), expected)
