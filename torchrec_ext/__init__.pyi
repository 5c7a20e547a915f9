from .adopt.rows.rows import Rows as Rows
from .adopt.step import adopt as adopt
from .batch import TowerBatch as TowerBatch
from .data.files.sources import ParquetSource as ParquetSource
from .data.loader.config import LoaderConfig as LoaderConfig
from .data.loader.loader import ChunkLoader as ChunkLoader
from .diagnose.why import why_slow as why_slow
from .distributed.optim.config import OptimizerConfig as OptimizerConfig
from .distributed.optim.config import Override as Override
from .distributed.parallel import hybrid_parallel as hybrid_parallel
from .distributed.plan.config import PlanConfig as PlanConfig
from .distributed.plan.config import TablePlan as TablePlan
from .distributed.plan.explain import explain as explain
from .distributed.plan.planner import plan_sharding as plan_sharding
from .distributed.runtime import Runtime as Runtime
from .distributed.sync import LocalSGD as LocalSGD
from .models.tower_model import TowerModel as TowerModel
from .models.tower_model import two_tower as two_tower
from .modules.tower import Tower as Tower
from .retrieval.bundle import Bundle as Bundle
from .retrieval.export import export as export
from .retrieval.scorer import Scorer as Scorer

__version__: str
