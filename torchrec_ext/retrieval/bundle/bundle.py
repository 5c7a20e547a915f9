"""Bundle: what was trained as it is served: towers apart, top NN, preprocessing, stored vectors, index; nothing that is alien."""

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

STORE, PROJECTED, USERS, ITEMS = "store", "projected", "users", "items.arrow"
_ANEW = "export the bundle again"
_BLOCK = 2**20  # numbers that are looked at together: what is made of them stays in the cache


class Bundle:
    """A bundle that was loaded; nothing of it changes, and any number of threads may read it.

    It needs no process group, no GPU, and FAISS only where its index is one of FAISS's.

    Attributes:
        folder: where it lies.
        manifest: what it says of itself: digest, parity, recall, coverage.
        query: names of the towers of the query, in order.
        candidate: name of the candidate tower.
        interaction: over the outputs [*query towers, candidate].
        projection: the interaction, with what is the candidate's alone applied beforehand.
        store: the candidate tower's vectors by position; its ``ids`` are the catalogue's.
        projected: what the projection makes of them, by position; the store itself where that is the same.
        index: over them.
        users: what was known of users at the export, or None.
        items: titles and categories by position.
    """

    def __init__(self, folder: Path, manifest: Manifest, *, verify: bool, also: Sequence[type[nn.Module]] = ()) -> None:
        """See :meth:`load`."""
        self.folder, self.manifest = folder, manifest
        self.architecture = Architecture.open(folder)
        self.query, self.candidate = self.architecture.query, self.architecture.candidate
        self._check_towers()
        preprocessor = open_preprocessor(folder)
        self._query = open_encoder(folder, self.architecture, self.query, preprocessor, also)
        self._candidate = open_encoder(folder, self.architecture, [self.candidate], preprocessor, also)
        self.interaction = open_interaction(folder, self.architecture, also)
        self.projection: Projection = projection(self.interaction, self._candidate.width)
        self.store = self._open_store(STORE, self.candidate_digest, self._candidate.width)
        self.projected = self.store
        if (folder / PROJECTED).is_dir():
            self.projected = self._open_store(PROJECTED, self.projection_digest, self.projection.width)
        self.items = ItemTable(read_table(folder / ITEMS))
        self.users = (
            UserTable.open(folder / USERS, manifest.content["users"]["key"]) if manifest.content.get("users") else None
        )
        self._check_catalogue()
        self.index = open_index(folder, manifest, self.projection, self.store, self.projected)
        if verify:
            self._check_values()
            self.audit()

    @classmethod
    def load(cls, folder: Path | str, *, verify: bool = True, also: Sequence[type[nn.Module]] = ()) -> Bundle:
        """Reads a bundle, and refuses what does not belong together.

        Args:
            folder: that :func:`torchrec_ext.retrieval.exporting.export.export` wrote.
            verify: read every file and compare its digest (about 1 s for each GB), look at its values (a tenth of
                that), and compute the audit batch anew. Without, only what the files say of themselves is compared:
                names, sizes, towers, metric.
            also: classes of your own that it may name, as at the export. Nothing else that it says is ever imported or
                run.

        Raises:
            BundleError: a file is missing, too many, cut or changed, a part is of another bundle, or a value is one
                that cannot be served; it is named with a remedy.
        """
        folder = existing_folder(Path(folder))
        try:
            manifest = Manifest.open(folder)
            check_files(folder, manifest.content["files"], digests=verify)
            return cls(folder, manifest, verify=verify, also=also)
        except (KeyError, TypeError) as error:
            raise BundleError(f"{folder}: the manifest lacks {error}, or has another type for it; {_ANEW}") from None
        except (OSError, ValueError) as error:
            if isinstance(error, BundleError):
                raise
            raise BundleError(f"{folder}: {error}; {_ANEW}, or copy the whole folder anew") from None

    @property
    def encoders(self) -> tuple[RowEncoder, RowEncoder]:
        """The query towers, and the candidate tower."""
        return self._query, self._candidate

    @property
    def schema(self) -> BatchSchema:
        """The columns that the query towers read."""
        return self._query.columns.schema

    @property
    def metric(self) -> str:
        """``dot``, ``cosine``, or ``top_nn`` where the interaction is another one."""
        return self.architecture.metric

    @cached_property
    def query_digest(self) -> str:
        """Of all that decides what vectors the query towers make."""
        return tower_digest(self.architecture, self.query, self.manifest.content["files"])

    @cached_property
    def candidate_digest(self) -> str:
        """Likewise of the candidate tower."""
        return tower_digest(self.architecture, [self.candidate], self.manifest.content["files"])

    @property
    def projection_digest(self) -> str:
        """Of the candidate tower and of the interaction, part of which is applied beforehand."""
        return projection_digest(self.architecture, self.manifest.content["files"])

    @property
    def query_width(self) -> int:
        """Dq, of the outputs of the query towers side by side."""
        return self._query.width

    @property
    def request_columns(self) -> dict[str, str]:
        """The raw columns that :meth:`embed_query` needs, and their types, such as ``int64`` or ``list<int64>``."""
        return self._query.request_columns

    @property
    def candidate_columns(self) -> dict[str, str]:
        """Likewise of :meth:`embed_candidates`."""
        return self._candidate.request_columns

    def embed_query(self, rows: Rows) -> Tensor:
        """(B, Dq) of B raw rows: the outputs of the query towers side by side.

        Raises:
            DataError: a column is missing, or holds a value of another type, NaN or infinity.
        """
        return self._query.embed(rows)

    def embed_with_unknown(self, rows: Rows) -> tuple[Tensor, dict[str, NDArray[np.bool_]]]:
        """What :meth:`embed_query` and :meth:`unknown` return, with the rows read once."""
        read = self._query.read(rows)
        return self._query.vectors(read), read.unknown

    def embed_candidates(self, rows: Rows) -> Tensor:
        """(B, Dc) of raw rows of items; raises as :meth:`embed_query`."""
        return self._candidate.embed(rows)

    def unknown(self, rows: Rows) -> dict[str, NDArray[np.bool_]]:
        """By feature of the query, (B,) whether a row's value, or one of its list's, took the row for what was never seen."""
        return self._query.read(rows).unknown

    @cached_property
    def unknown_candidate(self) -> Tensor:
        """(Dc,) what the candidate tower makes of an item of which nothing is known."""
        return self._candidate.unknown()

    def audit(self) -> None:
        """Computes the audit batch anew: towers and top NN give the logits, the store the vectors that they gave at the export.

        Raises:
            BundleError: they do not.
        """
        pairs, expected = audits.Audit.open(self.folder)
        found, vectors = pairs.of_towers(self._query, self._candidate, self.interaction)
        audits.check_logits(
            f"{self.folder}: the audit batch", found, expected, f"its towers are not those that were proven; {_ANEW}"
        )
        lost = self.manifest.content["audit"]["store_difference"]
        audits.check_store(self.folder / STORE, self.store, pairs, vectors, lost)
        if self.projected is not self.store:
            lost = self.manifest.content["audit"]["projected_difference"]
            audits.check_store(
                self.folder / PROJECTED, self.projected, pairs, self.projection.candidates(vectors), lost
            )

    def _open_store(self, name: str, tower: str, width: int) -> EmbeddingStore:
        store, said = EmbeddingStore.open(self.folder / name), self.manifest.content[name]
        where = self.folder / name
        if store.tower != tower:
            raise BundleError(
                f"{where}: was made by tower {store.tower[:12] or '(none)'}, this bundle's is {tower[:12]}: it is a "
                "store of "
                f"another model, or of other preprocessing; embed the catalogue with this bundle's tower, or {_ANEW}"
            )
        needed = {"digest": said["digest"], "dtype": said["dtype"], "width": width}
        for what, listed in needed.items():
            here = getattr(store, what)
            if here != listed:
                raise BundleError(
                    f"{where}: {what} {here}, this bundle needs {listed}: it is another version of the store; {_ANEW}"
                )
        return store

    def _check_towers(self) -> None:
        said = self.manifest.content
        if (said["query"], said["candidate"], said["metric"]) != (self.query, self.candidate, self.architecture.metric):
            raise BundleError(
                f"{self.folder}: the manifest names the towers {said['query']} and '{said['candidate']}' and the "
                "metric "
                f"{said['metric']}, the architecture {self.query}, '{self.candidate}' and {self.architecture.metric}; "
                f"{_ANEW}"
            )
        for what, found in (("query", self.query_digest), ("candidate", self.candidate_digest)):
            if said["towers"][what] != found:
                raise BundleError(f"{self.folder}: the {what} tower is not that of the manifest; {_ANEW}")

    def _check_catalogue(self) -> None:
        sizes = {"items": len(self.items), STORE: len(self.store), PROJECTED: len(self.projected)}
        if len({*sizes.values(), self.manifest.content["coverage"]["items"]}) > 1:
            raise BundleError(
                f"{self.folder}: parts of different catalogues, with these numbers of items: {sizes}; {_ANEW}"
            )

    def _check_values(self) -> None:
        """Refuses a bundle that holds a value by which a request would fail, or be answered wrongly.

        A digest says who wrote a value, not that it can be used. Every array is read once, block by block, in place:
        about a tenth of what its digests cost.
        """
        for encoder in self.encoders:
            _check_weights(self.folder, encoder.model)
        _check_weights(self.folder, self.interaction)
        for where, store in {self.folder / STORE: self.store, self.projected.folder.parent: self.projected}.items():
            _check_store(where, store)
        if self.users is not None:
            context = audits.Audit.open(self.folder)[0].queries.slice(0, 1).to_pydict()
            _check_users(self.folder / USERS, self.users, self._query, len(self.store), context)


