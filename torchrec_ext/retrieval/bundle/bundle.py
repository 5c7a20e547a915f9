"""Bundle: a trained model for serving: towers, top NN, preprocessing, stored vectors and index, all checked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from torchrec_ext.modules.shared_tables import values_by_table
from torchrec_ext.retrieval.bundle import audit as audits
from torchrec_ext.retrieval.bundle.architecture import Int8Table
from torchrec_ext.retrieval.bundle.encoder import (
    Architecture,
    RowEncoder,
    open_encoder,
    open_interaction,
    open_preprocessor,
    projection_digest,
    tower_digest,
)
from torchrec_ext.retrieval.bundle.index_kinds import open_index
from torchrec_ext.retrieval.bundle.manifest import BundleError, Manifest, check_files
from torchrec_ext.retrieval.bundle.request_columns import Rows
from torchrec_ext.retrieval.bundle.tables import ItemTable, UserTable, read_table
from torchrec_ext.retrieval.index.projection import Projection, projection
from torchrec_ext.retrieval.store.store import LIVE, SCALES, EmbeddingStore
from torchrec_ext.schema import BatchSchema
from torchrec_ext.sealed import existing_folder

STORE = "store"
PROJECTED = "projected"
USERS = "users"
ITEMS = "items.arrow"
_ANEW = "export the bundle again"
_BLOCK = 2**20  # numbers checked at a time, so that temporaries stay in the cache


class Bundle:
    """A loaded, immutable bundle; any number of threads may read it.

    It needs no process group and no GPU. It needs FAISS only if its index is one of FAISS's.

    Attributes:
        folder: folder of the bundle.
        manifest: digest, parity, recall and coverage.
        query: names of the query towers, in order.
        candidate: name of the candidate tower.
        interaction: module over the outputs ``[*query towers, candidate]``.
        projection: the interaction with its layers for candidates alone applied beforehand.
        store: the candidate tower's vectors by position; its ``ids`` are the catalogue's.
        projected: projected rows of the vectors, by position; the store itself if nothing is projected.
        index: index over the store.
        users: table of users from the export, or None.
        items: titles and categories by position.
    """

    def __init__(
        self,
        folder: Path,
        manifest: Manifest,
        *,
        verify: bool,
        also: Sequence[type[nn.Module]] = (),
    ) -> None:
        """See :meth:`load`."""
        self.folder = folder
        self.manifest = manifest
        self.architecture = Architecture.open(folder)
        self.query = self.architecture.query
        self.candidate = self.architecture.candidate
        self._check_towers()
        preprocessor = open_preprocessor(folder)
        self._query = open_encoder(
            folder, self.architecture, self.query, preprocessor, also
        )
        self._candidate = open_encoder(
            folder, self.architecture, [self.candidate], preprocessor, also
        )
        self.interaction = open_interaction(folder, self.architecture, also)
        self.projection: Projection = projection(
            self.interaction, self._candidate.width
        )
        self.store = self._open_store(
            STORE, self.candidate_digest, self._candidate.width
        )
        self.projected = self.store
        if (folder / PROJECTED).is_dir():
            digest = projection_digest(self.architecture, manifest.content["files"])
            self.projected = self._open_store(PROJECTED, digest, self.projection.width)
        self.items = ItemTable(read_table(folder / ITEMS))
        self.users: UserTable | None = None
        if manifest.content.get("users"):
            self.users = UserTable.open(
                folder / USERS, manifest.content["users"]["key"]
            )
        # Before the index opens, which refers to positions of the store.
        self._check_catalogue()
        self.index = open_index(
            folder, manifest, self.projection, self.store, self.projected
        )
        if verify:
            self._check_values()
            self.audit()

    @classmethod
    def load(
        cls,
        folder: Path | str,
        *,
        verify: bool = True,
        also: Sequence[type[nn.Module]] = (),
    ) -> Bundle:
        """Loads a bundle and checks that its files belong together.

        Args:
            folder: folder written by :func:`torchrec_ext.retrieval.exporting.export.export`.
            verify: read every file and compare its digest (about 1 s for each GB), check its values (a tenth of that),
                and compute the audit batch again. Without, only names, sizes, towers and metric are compared.
            also: further classes allowed in the bundle, as at the export. Nothing else named in it is imported or
                run.

        Raises:
            BundleError: a file is missing, unlisted, truncated or changed, belongs to another bundle, or holds an
                unusable value; the message names it and the remedy.
        """
        folder = existing_folder(Path(folder))
        try:
            manifest = Manifest.open(folder)
            check_files(folder, manifest.content["files"], digests=verify)
            return cls(folder, manifest, verify=verify, also=also)
        except (KeyError, TypeError) as error:
            raise BundleError(
                f"{folder}: the manifest lacks {error}, or has another type for it; {_ANEW}"
            ) from None
        except BundleError:
            raise
        except (OSError, ValueError) as error:
            raise BundleError(
                f"{folder}: {error}; {_ANEW}, or copy the whole folder anew"
            ) from None

    @property
    def encoders(self) -> tuple[RowEncoder, RowEncoder]:
        """Encoders of the query towers and of the candidate tower."""
        return self._query, self._candidate

    @property
    def schema(self) -> BatchSchema:
        """Schema of the query towers' columns."""
        return self._query.columns.schema

    @property
    def metric(self) -> str:
        """``dot``, ``cosine``, or ``top_nn`` for any other interaction."""
        return self.architecture.metric

    @cached_property
    def query_digest(self) -> str:
        """Digest of everything behind the query towers' vectors: weights, architecture and preprocessing."""
        return tower_digest(
            self.architecture, self.query, self.manifest.content["files"]
        )

    @cached_property
    def candidate_digest(self) -> str:
        """Digest of everything behind the candidate tower's vectors: weights, architecture and preprocessing."""
        return tower_digest(
            self.architecture, [self.candidate], self.manifest.content["files"]
        )

    @property
    def query_width(self) -> int:
        """Dq, the width of the query towers' outputs side by side."""
        return self._query.width

    @property
    def request_columns(self) -> dict[str, str]:
        """Types, such as ``int64`` or ``list<int64>``, of the raw columns for :meth:`embed_query`."""
        return self._query.request_columns

    @property
    def candidate_columns(self) -> dict[str, str]:
        """Types of the raw columns for :meth:`embed_candidates`."""
        return self._candidate.request_columns

    def embed_query(self, rows: Rows) -> Tensor:
        """Returns (B, Dq) outputs of the query towers for B raw rows, side by side.

        Raises:
            DataError: a column is missing, or holds a value of another type, NaN or infinity.
        """
        return self._query.embed(rows)

    def embed_with_unknown(
        self, rows: Rows
    ) -> tuple[Tensor, dict[str, NDArray[np.bool_]]]:
        """Returns the results of :meth:`embed_query` and :meth:`unknown`, reading the rows once."""
        columns = self._query.read(rows)
        return self._query.vectors(columns), columns.unknown

    def embed_candidates(self, rows: Rows) -> Tensor:
        """Returns (B, Dc) outputs of the candidate tower for B raw rows of items; raises as :meth:`embed_query`."""
        return self._candidate.embed(rows)

    def unknown(self, rows: Rows) -> dict[str, NDArray[np.bool_]]:
        """Returns for each query feature (B,) whether a row's id, or one of its list, is unknown."""
        return self._query.read(rows).unknown

    @cached_property
    def unknown_candidate(self) -> Tensor:
        """(Dc,) output of the candidate tower for an item without any known feature."""
        return self._candidate.unknown()

    def audit(self) -> None:
        """Computes the audit batch again and compares logits and stored vectors with those of the export.

        Raises:
            BundleError: they differ by more than rounding.
        """
        pairs, expected = audits.Audit.open(self.folder)
        logits, vectors = pairs.of_towers(
            self._query, self._candidate, self.interaction
        )
        audits.check_logits(
            f"{self.folder}: the audit batch",
            logits,
            expected,
            f"its towers are not those that were proven; {_ANEW}",
        )
        rounding = self.manifest.content["audit"]["store_difference"]
        audits.check_store(self.folder / STORE, self.store, pairs, vectors, rounding)
        if self.projected is not self.store:
            rounding = self.manifest.content["audit"]["projected_difference"]
            audits.check_store(
                self.folder / PROJECTED,
                self.projected,
                pairs,
                self.projection.candidates(vectors),
                rounding,
            )

    def _open_store(self, name: str, tower: str, width: int) -> EmbeddingStore:
        store = EmbeddingStore.open(self.folder / name)
        entry = self.manifest.content[name]
        where = self.folder / name
        if store.tower != tower:
            raise BundleError(
                f"{where}: was made by tower {store.tower[:12] or '(none)'}, this bundle's is {tower[:12]}"
                f": a store of another model or preprocessing; {_ANEW}"
            )
        expected = {"digest": entry["digest"], "dtype": entry["dtype"], "width": width}
        for what, value in expected.items():
            if getattr(store, what) != value:
                raise BundleError(
                    f"{where}: {what} {getattr(store, what)}, this bundle needs {value}: it is another version of the "
                    f"store; {_ANEW}"
                )
        return store

    def _check_towers(self) -> None:
        content = self.manifest.content
        listed = tuple(content[key] for key in ("query", "candidate", "metric"))
        if listed != (self.query, self.candidate, self.architecture.metric):
            raise BundleError(
                f"{self.folder}: the manifest names the towers {listed[0]} and '{listed[1]}' and the metric "
                f"{listed[2]}, the architecture {self.query}, '{self.candidate}' and {self.architecture.metric}; "
                f"{_ANEW}"
            )
        # Stored vectors name a tower by its digest, so the manifest's must be that of
        # these files.
        for what, digest in (
            ("query", self.query_digest),
            ("candidate", self.candidate_digest),
        ):
            if content["towers"][what] != digest:
                raise BundleError(
                    f"{self.folder}: the {what} tower is not that of the manifest; {_ANEW}"
                )

    def _check_catalogue(self) -> None:
        # All are by position, so parts of another catalogue would answer with wrong
        # items.
        sizes = {
            "items": len(self.items),
            STORE: len(self.store),
            PROJECTED: len(self.projected),
        }
        if len({*sizes.values(), self.manifest.content["coverage"]["items"]}) > 1:
            raise BundleError(
                f"{self.folder}: parts of different catalogues, with these numbers of items: {sizes}; {_ANEW}"
            )

    def _check_values(self) -> None:
        """Refuses a bundle with values that would make requests fail or be answered wrongly.

        A digest proves that a value is unchanged, not that it is usable. Every array is read once, block by block, in
        place. This takes about a tenth of the time for the digests.
        """
        for encoder in self.encoders:
            _check_weights(self.folder, encoder.model)
        _check_weights(self.folder, self.interaction)
        _check_store(self.folder / STORE, self.store)
        if self.projected is not self.store:
            _check_store(self.folder / PROJECTED, self.projected)
        if self.users is not None:
            context = audits.Audit.open(self.folder)[0].queries.slice(0, 1).to_pydict()
            _check_users(
                self.folder / USERS, self.users, self._query, len(self.store), context
            )


