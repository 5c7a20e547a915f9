"""DatasetReader: reads rows of a map-style Dataset as a DataLoader would, and leaves everything as it was."""

from __future__ import annotations

import builtins
import contextlib
import copy
import io
import operator
import os
import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils import _pytree as pytree
from torch.utils.data import IterableDataset

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.observe.put_back import copy_generator, copy_global_generators
from torchrec_ext.observe.reached import GENERATORS

GETITEMS = (
    "Or make whole batches yourself: give the Dataset a method __getitems__(rows), which torch's DataLoader calls with "
    "a batch's row numbers; the documentation has examples under 'Where columns cannot be read'."
)
Ids = NDArray[np.int64]
_MOST_BYTES = 1 << 26  # of an array of which a copy is kept
_DEPTH = 3
_MANY = 256  # entries of a container that are looked at one by one


class DatasetReader:
    """Reads rows of a Dataset as a DataLoader would, and leaves the Dataset and all generators as they were.

    Args:
        dataset: map-style Dataset.

    Raises:
        CannotAdopt: it is none, or has fewer than two rows.
    """

    def __init__(self, dataset: Any) -> None:
        kind = type(dataset).__name__
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__getitem__"):
            raise CannotAdopt(
                f"{kind} has no rows by number (an IterableDataset?); write its rows into tensors for "
                "Rows(columns=...), or into parquet for ChunkLoader"
            )
        try:
            self.num_rows = len(dataset)
        except (TypeError, NotImplementedError) as error:
            raise CannotAdopt(
                f"{kind} has no __len__ ({error}): Rows.of needs the number of rows"
            ) from None
        if self.num_rows < 2:
            rows = "1 row" if self.num_rows == 1 else f"{self.num_rows} rows"
            raise CannotAdopt(
                f"{kind} has {rows}: columns cannot be told from constants by fewer than 2; train on it as it is"
            )
        self.dataset = dataset
        self.kind = kind
        self.where = f"{kind}.__getitem__{_line(dataset)}"
        self._first: Any = None
        self._spec: Any = None
        self._file_reads: list[float] = []
        self._kinds: list[tuple[torch.dtype, torch.Size]] = []

    def leaves(self, row: int) -> list[Tensor]:
        """Returns the values of a row in order.

        Raises:
            CannotAdopt: the row is not of tensors and numbers, or of other shapes than the first row.
        """
        value = self.dataset[row]
        values, spec = _flat(value)
        tensors = [self._tensor(leaf, index) for index, leaf in enumerate(values)]
        # The first row says how all others must be.
        if self._spec is None:
            self._first = value
            self._spec = spec
            self._kinds = [(tensor.dtype, tensor.shape) for tensor in tensors]
            if not tensors:
                raise CannotAdopt(
                    f"{self.where} returns a row without a value: {value!r}"
                )
        if spec != self._spec:
            raise CannotAdopt(
                f"{self.where} returns rows of different structure: row {row} is {spec}. {GETITEMS}"
            )
        for index, (tensor, (dtype, shape)) in enumerate(
            zip(tensors, self._kinds, strict=True)
        ):
            if tensor.shape != shape or tensor.dtype != dtype:
                raise CannotAdopt(
                    f"{self.where} returns rows of different shapes: slot {index} of row {row} is "
                    f"{words(tensor.dtype, tensor.shape)}, that of the row before {words(dtype, shape)}. {GETITEMS}"
                )
        return tensors

    def rows(self, rows: Sequence[int] | Ids) -> list[Tensor]:
        """Returns each slot's values in ``rows`` (C,), (C, *S)."""
        slots: list[Tensor] = []
        before = _reads()
        for index, row in enumerate(rows):
            leaves = self.leaves(int(row))
            slots = slots or [
                torch.empty((len(rows), *leaf.shape), dtype=leaf.dtype)
                for leaf in leaves
            ]
            for target, leaf in zip(slots, leaves, strict=True):
                target[index] = leaf
        # one read is of the counter itself
        self._file_reads.append((_reads() - before - 1) / len(rows))
        return slots

    @property
    def names(self) -> list[str | None]:
        """The key of each value of a row that is a dict, None for others."""
        names: list[str | None] = []
        for path, _ in pytree.tree_flatten_with_path(self._first)[0]:
            last: Any = path[-1] if path else None
            names.append(str(last.key) if isinstance(last, pytree.MappingKey) else None)
        return names

    def slot_name(self, slot: int) -> str:
        """Returns the key of a value of a row, or its number."""
        return self.names[slot] or f"slot {slot}"

    def batch(
        self, rows: Sequence[int], collate: Callable[[list[Any]], Any]
    ) -> tuple[list[Tensor], Any]:
        """Returns the values of ``rows`` slot by slot, and what ``collate`` makes of the same rows."""
        values = [self.dataset[row] for row in rows]
        slots = zip(*map(pytree.tree_leaves, values), strict=True)
        stacked = [
            torch.stack([self._tensor(value, index) for value in slot])
            for index, slot in enumerate(slots)
        ]
        return stacked, collate(values)

    def _tensor(self, value: Any, slot: int) -> Tensor:
        if isinstance(value, Tensor) and value.layout == torch.strided:
            return value.detach()
        if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
            # np.array makes an array of a scalar too, in memory that torch may write.
            return torch.from_numpy(np.array(value))
        # default_collate makes float64 of Python's numbers.
        if isinstance(value, float):
            return torch.tensor(value, dtype=torch.float64)
        if isinstance(value, bool | int):
            return torch.tensor(value)
        raise CannotAdopt(
            f"{self.where} returns a {type(value).__name__} in slot {slot}: a row must be of tensors, arrays and "
            "numbers; leave out what the step does not read, and give texts numbers"
        )

    @contextlib.contextmanager
    def untouched(self, *, generators_alone: bool = False) -> Iterator[None]:
        """Restores the Dataset and all generators at the end.

        Args:
            generators_alone: leave the Dataset's attributes as reading rows left them, which takes no time.

        Raises:
            CannotAdopt: reading rows opened files or changed the Dataset.
        """
        snapshot = _Snapshot(self.dataset, generators_alone)
        opened = _Opened()
        try:
            with opened:
                yield
        finally:
            changed = snapshot.restore()
        # The first rows import what they need, from files too.
        if opened.names or min(self._file_reads[1:], default=0.0) > _OFTEN:
            name = f", such as {opened.names[0]!r}" if opened.names else ""
            raise CannotAdopt(
                f"{self.where} reads files{name}: they may be larger than memory or change. Read them once into "
                f"tensors, in __init__. {GETITEMS}"
            )
        if changed:
            raise CannotAdopt(
                f"{self.where} changes {changed[0]}: its rows may depend on which were read before. Make it in "
                f"__init__. {GETITEMS}"
            )


