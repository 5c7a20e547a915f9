"""Bundle: a trained model for serving: graphs, tables, stored rows, items and users, proven by an audit.

Axis letters: B rows, N items, L list length, D embedding dim, Wq and Wc the widths of a query and of a stored row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from torchrec_ext.data.preprocess.columns import is_list_column
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.retrieval.catalogue import (
    USERS,
    IdArray,
    ItemTable,
    UserTable,
    read_table,
)
from torchrec_ext.retrieval.columns import (
    Columns,
    ModelColumn,
    Rows,
    Values,
    latest,
)
from torchrec_ext.retrieval.manifest import (
    ANEW,
    BundleError,
    Manifest,
    check_files,
)
from torchrec_ext.retrieval.onnx_file import open_graph
from torchrec_ext.schema.validation import DataError
from torchrec_ext.sealed import existing_folder

Floats = NDArray[np.float32]
AUDIT = "audit.arrow"
PREPROCESSOR = "preprocessor"
ROWS = "rows.npy"
POSITION = "position"
LOGIT = "logit"
# Rows that a graph scores together are a multiple of this, the last ones empty. So a
# pair's logit does not depend, in its last digits, on the pairs beside it.
ROWS_STEP = 16


class Parity(NamedTuple):
    """Result of an audit: pairs, greatest difference of a logit from the trained model's, and the allowed one."""

    pairs: int
    greatest_difference: float
    allowed: float


class GraphError(BundleError):
    """ONNX Runtime cannot run a graph on some inputs; ``why`` is its own reason."""

    def __init__(self, path: Path, why: str) -> None:
        super().__init__(f"{path}: ONNX Runtime cannot run it ({why}); {ANEW}")
        self.why = why


class Side:
    """One side of a model, its queries or its candidates: columns, tables and a graph.

    Args:
        folder: folder of the bundle.
        name: ``query`` or ``candidate``.
        content: the manifest's ``graphs``, ``columns`` and ``tables``.
        tables: arrays by name, of :func:`open_tables`.
        preprocessor: see :class:`~torchrec_ext.retrieval.columns.Columns`.
        threads: threads of the graph.

    Raises:
        BundleError: graph, leaves, tables and columns do not fit together.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        content: Mapping[str, Any],
        tables: Mapping[str, NDArray[Any]],
        preprocessor: FittedPreprocessor | None = None,
        *,
        threads: int = 1,
    ) -> None:
        entry = content["graphs"][name]
        self._path = folder / f"{name}.onnx"
        self.width = int(entry["width"])
        self._tables = tables
        self._leaves: Sequence[Mapping[str, Any]] = entry["leaves"]
        columns = {
            column: ModelColumn(**values)
            for column, values in content["columns"][name].items()
        }
        self.columns = Columns(columns, preprocessor)
        self._session = open_graph(self._path, threads=threads)
        inputs = {each.name for each in self._session.get_inputs()}
        filled = {str(leaf["input"]) for leaf in self._leaves}
        if inputs != filled:
            raise BundleError(
                f"{self._path}: takes {sorted(inputs)}, the manifest fills {sorted(filled)}; {ANEW}"
            )
        for leaf in self._leaves:
            self._check(leaf["column"], leaf["table"])

    def _check(self, name: str, table: str) -> None:
        """Refuses a column or a table that is missing, and a table with fewer rows than the column's ids."""
        column = self.columns.columns.get(name)
        largest, rows = 0, 0
        if column is not None and column.rows is not None:
            largest = max(column.rows, (column.oov or 0) + 1)
        if table in self._tables:
            rows = len(self._tables[table])
        if column is None or (table and not 0 < largest <= rows):
            raise BundleError(
                f"{self._path}: column '{name}' has ids up to {largest - 1}, its table '{table}' has {rows} rows; "
                f"{ANEW}"
            )

    def __call__(self, columns: Mapping[str, Values]) -> Floats:
        """Returns (B, W) outputs of B rows of the model's columns."""
        inputs = {leaf["input"]: self._fill(leaf, columns) for leaf in self._leaves}
        output = _run(self._session, self._path, inputs)
        if output.ndim != 2 or output.shape[1] != self.width:
            raise BundleError(
                f"{self._path}: gives {output.shape}, must be (B, {self.width}); {ANEW}"
            )
        return output

    def embed(self, rows: Rows | pa.Table | Sequence[Mapping[str, Any]]) -> Floats:
        """Returns (B, W) outputs of B raw rows; see :meth:`Columns.read` for the rows and what is refused."""
        return self(self.columns.read(rows).columns)

    def embed_row(self, row: Mapping[str, Any]) -> Floats:
        """Returns the (W,) output of one raw row, read as a request's; see :meth:`Columns.read_row`."""
        vector: Floats = self(self.columns.read_row(row).columns)[0]
        return vector

    def list_widths(self) -> dict[str, int]:
        """Returns the lengths of lists whose rows all have one length, by column."""
        widths = {}
        for leaf in self._leaves:
            column = self.columns.columns[leaf["column"]]
            if column.padded or not is_list_column(column.type):
                continue
            if leaf["kind"] in ("column", "rows"):
                widths[str(leaf["column"])] = int(leaf["shape"][0])
            elif leaf.get("length") and leaf.get("padding") is None:
                widths[str(leaf["column"])] = int(leaf["length"])
        return widths

    def unknown_row(self) -> Floats:
        """Returns the (W,) output of a row of which nothing is known; raises DataError if there is none."""
        row: Floats = self(self.columns.unknown_row(self.list_widths()))[0]
        return row

    def _fill(
        self, leaf: Mapping[str, Any], columns: Mapping[str, Values]
    ) -> NDArray[Any]:
        kind = leaf["kind"]
        name = leaf["column"]
        column = self.columns.columns[name]
        values = columns[name]
        if kind == "pooled":
            bags = _bags(name, values, leaf.get("length"), leaf.get("padding"))
            return _pooled(self._tables[leaf["table"]], bags, leaf["pooling"])
        if column.padded:
            values = latest(values, column.longest)
        if kind == "lengths":
            assert values.lengths is not None
            return values.lengths.astype(np.int64, copy=False)
        dense = values.values
        if column.padded:
            dense = _padded(values, column.longest)
        elif values.lengths is not None:
            dense = _matrix(name, values, leaf["shape"][0])
        if kind == "rows":
            found = self._tables[leaf["table"]].take(dense, axis=0, mode="clip")
            return found.astype(np.float32, copy=False)
        return dense.astype(leaf["dtype"], copy=False)