def _check_weights(folder: Path, module: nn.Module) -> None:
    tables = {id(weight): name for name, _, weight in values_by_table(module)}
    for name, weight in module.state_dict(keep_vars=True).items():
        if weight.is_floating_point() and (row := _not_finite(weight)) is not None:
            what = f"table '{tables[id(weight)]}'" if id(weight) in tables else f"weight '{name}'"
            raise BundleError(
                f"{folder}: {what}, row {row}: holds NaN or infinity; export another checkpoint, or train with finite "
                "values"
            )


def _check_store(where: Path, store: EmbeddingStore) -> None:
    if store.live.view(np.uint8).max(initial=0) > 1 or not store.live.any():
        raise BundleError(
            f"{where}: {LIVE} says of none of its {len(store):,} items that it is live, or holds no yes or no; {_ANEW}"
        )
    if store.scales is not None and (row := _not_finite(store.scales)) is not None:
        raise BundleError(f"{where / store.version / SCALES}: row {row}: NaN or infinity; {_ANEW}")
    if store.matrix().is_floating_point() and (row := _not_finite(store.matrix())) is not None:
        raise BundleError(
            f"{where}: the vector of item {store.ids.ids([row])[0]} (row {row}) holds NaN or infinity; {_ANEW}"
        )
    try:
        store.ids.check()
    except ValueError as error:
        raise BundleError(f"{where}: {error}; {_ANEW}") from None


