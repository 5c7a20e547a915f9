"""From a log in Taobao's form to a served model: taobao -> bst or multi_task -> bundle, whose requests are raw rows."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest

from tests.apps.test_stream import rows_of
from tests.files import summary
from tests.settings import with_settings
from torchrec_ext.data.config import DataConfig
from torchrec_ext.data.planted import planted_log, planted_log_set
from torchrec_ext.data.prepare import write_set
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.data.preprocess.history import GAPS
from torchrec_ext.data.preprocess.rows import connected
from torchrec_ext.data.sets import load_set
from torchrec_ext.schema import DataError
from torchx_apps.jobs.preprocessing import run_preprocess
from torchx_apps.jobs.setup import build_model
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.recipes.preprocess import PreprocessJob, build_taobao, taobao
from torchx_apps.tasks.job import Job
from torchx_apps.tasks.task import Task

pytest.importorskip("duckdb", reason="needs the extra `data`")

S = 6
SMALL = {
    "bst": (
        *(
            "train.epochs=1",
            "loader.batch_size=128",
            "model.top_widths=64",
            "model.embedding_dim=16",
        ),
        *("model.heads=2", "model.dropout=0", "optimizer.dense_lr=0.003"),
        "train.compile=off",
    ),
    "multi_task": (
        *(
            "train.epochs=1",
            "loader.batch_size=128",
            "model.embedding_std=0.1",
            "optimizer.tables=adam",
        ),
        *("optimizer.tables_lr=0.01", "optimizer.dense_lr=0.003"),
        "train.compile=off",
    ),
}


def write_log(path: Path) -> pa.Table:
    """A csv file without a header, as the publisher's is; returns its rows."""
    log = planted_log(users=160, items=60, clicks=40)
    clicks = pa.table(log.columns).append_column(
        "behavior_type", pa.array(["pv"] * len(log.bought))
    )
    bought = clicks.filter(pa.array(log.bought)).drop(["behavior_type", "timestamp"])
    later = log.columns["timestamp"][log.bought] + 5
    buys = bought.append_column("timestamp", pa.array(later)).append_column(
        "behavior_type", pa.array(["buy"] * len(later))
    )
    names = ["user_id", "item_id", "category_id", "behavior_type", "timestamp"]
    table = pa.concat_tables([clicks.select(names), buys.select(names)])
    table = table.take(pa.array(np.random.default_rng(0).permutation(len(table))))
    path.write_text(
        "".join(",".join(map(str, row.values())) + "\n" for row in table.to_pylist())
    )
    return table


def prepared(path: Path, out: Path, *overrides: str) -> Path:
    job: PreprocessJob = with_settings(
        taobao(),
        [
            f"config.path={path}",
            f"config.history_length={S}",
            *overrides,
        ],
    )
    return run_preprocess(dataclasses.replace(job, out=str(out)))


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("taobao") / "UserBehavior.csv"


@pytest.fixture(scope="module")
def log(file: Path) -> pa.Table:
    return write_log(file)


@pytest.fixture(scope="module")
def folder(file: Path, log: pa.Table) -> Path:
    del log
    return prepared(file, file.with_name("ready"))


