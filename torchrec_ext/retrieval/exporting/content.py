"""BundleContent: writes the files of a bundle on rank 0 in order of their dependence, and checks them on the way.

Catalogue and NamedUsers are the data of an export: the items to recommend from, and the users.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor, nn

from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.retrieval.bundle import audit as audits
from torchrec_ext.retrieval.bundle.architecture import read_tensors
from torchrec_ext.retrieval.bundle.audit import LOGIT_SHARE, LiveModel
from torchrec_ext.retrieval.bundle.bundle import ITEMS, PROJECTED, STORE, USERS
from torchrec_ext.retrieval.bundle.encoder import (
    ARCHITECTURE,
    INTERACTION,
    PREPROCESSOR_FILE,
    Architecture,
    RowEncoder,
    named_tables,
    open_encoder,
    open_interaction,
    projection_digest,
    raw_request_columns,
    tower_digest,
    towers_of,
)
from torchrec_ext.retrieval.bundle.index_kinds import (
    INDEX_KINDS,
    IndexKind,
    build_index,
    check_index_metric,
)
from torchrec_ext.retrieval.bundle.manifest import BundleError, Manifest, file_digests
from torchrec_ext.retrieval.bundle.request_columns import Columns
from torchrec_ext.retrieval.bundle.tables import (
    even_rows,
    raw_column_type,
    write_items,
    write_users,
)
from torchrec_ext.retrieval.index.projection import projection
from torchrec_ext.retrieval.store.ids import IdMap
from torchrec_ext.retrieval.store.row_formats import ROW_FORMATS, Dtype
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.retrieval.store.writer import write_store
from torchrec_ext.sealed import package_versions
from torchrec_ext.tensor_file import Shape, TensorWriter


@dataclass(frozen=True, kw_only=True, eq=False)
class Catalogue:
    """The I items to recommend from, in the order of their positions.

    Args:
        ids: (I,) int64 or str ids.
        features: I rows with the raw columns of the candidate tower.
        titles: (I,) titles for display, or None.
        categories: (I,) lists of names to filter by, as the attribute ``categories``, or None.
        attributes: I rows of further columns to filter by: whole numbers, text or lists of them; None for none.
        trained: ids in the training rows, or None. All of them must be among ``ids``.
    """

    ids: NDArray[Any]
    features: pa.Table
    titles: Sequence[str] | None = None
    categories: Sequence[Sequence[str]] | None = None
    attributes: pa.Table | None = None
    trained: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        names = ("features", "titles", "categories", "attributes")
        _check_lengths(
            "catalogue", vars(self), names, "give one for each item, in their order"
        )
        if not len(self.ids):
            raise BundleError(
                "catalogue: has no items; give the rows that can be recommended"
            )

    @cached_property
    def id_map(self) -> IdMap:
        """Map of the ids to positions."""
        return IdMap.build(self.ids)

    @cached_property
    def missing(self) -> NDArray[Any]:
        """Trained ids that are not among the items."""
        if self.trained is None:
            return np.zeros(0)
        return self.trained[self.id_map.positions(self.trained) < 0]


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedUsers:
    """U users with their features and items, so that requests can name a user by id alone.

    Args:
        key: request column with the user's id, whether a tower reads it or not.
        ids: (U,) int64 or str ids.
        features: U rows with raw columns of the query towers; a request's own values take precedence.
        unknown: raw columns of an unknown user.
        seen: (U,) lists of positions of items a user has taken.
        liked: (U,) lists of positions of items a user has liked, oldest first, for display.
    """

    key: str
    ids: NDArray[Any]
    features: pa.Table
    unknown: Mapping[str, Any]
    seen: pa.Array
    liked: pa.Array

    def __post_init__(self) -> None:
        names = ("features", "seen", "liked")
        _check_lengths("users", vars(self), names, "give one for each user")
        missing = [
            name for name in self.features.column_names if name not in self.unknown
        ]
        if missing:
            raise BundleError(
                f"users: unknown lacks {missing}; give one value for each column of features"
            )


def _check_lengths(
    owner: str, values: Mapping[str, Any], names: Sequence[str], remedy: str
) -> None:
    count = len(values["ids"])
    for name in names:
        if values[name] is not None and len(values[name]) != count:
            raise BundleError(
                f"{owner}: {len(values[name]):,} {name} for {count:,} ids; {remedy}"
            )


ExportProgress = Callable[[str, int, int], None]
INDEX_QUERIES = 1024  # queries for an approximate index: half tune it, half measure it
_BLOCK_ROWS = 4096  # rows of the catalogue in a block; a fixed size, because vectors depend on it in the last bits


ExportTables = Literal["trained", "int8"]
OVERLAP_K = 10
OVERLAP_QUERIES = 64
OVERLAP_ITEMS = 4096


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """Formats of an export; see :func:`torchrec_ext.retrieval.exporting.export.export`."""

    store: Dtype = "fp32"
    index: IndexKind = "exact"
    recall: float = 0.95
    tables: ExportTables = "trained"
    overlap: float = 0.9

    def __post_init__(self) -> None:
        choices = {
            "tables": get_args(ExportTables),
            "store": ROW_FORMATS,
            "index": INDEX_KINDS,
        }
        for name, names in choices.items():
            if getattr(self, name) not in names:
                raise BundleError(
                    f"{name}={getattr(self, name)!r}: must be one of {', '.join(names)}"
                )
        for name in ("overlap", "recall"):
            if not 0 < getattr(self, name) <= 1:
                raise BundleError(
                    f"{name}={getattr(self, name)}: must be greater than 0 and at most 1"
                )


@dataclass(frozen=True, kw_only=True, eq=False)
class BundleContent:
    """Model, data and settings of an export, equal on every rank.

    See :func:`~torchrec_ext.retrieval.exporting.export.export` for the arguments.
    """

    live: LiveModel
    catalogue: Catalogue
    users: NamedUsers | None
    queries: pa.Table
    preprocessor: FittedPreprocessor | None
    oov_ids: Mapping[str, int]
    unseen: Mapping[str, Sequence[int]]
    settings: ExportConfig
    also: tuple[type[nn.Module], ...]
    details: Mapping[str, Any]
    progress: ExportProgress

    def __post_init__(self) -> None:
        # Here, before anything is computed or written.
        check_index_metric(self.settings.index, self.live.metric)
        missing = self.catalogue.missing
        if len(missing):
            raise BundleError(
                f"catalogue: {len(missing):,} ids of the training rows are not in it, {missing[0]} among them; every "
                "id that was trained must be servable: give the whole catalogue"
            )

    @cached_property
    def architecture(self) -> Architecture:
        """Architecture of the bundle."""
        table_names: set[str] = set()
        for tower in self.live.towers.values():
            table_names |= set(named_tables(tower))
        fields = [*self.queries.schema, *self.catalogue.features.schema]
        return Architecture(
            towers=self.live.towers,
            interaction=self.live.interaction,
            metric=self.live.metric,
            # Numbered files: a table's name may contain characters that no file name
            # can have.
            tables={
                name: f"tables/{number:03}.safetensors"
                for number, name in enumerate(sorted(table_names))
            },
            oov_ids=dict(self.oov_ids),
            unseen={name: list(rows) for name, rows in self.unseen.items()},
            # Reversed, because the last type of a column stays: a column of both tables
            # has the query's.
            types={field.name: raw_column_type(field) for field in reversed(fields)},
        )

    @cached_property
    def audit(self) -> audits.Audit:
        """Pairs to compare the bundle with the model."""
        return audits.Audit.choose(
            self.queries, self.catalogue.features, self.catalogue.id_map
        )

    def columns(self, names: Sequence[str]) -> Columns:
        """Returns the reader of raw rows into the columns of some towers."""
        return raw_request_columns(
            self.architecture,
            towers_of(self.architecture, names, self.also),
            self.preprocessor,
        )

    def write(
        self,
        folder: Path,
        shapes: Mapping[str, Shape],
        blocks: Iterator[tuple[str, int, Tensor]],
        dense: Mapping[str, Tensor],
        expected: Tensor,
    ) -> Manifest:
        """Writes every file of the bundle, from weights to manifest.

        Args:
            folder: empty folder.
            shapes: shape of each table by name.
            blocks: table, first row and rows of each block, one table after the other.
            dense: weights of the model outside of tables.
            expected: (P,) logits of the model for the audit's pairs.
        """
        self._write_weights(folder, shapes, blocks, dense)
        self._write_tables(folder)
        towers = self._towers(folder)
        logits, vectors = self.audit.of_towers(*towers)
        remedy = "the bundle would rank otherwise than the model; report it, with the architecture"
        what = "the towers of the bundle and the model that was trained"
        difference = audits.check_logits(
            what, logits, expected, remedy, self.live.rounding
        )
        rounding: dict[str, Any] = {}
        # The exact towers are checked first and then rounded, so that an error of
        # either has its own message.
        if self.settings.tables == "int8":
            queries = _sample(self.queries, OVERLAP_QUERIES)
            items = _sample(self.catalogue.features, OVERLAP_ITEMS)
            best = _best_items(towers, queries, items)
            rounding = _round_tables(folder, self.architecture.tables.values())
            towers = self._towers(folder)
            logits, vectors = self.audit.of_towers(*towers)
            rounded = _best_items(towers, queries, items)
            rounding |= _check_rounded(
                logits, expected, best, rounded, self.settings.overlap
            )
            rounding["items"] = len(items)
        self.audit.write(folder, logits)
        # The stores carry the towers' digests, so the files so far are measured before
        # the stores are written.
        files = file_digests(folder)
        store, store_entries = self._write_stores(folder, towers, files, vectors)
        rows = even_rows(len(self.queries), INDEX_QUERIES)
        index = build_index(
            folder,
            self.settings.index,
            self.settings.recall,
            self.live.metric,
            store,
            towers.query.embed(self.queries.take(pa.array(rows)).to_pydict()),
        )
        allowed = audits.tolerance(expected, self.live.rounding)
        parity = {
            "pairs": len(expected),
            "greatest_difference": difference,
            "allowed": allowed,
        }
        # Not a part of the content, because times and versions differ between equal
        # exports.
        certificate = {
            "parity": parity,
            "calibrated": self.live.calibrated,
            "versions": package_versions(),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
            **self.details,
        }
        architecture = self.architecture
        content = {
            "files": file_digests(folder, entries=files),
            "query": architecture.query,
            "candidate": architecture.candidate,
            "metric": architecture.metric,
            "towers": {
                "query": tower_digest(architecture, architecture.query, files),
                "candidate": store.tower,
            },
            **store_entries,
            "index": index,
            **self._coverage(),
        }
        if rounding:
            content["tables"] = rounding
        manifest = Manifest(content=content, certificate=certificate)
        manifest.save(folder)
        return manifest

    def _towers(self, folder: Path) -> _Towers:
        """Opens the towers and the interaction with the weights in ``folder``."""
        query, candidate = (
            open_encoder(folder, self.architecture, names, self.preprocessor, self.also)
            for names in (self.architecture.query, [self.architecture.candidate])
        )
        interaction = open_interaction(folder, self.architecture, self.also)
        return _Towers(query, candidate, interaction)

    def _coverage(self) -> dict[str, Any]:
        """Returns the manifest's entries for users and items."""
        users: dict[str, Any] | None = None
        if self.users is not None:
            users = {"key": self.users.key, "count": len(self.users.ids)}
        trained: int | None = None
        if self.catalogue.trained is not None:
            trained = len(np.unique(self.catalogue.trained))
        return {
            "users": users,
            "coverage": {
                "items": len(self.catalogue.ids),
                "trained": trained,
                "missing": len(self.catalogue.missing),
            },
        }

    def _write_weights(
        self,
        folder: Path,
        shapes: Mapping[str, Shape],
        blocks: Iterator[tuple[str, int, Tensor]],
        dense: Mapping[str, Tensor],
    ) -> None:
        # Not by safetensors' save_file: it ignores the umask, and only the owner may
        # read its files.
        (folder / "tables").mkdir()
        (folder / "towers").mkdir()
        total_bytes = sum(shapes[name].bytes for name in self.architecture.tables)
        done_bytes = 0
        for name, table in groupby(blocks, key=itemgetter(0)):
            with TensorWriter(
                folder / self.architecture.tables[name], {"weight": shapes[name]}
            ) as out:
                for _, row, rows in table:
                    out.write("weight", row, rows)
                    done_bytes += rows.nbytes
                    self.progress("tables", done_bytes, total_bytes)
        for name in self.architecture.towers:
            (folder / self.architecture.dense_file(name)).write_bytes(
                save(self.live.of_tower(name, dense))
            )
        (folder / INTERACTION).write_bytes(save(self.live.of_interaction(dense)))
        (folder / ARCHITECTURE).write_text(
            json.dumps(self.architecture.as_json(), indent=1, allow_nan=False) + "\n"
        )

    def _write_tables(self, folder: Path) -> None:
        if self.preprocessor is not None:
            self.preprocessor.save(folder / PREPROCESSOR_FILE)
        catalogue = self.catalogue
        write_items(
            folder / ITEMS,
            catalogue.titles,
            catalogue.categories,
            catalogue.attributes,
            len(catalogue.ids),
        )
        users = self.users
        if users is not None:
            write_users(
                folder / USERS,
                IdMap.build(users.ids),
                users.features,
                users.unknown,
                users.seen,
                users.liked,
            )

    def _write_stores(
        self,
        folder: Path,
        towers: _Towers,
        files: Mapping[str, Any],
        vectors: Tensor,
    ) -> tuple[EmbeddingStore, dict[str, Any]]:
        """Writes the catalogue's vectors, and their projected rows if the interaction is projected."""
        dtype = self.settings.store
        store = write_store(
            folder / STORE,
            self._vectors(towers.candidate),
            dtype=dtype,
            tower=tower_digest(self.architecture, [self.architecture.candidate], files),
        )
        positions = torch.from_numpy(self.audit.positions)
        difference = audits.largest_difference(store.rows(positions), vectors)
        differences = {"store_difference": difference}
        entries = {STORE: _entry(store)}
        split = projection(towers.interaction, towers.candidate.width)
        if split.projected:
            # By the tower again and not from the store, whose rows may be rounded.
            blocks = (
                (ids, split.candidates(block))
                for ids, block in self._vectors(towers.candidate)
            )
            projected = write_store(
                folder / PROJECTED,
                blocks,
                dtype=dtype,
                tower=projection_digest(self.architecture, files),
            )
            differences["projected_difference"] = audits.largest_difference(
                projected.rows(positions), split.candidates(vectors)
            )
            entries[PROJECTED] = _entry(projected)
        return store, {**entries, "audit": differences}

    def _vectors(self, candidate: RowEncoder) -> Iterator[tuple[NDArray[Any], Tensor]]:
        ids = self.catalogue.ids
        features = self.catalogue.features
        for start in range(0, len(ids), _BLOCK_ROWS):
            rows = features.slice(start, _BLOCK_ROWS)
            columns = {name: rows[name].combine_chunks() for name in rows.column_names}
            yield ids[start : start + _BLOCK_ROWS], candidate.embed(columns)
            self.progress("vectors", min(start + _BLOCK_ROWS, len(ids)), len(ids))


