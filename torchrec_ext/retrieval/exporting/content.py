"""Parts: the files of a bundle, written one after the other on rank 0, each from those before it, and proven on the way.

What an export is given beside the model: the items that can be recommended, and what is known of users.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.metadata import version
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch
from numpy.typing import NDArray
from safetensors.torch import save
from torch import Tensor, nn

from torchrec_ext.data.preprocess.columns import raw_type
from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.retrieval.bundle import audit as audits
from torchrec_ext.retrieval.bundle.audit import LiveModel
from torchrec_ext.retrieval.bundle.bundle import ITEMS, PROJECTED, STORE, USERS
from torchrec_ext.retrieval.bundle.encoder import (
    ARCHITECTURE,
    INTERACTION,
    PREPROCESSOR,
    Architecture,
    RowEncoder,
    open_encoder,
    open_interaction,
    projection_digest,
    raw_request_columns,
    tables_of,
    tower_digest,
    towers_of,
)
from torchrec_ext.retrieval.bundle.index_kinds import INDEX_KINDS, Kind, build_index, check_index_metric
from torchrec_ext.retrieval.bundle.manifest import BundleError, Manifest, file_digests
from torchrec_ext.retrieval.bundle.request_columns import Columns
from torchrec_ext.retrieval.bundle.tables import write_table, write_users
from torchrec_ext.retrieval.index.projection import projection
from torchrec_ext.retrieval.store.ids import IdMap
from torchrec_ext.retrieval.store.row_formats import ROW_FORMATS, Dtype
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.retrieval.store.writer import write_store
from torchrec_ext.tensor_file import Shape, TensorWriter


@dataclass(frozen=True, kw_only=True, eq=False)
class Catalogue:
    """The items that can be recommended, I of them; their order is that of the positions.

    Args:
        ids: (I,) int64 or str, what their owner calls them.
        features: I rows with the raw columns of the candidate tower.
        titles: (I,) for display.
        categories: (I,) lists of names to filter by.
        trained: ids that stand in the training rows, each of which must be among ``ids``.
    """

    ids: NDArray[Any]
    features: pa.Table
    titles: Sequence[str] | None = None
    categories: Sequence[Sequence[str]] | None = None
    trained: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        sizes = {"features": len(self.features), "titles": self.titles, "categories": self.categories}
        for name, found in sizes.items():
            count = found if isinstance(found, int) else None if found is None else len(found)
            if count is not None and count != len(self.ids):
                raise BundleError(
                    f"catalogue: {count:,} {name} for {len(self.ids):,} ids; give one for each item, in their order"
                )
        if not len(self.ids):
            raise BundleError("catalogue: has no items; give the rows that can be recommended")


@dataclass(frozen=True, kw_only=True, eq=False)
class NamedUsers:
    """What is known of U users, so that a request may name one by id alone.

    Args:
        key: the column of a request that holds the user's id, whether a tower reads it or not.
        ids: (U,).
        features: U rows with raw columns of the query towers; those of a request are put over them.
        unknown: one row, for an id that is not among them.
        seen: (U,) lists of the positions of items that each has taken.
        liked: (U,) lists of the positions of items that each has liked, oldest first, for display.
    """

    key: str
    ids: NDArray[Any]
    features: pa.Table
    unknown: Mapping[str, Any]
    seen: pa.Array
    liked: pa.Array

    def __post_init__(self) -> None:
        for name in ("features", "seen", "liked"):
            if len(getattr(self, name)) != len(self.ids):
                raise BundleError(
                    f"users: {len(getattr(self, name)):,} {name} for {len(self.ids):,} ids; give one for each user"
                )
        missing = [name for name in self.features.column_names if name not in self.unknown]
        if missing:
            raise BundleError(f"users: unknown lacks {missing}; give one value for each column of features")


Progress = Callable[[str, int, int], None]
INDEX_QUERIES = 1024  # by which an approximate index is tuned and measured, half each
BLOCK_ROWS = 4096  # of the catalogue: blocks of one size, so that vectors do not depend on who computes them


@dataclass(frozen=True, kw_only=True)
class ExportConfig:
    """See :func:`torchrec_ext.retrieval.exporting.export.export`."""

    store: Dtype = "fp32"
    index: Kind = "exact"
    recall: float = 0.95

    def __post_init__(self) -> None:
        registries: dict[str, Mapping[str, Any]] = {"store": ROW_FORMATS, "index": INDEX_KINDS}
        for name, known in registries.items():
            if getattr(self, name) not in known:
                raise BundleError(f"{name}={getattr(self, name)!r}: must be one of {', '.join(known)}")
        if not 0 < self.recall <= 1:
            raise BundleError(f"recall={self.recall}: must be greater than 0 and at most 1")


@dataclass(frozen=True, kw_only=True, eq=False)
class BundleContent:
    """What a bundle is made of; the same on every rank. See :func:`~torchrec_ext.retrieval.exporting.export.export` for arguments."""

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
    progress: Progress

    def __post_init__(self) -> None:
        check_index_metric(self.settings.index, self.live.metric)
        missing = self.missing
        if missing:
            raise BundleError(
                f"catalogue: {missing:,} ids of the training rows are not in it, {self._missing[0]} among them; every "
                "id that was "
                "trained must be servable: give the whole catalogue"
            )

    @cached_property
    def ids(self) -> IdMap:
        """Of the catalogue."""
        return IdMap.build(self.catalogue.ids)

    @cached_property
    def _missing(self) -> NDArray[Any]:
        trained = self.catalogue.trained
        return np.zeros(0) if trained is None else trained[self.ids.positions(trained) < 0]

    @property
    def missing(self) -> int:
        """Trained ids that the catalogue lacks."""
        return len(self._missing)

    @cached_property
    def architecture(self) -> Architecture:
        """Of the bundle."""
        names = sorted({name for own in self.live.towers.values() for name in tables_of(own)})
        fields = [*self.queries.schema, *self.catalogue.features.schema]
        return Architecture(
            towers=self.live.towers,
            interaction=self.live.interaction,
            metric=self.live.metric,
            tables={name: f"tables/{at:03}.safetensors" for at, name in enumerate(names)},
            oov_ids=dict(self.oov_ids),
            unseen={name: list(rows) for name, rows in self.unseen.items()},
            types={field.name: _raw(field) for field in reversed(fields)},
        )

    @cached_property
    def audit(self) -> audits.Audit:
        """The pairs by which the bundle is compared with the model."""
        return audits.Audit.choose(self.queries, self.catalogue.features, self.ids)

    def columns(self, names: Sequence[str]) -> Columns:
        """From raw rows to what these towers read."""
        return raw_request_columns(self.architecture, towers_of(self.architecture, names, self.also), self.preprocessor)

    def write(
        self,
        folder: Path,
        shapes: Mapping[str, Shape],
        blocks: Iterator[tuple[str, int, Tensor]],
        dense: Mapping[str, Tensor],
        expected: Tensor,
    ) -> Manifest:
        """Writes all of it into ``folder``, from weights to manifest.

        Args:
            folder: empty.
            shapes: of the tables.
            blocks: whole rows of the tables, one table after the other.
            dense: the model's other weights.
            expected: (P,) logits of the audit by the model.
        """
        self._write_weights(folder, shapes, blocks, dense)
        self._write_tables(folder)
        names = self.architecture.query
        query = open_encoder(folder, self.architecture, names, self.preprocessor, self.also)
        candidate = open_encoder(folder, self.architecture, [self.architecture.candidate], self.preprocessor, self.also)
        interaction = open_interaction(folder, self.architecture, self.also)
        found, vectors = self.audit.of_towers(query, candidate, interaction)
        remedy = "the bundle would rank otherwise than the model; report it, with the architecture"
        apart = audits.check_logits("the towers of the bundle and the model that was trained", found, expected, remedy)
        self.audit.write(folder, found)
        files = file_digests(folder)
        store, stored = self._write_stores(folder, candidate, interaction, files, vectors)
        rows = np.linspace(0, len(self.queries) - 1, INDEX_QUERIES).round().astype(np.int64)
        asked = query.embed(self.queries.take(pa.array(rows)).to_pydict())
        index = build_index(folder, self.settings.index, self.settings.recall, self.live.metric, store, asked)
        manifest = Manifest(
            content={
                "files": file_digests(folder, known=files),
                "query": names,
                "candidate": self.architecture.candidate,
                "metric": self.architecture.metric,
                "towers": {
                    "query": tower_digest(self.architecture, names, files),
                    "candidate": tower_digest(self.architecture, [self.architecture.candidate], files),
                },
                **stored,
                "index": index,
                "users": None if self.users is None else {"key": self.users.key, "count": len(self.users.ids)},
                "coverage": {
                    "items": len(self.ids),
                    "trained": None if self.catalogue.trained is None else len(np.unique(self.catalogue.trained)),
                    "missing": self.missing,
                },
            },
            certificate={
                "parity": {"pairs": len(expected), "greatest_difference": apart, "allowed": audits.tolerance(expected)},
                "versions": {name: version(name) for name in ("torch", "torchrec", "torchrec-ext")},
                "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
                **self.details,
            },
        )
        manifest.save(folder)
        return manifest

    def _write_weights(
        self,
        folder: Path,
        shapes: Mapping[str, Shape],
        blocks: Iterator[tuple[str, int, Tensor]],
        dense: Mapping[str, Tensor],
    ) -> None:
        # Not by safetensors' save_file, whose files only their owner may read, whatever the umask.
        (folder / "tables").mkdir()
        (folder / "towers").mkdir()
        total, done = sum(shapes[name].bytes for name in self.architecture.tables), 0
        for name, own in groupby(blocks, key=itemgetter(0)):
            with TensorWriter(folder / self.architecture.tables[name], {"weight": shapes[name]}) as out:
                for _, row, rows in own:
                    out.write("weight", row, rows)
                    done += rows.numel() * rows.element_size()
                    self.progress("tables", done, total)
        for name in self.architecture.towers:
            (folder / self.architecture.dense_file(name)).write_bytes(save(self.live.of_tower(name, dense)))
        (folder / INTERACTION).write_bytes(save(self.live.of_interaction(dense)))
        (folder / ARCHITECTURE).write_text(json.dumps(self.architecture.as_json(), indent=1, allow_nan=False) + "\n")

    def _write_tables(self, folder: Path) -> None:
        if self.preprocessor is not None:
            self.preprocessor.save(folder / PREPROCESSOR)
        shown: dict[str, Any] = {"position": np.arange(len(self.ids))}
        if self.catalogue.titles is not None:
            shown["title"] = pa.array(self.catalogue.titles, type=pa.string())
        if self.catalogue.categories is not None:
            shown["categories"] = pa.array(self.catalogue.categories, type=pa.list_(pa.string()))
        write_table(folder / ITEMS, pa.table(shown))
        if (users := self.users) is not None:
            ids = IdMap.build(users.ids)
            write_users(folder / USERS, ids, users.features, users.unknown, users.seen, users.liked)

    def _write_stores(
        self, folder: Path, candidate: RowEncoder, interaction: nn.Module, files: Mapping[str, Any], vectors: Tensor
    ) -> tuple[EmbeddingStore, dict[str, Any]]:
        """The vectors of the catalogue, and where it is narrower what the interaction makes of them."""
        tower = tower_digest(self.architecture, [self.architecture.candidate], files)
        store = write_store(folder / STORE, self._vectors(candidate), dtype=self.settings.store, tower=tower)
        positions = torch.from_numpy(self.audit.positions)
        lost = {"store_difference": audits.largest_difference(store.rows(positions), vectors)}
        said = {STORE: _said(store)}
        made = projection(interaction, candidate.width)
        if made.projected:
            digest = projection_digest(self.architecture, files)
            blocks = ((ids, made.candidates(block)) for ids, block in self._vectors(candidate))
            projected = write_store(folder / PROJECTED, blocks, dtype=self.settings.store, tower=digest)
            lost["projected_difference"] = audits.largest_difference(
                projected.rows(positions), made.candidates(vectors)
            )
            said[PROJECTED] = _said(projected)
        return store, {**said, "audit": lost}

    def _vectors(self, candidate: RowEncoder) -> Iterator[tuple[NDArray[Any], Tensor]]:
        ids, features = self.catalogue.ids, self.catalogue.features
        for start in range(0, len(ids), BLOCK_ROWS):
            rows = features.slice(start, BLOCK_ROWS)
            yield (
                ids[start : start + BLOCK_ROWS],
                candidate.embed({name: rows[name].combine_chunks() for name in rows.column_names}),
            )
            self.progress("vectors", min(start + BLOCK_ROWS, len(ids)), len(ids))


def _said(store: EmbeddingStore) -> dict[str, Any]:
    return {"digest": store.digest, "dtype": store.dtype, "width": store.width, "tower": store.tower}


def _raw(field: pa.Field) -> str:
    if (found := raw_type(field.type)) is None:
        raise BundleError(
            f"column '{field.name}' is {field.type}, must be whole numbers, numbers, text or lists of them"
        )
    return found
