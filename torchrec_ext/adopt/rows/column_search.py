"""ColumnSearch: what the rows of a map-style Dataset are made of, learnt by reading rows and by nothing else."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Set
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from tqdm import tqdm

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.rows.reading import (
    GETITEMS,
    DatasetReader,
    Ids,
    held_by,
    is_frame,
    seed_everything,
    words,
)
from torchrec_ext.adopt.rows.rereads import MOST_NUMBERS, Rereads, differs
from torchrec_ext.adopt.rows.slots import Reading, Slot, SlotPiece, equal

COMPARED = 4096  # rows that are compared at first, and at a time
# That comparing all rows may take: so much, or so much for each row.
_SECONDS, _SECONDS_PER_ROW = 8.0, 2e-4
_LONG_S = 30.0  # of a pass over all rows that is announced
_BLOCK_S = 1.0  # that the rows of a block take
_READ_AGAIN = 190
_DISPUTED = 16  # rows that are read to tell two sources apart
_MOST_BYTES = 1 << 26  # of the rows that are compared
_MOST_COLUMNS = 256  # of a matrix that are looked at one by one


class _Source:
    """An attribute of the Dataset with a value for each row.

    Args:
        path: name of the attribute, such as ``df['user']``.
        value: array, tensor, series or list of M values.
        index: (N,) value of each row; None where M = N and values stand in the order of the rows.
    """

    def __init__(self, path: str, value: Any, index: Tensor | None = None) -> None:
        self.path = path
        self._value = value
        self._index = index
        self._whole: Tensor | None = None

    def rows(self, rows: Tensor) -> Tensor | None:
        """Returns the values of ``rows`` (C,), (C, ...); None where they are no numbers of one shape."""
        where = rows if self._index is None else self._index[rows]
        # Of a list these rows alone, because a tensor of all of it takes long.
        if isinstance(self._value, list | tuple):
            return _array([self._value[row] for row in where.tolist()])
        values = _array(self._value)
        return None if values is None else values[where.to(values.device)].cpu()

    def whole(self) -> Tensor | None:
        """Returns the values of all rows, (N, ...)."""
        if self._whole is None:
            self._whole = _array(self._value)
            if self._whole is not None and self._index is not None:
                self._whole = self._whole[self._index]
        return self._whole


class _MatrixColumn(_Source):
    """One column of an attribute that has several."""

    def __init__(self, matrix: _Source, column: int) -> None:
        super().__init__(f"{matrix.path}[{column}]", None)
        self._matrix = matrix
        self._column = column

    def rows(self, rows: Tensor) -> Tensor | None:
        values = self._matrix.rows(rows)
        return values if values is None else values[:, self._column]

    def whole(self) -> Tensor | None:
        values = self._matrix.whole()
        return values if values is None else values[:, self._column]


def _array(value: Any) -> Tensor | None:
    """Returns values as a tensor, or None where they are no numbers of one shape."""
    if isinstance(value, Tensor):
        if value.layout != torch.strided or not value.dim():
            return None
        return value.detach()
    try:
        if (
            isinstance(value, list | tuple)
            and len(value)
            and isinstance(value[0], Tensor)
        ):
            return torch.stack([item.detach() for item in value])
        array = value.to_numpy() if hasattr(value, "to_numpy") else np.asarray(value)
    except (ValueError, TypeError, RuntimeError, AttributeError, OverflowError):
        return None
    if array.dtype.kind not in "biuf" or array.ndim == 0:
        return None
    # torch takes neither a foreign byte order nor, without a warning, memory that
    # cannot be written.
    native = array.astype(array.dtype.newbyteorder("="), copy=False)
    return torch.from_numpy(native if native.flags.writeable else native.copy())


def _sources(dataset: Any, rows: int) -> list[_Source]:
    """Returns the attributes of a Dataset that hold a value for each row."""
    values: list[tuple[str, Any]] = []
    for path, value in held_by(dataset):
        if isinstance(value, np.ndarray | Tensor):
            has_rows = value.ndim > 0
        else:
            has_rows = isinstance(value, list | tuple) or (
                hasattr(value, "iloc") and not is_frame(value)
            )
        if has_rows:
            values.append((path, value))
    direct = [_Source(path, value) for path, value in values if len(value) == rows]
    through = []
    for source in direct:
        order = _order(source)
        if order is None:
            continue
        is_plain = torch.equal(order, torch.arange(rows))
        for path, value in values:
            # In the plain order, values of as many rows are among the direct ones
            # already.
            if len(value) > int(order.max()) and not (is_plain and len(value) == rows):
                through.append(_Source(path, value, order))
    return direct + through


def _order(source: _Source) -> Tensor | None:
    """Returns the rows of an attribute such as a Subset's ``indices``, or None if it names no rows."""
    if not source.path.endswith("indices"):
        return None
    values = source.whole()
    if (
        values is None
        or values.dim() != 1
        or values.is_floating_point()
        or values.dtype == torch.bool
    ):
        return None
    return values.long() if int(values.min()) >= 0 else None


