"""Search: the best K items of a query under a mask, exact over all stored rows, or by an index of FAISS.

The scores of an answer are always those of :meth:`Bundle.logits`, so a pair has one number however it was found.
Axis letters: N items, K retrieved, W width of a query.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from torchrec_ext.retrieval.bundle import Bundle, Floats
from torchrec_ext.retrieval.catalogue import IdArray
from torchrec_ext.retrieval.manifest import BundleError

Mask = NDArray[np.bool_]
INDEX = "index.faiss"
# Rows scored at a time, a multiple of bundle.ROWS_STEP: what a network makes of them fits a
# core's cache.
_BLOCK = 2048
# A product's block is one pass of BLAS over the rows, twice as fast as a graph.
_PRODUCT_BLOCK = 2**15
# Scores whose best ones say which others need not be sorted.
_FIRST = 2**15
# Float32 sums in another order differ by this share of the greatest possible score.
_ROUNDING = 2.0**-20
# Items that pass a filter are gathered if at most 1 in this many does.
_GATHERED = 8
_K = 10


class ScoreError(ValueError):
    """A score is NaN or infinite; the message names the item."""


class Found(NamedTuple):
    """The K best items: logits (K,), the best first, and positions (K,); ties stand in the order of positions."""

    scores: Floats
    positions: IdArray


class ExactSearch:
    """Searches all stored rows of a bundle.

    Args:
        bundle: bundle with rows, and the graph of its pairs.
    """

    def __init__(self, bundle: Bundle) -> None:
        self._bundle = bundle
        # What BLAS may differ by from the graph, for a query of norm 1; None for other logits.
        self._margin: float | None = None
        if bundle.metric == "product":
            norms = [np.linalg.norm(block, axis=1).max() for block in self._blocks()]
            self._margin = 2 * _ROUNDING * float(max(norms))

    def _blocks(self) -> Iterator[Floats]:
        rows = self._bundle.rows
        for start in range(0, len(rows), _PRODUCT_BLOCK):
            yield rows[start : start + _PRODUCT_BLOCK].astype(np.float32, copy=False)

    def search(self, query: Floats, k: int, mask: Mask | None = None) -> Found:
        """Returns the ``k`` best items of a query (W,), fewer only if fewer pass.

        Args:
            query: output of the query side.
            k: number of items.
            mask: (N,) True for items to choose among; None for all.

        Raises:
            ScoreError: a score is NaN or infinite.
        """
        if mask is not None and np.count_nonzero(mask) * _GATHERED <= len(mask):
            return self.among(query, k, np.flatnonzero(mask))
        rows = self._bundle.rows
        if self._margin is None:
            blocks = (rows[at : at + _BLOCK] for at in range(0, len(rows), _BLOCK))
            found = [self._bundle.pairs(query, block) for block in blocks]
        else:
            found = [block @ query for block in self._blocks()]
        scores = np.concatenate(found)
        positions = np.arange(len(rows))
        # A NaN anywhere makes the greatest NaN; a comparison would drop it.
        if not np.isfinite(scores.max()):
            check_scores(self._bundle, scores, positions)
        if mask is not None:
            np.putmask(scores, ~mask, -np.inf)
            k = min(k, int(np.count_nonzero(mask)))
        if self._margin is None:
            return self._ranked(scores, positions, k)
        margin = self._margin * float(np.linalg.norm(query))
        # By the graph again, so that a pair has one number however it was found.
        return self.among(query, k, _best(scores, k, margin))

    def among(self, query: Floats, k: int, positions: IdArray) -> Found:
        """Returns the ``k`` best of the items at ascending ``positions``; raises as :meth:`search`."""
        scores = np.empty(len(positions), np.float32)
        for start in range(0, len(positions), _BLOCK):
            block = positions[start : start + _BLOCK]
            scores[start : start + _BLOCK] = self._bundle.logits(query, block)
        return self._ranked(scores, positions, k)

    def _ranked(self, scores: Floats, positions: IdArray, k: int) -> Found:
        if len(scores) and not np.isfinite(scores.max()):
            check_scores(self._bundle, scores, positions)
        order = rank(scores, k)
        found = Found(scores[order], positions[order])
        check_scores(self._bundle, *found)
        return found


def check_scores(bundle: Bundle, scores: Floats, positions: IdArray) -> None:
    """Raises ScoreError if a score is NaN or infinite; the message names the item at its position."""
    wrong = ~np.isfinite(scores)
    if wrong.any():
        index = int(wrong.argmax())
        item = bundle.items.ids.ids(np.maximum(positions[index : index + 1], 0))[0]
        raise ScoreError(
            f"item {str(item)[:60]}: its score is {scores[index]}: the bundle cannot score it; export another one"
        )


def rank(scores: Floats, k: int) -> NDArray[np.intp]:
    """Returns indices of the ``k`` greatest scores, the greatest first, equal ones in their order."""
    chosen = _best(scores, k)
    return chosen[np.argsort(-scores[chosen], kind="stable")[:k]]


def _best(scores: Floats, k: int, margin: float = 0.0) -> NDArray[np.intp]:
    """Returns the ascending indices of scores within ``margin`` of the K best, or better."""
    # Most scores are below the K best of the first ones.
    chosen = np.flatnonzero(scores >= _kth(scores[:_FIRST], k) - margin)
    found = scores[chosen]
    return chosen[found >= _kth(found, k) - margin]


def _kth(scores: Floats, k: int) -> float:
    """Returns the ``k``-th greatest of scores; minus infinity if there are not more."""
    if not 0 < k < len(scores):
        return -np.inf
    place = len(scores) - k
    return float(np.partition(scores, place)[place])


class FaissSearch(ExactSearch):
    """Searches an index of FAISS, and falls back to exact search where a filter leaves it too few items.

    Args:
        bundle: bundle with the rows and the index; its metric is ``product``.

    Raises:
        BundleError: FAISS is not installed, or cannot read the index.
    """

    def __init__(self, bundle: Bundle) -> None:
        super().__init__(bundle)
        path = bundle.folder / INDEX
        try:
            self._index = require_faiss().read_index(str(path))
        except RuntimeError as error:
            raise BundleError(
                f"{path}: FAISS cannot read it ({str(error).splitlines()[-1][:80]}); export the bundle again"
            ) from None
        self._settings = bundle.manifest.content["index"]["settings"]

    def search(self, query: Floats, k: int, mask: Mask | None = None) -> Found:
        """Returns the ``k`` best items that the index finds; see :meth:`ExactSearch.search`."""
        size = len(self._bundle.rows)
        passing = size if mask is None else int(np.count_nonzero(mask))
        if passing * _GATHERED > size and k < passing:
            positions = found_by(self._index, self._settings, query[None], k, mask)[0]
            positions = positions[positions >= 0]
            if len(positions) == k:
                return self.among(query, k, np.sort(positions))
        return super().search(query, k, mask)


def open_search(bundle: Bundle) -> ExactSearch:
    """Opens the search that a bundle's manifest names."""
    if bundle.manifest.content["index"]["kind"] == "faiss":
        return FaissSearch(bundle)
    return ExactSearch(bundle)