def _flat(row: Any) -> tuple[list[Any], Any]:
    """Returns the values of a row and its structure; most rows are a plain tuple of them."""
    if type(row) in (tuple, list) and not any(
        isinstance(value, _CONTAINERS) for value in row
    ):
        return list(row), (type(row), len(row))
    return pytree.tree_flatten(row)


_CONTAINERS = (tuple, list, dict, deque)


def _line(dataset: Any) -> str:
    code = getattr(getattr(type(dataset), "__getitem__", None), "__code__", None)
    return f" ({code.co_filename}:{code.co_firstlineno})" if code else ""


def words(dtype: torch.dtype, shape: Sequence[int]) -> str:
    """Returns a dtype and a shape as text."""
    return f"{str(dtype).removeprefix('torch.')} {tuple(shape)}"


def seed_everything(seed: int) -> None:
    """Seeds the global generators of random, numpy and torch."""
    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


class _Opened:
    """Notes which files are opened in this thread, also for reading.

    FilesWritten has an audit hook instead of functions in place of ``open``. Python cannot remove a hook, and with one
    each ``id()`` takes four times as long. A diagnosis ends with a page, but here training goes on.
    """

    def __enter__(self) -> _Opened:
        self.names: list[str] = []
        self._thread = threading.get_ident()
        self._functions = [
            (module, name, getattr(module, name)) for module, name in _OPENERS
        ]
        for module, name, function in self._functions:
            setattr(module, name, self._noting(function))
        return self

    def __exit__(self, *_: object) -> None:
        for module, name, function in self._functions:
            setattr(module, name, function)

    def _noting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        def noting(file: Any, *rest: Any, **options: Any) -> Any:
            # What other threads open meanwhile is not the Dataset's.
            if threading.get_ident() == self._thread and not str(file).endswith(
                _NOT_NOTED
            ):
                self.names.append(str(file))
            return function(file, *rest, **options)

        return noting


_OPENERS: tuple[tuple[Any, str], ...] = ((builtins, "open"), (io, "open"), (os, "open"))
_COUNTERS = "/proc/thread-self/io"
_NOT_NOTED = (".py", _COUNTERS)  # a source is read for a warning's text
_OFTEN = 0.25  # reads of files for each row


def _reads() -> int:
    """Returns the number of this thread's reads from files; 0 if the system does not count them."""
    try:
        handle = os.open(_COUNTERS, os.O_RDONLY)
    except OSError:
        return 0
    try:
        fields = os.read(handle, 4096).split()
        return int(fields[fields.index(b"syscr:") + 1])
    finally:
        os.close(handle)


