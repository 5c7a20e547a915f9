"""A search finds the best items under any mask, exactly; an index of FAISS finds as many as its manifest says."""

from pathlib import Path

import numpy as np
import pytest

from tests.retrieval.small import WIDTH, Small
from tests.retrieval.test_bundle import resealed
from torchrec_ext.retrieval import search as searching
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.search import (
    ExactSearch,
    FaissSearch,
    ScoreError,
    build_faiss,
    open_search,
)

ITEMS = 5_000


@pytest.fixture(scope="module", params=["product", "top_nn"])
def small(request: pytest.FixtureRequest) -> Small:
    return Small(ITEMS, metric=request.param)


@pytest.fixture(scope="module")
def bundle(small: Small, tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("search") / "bundle"
    small.write(folder)
    return Bundle.load(folder, verify=False)


@pytest.mark.parametrize("share", [None, 1.0, 0.5, 0.1, 0.01, 0.0])
@pytest.mark.parametrize("k", [1, 10, 600])
def test_the_best_items_under_a_mask(
    bundle: Bundle, share: float | None, k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The answer is the stable sort of every item's own logit."""
    monkeypatch.setattr(searching, "_PRODUCT_BLOCK", 1024)
    monkeypatch.setattr(searching, "_FIRST", 1024)
    draw = np.random.default_rng(k)
    search = ExactSearch(bundle)
    mask = None if share is None else draw.random(ITEMS) < share
    passing = np.arange(ITEMS) if mask is None else np.flatnonzero(mask)
    for _ in range(5):
        query = draw.normal(size=WIDTH).astype(np.float32)
        logits = bundle.logits(query, passing)
        best = np.argsort(-logits, kind="stable")[:k]
        found = search.search(query, k, mask)
        assert found.positions.tolist() == passing[best].tolist()
        assert found.scores.tolist() == logits[best].tolist()


def test_ties_stand_in_the_order_of_positions(tmp_path: Path) -> None:
    small = Small(ITEMS, metric="product")
    small.rows[:] = small.rows[np.arange(ITEMS) % 3]
    small.write(tmp_path / "bundle", certify=False)
    found = ExactSearch(Bundle.load(tmp_path / "bundle", verify=False)).search(
        np.ones(WIDTH, np.float32), 30
    )
    assert len(set(found.scores.tolist())) == 1
    first = found.positions[0]
    assert first < 3
    assert found.positions.tolist() == list(range(first, first + 90, 3))


def test_near_ties_are_ranked_by_the_graph(tmp_path: Path) -> None:
    """A pass of BLAS rounds otherwise, so the best of its scores alone are others."""
    small = Small(ITEMS, metric="product")
    draw = np.random.default_rng(1)
    small.rows[:] = small.rows[0] + draw.normal(0, 3e-7, small.rows.shape)
    small.write(tmp_path / "bundle", certify=False)
    bundle = Bundle.load(tmp_path / "bundle", verify=False)
    search = ExactSearch(bundle)
    for _ in range(20):
        query = draw.normal(size=WIDTH).astype(np.float32)
        best = np.argsort(-bundle.logits(query, np.arange(ITEMS)), kind="stable")[:10]
        assert search.search(query, 10).positions.tolist() == best.tolist()


def test_nan_is_an_error_that_names_the_item(bundle: Bundle, small: Small) -> None:
    """A top NN that overflows for one item must not answer without it."""
    search = ExactSearch(bundle)
    rows = bundle.rows.copy()
    rows[77] = np.nan
    query = small.known(1).astype(np.float32)
    broken = object.__new__(Bundle)
    broken.__dict__.update(bundle.__dict__, rows=rows)
    search = ExactSearch.__new__(ExactSearch)
    search.__dict__.update(ExactSearch(bundle).__dict__, _bundle=broken)
    with pytest.raises(ScoreError, match=r"item 870: its score is nan"):
        search.search(query, 5)
    with pytest.raises(ScoreError, match=r"item 870"):
        search.among(query, 5, np.array([1, 77]))


@pytest.fixture(scope="module")
def approximate(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    pytest.importorskip("faiss")
    folder = tmp_path_factory.mktemp("faiss") / "bundle"
    small = Small(ITEMS, metric="product")
    small.write(folder)
    queries = np.random.default_rng(5).normal(size=(200, WIDTH)).astype(np.float32)
    entry = build_faiss(folder, "IVF64,Flat", small.rows, queries, 0.9)
    resealed(folder, index=entry)
    return Bundle.load(folder)


def test_faiss_finds_what_its_manifest_says(approximate: Bundle) -> None:
    entry = approximate.manifest.content["index"]
    assert entry["recall"] >= 0.85
    assert 1 <= entry["settings"]["nprobe"] < 64
    search = open_search(approximate)
    assert isinstance(search, FaissSearch)
    exact = ExactSearch(approximate)
    draw = np.random.default_rng(9)
    hits = 0
    for _ in range(100):
        query = draw.normal(size=WIDTH).astype(np.float32)
        found = search.search(query, 10)
        wanted = exact.search(query, 10)
        hits += len(set(found.positions.tolist()) & set(wanted.positions.tolist()))
        logits = approximate.logits(query, found.positions)
        assert found.scores.tolist() == logits.tolist()
        assert found.scores.tolist() == sorted(found.scores.tolist(), reverse=True)
    assert hits / 1000 >= 0.85


@pytest.mark.parametrize("share", [0.5, 0.05, 0.001])
def test_faiss_never_answers_fewer_than_pass(approximate: Bundle, share: float) -> None:
    search = open_search(approximate)
    draw = np.random.default_rng(3)
    mask = draw.random(ITEMS) < share
    for k in (10, 400):
        query = draw.normal(size=WIDTH).astype(np.float32)
        found = search.search(query, k, mask)
        assert len(found.positions) == min(k, np.count_nonzero(mask))
        assert mask[found.positions].all()


@pytest.mark.parametrize(
    ("factory", "recall", "what"),
    [
        ("nonsense", 0.9, "FAISS refuses it"),
        ("PCA4,Flat", 0.9, "takes no filter"),
        ("IVF4,PQ2x2", 0.999, r"of the 10 best at most, recall=0.999 is asked"),
    ],
)
def test_other_indexes_are_refused(
    factory: str, recall: float, what: str, tmp_path: Path
) -> None:
    pytest.importorskip("faiss")
    small = Small(600, metric="product")
    queries = np.random.default_rng(5).normal(size=(50, WIDTH)).astype(np.float32)
    with pytest.raises(BundleError, match=what):
        build_faiss(tmp_path, factory, small.rows, queries, recall)