def _check_weights(folder: Path, module: nn.Module) -> None:
    tables = {}
    for name, holder, weight in values_by_table(module):
        tables[id(weight)] = name
        if not isinstance(holder, Int8Table):
            continue
        row = _first_nonfinite_row(holder.scales)
        if row is not None:
            raise BundleError(
                f"{folder}: table '{name}', row {row}: its scale is NaN or infinity; {_ANEW}"
            )
    for name, weight in module.state_dict(keep_vars=True).items():
        row = _first_nonfinite_row(weight)
        if row is not None:
            what = f"weight '{name}'"
            if id(weight) in tables:
                what = f"table '{tables[id(weight)]}'"
            raise BundleError(
                f"{folder}: {what}, row {row}: holds NaN or infinity; export another checkpoint, or train with finite "
                "values"
            )


def _check_store(where: Path, store: EmbeddingStore) -> None:
    if store.live.view(np.uint8).max(initial=0) > 1 or not store.live.any():
        raise BundleError(
            f"{where}: {LIVE} says of none of its {len(store):,} items that it is live, or holds no yes or no; {_ANEW}"
        )
    row = _first_nonfinite_row(store.scales)
    if row is not None:
        raise BundleError(
            f"{where / store.version / SCALES}: row {row}: NaN or infinity; {_ANEW}"
        )
    row = _first_nonfinite_row(store.matrix())
    if row is not None:
        raise BundleError(
            f"{where}: the vector of item {store.ids.ids([row])[0]} (row {row}) holds NaN or infinity; {_ANEW}"
        )
    try:
        store.ids.check()
    except ValueError as error:
        raise BundleError(f"{where}: {error}; {_ANEW}") from None