def _entry(store: EmbeddingStore) -> dict[str, Any]:
    """Returns the manifest's entry of a store."""
    return {
        "digest": store.digest,
        "dtype": store.dtype,
        "width": store.width,
        "tower": store.tower,
    }


class _Towers(NamedTuple):
    """Encoders of the query towers and of the candidate tower, and the interaction."""

    query: RowEncoder
    candidate: RowEncoder
    interaction: nn.Module


def _round_tables(folder: Path, files: Iterable[str]) -> dict[str, Any]:
    """Rewrites every table in int8 with a scale per row, block by block; returns the sizes for the manifest.

    Works for half precision and float32. Open memory maps keep the old files until they are closed.
    """
    int8_format = ROW_FORMATS["int8"]
    bytes_before = 0
    bytes_after = 0
    for file in files:
        rows = read_tensors(folder / file)["weight"]
        shapes = {
            "weight": Shape(tuple(rows.shape), int8_format.numbers),
            "scale": Shape(tuple(rows.shape[:1]), torch.float32),
        }
        with TensorWriter(folder / file, shapes) as out:
            for start in range(0, len(rows), _BLOCK_ROWS):
                int8_rows, scales = int8_format.encode(
                    rows[start : start + _BLOCK_ROWS].float()
                )
                assert scales is not None
                out.write("weight", start, int8_rows)
                out.write("scale", start, scales)
        bytes_before += rows.nbytes
        bytes_after += sum(shape.bytes for shape in shapes.values())
    return {"dtype": "int8", "bytes": bytes_after, "bytes_trained": bytes_before}


