"""Figures of a model over the rows of all ranks: ranking of catalogue or candidates, and classification."""

from torchrec_ext.train.metrics.classification import (
    ClassificationMetrics,
    classification_names,
)
from torchrec_ext.train.metrics.hits import Hits, query_figures, ranking_metrics
from torchrec_ext.train.metrics.question import (
    Question,
    hits_by,
    model_hits,
    popularity_hits,
)
from torchrec_ext.train.metrics.shares import (
    Kept,
    PaddedRows,
    Recommender,
    embed_all,
    gather_uneven_rows,
    own_share,
)

__all__ = [
    "ClassificationMetrics",
    "Hits",
    "Kept",
    "PaddedRows",
    "Question",
    "Recommender",
    "classification_names",
    "embed_all",
    "gather_uneven_rows",
    "hits_by",
    "model_hits",
    "own_share",
    "popularity_hits",
    "query_figures",
    "ranking_metrics",
]
