"""export(): writes a trained model, sharded or not, as a bundle, and checks that both are equal."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.data.preprocess.folders import whole_folder
from torchrec_ext.distributed.runtime import gather_objects
from torchrec_ext.distributed.tables import Shard, collections, local_shards
from torchrec_ext.retrieval.bundle.audit import LiveModel
from torchrec_ext.retrieval.bundle.index_kinds import IndexKind
from torchrec_ext.retrieval.bundle.manifest import (
    BUNDLE_MANIFEST,
    BundleError,
    Manifest,
)
from torchrec_ext.retrieval.bundle.traced import TracedModel, evaluating
from torchrec_ext.retrieval.exporting.content import (
    BundleContent,
    Catalogue,
    ExportConfig,
    ExportProgress,
    ExportTables,
    NamedUsers,
)
from torchrec_ext.retrieval.exporting.dlrm import dlrm_by_columns
from torchrec_ext.retrieval.store.row_formats import Dtype
from torchrec_ext.sealed import sync_tree
from torchrec_ext.tensor_file import Shape


def export(
    model: nn.Module,
    out: Path | str,
    *,
    towers: Mapping[str, str | Sequence[str]] | None = None,
    catalogue: Catalogue,
    users: NamedUsers | None = None,
    queries: pa.Table | None = None,
    preprocessor: FittedPreprocessor | None = None,
    candidate: str | None = None,
    oov_ids: Mapping[str, int] | None = None,
    unseen: Mapping[str, Sequence[int]] | None = None,
    rows: Mapping[str, Tensor] | None = None,
    store: Dtype = "fp32",
    index: IndexKind = "exact",
    recall: float = 0.95,
    tables: ExportTables = "trained",
    overlap: float = 0.9,
    also: Sequence[type[nn.Module]] = (),
    details: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: ExportProgress | None = None,
) -> Manifest:
    """Writes a bundle: towers, top NN, preprocessing, stored vectors and index, with a check against the model.

    If the model is sharded, call it on every rank with the same arguments. The digest depends only on weights, data and
    settings, not on ranks, plan or time. The folder appears when it is complete; until then an earlier one stays.

    Args:
        model: TowerModel or NextItemModel, from ``hybrid_parallel``, in any DistributedModelParallel, or unsharded;
            with ``towers`` any module of your own, with a forward from columns by name to logits (B,). An unsharded
            DLRM or DLRMTrain of TorchRec needs no ``towers``: its columns are ``dense_features``, and each sparse
            feature by its name.
        out: folder to make.
        towers: modules of the query tower, then of the candidate tower, in a module of your own: a path or several by
            the tower's name. They must read columns of the queries alone, and of the catalogue alone. Anything else
            that forward computes from one side alone joins that tower; the rest runs for each pair.
        catalogue: items to recommend from.
        users: users to look up by id, or None.
        queries: rows of raw columns of the query towers for the audit; by default the users' rows.
        preprocessor: computes the model's columns from raw ones; without it, raw columns are the model's columns.
        candidate: name of the candidate tower; by default the model's last.
        oov_ids: out-of-vocabulary row of each feature, for requests, queries and the catalogue; by default 0, or none
            with ``towers`` and for a DLRM, so that unknown ids are refused. Training must have moved that row.
        unseen: rows of a feature's table that training never read, by feature. Such an id in a request takes the
            out-of-vocabulary row. Use it if ids are rows; a ``preprocessor`` leaves such ids out of its
            vocabulary.
        rows: rows of a table that the bundle holds, (n,) int64, by table; all rows by default. The bundle's ids are
            places among them: 0 for the first of these rows, and so on.
        store: row format of the stored vectors: ``fp32``, ``fp16`` or ``int8``.
        index: ``exact``, or one of FAISS's: ``flat``, ``ivf``, ``hnsw``, ``pq``, for a dot product or a cosine.
        recall: required recall of an approximate index against exact search.
        tables: ``trained``, unchanged, or ``int8``: a byte per number, and a scale per row. The loss is measured
            against the trained model and listed in the manifest under ``tables``.
        overlap: least average share of a query's 10 best items that stay among its 10 best with int8 tables.
        also: further classes in the model, each ``Recorded``.
        details: JSON values for the certificate, such as the run and its figures.
        overwrite: replace an earlier bundle.
        progress: called on rank 0 with the name of the current part, the amount so far, and the total.

    Returns:
        The manifest, on every rank.

    Raises:
        BundleError: the model cannot be exported, data do not fit, or the bundle's logits differ from the model's.
        DataError: the folder exists already, or cannot be written.
    """
    queries = _queries(queries, users)
    if towers is None:
        by_columns = dlrm_by_columns(model, queries, catalogue.features)
        if by_columns is not None:
            model, towers = by_columns
    if towers is not None:
        model = _trace(
            model, towers, candidate, preprocessor, catalogue, queries, oov_ids or {}
        )
        oov_ids = dict.fromkeys(model.features, -1) | dict(oov_ids or {})
        # The towers' digests have the columns' types: a column that no tower reads must
        # not change them.
        queries = model.read_columns(queries)
        catalogue = dataclasses.replace(
            catalogue, features=model.read_columns(catalogue.features)
        )
    ranks = ExportRanks()
    live = LiveModel(model, candidate=candidate, also=also, rows=rows)
    content = BundleContent(
        live=live,
        catalogue=catalogue,
        users=users,
        queries=queries,
        preprocessor=preprocessor,
        oov_ids=oov_ids or {},
        unseen=unseen or {},
        settings=ExportConfig(
            store=store, index=index, recall=recall, tables=tables, overlap=overlap
        ),
        also=tuple(also),
        details=details or {},
        progress=progress or (lambda *_: None),
    )
    with evaluating(model):
        query_columns = content.columns(live.names[:-1])
        # On every rank, because a sharded model's forward exchanges rows.
        expected = content.audit.of_model(
            live, query_columns, content.columns([live.candidate])
        )
        weights = LiveWeights(model, ranks, live.rows)
        dense = weights.dense()
        blocks = weights.blocks(content.architecture.tables)
        outcome: Any = None
        if ranks.rank == 0:
            try:
                with (
                    whole_folder(
                        Path(out), overwrite=overwrite, mark=BUNDLE_MANIFEST
                    ) as folder,
                    one_thread(),
                ):
                    outcome = content.write(
                        folder, weights.tables, blocks, dense, expected
                    )
                    # On the disk before the folder gets its name, so that a crash
                    # leaves no bundle of empty files.
                    sync_tree(folder)
            except Exception as error:
                # Raised below, when the other ranks have sent their rows.
                outcome = error
        # The other ranks send their rows even if rank 0 failed, so that no rank waits
        # forever.
        for _ in blocks:
            pass
        # Sent to all ranks, so that every rank raises rank 0's error, or returns its
        # manifest.
        outcome = ranks.gathered(outcome)[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome  # type: ignore[no-any-return]


def _trace(
    model: nn.Module,
    towers: Mapping[str, str | Sequence[str]],
    candidate: str | None,
    preprocessor: FittedPreprocessor | None,
    catalogue: Catalogue,
    queries: pa.Table,
    oov_ids: Mapping[str, int],
) -> TracedModel:
    if preprocessor is not None:
        raise BundleError(
            "preprocessor: not beside towers=; give the columns as the module's forward reads them"
        )
    if candidate is not None and candidate in towers:
        # TracedModel takes the last tower as the candidate's.
        query_towers = {
            name: paths for name, paths in towers.items() if name != candidate
        }
        towers = {**query_towers, candidate: towers[candidate]}
    return TracedModel(
        model, towers, queries=queries, catalogue=catalogue.features, oov_ids=oov_ids
    )


def _queries(queries: pa.Table | None, users: NamedUsers | None) -> pa.Table:
    rows = queries
    if rows is None and users is not None:
        rows = users.features
    if rows is None or not len(rows):
        raise BundleError(
            "queries: there are no rows to audit by; give users with their features, or queries of some raw rows"
        )
    return rows


@contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread inside the block: a fixed order of sums gives bit-equal vectors."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


# Larger blocks get new pages from the system each time, which takes longer than to
# gather and to write them.
_BLOCK_BYTES = 8 * 2**20
# timeout of a collective: the others wait while rank 0 writes a whole bundle
_PATIENCE = timedelta(hours=6)


class _Piece(NamedTuple):
    """A rectangle of a table, held by ``rank``."""

    rank: int
    row: int
    column: int
    rows: int
    columns: int


class ExportRanks:
    """The ranks of an export, with a process group of their own; one rank without ``torch.distributed``.

    Every rank creates one and calls each method in the same order.
    """

    def __init__(self) -> None:
        self.rank = 0
        self.size = 1
        self.group: Any = None
        if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            self.rank = dist.get_rank()
            self.size = dist.get_world_size()
            # A group of its own: gloo sends CPU tensors, and the default group's
            # timeout is too short.
            self.group = dist.new_group(backend="gloo", timeout=_PATIENCE)

    def gathered(self, value: Any) -> list[Any]:
        """Returns each rank's value, in rank order, on every rank."""
        return gather_objects(value, self.size, self.group)

    def moved(self, tensor: Tensor, source: int) -> Tensor:
        """Sends a tensor from rank ``source`` to rank 0; rank 0 passes a buffer of its shape and returns it filled."""
        if source == 0 or self.rank not in (0, source):
            return tensor
        if self.rank == 0:
            dist.recv(tensor, src=source, group=self.group)
        else:
            dist.send(tensor, dst=0, group=self.group)
        return tensor


