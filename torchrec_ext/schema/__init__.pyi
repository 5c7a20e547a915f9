from ..batch import Jagged as Jagged
from .batch_schema import BatchSchema as BatchSchema
from .batch_schema import IdHook as IdHook
from .batch_schema import RowNumbers as RowNumbers
from .features import SparseFeature as SparseFeature
from .validation import DataError as DataError
from .validation import OutOfRange as OutOfRange