def test_rows_without_a_user_or_a_time_are_counted(
    file: Path, log: pa.Table, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lines = file.read_text().splitlines()
    for number in (3, 5, 8):
        values = lines[number].split(",")
        values[-1 if number == 8 else 0] = ""
        lines[number] = ",".join(values)
    path = tmp_path / "log.csv"
    path.write_text("\n".join(lines))
    config = dataclasses.replace(taobao().config, path=str(path))
    with connected() as con:
        build_taobao(config, con)
    assert (
        f"note: {path}: rows without user_id or timestamp are left out: 3 of {len(log):,}\n"
        in capsys.readouterr().out
    )


def job_of(recipe: str, folder: Path | str, *overrides: str) -> Job:
    job: Job = with_settings(
        load_recipe(recipe), [*SMALL[recipe], f"data.name={folder}", *overrides]
    )
    return job


def clicks_of(log: pa.Table) -> dict[int, list[tuple[int, int, int]]]:
    """Every user's clicks as (time, item, category), in order."""
    past: dict[int, list[tuple[int, int, int]]] = {}
    for row in log.to_pylist():
        if row["behavior_type"] == "pv":
            past.setdefault(row["user_id"], []).append(
                (row["timestamp"], row["item_id"], row["category_id"])
            )
    return {user: sorted(clicks) for user, clicks in past.items()}


def raw_rows(log: pa.Table, folder: Path, split: str) -> list[dict[str, Any]]:
    """The clicks of a split in the order in which their rows are written, one for each row with label 1."""
    assert summary(folder)["roles"]["tasks"] == ["conversion"]
    clicks = log.filter(pc.equal(log["behavior_type"], "pv"))
    order = [
        (name, "ascending")
        for name in ("timestamp", "user_id", "item_id", "category_id")
    ]
    clicks = clicks.sort_by(order)
    sizes = {
        name: int((rows_of(folder, name)["click"].values > 0).sum())
        for name in ("train", "validation", "test")
    }
    start = {
        "train": 0,
        "validation": sizes["train"],
        "test": sizes["train"] + sizes["validation"],
    }[split]
    assert sum(sizes.values()) == len(clicks), "every click is the row of one split"
    return clicks.slice(start, sizes[split]).to_pylist()  # type: ignore[no-any-return]


@pytest.mark.parametrize("split", ["train", "test"])
def test_the_rows_are_those_that_a_count_by_hand_gives(
    log: pa.Table, folder: Path, split: str
) -> None:
    made = rows_of(folder, split)
    raw = raw_rows(log, folder, split)
    past = clicks_of(log)
    data = load_set(DataConfig(name=str(folder)), "labels")
    items, categories = (
        {v: i + 1 for i, v in enumerate(s.values.to_pylist())}
        for _, s in data.preprocessor.pairs[1:3]
    )
    ends = {"train": raw_rows(log, folder, "train")[-1]["timestamp"], "test": np.inf}
    buys = [
        row
        for row in log.to_pylist()
        if row["behavior_type"] == "buy" and row["timestamp"] <= ends[split]
    ]
    begin = raw[0]["timestamp"] if split == "test" else 0
    bought = {(row["user_id"], row["item_id"]): 0 for row in buys}
    for row in buys:
        if row["timestamp"] >= begin:
            bought[row["user_id"], row["item_id"]] = max(
                bought[row["user_id"], row["item_id"]], row["timestamp"]
            )
    clicked = np.flatnonzero(made["click"].values > 0)
    assert len(clicked) == len(raw)
    for number, row in zip(clicked.tolist(), raw, strict=True):
        before = [
            click for click in past[row["user_id"]] if click[0] < row["timestamp"]
        ][-S:]
        assert made["history"].row(number).tolist() == [
            items.get(item, 0) for _, item, _ in before
        ]
        assert made["history_category_id"].row(number).tolist() == [
            categories[kind] for _, _, kind in before
        ]
        gaps = [
            1 + sum(start <= row["timestamp"] - moment for start in GAPS)
            for moment, _, _ in before
        ]
        assert made["history_gap"].row(number).tolist() == gaps
        assert made["item_id"].values[number] == items.get(row["item_id"], 0)
        assert made["conversion"].values[number] == (
            bought.get((row["user_id"], row["item_id"]), -1) >= row["timestamp"]
        )


def test_a_drawn_row_is_its_click_with_another_item(folder: Path) -> None:
    made = rows_of(folder, "train")
    drawn = np.flatnonzero(made["click"].values == 0)
    assert 0.9 < len(drawn) / (made.num_rows - len(drawn)) <= 1
    assert made["click"].values[drawn - 1].all(), "each after its click"
    assert (made["item_id"].values[drawn] != made["item_id"].values[drawn - 1]).all()
    assert not made["conversion"].values[drawn].any()
    for name in ("history", "history_gap"):
        for row in drawn[:200].tolist():
            assert made[name].row(row).tolist() == made[name].row(row - 1).tolist()
    share = np.bincount(made["item_id"].values[drawn], minlength=61) / len(drawn)
    clicked = np.bincount(
        made["item_id"].values[made["click"].values > 0], minlength=61
    ) / (made.num_rows - len(drawn))
    assert np.abs(share - clicked).max() < 0.02, "as often as items are clicked"


def test_the_requests_for_an_audit_are_spread_over_the_training_rows(
    log: pa.Table, folder: Path
) -> None:
    """The first rows of a log have no clicks before them, and would say nothing of sessions."""
    requests = pq.read_table(folder / "raw/requests.parquet")
    rows = raw_rows(log, folder, "train")
    past = clicks_of(log)
    moments = requests["timestamp"].to_pylist()
    assert moments == sorted(moments)
    assert 500 < len(moments) <= 1000
    middle = rows[len(rows) // 2]["timestamp"]
    assert 0.45 < np.mean(np.array(moments) <= middle) < 0.55
    for request in requests.slice(len(moments) - 20).to_pylist():
        before = [
            click
            for click in past[request["user_id"]]
            if click[0] < request["timestamp"]
        ][-S:]
        assert request["history_items"] == [item for _, item, _ in before]
        assert before


def test_without_drawn_rows_conversions_are_learned(
    log: pa.Table, tmp_path: Path
) -> None:
    pq.write_table(log, tmp_path / "log.parquet")
    made = prepared(tmp_path / "log.parquet", tmp_path / "ready", "config.negatives=0")
    data = load_set(DataConfig(name=str(made)), "labels")
    assert (data.roles.label, list(data.roles.tasks)) == ("conversion", [])
    assert sum(source.num_rows for source in data.splits.values()) == sum(
        map(len, clicks_of(log).values())
    )
    with pytest.raises(
        ValueError,
        match=r"its preprocessing names one label, 'conversion'; name more, as Prepare\(",
    ):
        build_model(job_of("multi_task", made), Task(data))


def test_times_and_ids_of_text_are_read_from_parquet(
    log: pa.Table, tmp_path: Path
) -> None:
    """Of files with timestamps, and of files whose ids are text."""
    times = log["timestamp"].cast(pa.timestamp("s"))
    place = log.column_names.index("timestamp")
    pq.write_table(log.set_column(place, "timestamp", times), tmp_path / "a.parquet")
    users = [f"u{user}" for user in log["user_id"].to_pylist()]
    texts = log.set_column(0, "user_id", pa.array(users))
    pq.write_table(texts, tmp_path / "b.parquet")
    made = []
    for name in ("a.parquet", "b.parquet"):
        rows = rows_of(prepared(tmp_path / name, tmp_path / f"ready-{name}"), "train")
        # Drawn items, and so the counts of all, depend on the order of the users.
        clicks = np.flatnonzero(rows["click"].values > 0)
        columns = [rows[column].values[clicks] for column in CLICKED]
        lengths = rows["history"].lengths[clicks]
        made.append(sorted(zip(*columns, lengths, strict=True)))
    assert made[0] == made[1]


CLICKED = ("timestamp_hour", "timestamp_weekday", "conversion")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1,2,3,pv,1709942400000\n", "1709942400000; must be seconds since 1970"),
        (
            "1,2,3,pv\n",
            r"log\.csv: line 1: 4 values, must be 5",
        ),
        ("user_id,item_id,category_id,behavior_type,timestamp\n", r"log\.csv: line 1"),
        (
            "1,2,3,pv,4\n1,2,3,view,5\n",
            r"column 'behavior_type' has the value 'view'; must be one of pv, buy, cart",
        ),
        (
            "1,2,3,buy,4\n",
            r"column 'behavior_type' has no 'pv', of which the rows are made",
        ),
        ("1,2,3,pv,4\n1,2,3,pv,yesterday\n", r"log\.csv: .*"),
    ],
)
def test_another_log_is_refused_by_name(text: str, words: str, tmp_path: Path) -> None:
    (tmp_path / "log.csv").write_text(text)
    with pytest.raises(DataError, match=words):
        prepared(tmp_path / "log.csv", tmp_path / "ready")
    assert not (tmp_path / "ready").exists()