def _sample(table: pa.Table, count: int) -> pa.Table:
    """Returns ``count`` evenly spaced rows; all rows of a shorter table."""
    return table.take(pa.array(np.unique(even_rows(len(table), count))))


@torch.no_grad()
def _best_items(towers: _Towers, queries: pa.Table, items: pa.Table) -> list[set[int]]:
    """Returns the row numbers of the best ``items`` for each query."""
    vectors = towers.candidate.embed(items.to_pydict())
    outputs = towers.query.outputs(towers.query.read(queries.to_pydict()))
    best = []
    for row in range(len(queries)):
        repeated = [output[row].expand(len(vectors), -1) for output in outputs]
        scores = towers.interaction([*repeated, vectors]).float()
        best.append(set(scores.topk(min(OVERLAP_K, len(scores))).indices.tolist()))
    return best


def _check_rounded(
    logits: Tensor,
    expected: Tensor,
    best: Sequence[set[int]],
    rounded: Sequence[set[int]],
    least_overlap: float,
) -> dict[str, Any]:
    """Returns the loss of rounding the tables, for the manifest.

    Raises:
        BundleError: logits change by more than their tolerance, or the best items agree less than ``least_overlap``.
    """
    difference = audits.largest_difference(logits, expected)
    allowed = audits.tolerance(expected, LOGIT_SHARE)
    shared = 0
    for one, other in zip(best, rounded, strict=True):
        shared += len(one & other)
    overlap = shared / sum(map(len, best))
    if not difference <= allowed or overlap < least_overlap:
        raise BundleError(
            f"tables=int8: {len(expected)} logits differ by up to {difference:.3g}, at most {allowed:.3g} is "
            f"allowed, and {overlap:.1%} of the {OVERLAP_K} best agree (at least {least_overlap:.1%}); "
            "export with tables=trained, or a lower overlap"
        )
    return {
        "greatest_difference": difference,
        "allowed": allowed,
        "overlap": overlap,
        "k": OVERLAP_K,
        "queries": len(best),
    }
