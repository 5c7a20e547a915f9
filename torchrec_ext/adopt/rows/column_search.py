"""ColumnSearch: what the rows of a map-style Dataset are made of, learnt by reading rows and by nothing else.

Slot: one value of a row: a constant, a column, a repeat of it, several columns beside each other, or drawn integers.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

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
from torchrec_ext.adopt.rows.rereads import MOST_NUMBERS, ROUNDS, Rereads, differs

COMPARED = 4096  # rows that are compared if reading all would take too long
_SECONDS = 8.0  # that reading all rows may take
_LONG_S = 30.0  # of a pass over all rows that is announced
_READ_AGAIN = 190
_DISPUTED = 16  # rows that are read to tell two sources apart
_CALLS = 8  # of each row whose draws are read
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


@dataclass(frozen=True, kw_only=True, eq=False)
class Slot:
    """One value of a row, and what it is made of.

    Args:
        name: name of the slot, unique among those of a row.
        dtype: dtype of the values.
        shape: S, the shape of a row's value.
        pieces: names of columns and constants: one for the whole value, or one for each of its numbers, in order; None
            stands for a number that is drawn.
        repeat: k where the value is k times the same piece beside each other, else 0.
    """

    name: str
    dtype: torch.dtype
    shape: torch.Size
    pieces: tuple[str | None, ...]
    repeat: int = 0

    @property
    def drawn(self) -> int:
        """The number of integers that are drawn."""
        return self.pieces.count(None)

    def build(
        self, pieces: Mapping[str, Tensor], draws: Tensor | None, size: int
    ) -> Tensor:
        """Returns the values of a batch of B = ``size`` rows, (B, *S).

        Args:
            pieces: (B, ...) rows of columns, and constants, (1, ...), by name.
            draws: (B, n) drawn integers.
            size: B.
        """
        if len(self.pieces) == 1 and self.pieces[0] is not None:
            piece = pieces[self.pieces[0]].to(self.dtype)
            shape = torch.Size((1, *self.shape[1:])) if self.repeat else self.shape
            return piece.reshape(len(piece), *shape).expand(size, *self.shape)
        numbers = []
        index = 0
        for run in self._runs():
            if isinstance(run, int):
                assert draws is not None
                numbers.append(draws[:, index : index + run])
                index += run
            else:
                numbers.append(pieces[run].reshape(-1, 1).expand(size, 1))
        return torch.cat([number.to(self.dtype) for number in numbers], dim=1).view(
            size, *self.shape
        )

    def _runs(self) -> list[str | int]:
        """Returns the names of the pieces in order, with the length of each run of draws between them."""
        runs: list[str | int] = []
        for name in self.pieces:
            if name is not None:
                runs.append(name)
            elif runs and isinstance(runs[-1], int):
                runs[-1] += 1
            else:
                runs.append(1)
        return runs

    def describe(self, constants: Mapping[str, Tensor]) -> str:
        """Returns what the slot is made of in words."""
        if len(self.pieces) > 1:
            texts = []
            for run in self._runs():
                texts.append(f"{run} drawn" if isinstance(run, int) else f"`{run}`")
            return ", ".join(texts)
        (name,) = self.pieces
        if name is None:
            return "drawn"
        if name in constants:
            values = constants[name].reshape(-1).tolist()
            return (
                f"constant {values}"
                if len(values) <= 8
                else f"constant {values[:4]} and so on"
            )
        return (
            f"column `{name}` {self.repeat} times"
            if self.repeat
            else f"column `{name}`"
        )


@dataclass(frozen=True)
class SlotPiece:
    """The numbers of a slot that one column holds: all, the first of equal ones (``"repeat"``), or that at an index."""

    slot: int
    index: int | str = "all"

    def of(self, values: Sequence[Tensor]) -> Tensor:
        """Returns the numbers (C, *P) in the slots' values (C, *S)."""
        slot_values = values[self.slot]
        if isinstance(self.index, int):
            return slot_values.flatten(1)[:, self.index]
        return slot_values if self.index == "all" else slot_values[:, 0]