def _matrix(name: str, values: Values, width: int) -> NDArray[Any]:
    """Returns (B, W) numbers of lists of one length."""
    lengths = values.lengths
    assert lengths is not None
    if (lengths != width).any():
        row = int((lengths != width).argmax())
        raise DataError(
            f"column '{name}', row {row}: {lengths[row]} numbers, must be a list of {width}; send as many, padded as "
            "in training"
        )
    return values.values.reshape(len(lengths), width)


def _padded(values: Values, size: int | None) -> NDArray[Any]:
    """Returns (B, L) entries of lists, with zeros behind those of shorter ones."""
    lengths = values.lengths
    assert lengths is not None
    if size is None:
        size = max(1, int(lengths.max(initial=0)))
    padded = np.zeros((len(lengths), size), values.values.dtype)
    padded[np.arange(size) < lengths[:, None]] = values.values
    return padded


def _bags(name: str, bags: Values, length: int | None, padding: int | None) -> Values:
    """Returns bags without the row that fills them up to ``length`` ids; without such a row, all have that length."""
    lengths = bags.lengths
    if length is None or lengths is None:
        return bags
    if padding is None:
        _matrix(name, bags, length)
        return bags
    if (lengths > length).any():
        row = int((lengths > length).argmax())
        raise DataError(
            f"column '{name}', row {row}: {lengths[row]} numbers, must be {length} or fewer; send those that training "
            "would take"
        )
    stays = bags.values != padding
    owners = np.repeat(np.arange(len(lengths)), lengths)[stays]
    return Values(bags.values[stays], np.bincount(owners, minlength=len(lengths)))


def _pooled(table: NDArray[Any], bags: Values, pooling: str) -> Floats:
    """Returns (B, D) sums or means of bags of rows; an empty bag is zeros."""
    rows = table.take(bags.values, axis=0, mode="clip").astype(np.float32, copy=False)
    lengths = bags.lengths
    if lengths is None:
        lengths = np.ones(len(rows), np.int64)
    if len(lengths) == 1:
        pooled = np.add.reduce(rows, axis=0, keepdims=True)
    else:
        pooled = np.zeros((len(lengths), table.shape[1]), np.float32)
        starts = lengths.cumsum() - lengths
        # Row by row, so that a row's sum does not depend on the rows beside it.
        for row in np.flatnonzero(lengths).tolist():
            bag = rows[starts[row] : starts[row] + lengths[row]]
            np.add.reduce(bag, axis=0, out=pooled[row])
    if pooling == "mean":
        pooled /= np.maximum(lengths, 1)[:, None].astype(np.float32)
    return pooled


def _run(session: Any, path: Path, inputs: Mapping[str, NDArray[Any]]) -> NDArray[Any]:
    try:
        output: NDArray[Any] = session.run(None, inputs)[0]
    # Its errors have no class of their own.
    except Exception as error:
        raise GraphError(path, str(error).splitlines()[0][:100]) from None
    if output.dtype != np.float32:
        raise BundleError(f"{path}: gives {output.dtype}, must be float32; {ANEW}")
    return output