class LiveWeights:
    """Gathers a model's dense weights on rank 0, and its tables block by block, because they may exceed the memory.

    Args:
        model: model from ``hybrid_parallel``, in any DistributedModelParallel, or unsharded.
        ranks: ranks of the export; all of them create one and iterate alike.
        rows: rows of a table that are exported, by table; all rows by default.

    Attributes:
        tables: exported shape of each table by name, equal on every rank.
    """

    def __init__(
        self,
        model: nn.Module,
        ranks: ExportRanks,
        rows: Mapping[str, Tensor] | None = None,
    ) -> None:
        self._ranks = ranks
        self._rows_of = dict(rows or {})
        self._shards: dict[str, list[Shard]] = {}
        for shard in local_shards(model):
            self._shards.setdefault(shard.config.name, []).append(shard)
        local_pieces: dict[str, list[_Piece]] = {}
        local_shapes: dict[str, Shape] = {}
        for name, shards in self._shards.items():
            local_pieces[name] = [_piece(ranks.rank, shard) for shard in shards]
            config = shards[0].config
            local_shapes[name] = Shape(
                (config.num_embeddings, config.embedding_dim), shards[0].tensor.dtype
            )
        self.tables: dict[str, Shape] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for pieces, shapes in ranks.gathered((local_pieces, local_shapes)):
            self.tables |= shapes
            for name, more in pieces.items():
                self._pieces.setdefault(name, []).extend(more)
        self.tables = dict(sorted(self.tables.items()))
        for name, whole in self.tables.items():
            self._pieces[name] = _choose_pieces(name, self._pieces[name], whole)
            if name in self._rows_of:
                self.tables[name] = Shape(
                    (len(self._rows_of[name]), whole.size[1]), whole.dtype
                )
        unwrapped = get_unwrapped_module(model)
        tables: set[str] = set()
        for path, collection in collections(model):
            prefix = f"{path}." if path else ""
            tables |= {prefix + key for key in collection.state_dict()}
        self._dense: dict[str, Tensor] = {}
        for name, value in unwrapped.state_dict().items():
            if (
                name not in tables
                and isinstance(value, Tensor)
                and not isinstance(value, ShardedTensor)
            ):
                self._dense[name] = value.detach().cpu().contiguous()

    def blocks(self, names: Iterable[str]) -> Iterator[tuple[str, int, Tensor]]:
        """Yields (table, first row, full rows), table by table and block by block; rows are valid on rank 0 only."""
        for name in names:
            for row, rows in self._rows(name):
                yield name, row, rows

    @torch.no_grad()
    def _rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        size, width = self.tables[name].size
        step = max(_BLOCK_BYTES // max(self.tables[name].row_bytes, 1), 1)
        for start in range(0, size, step):
            stop = min(start + step, size)
            rows = torch.arange(start, stop)
            if name in self._rows_of:
                rows = self._rows_of[name][start:stop]
            block = torch.empty(stop - start, width, dtype=self.tables[name].dtype)
            # Every rank goes through the pieces of all ranks, so that a sender and rank
            # 0 meet in one order.
            for piece in self._pieces[name]:
                places = (
                    ((rows >= piece.row) & (rows < piece.row + piece.rows))
                    .nonzero()
                    .squeeze(1)
                )
                if len(places):
                    values = self._ranks.moved(
                        self._values(name, piece, rows[places]), piece.rank
                    )
                    if self._ranks.rank == 0:
                        block[places, piece.column : piece.column + piece.columns] = (
                            values
                        )
            yield start, block

    def dense(self) -> dict[str, Tensor]:
        """Returns, on rank 0, all weights and buffers outside of tables, by their names in the unsharded model."""
        names_by_rank = self._ranks.gathered(sorted(self._dense))
        # Each weight that rank 0 lacks is sent by the lowest rank that has it.
        holder: dict[str, int] = {}
        for rank, names in enumerate(names_by_rank):
            for name in names:
                holder.setdefault(name, rank)
        own_weights: dict[str, Tensor] = {}
        if self._ranks.rank != 0:
            own_weights = {
                name: self._dense[name]
                for name, rank in holder.items()
                if rank == self._ranks.rank
            }
        weights_by_name = dict(self._dense)
        for weights in self._ranks.gathered(own_weights):
            weights_by_name |= weights
        return dict(sorted(weights_by_name.items()))

    def _values(self, name: str, piece: _Piece, rows: Tensor) -> Tensor:
        if piece.rank != self._ranks.rank:
            return torch.empty(len(rows), piece.columns, dtype=self.tables[name].dtype)
        shard = next(
            shard for shard in self._shards[name] if _piece(piece.rank, shard) == piece
        )
        local = (rows - piece.row).to(shard.tensor.device)
        return shard.tensor.detach().index_select(0, local).cpu()


def _piece(rank: int, shard: Shard) -> _Piece:
    rows, columns = shard.tensor.shape
    return _Piece(rank, shard.row, shard.column, rows, columns)


def _choose_pieces(name: str, pieces: list[_Piece], shape: Shape) -> list[_Piece]:
    """Chooses one holder for each rectangle of a table: the lowest rank."""
    first_holders: dict[tuple[int, ...], _Piece] = {}
    for piece in sorted(pieces):
        if piece.rows and piece.columns:
            first_holders.setdefault(piece[1:], piece)
    numbers = sum(piece.rows * piece.columns for piece in first_holders.values())
    assert numbers == torch.Size(shape.size).numel(), (
        f"table '{name}': {numbers} numbers of {shape.size} are held"
    )
    return sorted(first_holders.values(), key=lambda piece: piece[1:])
