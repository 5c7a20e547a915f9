"""FAISS's indexes reach the recall that their build measured, with exact scores, and K results under filters."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from torchrec_ext.retrieval.index.exact import ExactIndex
from torchrec_ext.retrieval.store.store import refresh_store
from torchrec_ext.retrieval.store.versions import StoreError
from torchrec_ext.retrieval.store.writer import write_store

faiss = pytest.importorskip(
    "faiss", reason="the package faiss-cpu is not installed (extra `retrieval`)"
)
from torchrec_ext.retrieval.index.faiss import FaissIndex, lifted  # noqa: E402

KINDS = ("flat", "ivf", "hnsw", "pq")


def clustered(rows: int = 3_000, width: int = 16, seed: int = 0) -> torch.Tensor:
    """Rows around 40 centres, which are the same for every seed."""
    centres = torch.randn(40, width, generator=torch.Generator().manual_seed(9))
    generator = torch.Generator().manual_seed(seed)
    return centres[torch.randint(40, (rows,), generator=generator)] + 0.4 * torch.randn(
        rows, width, generator=generator
    )


def of_many_norms(rows: int, seed: int = 0) -> torch.Tensor:
    """Rows in all directions, some many times as long as others."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 16, generator=generator) * torch.exp(
        0.7 * torch.randn(rows, 1, generator=generator)
    )


def recall(truth: torch.Tensor, found: torch.Tensor) -> float:
    return float((truth[:, :, None] == found[:, None, :]).any(dim=2).float().mean())


@pytest.mark.parametrize("metric", ["dot", "cosine"])
@pytest.mark.parametrize("kind", KINDS)
def test_recall_as_measured_scores_as_exact_and_saved(
    kind: str, metric: str, tmp_path: Path
) -> None:
    rows, fresh = clustered(), clustered(200, seed=1)
    index = FaissIndex.build(rows, metric, kind=kind, recall=0.9, k=20)
    exact = ExactIndex(rows, metric)
    assert index.measured_recall >= 0.9
    held_out = rows[torch.linspace(0, len(rows) - 1, 512).long()][1::2]
    assert recall(
        exact.search(held_out, 20)[1], index.search(held_out, 20)[1]
    ) == pytest.approx(index.measured_recall, abs=1e-6)
    scores, positions = index.search(fresh, 20)
    assert recall(exact.search(fresh, 20)[1], positions) > 0.8
    true, _ = exact.search(fresh, len(rows))
    everything = dict(
        zip(
            exact.search(fresh[:1], len(rows))[1][0].tolist(),
            true[0].tolist(),
            strict=True,
        )
    )
    assert scores[0].tolist() == pytest.approx(
        [everything[place] for place in positions[0].tolist()], abs=1e-4
    )
    index.save(tmp_path / "index")
    loaded = FaissIndex.load(tmp_path / "index", rows)
    assert torch.equal(loaded.search(fresh, 20)[1], positions)
    assert (loaded.setting, loaded.measured_recall, loaded.metric) == (
        index.setting,
        index.measured_recall,
        metric,
    )
    with pytest.raises(
        StoreError, match="of 3,000 vectors of 16, these are 10 of 16; build it again"
    ):
        FaissIndex.load(tmp_path / "index", rows[:10])


@pytest.mark.parametrize("kind", KINDS)
def test_filters_inside_the_search(kind: str) -> None:
    """K are found where K are left, none of them filtered out; a rare category is as good as exact."""
    rows, queries = clustered(), clustered(5, seed=2)
    index = FaissIndex.build(rows, "dot", kind=kind, recall=0.9, k=20)
    exact = ExactIndex(rows, "dot")
    half, rare = torch.arange(3_000) % 2 == 0, torch.arange(3_000) % 300 == 7
    taken = [exact.search(query, 30)[1][0] for query in queries.split(1)]
    for allowed, excluded in ((half, None), (None, taken), (half, taken)):
        found = index.search(queries, 20, allowed=allowed, excluded=excluded)[1]
        assert bool((found >= 0).all())
        assert allowed is None or bool(allowed[found].all())
        assert excluded is None or not any(
            set(out.tolist()) & set(row.tolist())
            for out, row in zip(taken, found, strict=True)
        )
        assert (
            recall(
                exact.search(queries, 20, allowed=allowed, excluded=excluded)[1], found
            )
            > 0.7
        )
    assert torch.equal(
        index.search(queries, 20, allowed=rare)[1],
        exact.search(queries, 20, allowed=rare)[1],
    )
    assert bool((index.search(queries, 20, allowed=rare)[1][:, 10:] == -1).all())


