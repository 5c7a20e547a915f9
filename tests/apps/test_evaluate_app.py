"""`rec.evaluate`: exact figures of anybody's vectors, equal to a count by hand and to those of other libraries."""

from __future__ import annotations

import json
import math
import tracemalloc
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torchrec_ext.components  # type: ignore[import-not-found]
from safetensors.numpy import save_file
from torchx.components.component_test_base import ComponentTestCase
from torchx.specs.builders import materialize_appdef

from torchx_apps.evaluate import main

pytestmark = pytest.mark.unit

USERS, ITEMS, DIM = 40, 200, 8


class TestValid(ComponentTestCase):
    def test_evaluate(self) -> None:
        self.validate(torchrec_ext.components, "evaluate")


class Files(NamedTuple):
    """Vectors and pairs, on disk and in memory; ids are texts where ``names`` are."""

    folder: Path
    users: np.ndarray[Any, Any]
    items: np.ndarray[Any, Any]
    truth: list[tuple[int, int]]
    seen: list[tuple[int, int]]

    def flags(self, *more: str) -> list[str]:
        given = {"users": "users", "items": "items", "truth": "truth", "seen": "seen"}
        return [
            *(f"--{flag}={self.folder / name}.parquet" for flag, name in given.items()),
            *more,
        ]


def write_pairs(
    path: Path, pairs: list[tuple[int, int]], *, text: bool = False
) -> None:
    users, items = (
        [f"{kind}{pair[side]}" if text else pair[side] for pair in pairs]
        for side, kind in enumerate("ui")
    )
    pq.write_table(pa.table({"user_id": users, "item_id": items}), path)


def write_vectors(path: Path, vectors: np.ndarray[Any, Any], *, kind: str = "") -> None:
    order = np.random.default_rng(1).permutation(len(vectors))  # ids need not ascend
    ids = [f"{kind}{row}" if kind else int(row) for row in order]
    pq.write_table(pa.table({"id": ids, "vector": list(vectors[order])}), path)


@pytest.fixture
def files(tmp_path: Path) -> Files:
    draw = np.random.default_rng(0)
    users, items = (
        draw.normal(size=(size, DIM)).astype(np.float32) for size in (USERS, ITEMS)
    )
    pairs = sorted(
        {
            (int(user), int(item))
            for user, item in draw.integers(0, (USERS, ITEMS), (600, 2))
        }
    )
    truth, seen = pairs[::3], [pair for index, pair in enumerate(pairs) if index % 3]
    write_vectors(tmp_path / "users.parquet", users)
    write_vectors(tmp_path / "items.parquet", items)
    write_pairs(tmp_path / "truth.parquet", truth)
    write_pairs(tmp_path / "seen.parquet", seen)
    return Files(tmp_path, users, items, truth, seen)


def report_of(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*flags, "--json"]) == 0, capsys.readouterr().err
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def by_hand(files: Files, k: int, scores: np.ndarray[Any, Any]) -> dict[str, float]:
    """The figures by sorting each user's scores, as RecBole 1.2.1 defines them."""
    sums = dict.fromkeys(("hr", "recall", "precision", "ndcg", "mrr", "map"), 0.0)
    asked = sorted({user for user, _ in files.truth})
    for user in asked:
        wanted = {item for owner, item in files.truth if owner == user}
        row = scores[user].copy()
        row[[item for owner, item in files.seen if owner == user]] = -np.inf
        hits = [item in wanted for item in np.argsort(-row)[:k].tolist()]
        gain = sum(hit / math.log2(place + 2) for place, hit in enumerate(hits))
        best = sum(1 / math.log2(place + 2) for place in range(min(k, len(wanted))))
        precisions = [
            sum(hits[: place + 1]) / (place + 1)
            for place, hit in enumerate(hits)
            if hit
        ]
        sums["hr"] += any(hits)
        sums["recall"] += sum(hits) / len(wanted)
        sums["precision"] += sum(hits) / k
        sums["ndcg"] += gain / best
        sums["mrr"] += 1 / (1 + hits.index(True)) if any(hits) else 0
        sums["map"] += sum(precisions) / min(k, len(wanted))
    return {f"{name}@{k}": value / len(asked) for name, value in sums.items()}