def open_array(path: Path) -> NDArray[Any]:
    """Opens a .npy file with a matrix of float32 or float16, memory-mapped.

    Raises:
        BundleError: it is damaged, or holds something else.
    """
    try:
        mapped: NDArray[Any] = np.load(path, mmap_mode="r", allow_pickle=False)
    except (OSError, ValueError, EOFError, SyntaxError) as error:
        raise BundleError(
            f"{path}: cannot be read as a .npy file ({str(error)[:80]}); {ANEW}"
        ) from None
    # A memmap's own class makes every slice slower.
    array = mapped.view(np.ndarray)
    is_matrix = array.ndim == 2 and array.dtype in (np.float32, np.float16)
    if not is_matrix or not array.flags.c_contiguous:
        raise BundleError(
            f"{path}: is {array.shape} of {array.dtype}, must be a matrix of float32 or float16 in C order; {ANEW}"
        )
    return array


def open_tables(folder: Path, content: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
    """Opens the tables of a bundle, memory-mapped; raises as :func:`open_array`."""
    return {name: open_array(folder / file) for name, file in content["tables"].items()}


class Bundle:
    """An open, immutable bundle; any number of threads may read it. It needs neither torch nor a GPU.

    Attributes:
        folder: folder of the bundle.
        manifest: digest, parity and content.
        query: side of the queries: raw rows to (B, Wq).
        candidate: side of the candidates: raw rows to (B, Wc).
        rows: (N, Wc) stored rows of the items, memory-mapped.
        items: ids, titles and attributes by position.
        users: table of users from the export, or None.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, threads: int = 1) -> None:
        """See :meth:`load`."""
        self.folder = folder
        self.manifest = manifest
        content = manifest.content
        preprocessor = None
        if (folder / PREPROCESSOR).is_dir():
            preprocessor = FittedPreprocessor.load(folder / PREPROCESSOR)
        self._tables = tables = open_tables(folder, content)
        self.query, self.candidate = (
            Side(folder, name, content, tables, preprocessor, threads=threads)
            for name in ("query", "candidate")
        )
        self._path = folder / "pairs.onnx"
        self._session = open_graph(self._path, threads=threads)
        names = sorted(each.name for each in self._session.get_inputs())
        if names != ["query", "rows"]:
            raise BundleError(
                f"{self._path}: takes {names}, must take ['query', 'rows']; {ANEW}"
            )
        self.items = ItemTable.open(folder)
        count = content["items"]["rows"]
        if len(self.items) != count:
            raise BundleError(
                f"{folder}: items.arrow has {len(self.items)} items, the manifest says {count}; {ANEW}"
            )
        self.rows = open_array(folder / ROWS)
        if self.rows.shape != (count, self.candidate.width):
            raise BundleError(
                f"{folder / ROWS}: is {self.rows.shape}, must be {(count, self.candidate.width)}; {ANEW}"
            )
        self.users: UserTable | None = None
        if content.get("users"):
            self.users = UserTable.open(folder, content["users"]["key"], count)

    @classmethod
    def load(
        cls, folder: Path | str, *, verify: bool = True, threads: int = 1
    ) -> Bundle:
        """Opens a bundle, checks that its files belong together, and repeats its audit.

        Args:
            folder: folder of a bundle.
            verify: read every file and compare its digest, about 1 s for each GB, and audit; without, compare names and
                sizes alone.
            threads: threads of ONNX Runtime for a call.

        Raises:
            BundleError: a file is missing, unlisted, truncated or changed, belongs to another bundle, or holds an
                unusable value, or a logit is another one; the message names it and the remedy.
        """
        folder = existing_folder(Path(folder))
        try:
            manifest = Manifest.open(folder)
            check_files(folder, manifest.content["files"], digests=verify)
            bundle = cls(folder, manifest, threads=threads)
            if verify:
                bundle.check_values()
                bundle.audit()
            return bundle
        except (KeyError, TypeError, AttributeError, IndexError) as error:
            raise BundleError(
                f"{folder}: the manifest lacks {error}, or has another type for it; {ANEW}"
            ) from None
        except BundleError:
            raise
        except (OSError, ValueError) as error:
            raise BundleError(f"{folder}: {error}; {ANEW}") from None

    @property
    def digest(self) -> str:
        """The bundle's name in answers."""
        return self.manifest.digest

    @property
    def metric(self) -> str:
        """``product`` if a logit is the dot product of query and stored row, else ``top_nn``."""
        return str(self.manifest.content["metric"])

    def digest_of(self, side: str) -> str:
        """Returns the digest of all behind the vectors of a side, ``query`` or ``candidate``; stores keep it."""
        return str(self.manifest.content["towers"][side]["digest"])

    @property
    def features_digest(self) -> str:
        """The digest of the users' features; empty if the bundle knows no users."""
        files = self.manifest.content["files"]
        return "" if self.users is None else str(files[USERS]["sha256"])

    @cached_property
    def unknown_item(self) -> Floats:
        """(1, Wc) row of an item of which nothing is known; raises DataError if the model has none."""
        return self.candidate.unknown_row()[None]

    def pairs(self, query: Floats, rows: NDArray[Any]) -> Floats:
        """Returns the (N,) logits of a query (Wq,) with stored rows (N, Wc), or (N, Wc) float32 of any items."""
        size = len(rows)
        if size % ROWS_STEP or rows.dtype != np.float32:
            whole = -(-size // ROWS_STEP) * ROWS_STEP
            padded = np.empty((whole, rows.shape[1]), np.float32)
            padded[:size] = rows
            padded[size:] = 0
            rows = padded
        inputs = {"query": query.reshape(1, -1), "rows": rows}
        logits = _run(self._session, self._path, inputs)
        if logits.shape != (len(rows),):
            raise BundleError(
                f"{self._path}: gives {logits.shape} for {len(rows)} rows, must be ({len(rows)},); {ANEW}"
            )
        return logits[:size]

    def logits(self, query: Floats, positions: IdArray) -> Floats:
        """Returns the (N,) logits of a query (Wq,) with the items at positions (N,)."""
        return self.pairs(query, self.rows.take(positions, axis=0, mode="clip"))

    def check_values(self) -> None:
        """Refuses NaN and infinity in stored rows and tables: a digest proves that a value is unchanged, not usable.

        Raises:
            BundleError: the message names the item, or the table and its row.
        """
        row = _first_nonfinite(self.rows)
        if row is not None:
            item = self.items.ids.ids([row])[0]
            raise BundleError(
                f"{self.folder / ROWS}: the row of item {str(item)[:60]} (position {row}) holds NaN or infinity; train "
                "with finite values, and export again"
            )
        for name, table in self._tables.items():
            row = _first_nonfinite(table)
            if row is not None:
                raise BundleError(
                    f"{self.folder}: table '{name}', row {row} holds NaN or infinity; train with finite values, and "
                    "export again"
                )

    def audit(self) -> Parity:
        """Computes the audit's logits by the functions of a request, and compares them with the trained model's.

        Each request is answered twice: its query in a batch of all, and alone.

        Raises:
            BundleError: a logit differs by more than the manifest's tolerance.
        """
        path = self.folder / AUDIT
        table = read_table(path)
        if not {POSITION, LOGIT} <= set(table.column_names):
            raise BundleError(f"{path}: has no pairs, so nothing is proven; {ANEW}")
        queries = table.drop_columns([POSITION, LOGIT])
        allowed = float(self.manifest.content["audit"]["tolerance"])
        try:
            batch = self.query.embed(queries)
            # As a request gives them: Python's own values, a row by itself.
            rows = queries.to_pylist()
            singles = [self.query.embed_row(row) for row in rows]
        except DataError as error:
            raise BundleError(f"{path}: {error}; {ANEW}") from None
        greatest = 0.0
        pairs = 0
        both = zip(table[POSITION].to_pylist(), table[LOGIT].to_pylist(), strict=True)
        for index, (places, logits) in enumerate(both):
            positions = np.array(places or [], np.int64)
            expected = np.array(logits or [], np.float32)
            inside = (positions >= 0) & (positions < len(self.rows))
            if len(positions) != len(expected) or not inside.all():
                raise BundleError(
                    f"{path}: row {index} names items that the bundle lacks; {ANEW}"
                )
            for query in (singles[index], batch[index]):
                difference = np.abs(self.logits(query, positions) - expected)
                # NaN must not pass as a small difference.
                worst = np.nan_to_num(difference, nan=np.inf).max(initial=0.0)
                greatest = max(greatest, float(worst))
            pairs += len(positions)
        if not greatest <= allowed:
            raise BundleError(
                f"{self.folder}: {pairs} audited logits differ from the trained model's by up to {greatest:.3g}, "
                f"allowed is {allowed:.3g}: it would rank otherwise; {ANEW}"
            )
        if not pairs:
            raise BundleError(f"{path}: has no pairs, so nothing is proven; {ANEW}")
        return Parity(pairs, greatest, allowed)


def _first_nonfinite(rows: NDArray[Any]) -> int | None:
    """Returns the first row with NaN or infinity, or None."""
    step = max(1, 2**18 // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        # Without a mask in memory: a NaN anywhere makes both extremes NaN.
        if block.size and not np.isfinite([block.min(), block.max()]).all():
            return start + int((~np.isfinite(block)).any(axis=1).argmax())
    return None