def _not_finite(values: Tensor) -> int | None:
    """The first row with NaN or infinity; None where there is none. A NaN is the least and the greatest value at once."""
    rows = values.detach().reshape(len(values), -1) if values.dim() else values.detach().reshape(1, 1)
    step = max(1, _BLOCK // max(1, rows.shape[1]))
    for start in range(0, len(rows), step):
        block = rows[start : start + step]
        if block.numel() and not torch.isfinite(torch.stack(torch.aminmax(block))).all():
            return start + int((~torch.isfinite(block)).any(dim=1).int().argmax())
    return None


def _check_users(
    where: Path, users: UserTable, query: RowEncoder, items: int, context: Mapping[str, list[Any]]
) -> None:
    """Looks at ids, positions and features; ``context`` has what a request says beside the user, of one of the audit's."""
    try:
        users.ids.check()
    except ValueError as error:
        raise BundleError(f"{where}: {error}; {_ANEW}") from None
    for name, lists in users.positions():
        for first, chunk in _chunks(lists):
            values = chunk.flatten()
            found = pc.min_max(values).as_py()
            if values.null_count or (len(values) and not 0 <= found["min"] <= found["max"] < items):
                raise BundleError(
                    f"{where}: column '{name}', users {first} to {first + len(chunk) - 1}: positions {found['min']} to "
                    f"{found['max']} and {values.null_count} nulls; must be 0 to {items - 1}, of the {items:,} items; "
                    f"{_ANEW}"
                )
    for place in sorted(
        {place for name, column in users.features() for place in _odd(column) if name in query.request_columns}
    ):
        row = {**context, **users.rows([place if place < len(users) else -1])}
        try:
            query.read(row)
        except (ValueError, TypeError, OverflowError) as error:
            who = (
                f"user {users.ids.ids([place])[0]} (row {place})"
                if place < len(users)
                else "the user of whom nothing is known"
            )
            raise BundleError(
                f"{where}: {who}: {error}; a request for such a user would be refused: give users finite features and "
                f"{_ANEW}"
            ) from None


def _chunks(column: pa.ChunkedArray) -> Iterator[tuple[int, Any]]:
    """The pieces of a column, each with the number of its first row."""
    first = 0
    for chunk in column.chunks:
        yield first, chunk
        first += len(chunk)


def _odd(column: pa.ChunkedArray) -> Iterator[int]:
    """The first rows of a column with a null, with NaN and with an infinity: each is read as every other of its kind."""
    found: set[str] = set()
    for first, chunk in _chunks(column):
        values = chunk.flatten() if _listed(chunk) else chunk
        for kind, mask in _kinds(values):
            place = int(pc.index(mask, True).as_py())
            if place >= 0 and kind not in found:
                found.add(kind)
                yield first + _row_of(chunk, place)


def _kinds(values: Any) -> Iterator[tuple[str, Any]]:
    """Which values are null, NaN or infinite, of those kinds that there may be."""
    if values.null_count:
        yield "null", values.is_null()
    if pa.types.is_floating(values.type) and len(values):
        numbers: NDArray[Any] = values.to_numpy(zero_copy_only=False)  # in which a null is NaN
        if not np.isfinite(numbers.min()) or not np.isfinite(numbers.max()):
            yield "nan", pc.is_nan(values)
            yield "inf", pc.is_inf(values)


def _row_of(chunk: Any, place: int) -> int:
    """The row of a value in a chunk, which may be one of lists."""
    return int(pc.list_parent_indices(chunk)[place].as_py()) if _listed(chunk) else place


def _listed(chunk: Any) -> bool:
    return hasattr(chunk.type, "value_type")