@pytest.fixture(scope="module")
def planted(tmp_path_factory: pytest.TempPathFactory) -> Prepared:
    out = tmp_path_factory.mktemp("planted")
    write_set(out, planted_log_set())
    return load_set(DataConfig(name=str(out)), "labels")


def test_a_shorter_window_is_the_latest_steps_and_the_catalogue_is_ranked_where_asked(
    planted: Prepared,
) -> None:
    model: Any = build_model(job_of("bst", "planted", "model.window=4"), Task(planted))
    assert model.towers["session"].max_length == 4
    towers = ["session", "user", "context", "target"]
    assert list(model.towers) == towers
    from torchx_apps.tasks.evaluator import ranking_towers

    ranked = dataclasses.replace(planted, ranked=10)
    assert ranking_towers(model, ranked) == towers
    assert ranking_towers(model, dataclasses.replace(planted, ranked=0)) is None


def without(data: Prepared, **changed: Any) -> Task:
    return Task(dataclasses.replace(data, **changed))


def test_a_folder_without_what_a_recipe_reads_is_refused_with_the_remedy(
    planted: Prepared,
) -> None:
    fitted = planted.preprocessor

    (history, none), *rest = fitted.pairs
    alone = Task.__new__(Task)
    object.__setattr__(
        alone,
        "data",
        dataclasses.replace(
            planted,
            splits={},
            preprocessor=dataclasses.replace(fitted, pairs=rest[2:]),
        ),
    )
    job = job_of("bst", "planted")
    with pytest.raises(
        DataError,
        match=r"its preprocessing has no History, so its rows have no session; .* taobao",
    ):
        build_model(job, alone)
    other = dataclasses.replace(planted.roles, item=None)
    with pytest.raises(
        DataError, match=r"'history' has not the vocabulary of the shown item \(None\)"
    ):
        build_model(job, without(planted, roles=other))
    bare = dataclasses.replace(
        fitted, pairs=[(dataclasses.replace(history, gaps=()), none), *rest]
    )
    with pytest.raises(
        DataError,
        match=r"model\.position=none: the sessions have no time gaps, .* model\.position=end",
    ):
        build_model(job, without(planted, preprocessor=bare))
    assert build_model(
        job_of("bst", "planted", "model.position=end"),
        without(planted, preprocessor=bare),
    )


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (
            ("model.weights.buy=2",),
            r"model\.weights=buy: the rows of '.*' have no such label; .* click, conversion",
        ),
        (
            ("model.interaction=dot",),
            r"model\.interaction=dot: several tasks share the hidden layers of top_nn",
        ),
    ],
)
def test_a_task_without_column_is_refused(
    overrides: Sequence[str], words: str, planted: Prepared
) -> None:
    with pytest.raises(ValueError, match=words):
        build_model(job_of("multi_task", "planted", *overrides), Task(planted))