@dataclass(kw_only=True)
class Reading:
    """The columns, constants and draws that the rows of a Dataset are made of.

    Args:
        slots: the values of a row in order.
        columns: (N, ...) values of all rows by name.
        constants: (1, ...) values that all rows share, by name.
        compared: number of rows that were compared with the Dataset.
        notes: lines to show the user.
    """

    slots: list[Slot] = field(default_factory=list)
    columns: dict[str, Tensor] = field(default_factory=dict)
    constants: dict[str, Tensor] = field(default_factory=dict)
    compared: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def drawn(self) -> Slot | None:
        """The slot that holds drawn integers."""
        return next((slot for slot in self.slots if slot.drawn), None)

    def values(self, rows: Tensor) -> dict[str, Tensor]:
        """Returns the rows (B,) of all columns, and the constants, by name."""
        return {
            name: column[rows] for name, column in self.columns.items()
        } | self.constants

    def wrong(self, rows: Tensor, slot_values: Sequence[Tensor]) -> SlotPiece | None:
        """Compares ``slot_values`` of ``rows`` (B,) with columns and constants; returns a differing piece, or None."""
        pieces = self.values(rows)
        for index, (slot, values) in enumerate(
            zip(self.slots, slot_values, strict=True)
        ):
            if len(slot.pieces) == 1 and not slot.drawn:
                if not equal(slot.build(pieces, None, len(rows)), values):
                    return SlotPiece(index, "repeat" if slot.repeat else "all")
                continue
            for number, name in enumerate(slot.pieces):
                if name is not None and not equal(
                    pieces[name].reshape(-1), values.flatten(1)[:, number]
                ):
                    return SlotPiece(index, number)
        return None

    def seen(self, rows: int) -> str:
        """Returns what was compared, of ``rows`` in all, in words."""
        if self.compared >= rows:
            return "all rows were compared with the Dataset's"
        # The rule of three: after no event in n, at most 3 in n are expected with 95 %
        # certainty.
        return (
            f"{self.compared:,} rows were compared with the Dataset's: a difference in more than one row of "
            f"{self.compared // 3:,} would have been seen with 95 % certainty; compared=len(dataset) compares all"
        )


def equal(first: Tensor, second: Tensor) -> bool:
    """Says whether values are equal; what is no number equals itself."""
    return not differs(first, second).any()


