"""Recommender sub-networks declared as towers, trained hybrid-parallel on TorchRec, explained when slow, and served as trained.

Importing the package costs no torch: the names below are imported when first used, after a check of the installed
stack.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torchrec_ext.batch import TowerBatch
    from torchrec_ext.data.files.sources import ArrowSource, ParquetSource
    from torchrec_ext.data.loader.config import LoaderConfig
    from torchrec_ext.data.loader.loader import ChunkLoader
    from torchrec_ext.distributed.optim.config import OptimizerConfig
    from torchrec_ext.distributed.parallel import hybrid_parallel
    from torchrec_ext.distributed.plan.explain import explain
    from torchrec_ext.distributed.plan.planner import PlanConfig, plan_sharding
    from torchrec_ext.distributed.runtime import Runtime
    from torchrec_ext.models.multi_task import MultiTaskModel
    from torchrec_ext.models.ncf import ContextualNCF
    from torchrec_ext.models.partition import affinity, partition
    from torchrec_ext.models.retrieval import RetrievalModel
    from torchrec_ext.models.session import NextItemModel, bst
    from torchrec_ext.models.tower_model import TowerModel, two_tower
    from torchrec_ext.modules.compression import Compression
    from torchrec_ext.modules.session_tower import SessionTower
    from torchrec_ext.modules.tower import Tower
    from torchrec_ext.retrieval.bundle.bundle import Bundle
    from torchrec_ext.retrieval.scorer.scorer import Scorer
    from torchrec_ext.schema import BatchSchema

# `train` is not here: a name shared with the subpackage would be the function or the module, whichever was imported
# last.
_EXPORTS: dict[str, str] = {
    "ArrowSource": "torchrec_ext.data.files.sources",
    "BatchSchema": "torchrec_ext.schema",
    "Bundle": "torchrec_ext.retrieval.bundle.bundle",
    "ChunkLoader": "torchrec_ext.data.loader.loader",
    "Compression": "torchrec_ext.modules.compression",
    "ContextualNCF": "torchrec_ext.models.ncf",
    "LoaderConfig": "torchrec_ext.data.loader.config",
    "MultiTaskModel": "torchrec_ext.models.multi_task",
    "NextItemModel": "torchrec_ext.models.session",
    "OptimizerConfig": "torchrec_ext.distributed.optim.config",
    "ParquetSource": "torchrec_ext.data.files.sources",
    "PlanConfig": "torchrec_ext.distributed.plan.planner",
    "RetrievalModel": "torchrec_ext.models.retrieval",
    "Runtime": "torchrec_ext.distributed.runtime",
    "Scorer": "torchrec_ext.retrieval.scorer.scorer",
    "SessionTower": "torchrec_ext.modules.session_tower",
    "Tower": "torchrec_ext.modules.tower",
    "TowerBatch": "torchrec_ext.batch",
    "TowerModel": "torchrec_ext.models.tower_model",
    "affinity": "torchrec_ext.models.partition",
    "bst": "torchrec_ext.models.session",
    "explain": "torchrec_ext.distributed.plan.explain",
    "hybrid_parallel": "torchrec_ext.distributed.parallel",
    "partition": "torchrec_ext.models.partition",
    "plan_sharding": "torchrec_ext.distributed.plan.planner",
    "two_tower": "torchrec_ext.models.tower_model",
}

__all__ = [
    "ArrowSource",
    "BatchSchema",
    "Bundle",
    "ChunkLoader",
    "Compression",
    "ContextualNCF",
    "LoaderConfig",
    "MultiTaskModel",
    "NextItemModel",
    "OptimizerConfig",
    "ParquetSource",
    "PlanConfig",
    "RetrievalModel",
    "Runtime",
    "Scorer",
    "SessionTower",
    "Tower",
    "TowerBatch",
    "TowerModel",
    "affinity",
    "bst",
    "explain",
    "hybrid_parallel",
    "partition",
    "plan_sharding",
    "two_tower",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; it has {', '.join(__all__)}")
    importlib.import_module("torchrec_ext.needs_torch")
    value = globals()[name] = getattr(importlib.import_module(_EXPORTS[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
