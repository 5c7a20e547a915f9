"""Which columns a batch has, derived from the tables that will read them, and the one place where ids are checked.

Axis letters, one legend for the whole package: B batch, Q shared rows, F features, L bag length, D embedding dim, T
towers or tasks, N negatives or candidates, K retrieved, R ranks, S session length.
"""

import torchrec_ext.needs_torch  # noqa: F401

from torchrec_ext.batch import Jagged, Keys
from torchrec_ext.schema.batch_schema import BatchSchema, Dense, OutOfRange
from torchrec_ext.schema.features import Joint, SparseFeature
from torchrec_ext.schema.validation import DataError

__all__ = ["BatchSchema", "DataError", "Dense", "Jagged", "Joint", "Keys", "OutOfRange", "SparseFeature"]