class ColumnSearch:
    """Finds the columns of a Dataset; call it inside :meth:`DatasetReader.untouched`.

    Args:
        reader: reads its rows.
        compared: number of rows to compare with the Dataset; None for all where they are read in :data:`_SECONDS`.
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
        self._compared = max(2, min(reader.num_rows, compared or COMPARED, affordable))
        self._quickly = compared is None
        # What holds numbers, and each column of a matrix besides, since a draw may
        # exclude by one.
        self._sources: list[_Source] = []
        ends = torch.tensor([0, self._reader.num_rows - 1])
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
        self._read()
        self._seconds_of_all = (
            (time.perf_counter() - start) / len(self._rows) * self._reader.num_rows
        )
        self._solve()
        # Rows in which two candidates for a slot differ decide between them.
        while len(rows := np.setdiff1d(self._disputes, self._rows.numpy())):
            self._read_more(rows)
            self._solve()
        self._result.compared = len(self._rows)
        return self._result

    @property
    def rows(self) -> Ids:
        """Numbers of the rows that were read, (C,)."""
        return self._rows.numpy()

    @property
    def own_columns(self) -> dict[str, Tensor]:
        """Values that are in no attribute, (C, ...) by name."""
        return {
            name: piece.of(self._values) for name, piece in self._own_columns.items()
        }

    def run(self) -> Reading:
        """Returns what all rows are made of, after :meth:`sample`.

        Raises:
            CannotAdopt: they cannot be written as columns, constants and draws.
        """
        # All rows are compared if that is quick, also where nothing has to be written.
        all_too = (
            self._quickly
            and self._seconds_of_all < _SECONDS
            and len(self._rows) < self._reader.num_rows
        )
        if self._own_columns and self._seconds_of_all > _LONG_S and self._speaks:
            print(
                f"rows: {', '.join(self._own_columns)} in no attribute of {self._reader.kind}: writing "
                f"{self._reader.num_rows:,} rows takes about {self._seconds_of_all / 60:.1f} min, once; to avoid it, "
                "set each as an attribute with a value for each row in __init__",
                flush=True,
            )
        while (self._own_columns or all_too) and (
            refuted := self._wrong_after_writing()
        ):
            self._refuted.add(refuted)
            self._solve()
        # A batch is as large as what a column gives for it, so there must be one.
        if not self._result.columns:
            self._result.columns["row"] = torch.zeros(
                self._reader.num_rows, dtype=torch.bool
            )
        return self._result

    def _read(self) -> None:
        """Reads rows once, and some of them again with other seeds: numbers that vary are drawn."""
        rows = self._reader.num_rows
        rows_read = np.arange(rows)
        if self._compared < rows:
            # A random sample alone would miss the one row in which an attribute
            # differs.
            some = self._random.choice(rows, self._compared, replace=False)
            rows_read = np.unique(
                np.concatenate([[0, rows - 1], some, self._extremes()])
            )
        again = np.sort(
            self._random.choice(
                len(rows_read), min(len(rows_read), _READ_AGAIN), replace=False
            )
        )
        seed_everything(0)
        self._rows = torch.from_numpy(rows_read)
        self._values = self._reader.rows(rows_read)
        values_again = [values[torch.from_numpy(again)] for values in self._values]
        rereads = Rereads(self._reader, rows_read[again], values_again)
        rereads.check()
        self._draw_masks = rereads.masks

    def _read_more(self, rows: Ids) -> None:
        seed_everything(len(self._rows))
        values = self._reader.rows(rows)
        self._rows = torch.cat([self._rows, torch.from_numpy(rows)])
        self._values = list(map(torch.cat, zip(self._values, values, strict=True)))

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

    def _solve(self) -> None:
        """Finds the pieces of each slot, as far as the rows read so far show them."""
        self._result = Reading()
        self._paths: dict[tuple[str, torch.dtype], str] = {}
        self._disputes: list[int] = []
        self._own_columns: dict[str, SlotPiece] = {}
        for slot in range(len(self._values)):
            self._result.slots.append(self._slot(slot))

    def _slot(self, slot: int) -> Slot:
        values = self._values[slot]
        draw_mask = self._draw_masks[slot].flatten().tolist()
        repeat = (
            values.dim() > 1
            and values.shape[1] > 1
            and equal(values, values[:, :1].expand_as(values))
        )
        pieces: tuple[str | None, ...]
        times = 0
        if any(draw_mask):
            numbers: list[str | None] = []
            for index, varies in enumerate(draw_mask):
                piece = SlotPiece(slot, index)
                numbers.append(
                    None if varies else self._known(piece) or self._to_write(piece)
                )
            pieces = tuple(numbers)
        else:
            whole = SlotPiece(slot, "repeat" if repeat else "all")
            column = self._known(whole)
            pieces = (column,)
            # What is no column as a whole may be several columns beside each other.
            if column is None and not repeat and 1 < values[0].numel() <= MOST_NUMBERS:
                pieces = tuple(
                    self._known(SlotPiece(slot, index))
                    for index in range(values[0].numel())
                )
            if None in pieces:
                pieces = (self._to_write(whole),)
            if repeat and pieces[0] in self._result.columns:
                times = values.shape[1]
        name = self._shown(slot, pieces)
        return Slot(
            name=name,
            dtype=values.dtype,
            shape=values.shape[1:],
            pieces=pieces,
            repeat=times,
        )

    def _shown(self, slot: int, pieces: tuple[str | None, ...]) -> str:
        name = self._reader.names[slot]
        if not name:
            columns = set(pieces) - {None, *self._result.constants}
            name = str(columns.pop()) if len(columns) == 1 else f"slot {slot}"
        if any(name == other.name for other in self._result.slots):
            name = f"{name} (slot {slot})"
        return name

    def _piece_name(self, piece: SlotPiece) -> str:
        name = self._reader.slot_name(piece.slot)
        if isinstance(piece.index, int):
            name += f"[{piece.index}]"
        return name

    def _to_write(self, piece: SlotPiece) -> str:
        name = self._piece_name(piece)
        self._own_columns[name] = piece
        shape = piece.of(self._values).shape[1:]
        self._result.columns[name] = torch.empty(
            (0, *shape), dtype=self._values[piece.slot].dtype
        )
        return name

    def _known(self, piece: SlotPiece) -> str | None:
        """Returns the name of the constant or attribute with the values of a piece, or None."""
        values = piece.of(self._values)
        # A pass over all rows has shown that no source of it holds.
        if piece in self._refuted:
            return None
        matches = [source for source in self._sources if self._holds(source, values)]
        first = values[:1]
        is_constant = equal(values, first.expand_as(values))
        if not is_constant:
            if not matches:
                return None
            first = _as(matches[0].whole(), values)
        for source in matches:
            rows = ~_equal_rows(_as(source.whole(), values), first)
            self._disputes += rows.nonzero().reshape(-1)[:_DISPUTED].tolist()
        if not is_constant:
            return self._column(piece, matches[0], first)
        name = self._piece_name(piece)
        self._result.constants[name] = first.clone()
        return name

    def _holds(self, source: _Source, values: Tensor) -> bool:
        # Eight rows tell most sources apart, and all rows of a list take long.
        for rows in (slice(8), slice(None)):
            source_rows = source.rows(self._rows[rows])
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
            used = {*self._result.columns, *self._result.constants}
            names = (key, short, source.path, f"slot {piece.slot} {source.path}")
            name = next(name for name in names if name and name not in used)
            self._paths[path_and_dtype] = name
            self._result.columns[name] = values
        return self._paths[path_and_dtype]

    def _wrong_after_writing(self) -> SlotPiece | None:
        """Writes pieces without an attribute in one pass, and compares all rows; returns a wrong column, or None."""
        reader = self._reader
        start = time.perf_counter()
        self._check_memory()
        for name in self._own_columns:
            column = self._result.columns[name]
            self._result.columns[name] = column.new_empty(
                (reader.num_rows, *column.shape[1:])
            )
        for block in self._blocks():
            slot_values = reader.rows(block)
            rows = torch.from_numpy(block)
            for name, piece in self._own_columns.items():
                self._result.columns[name][rows] = piece.of(slot_values)
            wrong = self._result.wrong(rows, slot_values)
            if wrong is not None:
                return wrong
        self._check_steady()
        self._result.compared = reader.num_rows
        if not self._own_columns:
            return None
        names = []
        for name, piece in self._own_columns.items():
            column = self._result.columns[name]
            names.append(
                f"{self._reader.slot_name(piece.slot)} ({words(column.dtype, column.shape[1:])})"
            )
        self._result.notes.append(
            f"rows: {', '.join(names)} in no attribute of {reader.kind}: written in one pass over "
            f"{reader.num_rows:,} rows ({time.perf_counter() - start:.1f} s)"
        )
        return None

    def _blocks(self) -> Iterator[Ids]:
        title = "rows: comparing all"
        if self._own_columns:
            title = f"rows: writing {', '.join(self._own_columns)}"
        options: dict[str, Any] = {"delay": 2.0, "unit": "row", "leave": False}
        # None: if this is no terminal
        options["disable"] = None if self._speaks else True
        with tqdm(total=self._reader.num_rows, desc=title, **options) as progress:
            for start in range(0, self._reader.num_rows, COMPARED):
                block = np.arange(start, min(start + COMPARED, self._reader.num_rows))
                yield block
                progress.update(len(block))

    def _check_steady(self) -> None:
        for name, piece in self._own_columns.items():
            # Rows of the sample have been read a second time now.
            changed = self._rows[
                ~_equal_rows(
                    self._result.columns[name][self._rows], piece.of(self._values)
                )
            ]
            if len(changed):
                raise CannotAdopt(
                    f"{self._reader.where} returns rows that change from call to call: "
                    f"{self._reader.slot_name(piece.slot)} of row {changed[0]} is another in the second reading. "
                    f"{GETITEMS}"
                )

    def _check_memory(self) -> None:
        size = (
            sum(
                piece.of(self._values)[0].nbytes for piece in self._own_columns.values()
            )
            * self._reader.num_rows
        )
        memory = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        if size > memory / 2:
            raise CannotAdopt(
                f"{', '.join(self._own_columns)} of {self._reader.num_rows:,} rows take {size / 1e9:,.1f} GB as "
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


def drawn_rows(
    reader: DatasetReader, slot: Slot, index: int, calls: int, among: Ids
) -> tuple[Ids, Ids]:
    """Reads what some rows draw, each row eight times.

    Args:
        reader: reads them; inside :meth:`DatasetReader.untouched`.
        slot: the slot with drawn integers.
        index: number of this slot.
        calls: about so many calls.
        among: rows from which some are chosen.

    Returns:
        (C,) the row of each call, and (C, n) what it drew.
    """
    generator = np.random.default_rng(1)
    # Several calls of each row show whether it draws from the same few items each time.
    rows = generator.choice(
        among, min(len(among), max(calls // _CALLS, 1)), replace=False
    )
    again = max(_CALLS, calls // len(rows))
    rows = np.sort(rows).repeat(again).astype(np.int64)
    seed_everything(ROUNDS)
    mask = torch.tensor([piece is None for piece in slot.pieces])
    draws = torch.empty((len(rows), slot.drawn), dtype=torch.int64)
    title = "rows: reading what is drawn"
    for call, row in enumerate(
        tqdm(rows, desc=title, delay=2.0, unit="row", leave=False, disable=None)
    ):
        draws[call] = reader.leaves(int(row))[index].flatten()[mask]
    return rows, draws.numpy()
