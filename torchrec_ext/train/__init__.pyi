from torchrec_ext.capture.policy import TrainingDivergedError as TrainingDivergedError

from .checkpoint.checkpointer import Checkpointer as Checkpointer
from .checkpoint.config import CheckpointConfig as CheckpointConfig
from .checkpoint.config import StartConfig as StartConfig
from .checkpoint.storage import CheckpointError as CheckpointError
from .checkpoint.vectors import load_vectors as load_vectors
from .checkpoint.vectors import publish_weights as publish_weights
from .config import EarlyStop as EarlyStop
from .config import Schedule as Schedule
from .config import TrainConfig as TrainConfig
from .loop import train as train
from .metrics.catalogue import catalogue_ranks as catalogue_ranks
from .metrics.classification import ClassificationMetrics as ClassificationMetrics
from .metrics.ranking import RankingMetrics as RankingMetrics
from .metrics.ranking import ranking_metrics as ranking_metrics
from .report.progress import RunFolder as RunFolder
from .step.pipeline import make_pipeline as make_pipeline