@pytest.mark.parametrize("similarity", ["dot", "cosine"])
def test_figures_are_those_of_a_count_by_hand(
    files: Files, similarity: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted = ",".join(
        f"{name}@{k}"
        for k in (5, 20)
        for name in ("hr", "recall", "precision", "ndcg", "mrr", "map")
    )
    report = report_of(
        capsys, *files.flags(f"--metrics={wanted}", f"--similarity={similarity}")
    )
    users, items = (
        vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        if similarity == "cosine"
        else vectors
        for vectors in (files.users, files.items)
    )
    expected = by_hand(files, 5, users @ items.T) | by_hand(files, 20, users @ items.T)
    assert report["figures"] == pytest.approx(expected, abs=1e-6)
    assert report["users"] == len({user for user, _ in files.truth})
    assert report["pairs"] == len(files.truth)


def test_blocks_change_nothing(
    files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = report_of(capsys, *files.flags())
    monkeypatch.setattr("torchrec_ext.train.metrics.vectors.SCORES", 3 * ITEMS)
    assert report_of(capsys, *files.flags())["figures"] == pytest.approx(
        whole["figures"], abs=1e-12
    )


def test_figures_are_torchmetrics(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    retrieval = pytest.importorskip("torchmetrics.retrieval")
    import torch

    scores = torch.from_numpy(files.users @ files.items.T)
    wanted = torch.zeros(USERS, ITEMS, dtype=torch.bool)
    wanted[tuple(torch.tensor(files.truth).T)] = True
    counted = torch.ones(USERS, ITEMS, dtype=torch.bool)
    counted[tuple(torch.tensor(files.seen).T)] = False
    asked = wanted.any(1, keepdim=True).expand(-1, ITEMS) & counted
    queries = torch.arange(USERS)[:, None].expand(-1, ITEMS)
    figures = report_of(
        capsys, *files.flags("--metrics=recall@10,ndcg@10,precision@10,hr@10")
    )["figures"]
    theirs = {
        "recall@10": retrieval.RetrievalRecall(top_k=10),
        "ndcg@10": retrieval.RetrievalNormalizedDCG(top_k=10),
        "precision@10": retrieval.RetrievalPrecision(top_k=10),
        "hr@10": retrieval.RetrievalHitRate(top_k=10),
    }
    for name, metric in theirs.items():
        value = metric(scores[asked], wanted[asked], indexes=queries[asked])
        assert figures[name] == pytest.approx(float(value), abs=1e-6), name


def test_ids_may_be_texts_and_vectors_stand_in_other_forms(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = report_of(capsys, *files.flags())["figures"]
    folder = files.folder
    write_vectors(folder / "u.parquet", files.users, kind="u")
    write_vectors(folder / "i.parquet", files.items, kind="i")
    write_pairs(folder / "t.parquet", files.truth, text=True)
    write_pairs(folder / "s.parquet", files.seen, text=True)
    named = {"users": "u", "items": "i", "truth": "t", "seen": "s"}
    texts = report_of(
        capsys, *(f"--{flag}={folder / name}.parquet" for flag, name in named.items())
    )
    assert texts["figures"] == pytest.approx(expected, abs=1e-9)
    np.save(folder / "users.npy", files.users)
    save_file(
        {"vectors": files.items, "ids": np.arange(ITEMS)}, folder / "items.safetensors"
    )
    pairs = files.flags()[2:]
    others = report_of(
        capsys,
        f"--users={folder}/users.npy",
        f"--items={folder}/items.safetensors",
        *pairs,
    )
    assert others["figures"] == pytest.approx(expected, abs=1e-9)


def test_a_long_id_takes_no_more_than_its_own_length(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, kind in (("users", "u"), ("items", "i")):
        write_vectors(files.folder / f"{name}.parquet", getattr(files, name), kind=kind)
    for name in ("truth", "seen"):
        write_pairs(files.folder / f"{name}.parquet", getattr(files, name), text=True)
    expected = report_of(capsys, *files.flags())
    table = pq.read_table(files.folder / "items.parquet")
    huge = pa.table({"id": ["x" * 4_000_000, "y"], "vector": [[-9.0] * DIM] * 2}).cast(
        table.schema
    )
    pq.write_table(pa.concat_tables([table, huge]), files.folder / "items.parquet")
    tracemalloc.start()
    assert report_of(capsys, *files.flags())["pairs"] == expected["pairs"]
    assert tracemalloc.get_traced_memory()[1] < 100 << 20
    tracemalloc.stop()
    pq.write_table(
        pa.concat_tables([table, huge, huge]), files.folder / "items.parquet"
    )
    assert main(files.flags()) != 0
    assert "id 'xxx" in (told := capsys.readouterr().err)
    assert "... is there twice (2 such rows)" in told
    assert len(told) < 300


def test_a_footer_that_lies_about_its_rows_does_no_harm(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = report_of(capsys, *files.flags())
    data = bytearray((files.folder / "items.parquet").read_bytes())
    # field 3 of the footer, zigzag, before the row groups
    at = data.rindex(b"\x16" + varint(2 * ITEMS) + b"\x19")
    told = (
        data[:at]
        + b"\x16"
        + varint(2 * (1 << 40))
        + data[at + 1 + len(varint(2 * ITEMS)) :]
    )
    length = len(told) - len(data)
    told[-8:-4] = (int.from_bytes(told[-8:-4], "little") + length).to_bytes(4, "little")
    (files.folder / "items.parquet").write_bytes(told)
    assert pq.read_metadata(files.folder / "items.parquet").num_rows == 1 << 40
    assert report_of(capsys, *files.flags()) == expected


def varint(number: int) -> bytes:
    """The number as Thrift's compact protocol writes it."""
    return (
        bytes([number & 127 | 128]) + varint(number >> 7)
        if number > 127
        else bytes([number])
    )


def test_items_without_a_vector_are_not_found_and_popularity_stands_beside(
    files: Files, capsys: pytest.CaptureFixture[str]
) -> None:
    gone = {item for _, item in files.truth[::4]}
    kept = [item for item in range(ITEMS) if item not in gone]
    pq.write_table(
        pa.table({"id": kept, "vector": list(files.items[kept])}),
        files.folder / "items.parquet",
    )
    report = report_of(capsys, *files.flags("--metrics=recall@20,ndcg@20,map@20"))
    scores = files.users @ files.items.T
    scores[:, sorted(gone)] = -1e9
    expected = by_hand(files, 20, scores)
    assert report["figures"] == pytest.approx(
        {name: expected[name] for name in report["figures"]}, abs=1e-6
    )
    assert report["pairs_whose_item_has_no_vector"] == sum(
        item in gone for _, item in files.truth
    )
    assert set(report["popularity"]) == set(report["figures"])
    assert 0 <= report["popularity"]["recall@20"] < 0.5


def test_it_leaves_a_table_a_picture_and_a_tracked_run(
    files: Files, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from torchx.tracker.backend.fsspec import create

    (files.folder / "tracking").mkdir()
    (files.folder / "tracking.conf").write_text(
        f"protocol=file\nroot_path={files.folder}/tracking\n"
    )
    monkeypatch.setenv("TORCHX_TRACKERS", "fsspec")
    monkeypatch.setenv(
        "TORCHX_TRACKER_FSSPEC_CONFIG", str(files.folder / "tracking.conf")
    )
    monkeypatch.setenv("TORCHX_JOB_ID", "local_cwd://torchx/evaluate-1")
    assert (
        main(files.flags(f"--out={files.folder / 'out'}", "--metrics=recall@20")) == 0
    )
    printed = capsys.readouterr().out
    assert "items to find among 200" in printed
    assert "recall@20" in printed
    figures = json.loads((files.folder / "out/evaluation.json").read_text())["figures"]
    assert figures.keys() == {"recall@20"}
    known = create(str(files.folder / "tracking.conf")).metadata(
        "local_cwd://torchx/evaluate-1"
    )
    assert (known["metrics"], known["figures.recall@20"]) == (
        "recall@20",
        figures["recall@20"],
    )
    assert (files.folder / "out/evaluation.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            "metric",
            r"metrics: 'recal@20' must be a figure and a number of items shown, such as recall@20",
        ),
        ("missing", r"--users .*nowhere\.parquet: there is no such file"),
        (
            "width",
            r"vectors are 8 wide, and those of .*items\.parquet 3; give vectors of one model",
        ),
        ("nan", r"items\.parquet, row \d+: the vector of id 7 is not finite"),
        ("twice", r"users\.parquet: id 0 is there twice"),
        (
            "unknown",
            r"truth\.parquet: user 999 has no vector in .*users\.parquet \(1 such users\)",
        ),
        (
            "types",
            r"truth\.parquet: column 'user_id' has texts, and .*users\.parquet has numbers; write both as",
        ),
        (
            "column",
            r"items\.parquet: column 'vector' is missing, the file has \['id', 'embedding'\]",
        ),
        (
            "ragged",
            r"items\.parquet: column 'vector' has lists of several lengths, or nulls",
        ),
        ("text", r"seen\.parquet: cannot be read as parquet"),
    ],
)
def test_mistakes_are_named(
    files: Files, change: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    flags, folder = files.flags(), files.folder
    items, ids = files.items.copy(), np.arange(ITEMS)
    if change == "metric":
        flags.append("--metrics=recal@20")
    elif change == "missing":
        flags[0] = f"--users={folder}/nowhere.parquet"
    elif change == "width":
        pq.write_table(
            pa.table({"id": ids, "vector": list(items[:, :3])}),
            folder / "items.parquet",
        )
    elif change == "nan":
        items[7, 2] = np.nan
        pq.write_table(
            pa.table({"id": ids, "vector": list(items)}), folder / "items.parquet"
        )
    elif change == "twice":
        pq.write_table(
            pa.table({"id": [0, 0], "vector": list(files.users[:2])}),
            folder / "users.parquet",
        )
    elif change == "unknown":
        write_pairs(folder / "truth.parquet", [*files.truth, (999, 1)])
    elif change == "types":
        write_pairs(folder / "truth.parquet", files.truth, text=True)
    elif change == "column":
        pq.write_table(
            pa.table({"id": ids, "embedding": list(items)}), folder / "items.parquet"
        )
    elif change == "ragged":
        pq.write_table(
            pa.table({"id": [1, 2], "vector": [[1.0, 2.0], [1.0]]}),
            folder / "items.parquet",
        )
    else:
        (folder / "seen.parquet").write_text("user,item\n1,2\n")
    assert main(flags) == 1
    import re

    error = capsys.readouterr().err
    assert re.search(message, error), error
    assert "Traceback" not in error


def test_the_component_hands_on_what_was_asked() -> None:
    flags = [
        "--users",
        "u.npy",
        "--items",
        "i.npy",
        "--truth",
        "t.parquet",
        "--metrics",
        "recall@20",
        "--",
        "--json",
    ]
    (role,) = materialize_appdef(torchrec_ext.components.evaluate, flags).roles
    assert role.args == [
        *(
            "-m",
            "torchx_apps.evaluate",
            "--users=u.npy",
            "--items=i.npy",
            "--truth=t.parquet",
            "--metrics=recall@20",
        ),
        *("--similarity=dot", "--json"),
    ]


def test_an_item_seen_before_is_missed_and_popularity_counts_every_seen_pair(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """User 2 is new and alone is asked, for item 0; user 3 is asked for item 3, which it has seen."""
    eye = np.eye(4, dtype=np.float32)
    write_vectors(tmp_path / "users.parquet", eye)
    write_vectors(tmp_path / "items.parquet", eye)
    write_pairs(tmp_path / "truth.parquet", [(2, 0), (3, 3)])
    write_pairs(tmp_path / "seen.parquet", [(0, 0), (1, 0), (1, 1), (3, 3)])
    folder = tmp_path
    files = Files(folder, eye, eye, [], [])
    report = report_of(capsys, *files.flags("--metrics=hr@1"))
    assert report["pairs_seen_before"] == 1
    # Item 0 is the most popular one. Item 3 has the best score for user 3, who has seen it.
    assert report["popularity"] == {"hr@1": 0.5}
    assert report["figures"] == {"hr@1": 0.0}
    assert main(files.flags("--metrics=hr@1")) == 0
    assert "1 of these items were seen" in capsys.readouterr().out