def _children(value: Any) -> Iterator[tuple[str, Any]]:
    """Yields the values of an object, each with the text after the object's name."""
    if isinstance(value, Mapping | list | tuple):
        if len(value) <= _MANY:
            items: Iterable[tuple[Any, Any]] = (
                value.items() if isinstance(value, Mapping) else enumerate(value)
            )
            for key, item in items:
                yield f"[{key!r}]", item
    elif is_frame(value):
        for name in value.columns:
            yield f"[{name!r}]", value[name]
    elif (
        not isinstance(value, type | Tensor | np.ndarray)
        and not callable(value)
        and not hasattr(value, "iloc")
    ):
        for name, item in getattr(value, "__dict__", {}).items():
            yield f".{name}", item


def held_by(
    value: Any, path: str = "", depth: int = _DEPTH
) -> Iterator[tuple[str, Any]]:
    """Yields the values of an object, up to three steps away, each with its path.

    It looks for columns: it follows tables of pandas and objects of any library, but no classes, methods and closures.
    :func:`~torchrec_ext.observe.reached.reachable_from` looks for what a step may change.
    """
    for name, item in _children(value):
        yield f"{path}{name}".removeprefix("."), item
        if depth > 1:
            yield from held_by(item, f"{path}{name}", depth - 1)


def is_frame(value: Any) -> bool:
    """Says whether an object is a table of named columns, such as those of pandas."""
    return hasattr(value, "columns") and hasattr(value, "iloc")


class _Snapshot:
    """The state that reading a row may change: all generators, and the attributes and containers of a Dataset.

    Generators are put back by :mod:`torchrec_ext.observe`. The rest is not: StateCopy puts everything back without
    a word, and here the first change is an error that names its path, but for a look-up in a defaultdict.
    """

    def __init__(self, dataset: Any, generators_alone: bool) -> None:
        self._generators_alone = generators_alone
        self._generators = [copy_global_generators()]
        self._objects: list[tuple[str, Any, dict[str, Any]]] = []
        self._containers: list[tuple[str, Any, Any]] = []
        self._arrays: list[tuple[str, Any, Any]] = []
        for path, value in [("", dataset), *held_by(dataset)]:
            self._keep(path, value)

    def _keep(self, path: str, value: Any) -> None:
        if isinstance(value, GENERATORS):
            self._generators.append(copy_generator(value))
        elif self._generators_alone:
            return
        elif isinstance(value, dict | list | set):
            self._containers.append((path, value, copy.copy(value)))
        elif isinstance(value, Tensor):
            # Its version tells of a write, without a copy.
            self._arrays.append((path, value, value._version))
        elif (
            isinstance(value, np.ndarray)
            and value.dtype != object
            and value.nbytes <= _MOST_BYTES
        ):
            self._arrays.append((path, value, value.copy()))
        elif not callable(value) and not is_frame(value) and hasattr(value, "__dict__"):
            self._objects.append((path, value, dict(vars(value))))

    def restore(self) -> list[str]:
        """Returns the names of what changed."""
        for put_back in self._generators:
            put_back()
        return [
            *self._restored_objects(),
            *self._restored_containers(),
            *self._restored_arrays(),
        ]

    def _restored_objects(self) -> Iterator[str]:
        for path, value, before in self._objects:
            after = vars(value)
            # This object stands for an attribute that is not there, because None may be
            # a value.
            changed = [
                name
                for name in {**before, **after}
                if before.get(name, self) is not after.get(name, self)
            ]
            if changed:
                after.clear()
                after.update(before)
                yield ".".join(filter(None, ("self", path, changed[0])))

    def _restored_containers(self) -> Iterator[str]:
        for path, value, before in self._containers:
            if _alike(value, before):
                continue
            is_look_up = False
            if isinstance(value, defaultdict):
                # A look-up in a defaultdict makes an empty entry.
                new = [item for key, item in value.items() if key not in before]
                is_look_up = len(value) == len(before) + len(new) and not any(new)
            value.clear()
            if isinstance(value, list):
                value.extend(before)
            else:
                value.update(before)
            if not is_look_up:
                yield f"self.{path}"

    def _restored_arrays(self) -> Iterator[str]:
        for path, value, before in self._arrays:
            if isinstance(value, Tensor):
                if value._version != before:
                    yield f"self.{path}"
            elif value.tobytes() != before.tobytes():
                value[...] = before
                yield f"self.{path}"


def _alike(value: Any, before: Any) -> bool:
    """Says whether a container holds the same objects as its copy."""
    if len(value) != len(before):
        return False
    if isinstance(value, set):
        return bool(value == before)
    if isinstance(value, dict):
        return all(map(operator.is_, value, before)) and all(
            map(operator.is_, value.values(), before.values())
        )
    return all(map(operator.is_, value, before))