def _first_nonfinite_row(values: Tensor | None) -> int | None:
    """Returns the first row with NaN or infinity, or None; whole numbers have no such row."""
    if values is None or not values.is_floating_point():
        return None
    values = torch.atleast_1d(values.detach())  # type: ignore[no-untyped-call]
    rows = values.reshape(len(values), -1)
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        # One pass, and no mask in memory: a NaN anywhere makes both extremes NaN.
        if (
            block.numel()
            and not torch.isfinite(torch.stack(torch.aminmax(block))).all()
        ):
            return start + int((~torch.isfinite(block)).any(dim=1).int().argmax())
    return None


def _check_users(
    where: Path,
    users: UserTable,
    query: RowEncoder,
    items: int,
    context: Mapping[str, list[Any]],
) -> None:
    """Checks users' ids, positions and features; ``context`` has the other columns of one audited request."""
    try:
        users.ids.check()
    except ValueError as error:
        raise BundleError(f"{where}: {error}; {_ANEW}") from None
    for name, lists in users.positions():
        first = 0
        for chunk in lists.chunks:
            values = chunk.flatten()
            bounds = pc.min_max(values).as_py()
            if values.null_count or (
                len(values) and not 0 <= bounds["min"] <= bounds["max"] < items
            ):
                raise BundleError(
                    f"{where}: column '{name}', users {first} to {first + len(chunk) - 1}: positions {bounds['min']} "
                    f"to {bounds['max']} and {values.null_count} nulls; must be 0 to {items - 1}, of the {items:,} "
                    f"items; {_ANEW}"
                )
            first += len(chunk)
    # Reading all users would be slow, and one row of each special kind is refused just
    # like the others of its kind.
    odd_rows: set[int] = set()
    for name, column in users.features():
        if name in query.request_columns:
            odd_rows |= set(_odd_rows(column))
    for row in sorted(odd_rows):
        if row < len(users):
            who = f"user {users.ids.ids([row])[0]} (row {row})"
            table_row = row
        else:
            who = "the user of whom nothing is known"
            table_row = -1
        try:
            # A request's other columns come from its caller, so those of an audited
            # query stand in for them.
            query.read({**context, **users.rows([table_row])})
        except (ValueError, TypeError, OverflowError) as error:
            raise BundleError(
                f"{where}: {who}: {error}; a request for such a user would be refused: give users finite features and "
                f"{_ANEW}"
            ) from None


def _odd_rows(column: pa.ChunkedArray) -> Iterator[int]:
    """Yields one row with a null, one with NaN and one with infinity: all others of a kind are read alike."""
    is_list = hasattr(column.type, "value_type")
    values = pc.list_flatten(column) if is_list else column
    masks = []
    if values.null_count:
        masks.append(pc.is_null(values))
    if pa.types.is_floating(values.type):
        masks += [pc.is_nan(values), pc.is_inf(values)]
    for mask in masks:
        index = pc.index(mask, True).as_py()
        if index < 0:
            continue
        if is_list:
            index = pc.list_parent_indices(column)[index].as_py()
        yield index
