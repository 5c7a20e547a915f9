"""Figures of a model over the rows of all ranks: ranking of catalogue or candidates, coverage, classification."""

from torchrec_ext.train.metrics.catalogue import (
    Coverage,
    Question,
    catalogue_ranks,
    popularity_ranks,
    ranks_of,
)
from torchrec_ext.train.metrics.classification import (
    ClassificationMetrics,
    auc,
    classification_metrics,
    classification_names,
)
from torchrec_ext.train.metrics.evaluation_watch import (
    EvaluationStoppedError,
    EvaluationWatch,
    watched,
    watching,
)
from torchrec_ext.train.metrics.ranking import (
    RankingMetrics,
    TargetRanks,
    candidate_ranks,
    gather_ranks,
    joined_ranks,
    named_figures,
    query_figures,
    ranking_metrics,
    ranks_among,
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
    vector_ranks,
)

__all__ = [
    "ClassificationMetrics",
    "Coverage",
    "EvaluationStoppedError",
    "EvaluationWatch",
    "Kept",
    "PaddedRows",
    "Question",
    "RankingMetrics",
    "Recommender",
    "Similarity",
    "TargetRanks",
    "VectorFigures",
    "auc",
    "candidate_ranks",
    "catalogue_ranks",
    "classification_metrics",
    "classification_names",
    "embed_all",
    "gather_ranks",
    "gather_uneven_rows",
    "joined_ranks",
    "named_figures",
    "own_share",
    "popularity_ranks",
    "query_figures",
    "ranking_metrics",
    "ranks_among",
    "ranks_of",
    "vector_figures",
    "vector_ranks",
    "watched",
    "watching",
]
