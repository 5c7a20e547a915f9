"""Which index a bundle has: exact search over its store, or one of FAISS's with its recall measured; and whether it belongs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal, cast

from torch import Tensor

from torchrec_ext.retrieval.bundle.manifest import BundleError, Manifest
from torchrec_ext.retrieval.index.exact import ExactIndex, Index, Metric, ScoredIndex
from torchrec_ext.retrieval.index.projection import Projection
from torchrec_ext.retrieval.store.store import EmbeddingStore

Kind = Literal["exact", "flat", "ivf", "hnsw", "pq"]
FOLDER = "index"


def check_index_metric(kind: Kind, metric: str) -> None:
    """Refuses an index that does not search by the loss's own metric.

    Raises:
        BundleError: FAISS's search by products and cosines, the model scores by a network.
    """
    if kind != "exact" and metric == "top_nn":
        raise BundleError(
            f"index={kind!r}: searches by dot product or cosine, and this model scores by a top NN, whose best "
            "candidates it would "
            "miss; take index=exact, or train with model.interaction=dot or cosine (recipe retrieval)"
        )


def build_index(
    folder: Path, kind: Kind, recall: float, metric: Metric, store: EmbeddingStore, queries: Tensor
) -> dict[str, Any]:
    """Writes the index of a bundle, and returns what its manifest says of it.

    Args:
        folder: of the bundle.
        kind: of the index.
        recall: that it must reach.
        metric: of the loss.
        store: the vectors.
        queries: (Q, D) outputs of the query towers, by which the recall is measured.
    """
    if kind == "exact":
        return {"kind": kind, "metric": metric, "recall": 1.0, "store": store.digest}
    from torchrec_ext.retrieval.index.faiss import FaissIndex

    index = FaissIndex.build(store, metric, kind=kind, recall=recall, queries=queries)
    index.save(folder / FOLDER)
    return {"kind": kind, "metric": metric, "recall": index.measured_recall, "store": store.digest}


def open_index(
    folder: Path, manifest: Manifest, projection: Projection, store: EmbeddingStore, projected: EmbeddingStore
) -> Index:
    """The index of a bundle.

    Raises:
        BundleError: it searches by another metric, or over another store.
    """
    said, metric = manifest.content["index"], cast(Metric, manifest.metric)
    where = folder / FOLDER
    if said["metric"] != metric or said["store"] != store.digest:
        raise BundleError(
            f"{where}: of metric {said['metric']} over store {said['store'][:12]}, this bundle is of {metric} over "
            f"{store.digest[:12]}: it is the index of another bundle, or of an older store; export the bundle again"
        )
    if said["kind"] == "exact":
        return ScoredIndex(projection, projected) if metric == "top_nn" else ExactIndex(store, metric)
    from torchrec_ext.retrieval.index.faiss import FaissIndex

    index = FaissIndex.load(where, store)
    if index.metric != metric or index.size != len(store):
        raise BundleError(
            f"{where}: of metric {index.metric} with {index.size:,} vectors, this bundle is of {metric} with "
            f"{len(store):,}; "
            "export the bundle again"
        )
    return index