class _RowSample(NamedTuple):
    """Rows that were read: their numbers (C,), the values of each slot (C, *S), and which numbers (*S) are drawn."""

    rows: Tensor
    values: list[Tensor]
    draw_masks: list[Tensor]


class _SlotSearch:
    """Finds the pieces of each slot, as far as the rows of a sample show them.

    Args:
        reader: has read them.
        sources: attributes of the Dataset.
        sample: the rows.
        refuted: pieces that no attribute holds, as a pass over all rows has shown.

    Attributes:
        reading: the pieces; of a column in no attribute, no row is there yet.
        own_columns: pieces in no attribute, by the name of their column.
        disputes: rows in which two candidates for a slot differ.
    """

    def __init__(
        self,
        reader: DatasetReader,
        sources: list[_Source],
        sample: _RowSample,
        refuted: Set[SlotPiece],
    ) -> None:
        self._reader = reader
        self._sources = sources
        self._sample = sample
        self._refuted = refuted
        self._paths: dict[tuple[str, torch.dtype], str] = {}
        self.reading = Reading(compared=len(sample.rows))
        self.disputes: list[int] = []
        self.own_columns: dict[str, SlotPiece] = {}
        for slot in range(len(sample.values)):
            self.reading.slots.append(self._slot(slot))

    def _slot(self, slot: int) -> Slot:
        values = self._sample.values[slot]
        draw_mask = self._sample.draw_masks[slot].flatten().tolist()
        repeat = (
            values.dim() > 1
            and values.shape[1] > 1
            and equal(values, values[:, :1].expand_as(values))
        )
        pieces: list[str | None] = []
        times = 0
        if any(draw_mask):
            for index, varies in enumerate(draw_mask):
                piece = SlotPiece(slot, index)
                pieces.append(
                    None if varies else self._known(piece) or self._to_write(piece)
                )
        else:
            whole = SlotPiece(slot, "repeat" if repeat else "all")
            pieces = [self._known(whole)]
            # What is no column as a whole may be several columns beside each other.
            count = len(draw_mask)
            if pieces[0] is None and not repeat and 1 < count <= MOST_NUMBERS:
                pieces = [self._known(SlotPiece(slot, index)) for index in range(count)]
            if None in pieces:
                pieces = [self._to_write(whole)]
            if repeat and pieces[0] in self.reading.columns:
                times = values.shape[1]
        return Slot(
            name=self._shown(slot, pieces),
            dtype=values.dtype,
            shape=values.shape[1:],
            pieces=tuple(pieces),
            repeat=times,
        )

    def _shown(self, slot: int, pieces: list[str | None]) -> str:
        name = self._reader.names[slot]
        if not name:
            columns = set(pieces) - {None, *self.reading.constants}
            name = str(columns.pop()) if len(columns) == 1 else f"slot {slot}"
        if any(name == other.name for other in self.reading.slots):
            name = f"{name} (slot {slot})"
        return name

    def _piece_name(self, piece: SlotPiece) -> str:
        name = self._reader.slot_name(piece.slot)
        if isinstance(piece.index, int):
            name += f"[{piece.index}]"
        return name

    def _to_write(self, piece: SlotPiece) -> str:
        name = self._piece_name(piece)
        self.own_columns[name] = piece
        self.reading.columns[name] = piece.of(self._sample.values)[:0]
        return name

    def _known(self, piece: SlotPiece) -> str | None:
        """Returns the name of the constant or attribute with the values of a piece, or None."""
        if piece in self._refuted:
            return None
        values = piece.of(self._sample.values)
        matches = [source for source in self._sources if self._holds(source, values)]
        first = values[:1]
        is_constant = equal(values, first.expand_as(values))
        if not is_constant:
            if not matches:
                return None
            first = _as(matches[0].whole(), values)
        for source in matches:
            rows = ~_equal_rows(_as(source.whole(), values), first)
            self.disputes += rows.nonzero().reshape(-1)[:_DISPUTED].tolist()
        if not is_constant:
            return self._column(piece, matches[0], first)
        name = self._piece_name(piece)
        self.reading.constants[name] = first.clone()
        return name

    def _holds(self, source: _Source, values: Tensor) -> bool:
        # Eight rows tell most sources apart, and all rows of a list take long.
        for rows in (slice(8), slice(None)):
            source_rows = source.rows(self._sample.rows[rows])
            expected = values[rows]
            if (
                source_rows is None
                or source_rows[0].numel() != expected[0].numel()
                or not equal(_as(source_rows, expected), expected)
            ):
                return False
        # Other rows of a list may be of another length.
        return source.whole() is not None

    def _column(self, piece: SlotPiece, source: _Source, values: Tensor) -> str:
        path_and_dtype = (source.path, values.dtype)
        if path_and_dtype not in self._paths:
            # The name that a user would give it: the row's key, else the attribute's
            # last name or key.
            key = (
                None if isinstance(piece.index, int) else self._reader.names[piece.slot]
            )
            short = source.path.rpartition(".")[2]
            if short.endswith("']"):
                short = short.rpartition("['")[2].removesuffix("']")
            used = {*self.reading.columns, *self.reading.constants}
            names = (key, short, source.path, f"slot {piece.slot} {source.path}")
            name = next(name for name in names if name and name not in used)
            self._paths[path_and_dtype] = name
            self.reading.columns[name] = values
        return self._paths[path_and_dtype]


