"""Step: one named operation on columns: fitted by SQL, applied to cells of files and of requests alike."""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Mapping
from typing import Any, ClassVar

import pyarrow as pa

from torchrec_ext.data.preprocess.columns import (
    ID_LISTS,
    IDS,
    Columns,
    Types,
    id_type,
    need,
)

StepState = Any  # the result of fitting: a Vocabulary, or a dict of JSON values
# Runs SQL over a table `fit_rows` with the step's `fit_column` in its working type.
Query = Callable[[str], pa.Table]


class Step(ABC):
    """One operation of a preprocessor. Subclasses are frozen dataclasses whose fields are JSON values."""

    @property
    @abstractmethod
    def reads(self) -> tuple[str, ...]:
        """Names of the step's input columns."""

    @property
    @abstractmethod
    def writes(self) -> tuple[str, ...]:
        """Names of the step's output columns, new or replaced."""

    @property
    def fit_column(self) -> str | None:
        """Name of the column needed in fitting; None if nothing is fitted."""
        return None

    @abstractmethod
    def types(self, types: Types) -> Types:
        """Returns the types of the output columns.

        Raises:
            DataError: a column is missing or has a type that the step cannot take.
        """

    def fit(self, query: Query, types: Types, where: str) -> StepState:
        """Fits the step to the training rows, called ``where`` in messages, and returns its state."""
        return {}

    def request_types(self, raw: Mapping[str, str]) -> Mapping[str, str]:
        """Returns the raw types of a request's columns needed for the step, unless an earlier step writes them."""
        return {name: raw[name] for name in self.reads if name in raw}

    @abstractmethod
    def apply(self, columns: Columns, state: StepState) -> Columns:
        """Computes ``writes`` for some rows, of a file or of a request."""

    def vocab(self, state: StepState) -> Mapping[str, int]:
        """Returns the number of rows of each column's embedding table; row 0 is for unknown values."""
        return {}

    def meaning(self, state: StepState) -> Mapping[str, Any]:
        """Returns the fields and the state behind the step's values, as JSON can hold them."""
        return {"fields": dataclasses.asdict(self), "state": state}  # type: ignore[call-overload]

    def __str__(self) -> str:
        return f"{type(self).__name__}({', '.join(map(repr, self.writes))})"


class ColumnStep(Step):
    """A step from one column to one column: of values to ids, unless ``makes`` says otherwise."""

    column: str
    output: str | None
    # Types of the column, what to do about others, and the type of the result.
    takes: ClassVar[Collection[pa.DataType]] = IDS | ID_LISTS
    remedy: ClassVar[str] = (
        "bucket a number with Bucketize, or cast it where it is written"
    )
    makes: ClassVar[pa.DataType | None] = None

    def types(self, types: Types) -> Types:
        """Returns the result's type; of ids there are as many per row as there were values."""
        dtype = need(types, self, self.column, self.takes, self.remedy)
        return {self.writes[0]: self.makes or id_type(dtype)}

    @property
    def reads(self) -> tuple[str, ...]:
        """``column``."""
        return (self.column,)

    @property
    def writes(self) -> tuple[str, ...]:
        """``output``."""
        return (self.output or self.column,)


def makes_ids(step: Step, name: str) -> bool:
    """Says whether a result of the step is rows of a table; a history has the values of its events."""
    return type(step).vocab is not Step.vocab and name not in getattr(step, "ids", ())


def finite(number: str) -> str:
    """Returns the condition, in SQL, that a number is neither NaN nor infinite."""
    # Not isfinite() or isnan(): DuckDB 2.0.1 decides these by the least and greatest value of
    # a parquet file's column, of which a NaN is none.
    return f"({number} - {number} = 0)"


def quoted(name: str) -> str:
    """Returns a column's name as SQL.

    Example:
        >>> quoted("user id")
        '"user id"'
    """
    return '"' + name.replace('"', '""') + '"'
