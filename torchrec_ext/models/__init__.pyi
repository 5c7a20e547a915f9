from .multi_task import MultiTaskModel as MultiTaskModel
from .ncf import ContextualNCF as ContextualNCF
from .retrieval import RetrievalModel as RetrievalModel
from .session import NextItemModel as NextItemModel
from .session import bst as bst
from .tower_model import TowerModel as TowerModel
from .tower_model import two_tower as two_tower