class ColumnSearch:
    """Finds the columns of a Dataset; call it inside :meth:`DatasetReader.untouched`.

    Args:
        reader: reads its rows.
        compared: number of rows to compare with the Dataset; None for all that are read in :data:`_SECONDS`, or in
            :data:`_SECONDS_PER_ROW` for each row.
        speaks: announce a long pass over all rows, and show its progress on a terminal.
    """

    def __init__(
        self, reader: DatasetReader, compared: int | None, speaks: bool
    ) -> None:
        self._reader = reader
        self._speaks = speaks
        self._random = np.random.default_rng(0)
        size = sum(leaf.nbytes for leaf in reader.leaves(0))
        affordable = max(256, _MOST_BYTES // max(size, 1))
        count = reader.num_rows
        self._compares_all = compared is None or compared >= count
        first = COMPARED if self._compares_all else compared or COMPARED
        self._compared = max(2, min(count, first, affordable))
        self._affordable = affordable
        self._budget_s = max(_SECONDS, _SECONDS_PER_ROW * count)
        if compared is not None:
            self._budget_s = math.inf
        # What holds numbers, and each column of a matrix besides, since a draw may
        # exclude by one.
        self._sources: list[_Source] = []
        ends = torch.tensor([0, reader.num_rows - 1])
        for source in _sources(reader.dataset, reader.num_rows):
            values = source.rows(ends)
            if values is None:
                continue
            self._sources.append(source)
            if values.dim() == 2 and values.shape[1] <= _MOST_COLUMNS:
                self._sources += [
                    _MatrixColumn(source, index) for index in range(values.shape[1])
                ]
        self._refuted: set[SlotPiece] = set()

    def sample(self) -> Reading:
        """Returns what some rows are made of; :attr:`own_columns` hold these rows alone.

        Raises:
            CannotAdopt: they cannot be written as columns, constants and draws.
        """
        start = time.perf_counter()
        self._sample = self._read()
        seconds = time.perf_counter() - start
        self._seconds_of_all = seconds / len(self.rows) * self._reader.num_rows
        self._solve()
        # Rows in which two candidates for a slot differ decide between them.
        while len(rows := np.setdiff1d(self._slot_search.disputes, self.rows)):
            seed_everything(len(self.rows))
            before = [self._sample.rows, *self._sample.values]
            more = [torch.from_numpy(rows), *self._reader.rows(rows)]
            numbers, *values = map(torch.cat, zip(before, more, strict=True))
            self._sample = self._sample._replace(rows=numbers, values=values)
            self._solve()
        return self._slot_search.reading

    def _solve(self) -> None:
        self._slot_search = _SlotSearch(
            self._reader, self._sources, self._sample, self._refuted
        )

    @property
    def rows(self) -> Ids:
        """Numbers of the rows that were read, (C,)."""
        return self._sample.rows.numpy()

    @property
    def own_columns(self) -> dict[str, Tensor]:
        """Values that are in no attribute, (C, ...) by name."""
        return {
            name: piece.of(self._sample.values)
            for name, piece in self._slot_search.own_columns.items()
        }

    def run(self) -> Reading:
        """Returns what all rows are made of, after :meth:`sample`.

        Raises:
            CannotAdopt: they cannot be written as columns, constants and draws.
        """
        num_rows = self._reader.num_rows
        # A sample alone would take a Dataset with a few other rows for its columns.
        all_too = self._compares_all and len(self.rows) < num_rows
        own = self._slot_search.own_columns
        if own and self._seconds_of_all > _LONG_S and self._speaks:
            print(
                f"rows: {', '.join(own)} in no attribute of {self._reader.kind}: writing "
                f"{num_rows:,} rows takes about {self._seconds_of_all / 60:.1f} min, once; to avoid it, "
                "set each as an attribute with a value for each row in __init__",
                flush=True,
            )
        elif all_too and self._speaks and self._pass_s > _LONG_S:
            print(
                f"rows: comparing {num_rows:,} rows of {self._reader.kind} with its attributes takes about "
                f"{self._pass_s / 60:.1f} min, once; compared=N compares N of them",
                flush=True,
            )
        while (self._slot_search.own_columns or all_too) and (
            refuted := self._wrong_after_writing()
        ):
            self._refuted.add(refuted)
            self._solve()
        reading = self._slot_search.reading
        if reading.compared < num_rows:
            reading.notes.append(f"rows: {reading.not_compared(num_rows)}")
        # A batch is as large as what a column gives for it, so there must be one.
        if not reading.columns:
            reading.columns["row"] = torch.zeros(num_rows, dtype=torch.bool)
        return reading

    @property
    def _pass_s(self) -> float:
        return min(self._seconds_of_all, self._budget_s)

    def _read(self) -> _RowSample:
        """Reads rows once, and some of them again with other seeds: numbers that vary are drawn."""
        count = self._reader.num_rows
        rows = np.arange(count)
        if self._compared < count:
            # A random sample alone would miss the one row in which an attribute
            # differs.
            some = self._random.choice(count, self._compared, replace=False)
            rows = np.unique(np.concatenate([[0, count - 1], some, self._extremes()]))
        again = np.sort(
            self._random.choice(len(rows), min(len(rows), _READ_AGAIN), replace=False)
        )
        seed_everything(0)
        values = self._reader.rows(rows)
        values_again = [each[torch.from_numpy(again)] for each in values]
        rereads = Rereads(self._reader, rows[again], values_again)
        rereads.check()
        return _RowSample(torch.from_numpy(rows), values, rereads.masks)

    def _extremes(self) -> Ids:
        """Returns rows in which a column is least, greatest, no number, or has a rare value."""
        rows = [np.zeros(0, np.int64)]
        for source in self._sources:
            whole = source.whole()
            if whole is None or whole.dim() != 1:
                continue
            values = whole.numpy(force=True)
            is_nan = values != values
            rows.append(np.array([values.argmin(), values.argmax(), is_nan.argmax()]))
            if (
                values.dtype.kind in "biu"
                and int(values.max()) - int(values.min()) < _MOST_COLUMNS
            ):
                rows.append(np.unique(values, return_index=True)[1])
        return np.concatenate(rows)

    def _wrong_after_writing(self) -> SlotPiece | None:
        """Writes pieces without an attribute in one pass, and compares all rows; returns a wrong column, or None.

        Where nothing is written, the pass ends with the budget of time, and the number of rows compared says so.
        """
        reader = self._reader
        reading = self._slot_search.reading
        own = self._slot_search.own_columns
        start = time.perf_counter()
        self._check_memory()
        for name in own:
            column = reading.columns[name]
            shape = (reader.num_rows, *column.shape[1:])
            reading.columns[name] = column.new_empty(shape)
        is_compared = np.zeros(reader.num_rows, bool)
        is_compared[self.rows] = True
        for block in self._blocks():
            if not own and time.perf_counter() - start > self._budget_s:
                break
            slot_values = reader.rows(block)
            rows = torch.from_numpy(block)
            for name, piece in own.items():
                reading.columns[name][rows] = piece.of(slot_values)
            wrong = reading.wrong(rows, slot_values)
            if wrong is not None:
                return wrong
            is_compared[block] = True
        reading.compared = int(is_compared.sum())
        names = []
        for name, piece in own.items():
            column = reading.columns[name]
            slot_name = reader.slot_name(piece.slot)
            # Rows of the sample have been read a second time now.
            rows = self._sample.rows
            is_same = _equal_rows(column[rows], piece.of(self._sample.values))
            if not is_same.all():
                raise CannotAdopt(
                    f"{reader.where} returns rows that change from call to call: "
                    f"{slot_name} of row {rows[~is_same][0]} is another in the second reading. "
                    f"{GETITEMS}"
                )
            names.append(f"{slot_name} ({words(column.dtype, column.shape[1:])})")
        if names:
            reading.notes.append(
                f"rows: {', '.join(names)} in no attribute of {reader.kind}: written in one pass over "
                f"{reader.num_rows:,} rows ({time.perf_counter() - start:.1f} s)"
            )
        return None

    def _blocks(self) -> Iterator[Ids]:
        count = self._reader.num_rows
        title = "rows: comparing all"
        if self._slot_search.own_columns:
            title = f"rows: writing {', '.join(self._slot_search.own_columns)}"
        # None: unless this is a terminal.
        disable = None if self._speaks else True
        with tqdm(
            desc=title, total=count, delay=2.0, unit="row", leave=False, disable=disable
        ) as progress:
            seconds = max(self._seconds_of_all / count, 1e-9)
            size = min(COMPARED, self._affordable, max(1, int(_BLOCK_S / seconds)))
            starts = np.arange(0, count, size)
            # Spread over the set, should the time not suffice for all.
            for start in self._random.permutation(starts):
                block = np.arange(start, min(start + size, count))
                yield block
                progress.update(len(block))

    def _check_memory(self) -> None:
        columns = self.own_columns
        count = self._reader.num_rows
        size = sum(column[0].nbytes for column in columns.values()) * count
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size > memory / 2:
            raise CannotAdopt(
                f"{', '.join(columns)} of {count:,} rows take {size / 1e9:,.1f} GB as "
                f"columns, more than half of this machine's {memory / 1e9:,.1f} GB. {GETITEMS}"
            )


def _as(values: Tensor | None, like: Tensor) -> Tensor:
    """Returns an attribute's values (C, ...) in the shape and dtype of ``like`` (C', *P)."""
    assert values is not None
    return values.reshape(len(values), *like.shape[1:]).to(like.dtype)


def _equal_rows(first: Tensor, second: Tensor) -> Tensor:
    """Says for each row whether its values are equal, (C,)."""
    same = ~differs(first, second)
    return same.flatten(1).all(dim=1) if same.dim() > 1 else same
