"""Index of a bundle: exact search over its store, or one of FAISS's indexes with its recall measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

from torch import Tensor

from torchrec_ext.retrieval.bundle.manifest import BundleError, Manifest
from torchrec_ext.retrieval.index.exact import ExactIndex, Index, Metric, ScoredIndex
from torchrec_ext.retrieval.index.faiss import FAISS_KINDS, FaissIndex
from torchrec_ext.retrieval.index.projection import Projection
from torchrec_ext.retrieval.store.store import EmbeddingStore

IndexKind = str  # a name in INDEX_KINDS
_FOLDER = "index"


class ExactKind:
    """Exact search over the bundle's own store, without files.

    To add a kind of index, write a class with these two methods and add it to :data:`INDEX_KINDS`.

    Attributes:
        any_metric: whether it can search by a top NN too, not only by dot product and cosine.
    """

    any_metric = True

    def build(
        self,
        folder: Path,
        recall: float,
        metric: Metric,
        store: EmbeddingStore,
        queries: Tensor,
    ) -> float:
        """Writes the index of ``store`` to ``folder``; returns its recall measured with ``queries`` (Q, D)."""
        return 1.0

    def open(
        self,
        folder: Path,
        metric: Metric,
        store: EmbeddingStore,
        projection: Projection,
        projected: EmbeddingStore,
    ) -> Index:
        """Opens the index in ``folder``; raises BundleError if it is of another store or metric."""
        if metric == "top_nn":
            return ScoredIndex(projection, projected)
        return ExactIndex(store, metric)


class FaissBundleKind:
    """One of FAISS's indexes, saved in the bundle.

    Args:
        kind: name in :data:`~torchrec_ext.retrieval.index.faiss.FAISS_KINDS`.
    """

    any_metric = False

    def __init__(self, kind: str) -> None:
        self.kind = kind

    def build(
        self,
        folder: Path,
        recall: float,
        metric: Metric,
        store: EmbeddingStore,
        queries: Tensor,
    ) -> float:
        """See :meth:`ExactKind.build`."""
        index = FaissIndex.build(
            store, metric, kind=self.kind, recall=recall, queries=queries
        )
        index.save(folder)
        return index.measured_recall

    def open(
        self,
        folder: Path,
        metric: Metric,
        store: EmbeddingStore,
        projection: Projection,
        projected: EmbeddingStore,
    ) -> Index:
        """See :meth:`ExactKind.open`."""
        index = FaissIndex.load(folder, store)
        if index.metric != metric or index.size != len(store):
            raise BundleError(
                f"{folder}: of metric {index.metric} with {index.size:,} vectors, this bundle is of {metric} with "
                f"{len(store):,}; export the bundle again"
            )
        return index


INDEX_KINDS: dict[IndexKind, ExactKind | FaissBundleKind] = {
    "exact": ExactKind(),
    **{name: FaissBundleKind(name) for name in FAISS_KINDS},
}


def check_index_metric(kind: IndexKind, metric: str) -> None:
    """Refuses an index that cannot search by the loss's metric.

    Raises:
        BundleError: FAISS's indexes search by products and cosines, but the model scores by a network.
    """
    if metric == "top_nn" and not INDEX_KINDS[kind].any_metric:
        raise BundleError(
            f"index={kind!r}: searches by dot product or cosine, and this model scores by a top NN; "
            "take index=exact, or model.interaction=dot"
        )


def build_index(
    folder: Path,
    kind: IndexKind,
    recall: float,
    metric: Metric,
    store: EmbeddingStore,
    queries: Tensor,
) -> dict[str, Any]:
    """Writes the index of a bundle and returns the manifest's entry for it.

    Args:
        folder: folder of the bundle.
        kind: name in :data:`INDEX_KINDS`.
        recall: required recall of the index.
        metric: metric of the loss.
        store: vectors of the catalogue.
        queries: (Q, D) outputs of the query towers, to measure the recall.
    """
    measured = INDEX_KINDS[kind].build(folder / _FOLDER, recall, metric, store, queries)
    return {"kind": kind, "metric": metric, "recall": measured, "store": store.digest}


def open_index(
    folder: Path,
    manifest: Manifest,
    projection: Projection,
    store: EmbeddingStore,
    projected: EmbeddingStore,
) -> Index:
    """Opens the index of a bundle.

    Raises:
        BundleError: it searches by another metric, or over another store.
    """
    listed = manifest.content["index"]
    metric = cast(Metric, manifest.metric)
    if listed["metric"] != metric or listed["store"] != store.digest:
        raise BundleError(
            f"{folder / _FOLDER}: of metric {listed['metric']} over store {listed['store'][:12]}, this bundle is of "
            f"{metric} over {store.digest[:12]}: it is the index of another bundle, or of an older store; export the "
            "bundle again"
        )
    return INDEX_KINDS[listed["kind"]].open(
        folder / _FOLDER, metric, store, projection, projected
    )
