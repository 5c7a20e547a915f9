"""Preprocessing, fitted once on training rows by DuckDB, applied to files and to requests by the same numpy code."""

from torchrec_ext.data.preprocess.categorical import (
    Categorify,
    Cross,
    HashBucket,
    Vocabulary,
)
from torchrec_ext.data.preprocess.csv_files import read_csv
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.data.preprocess.history import History
from torchrec_ext.data.preprocess.lists import Lists
from torchrec_ext.data.preprocess.numeric import (
    Bucketize,
    FillMissing,
    LogClip,
    Normalize,
)
from torchrec_ext.data.preprocess.preprocessor import Preprocessor
from torchrec_ext.data.preprocess.step import Step
from torchrec_ext.data.preprocess.times import TimeFeatures

__all__ = [
    "Bucketize",
    "Categorify",
    "Cross",
    "FillMissing",
    "FittedPreprocessor",
    "HashBucket",
    "History",
    "Lists",
    "LogClip",
    "Normalize",
    "Preprocessor",
    "Step",
    "TimeFeatures",
    "Vocabulary",
    "read_csv",
]