def test_nearest_of_the_lifted_are_those_of_the_greatest_products() -> None:
    rows, queries = of_many_norms(1_000), of_many_norms(20, seed=1)
    index = faiss.IndexFlatL2(17)
    index.add(lifted(rows.numpy(), norm=float(rows.norm(dim=1).max())))
    assert (
        recall(
            ExactIndex(rows, "dot").search(queries, 50)[1],
            torch.from_numpy(index.search(lifted(queries.numpy()), 50)[1]),
        )
        > 0.999
    )


@pytest.mark.parametrize("kind", ["ivf", "hnsw"])
def test_lifted_vectors_are_found_filtered_scored_and_saved_as_others(
    kind: str, tmp_path: Path
) -> None:
    rows, queries = of_many_norms(3_000), of_many_norms(50, seed=1)
    index = FaissIndex._tuned(rows, rows, "dot", kind, 0.95, 20, rows[::6], lift=True)
    index.save(tmp_path / "index")
    loaded = FaissIndex.load(tmp_path / "index", rows)
    half = torch.arange(3_000) % 2 == 0
    scores, positions = loaded.search(queries, 20, allowed=half)
    assert loaded.lifted
    assert (
        recall(ExactIndex(rows, "dot").search(queries, 20, allowed=half)[1], positions)
        > 0.9
    )
    assert scores[:, 0].tolist() == pytest.approx(
        (queries * rows[positions[:, 0]]).sum(dim=1).tolist(), abs=1e-4
    )
    with pytest.raises(
        StoreError, match="of 3,000 vectors of 16, these are 3,000 of 15"
    ):
        FaissIndex.load(tmp_path / "index", rows[:, :15].contiguous())


def test_vectors_are_lifted_where_that_is_cheaper() -> None:
    """Lifting pays where norms differ widely; around centres of like norm, and for a cosine, nothing is gained."""
    rows = of_many_norms(3_000)
    assert FaissIndex.build(rows, "dot", kind="ivf", recall=0.9, k=20).lifted
    assert not FaissIndex.build(rows, "cosine", kind="ivf", recall=0.9, k=20).lifted


def test_hnsw_finds_fewer_neighbours_as_surely_as_it_was_measured() -> None:
    rows, fresh = clustered(), clustered(100, seed=1)
    index = FaissIndex.build(rows, "dot", kind="hnsw", recall=0.9, k=100)
    assert index.setting >= 100
    assert (
        recall(ExactIndex(rows, "dot").search(fresh, 5)[1], index.search(fresh, 5)[1])
        >= 0.9
    )


def test_queries_of_another_width_are_refused() -> None:
    index = FaissIndex.build(clustered(100), "dot", kind="flat", k=5)
    with pytest.raises(
        ValueError,
        match="queries: 15 wide, the stored vectors are 16; give the query tower's outputs",
    ):
        index.search(clustered(1, width=15), 3)


def test_tombstones_are_never_found(tmp_path: Path) -> None:
    rows = clustered(500)
    write_store(tmp_path, [(np.arange(500), rows.numpy())], dtype="int8")
    store = refresh_store(tmp_path, [], [], deleted=[5])
    index = FaissIndex.build(store, "cosine", kind="ivf", recall=0.9, k=10)
    assert 5 not in index.search(rows[5:6], 500)[1][0].tolist()
    assert (index.search(rows[5:6], 500)[1] >= 0).sum() == 499


def test_the_cheapest_setting_is_taken_and_what_cannot_be_reached_is_refused() -> None:
    rows = clustered()
    asked = [
        FaissIndex.build(rows, "dot", kind="ivf", recall=part, k=20)
        for part in (0.5, 0.99)
    ]
    assert asked[0].setting < asked[1].setting
    with pytest.raises(
        ValueError,
        match=r"recall=1.0: hnsw reaches 0.\d{4} of the exact 100 at its widest setting, 1",
    ):
        _narrow(rows)
    with pytest.raises(ValueError, match=r"recall=1\.5"):
        FaissIndex.build(rows, "dot", recall=1.5)
    with pytest.raises(ValueError, match="metric='l2'"):
        FaissIndex.build(rows, "l2")  # type: ignore[arg-type]


def _narrow(rows: torch.Tensor) -> None:
    """An HNSW graph of one link a node, which cannot reach everything."""
    index = faiss.IndexHNSWFlat(rows.shape[1], 2, faiss.METRIC_INNER_PRODUCT)
    index.hnsw.efConstruction = 2
    index.add(rows.numpy())
    made = FaissIndex(
        index,
        rows,
        {"metric": "dot", "kind": "hnsw", "setting": 1, "recall": 0.0, "k": 100},
    )
    made._tune([1], 1.0, rows[:50])


def test_without_faiss_the_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    with pytest.raises(
        ValueError,
        match=r"needs the package faiss: pip install 'torchrec-ext\[retrieval\]'; ExactIndex",
    ):
        FaissIndex.build(clustered(10), "dot")
    assert ExactIndex(clustered(10), "dot").search(clustered(1), 3)[1].shape == (1, 3)
