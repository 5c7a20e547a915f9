"""Figures of a model over the rows of all ranks: ranking of catalogue or candidates, and classification."""

from torchrec_ext.train.metrics.candidates import (
    Candidates,
    candidate_hits,
    gains_among,
)
from torchrec_ext.train.metrics.catalogue import Question, catalogue_hits
from torchrec_ext.train.metrics.classification import (
    ClassificationMetrics,
    auc,
    classification_metrics,
    classification_names,
)
from torchrec_ext.train.metrics.hits import (
    Hits,
    Ranked,
    hits_by,
    popularity_hits,
    query_figures,
    ranking_metrics,
)
from torchrec_ext.train.metrics.shares import (
    Kept,
    PaddedRows,
    Recommender,
    embed_all,
    gather_uneven_rows,
    own_share,
)
from torchrec_ext.train.metrics.vectors import (
    Similarity,
    VectorFigures,
    vector_figures,
)

__all__ = [
    "Candidates",
    "ClassificationMetrics",
    "Hits",
    "Kept",
    "PaddedRows",
    "Question",
    "Ranked",
    "Recommender",
    "Similarity",
    "VectorFigures",
    "auc",
    "candidate_hits",
    "catalogue_hits",
    "classification_metrics",
    "classification_names",
    "embed_all",
    "gains_among",
    "gather_uneven_rows",
    "hits_by",
    "own_share",
    "popularity_hits",
    "query_figures",
    "ranking_metrics",
    "vector_figures",
]