def build_faiss(
    folder: Path,
    factory: str,
    rows: NDArray[Any],
    queries: Floats,
    recall: float,
) -> dict[str, Any]:
    """Writes the index of a bundle; returns the manifest's entry for it.

    Half of the queries choose the cheapest setting that reaches the recall. The other half measures the recall of the
    entry.

    Args:
        folder: folder of the bundle.
        factory: text for ``faiss.index_factory``, such as ``IVF1024,Flat`` or ``HNSW32``.
        rows: (N, W) stored rows.
        queries: (Q, W) outputs of the query side, two or more.
        recall: least share of the 10 best items that the index finds.

    Raises:
        BundleError: the factory is not one of FAISS's, or no setting reaches the recall.
    """
    faiss = require_faiss()
    vectors = np.ascontiguousarray(rows, np.float32)
    try:
        index = faiss.index_factory(
            vectors.shape[1], factory, faiss.METRIC_INNER_PRODUCT
        )
        if type(faiss.downcast_index(index)) is faiss.IndexPreTransform:
            raise RuntimeError("a transform before the index takes no filter")
        index.train(vectors)
        index.add(vectors)
        # Some of its indexes take no filter, and say so only when they are asked.
        everything = np.ones(len(vectors), np.bool_)
        found_by(index, _settings(index)[0], vectors[:1], 1, everything)
    except RuntimeError as error:
        raise BundleError(
            f"index={factory!r}: FAISS refuses it ({str(error).splitlines()[-1][-100:]}); give a text for "
            "index_factory, such as IVF1024,Flat"
        ) from None
    k = min(_K, len(vectors))
    tuning, measuring = queries[::2], queries[1::2]
    reached = 0.0
    for settings in _settings(index):
        reached = _recall(index, settings, tuning, vectors, k)
        if reached >= recall:
            break
    else:
        raise BundleError(
            f"index={factory!r}: finds {reached:.1%} of the {k} best at most, recall={recall} is asked; ask for less, "
            "or take another index"
        )
    faiss.write_index(index, str(folder / INDEX))
    return {
        "kind": "faiss",
        "factory": factory,
        "settings": settings,
        "recall": _recall(index, settings, measuring, vectors, k),
        "k": k,
        "queries": len(measuring),
    }


def found_by(
    index: Any,
    settings: Mapping[str, int],
    queries: Floats,
    k: int,
    mask: Mask | None = None,
) -> IdArray:
    """Returns (Q, K) positions that an index of FAISS finds among those of a mask, -1 for none."""
    faiss = require_faiss()
    kinds = {
        "nprobe": faiss.SearchParametersIVF,
        "efSearch": faiss.SearchParametersHNSW,
    }
    kind = kinds.get(next(iter(settings), ""), faiss.SearchParameters)
    options: dict[str, Any] = dict(settings)
    if mask is not None:
        # Kept in a variable: the selector reads the array's own memory.
        bits = np.packbits(mask, bitorder="little")
        options["sel"] = faiss.IDSelectorBitmap(bits)
    found: IdArray = index.search(queries, k, params=kind(**options))[1]
    return found


def _settings(index: Any) -> Sequence[dict[str, int]]:
    """Returns the settings to try of an index, the cheapest first."""
    faiss = require_faiss()
    plain = faiss.downcast_index(index)
    if isinstance(plain, faiss.IndexIVF):
        powers = range(int(plain.nlist).bit_length() + 1)
        return [{"nprobe": min(2**power, plain.nlist)} for power in powers]
    if isinstance(plain, faiss.IndexHNSW):
        return [{"efSearch": 2**power} for power in range(4, 13)]
    return [{}]


def _recall(
    index: Any, settings: Mapping[str, int], queries: Floats, rows: Floats, k: int
) -> float:
    found = found_by(index, settings, queries, k)
    hits = 0
    for query, positions in zip(queries, found, strict=True):
        hits += len(np.intersect1d(rank(rows @ query, k), positions))
    return hits / (k * len(queries))


def require_faiss() -> Any:
    """Returns the package of FAISS; raises BundleError if it is not installed."""
    try:
        import faiss
    except ModuleNotFoundError:
        raise BundleError(
            "an index of FAISS needs its package: pip install 'torchrec-ext[retrieval]'"
        ) from None
    return faiss
