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

from torchrec_ext.data.columns import Column
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
    padded,
)
from torchrec_ext.retrieval.manifest import (
    ANEW,
    BundleError,
    Manifest,
    check_files,
)
from torchrec_ext.retrieval.onnx_file import open_graph
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
        preprocessor: see :class:`~torchrec_ext.retrieval.columns.Columns`.
        threads: threads of the graph.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        content: Mapping[str, Any],
        preprocessor: FittedPreprocessor | None = None,
        *,
        threads: int = 1,
    ) -> None:
        entry = content["graphs"][name]
        self._path = folder / f"{name}.onnx"
        self.width = int(entry["width"])
        self._leaves: Sequence[Mapping[str, Any]] = entry["leaves"]
        files: Mapping[str, str] = content["tables"]
        # Mapped: both sides and all workers share the memory.
        self._tables = {
            leaf["table"]: open_array(folder / files[leaf["table"]])
            for leaf in self._leaves
            if leaf["table"] in files
        }
        columns = {
            column: ModelColumn(**values)
            for column, values in content["columns"][name].items()
        }
        self.columns = Columns(columns, preprocessor)
        self._session = open_graph(self._path, threads=threads)

    def __call__(self, columns: Mapping[str, Column]) -> Floats:
        """Returns (B, W) outputs of B rows of the model's columns."""
        inputs = {leaf["input"]: self._fill(leaf, columns) for leaf in self._leaves}
        return _run(self._session, self._path, inputs)

    def embed(self, rows: pa.Table | Sequence[Mapping[str, Any]]) -> Floats:
        """Returns (B, W) outputs of B raw rows; see :meth:`Columns.read` for the rows and what is refused."""
        return self(self.columns.read(rows).columns)

    def _fill(
        self, leaf: Mapping[str, Any], columns: Mapping[str, Column]
    ) -> NDArray[Any]:
        kind = leaf["kind"]
        column = columns[leaf["column"]]
        if kind == "pooled":
            table = self._tables[leaf["table"]]
            return _pooled(table, column, leaf["pooling"])
        longest = self.columns.columns[leaf["column"]].longest
        if longest is not None and column.ragged:
            column = column.last(longest)
        if kind == "lengths":
            return column.lengths
        dense = column.values
        if column.ragged:
            dense = padded(column, longest or max(1, column.lengths.max(initial=0)))
        if kind == "rows":
            found = self._tables[leaf["table"]].take(dense, axis=0, mode="clip")
            return found.astype(np.float32, copy=False)
        return dense.astype(leaf["dtype"], copy=False)


def _pooled(table: NDArray[Any], bags: Column, pooling: str) -> Floats:
    """Returns (B, D) sums or means of bags of rows; an empty bag is zeros."""
    lengths = bags.lengths
    rows = table.take(bags.values, axis=0, mode="clip").astype(np.float32, copy=False)
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


def _run(session: Any, path: Path, inputs: Mapping[str, NDArray[Any]]) -> Floats:
    try:
        output: Floats = session.run(None, inputs)[0]
        return output
    # Its errors have no class of their own.
    except Exception as error:
        raise GraphError(path, str(error).splitlines()[0][:100]) from None


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
    return mapped.view(np.ndarray)


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
        self.query, self.candidate = (
            Side(folder, name, content, preprocessor, threads=threads)
            for name in ("query", "candidate")
        )
        self._path = folder / "pairs.onnx"
        self._session = open_graph(self._path, threads=threads)
        self.items = ItemTable.open(folder)
        self.rows = open_array(folder / ROWS)
        if len(self.items) != len(self.rows):
            raise BundleError(
                f"{folder}: has {len(self.items)} items and {len(self.rows)} rows of them; {ANEW}"
            )
        self.users: UserTable | None = None
        if content.get("users"):
            self.users = UserTable.open(folder, content["users"]["key"])

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
            BundleError: a file is missing, unlisted, truncated or changed, or belongs to another bundle, or a logit is
                another one; the message names it and the remedy.
        """
        folder = existing_folder(Path(folder))
        try:
            manifest = Manifest.open(folder)
            check_files(folder, manifest.content["files"], digests=verify)
            bundle = cls(folder, manifest, threads=threads)
            if verify:
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
        return self.candidate(self.candidate.columns.unknown_row())

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
        return _run(self._session, self._path, inputs)[:size]

    def logits(self, query: Floats, positions: IdArray) -> Floats:
        """Returns the (N,) logits of a query (Wq,) with the items at positions (N,)."""
        return self.pairs(query, self.rows.take(positions, axis=0, mode="clip"))

    def answered(self, queries: pa.Table, positions: IdArray) -> Floats:
        """Returns (2, Q, A) logits of queries with items at positions (Q, A): each query alone, and in a batch."""
        # Alone as a request gives it: Python's own values, a row by itself.
        side = self.query
        alone = [
            side(side.columns.read_row(row).columns) for row in queries.to_pylist()
        ]
        ways = alone, side.embed(queries)
        return np.array([list(map(self.logits, each, positions)) for each in ways])

    def audit(self) -> Parity:
        """Computes the audit's logits by the functions of a request, and compares them with the trained model's.

        Raises:
            BundleError: a logit differs by more than the manifest's tolerance.
        """
        path = self.folder / AUDIT
        table = read_table(path)
        allowed = float(self.manifest.content["audit"]["tolerance"])
        try:
            positions = np.array(table[POSITION].to_pylist(), np.int64)
            expected = np.array(table[LOGIT].to_pylist(), np.float32)
            found = self.answered(table.drop_columns([POSITION, LOGIT]), positions)
            greatest = float(np.abs(found - expected).max())
        except BundleError:
            raise
        except (ValueError, KeyError, TypeError) as error:
            raise BundleError(f"{path}: {error}; {ANEW}") from None
        # Written so, because NaN is below nothing.
        if not greatest <= allowed:
            raise BundleError(
                f"{self.folder}: {expected.size} audited logits differ from the trained model's by up to "
                f"{greatest:.3g}, allowed is {allowed:.3g}: it would rank otherwise; {ANEW}"
            )
        return Parity(expected.size, greatest, allowed)
