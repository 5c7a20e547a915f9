from ..batch import Jagged as Jagged
from ..batch import Keys as Keys
from .batch_schema import BatchSchema as BatchSchema
from .batch_schema import Dense as Dense
from .features import Joint as Joint
from .features import SparseFeature as SparseFeature
from .validation import DataError as DataError
from .validation import OutOfRange as OutOfRange
