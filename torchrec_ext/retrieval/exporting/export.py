"""export(): writes a trained model, sharded or not, as a bundle that is proven equal to it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.sharded_tensor import ShardedTensor
from torchrec.distributed.model_parallel import get_unwrapped_module

from torchrec_ext.data.preprocess.fitted import FittedPreprocessor
from torchrec_ext.data.preprocess.folders import whole_folder
from torchrec_ext.distributed.tables import Shard, collections, local_shards
from torchrec_ext.retrieval.bundle.audit import LiveModel
from torchrec_ext.retrieval.bundle.index_kinds import Kind
from torchrec_ext.retrieval.bundle.manifest import NAME, BundleError, Manifest
from torchrec_ext.retrieval.bundle.traced import TracedModel
from torchrec_ext.retrieval.exporting.content import (
    BundleContent,
    Catalogue,
    ExportConfig,
    NamedUsers,
    Progress,
    Tables,
)
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
    store: Dtype = "fp32",
    index: Kind = "exact",
    recall: float = 0.95,
    tables: Tables = "trained",
    overlap: float = 0.9,
    also: Sequence[type[nn.Module]] = (),
    details: Mapping[str, Any] | None = None,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> Manifest:
    """Writes a bundle: towers, top NN, preprocessing, stored vectors, index, and the proof that they are the model's.

    Where the model is sharded, every rank calls it with the same arguments. The digest depends on weights, data and
    settings alone: not on ranks, plan or time. The folder is whole or not there, and an earlier one stays until then.

    Args:
        model: TowerModel or NextItemModel, from ``hybrid_parallel``, in any DistributedModelParallel, or unsharded;
            with ``towers`` any module of your own, whose forward takes columns by name and returns logits (B,).
        out: folder to make.
        towers: paths of the modules of the query tower and of the candidate tower by their names, in that order, for a
            module of your own; a path or several each. They must read columns of the queries alone, and of the
            catalogue alone; what else forward computes of either alone is stored with them, and the rest runs for each
            pair.
        catalogue: items that can be recommended.
        users: known users, or None.
        queries: rows of raw columns of the query towers for the audit; those of the users where not given.
        preprocessor: makes the model's columns from raw ones; without, raw columns are the model's own.
        candidate: name of the candidate tower; the model's last where not given.
        oov_ids: out-of-vocabulary row of each feature; 0 where not given, or none with ``towers``, where unknown ids
            are refused.
        unseen: rows of a feature's table that no training row has read, by feature; a request's id that is one of them
            takes the out-of-vocabulary row. For features whose ids are their rows; a ``preprocessor`` leaves such ids
            out of its vocabulary.
        store: row format of the stored vectors: ``fp32``, ``fp16`` or ``int8``.
        index: ``exact``, or one of FAISS's: ``flat``, ``ivf``, ``hnsw``, ``pq``, for a dot product or a cosine.
        recall: recall that an approximate index must reach, measured against exact search.
        tables: ``trained``, as the model has them, or ``int8``: a byte a number, and a scale for each row. What that
            costs is measured against the trained model, and stands in the manifest under ``tables``.
        overlap: share of the 10 best items of a query that int8 tables must leave among its 10 best, on average.
        also: further classes that the model holds, each ``Recorded``.
        details: JSON values for the certificate, such as the run and its figures.
        overwrite: replace an earlier bundle.
        progress: called on rank 0 with the name of what is being written, the amount so far, and the whole amount.

    Returns:
        The manifest, on every rank.

    Raises:
        BundleError: the model cannot be exported, data do not fit, or the bundle does not give the model's logits.
        DataError: the folder is taken, or cannot be written.
    """
    if towers is not None:
        model = _traced(model, towers, candidate, preprocessor, catalogue, _queries(queries, users))
        oov_ids = dict.fromkeys(model.features, -1) | dict(oov_ids or {})
    ranks = ExportRanks()
    live = LiveModel(model, candidate=candidate, also=also)
    content = BundleContent(
        live=live,
        catalogue=catalogue,
        users=users,
        queries=_queries(queries, users),
        preprocessor=preprocessor,
        oov_ids=oov_ids or {},
        unseen=unseen or {},
        settings=ExportConfig(store=store, index=index, recall=recall, tables=tables, overlap=overlap),
        also=tuple(also),
        details=details or {},
        progress=progress or (lambda *_: None),
    )
    with evaluating(model):
        expected = content.audit.of_model(live, content.columns(live.names[:-1]), content.columns([live.candidate]))
        weights = LiveWeights(model, ranks)
        dense = weights.dense()
        blocks = weights.blocks(content.architecture.tables)
        outcome: Any = None
        if ranks.rank == 0:
            try:
                with whole_folder(Path(out), overwrite=overwrite, mark=NAME) as folder, one_thread():
                    outcome = content.write(folder, weights.tables, blocks, dense, expected)
                    sync_tree(folder)
            except Exception as error:
                outcome = error
        for _ in blocks:  # the other ranks send their rows, even where rank 0 has failed
            pass
        outcome = ranks.gathered(outcome)[0]
    if isinstance(outcome, Exception):
        raise outcome
    return outcome  # type: ignore[no-any-return]


def _traced(
    model: nn.Module,
    towers: Mapping[str, str | Sequence[str]],
    candidate: str | None,
    preprocessor: FittedPreprocessor | None,
    catalogue: Catalogue,
    queries: pa.Table,
) -> TracedModel:
    if preprocessor is not None:
        raise BundleError("preprocessor: not beside towers=; give the columns as the module's forward reads them")
    if candidate is not None and candidate in towers:
        towers = {**{name: paths for name, paths in towers.items() if name != candidate}, candidate: towers[candidate]}
    return TracedModel(model, towers, queries=queries, catalogue=catalogue.features)


def _queries(queries: pa.Table | None, users: NamedUsers | None) -> pa.Table:
    rows = queries if queries is not None else None if users is None else users.features
    if rows is None or not len(rows):
        raise BundleError(
            "queries: there are no rows to audit by; give users with their features, or queries of some raw rows"
        )
    return rows


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode for the time of the block."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


@contextmanager
def one_thread() -> Iterator[None]:
    """Runs torch with one thread in the block, so that sums are in one order and vectors equal to the last bit."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


BLOCK_BYTES = 32 * 2**20
_PATIENCE = timedelta(hours=6)  # timeout of a collective, during which rank 0 writes a whole bundle


class _Piece(NamedTuple):
    """A rectangle of a table, held by ``rank``."""

    rank: int
    row: int
    column: int
    rows: int
    columns: int


class ExportRanks:
    """The ranks of an export, with a process group of their own; one rank without ``torch.distributed``.

    Every rank makes one and calls each method alike.
    """

    def __init__(self) -> None:
        many = dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1
        self.rank, self.size = (dist.get_rank(), dist.get_world_size()) if many else (0, 1)
        self.group = dist.new_group(backend="gloo", timeout=_PATIENCE) if many else None

    def gathered(self, value: Any) -> list[Any]:
        """Returns each rank's value, in rank order, on every rank."""
        if self.group is None:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def moved(self, tensor: Tensor, source: int) -> Tensor:
        """Sends a tensor of rank ``source`` to rank 0, which passes one of the same shape and returns it filled."""
        if source == 0 or self.rank not in (0, source):
            return tensor
        if self.rank == 0:
            dist.recv(tensor, src=source, group=self.group)
        else:
            dist.send(tensor, dst=0, group=self.group)
        return tensor


class LiveWeights:
    """Gathers tables, block by block so that none need fit into memory, and dense weights of a model on rank 0.

    Args:
        model: model from ``hybrid_parallel``, in any DistributedModelParallel, or unsharded.
        ranks: ranks of the export, all of which make one and iterate alike.

    Attributes:
        tables: whole shape of each table by name, alike on every rank.
    """

    def __init__(self, model: nn.Module, ranks: ExportRanks) -> None:
        self._ranks = ranks
        self._shards: dict[str, list[Shard]] = {}
        for shard in local_shards(model):
            self._shards.setdefault(shard.config.name, []).append(shard)
        held = {name: [_piece(ranks.rank, shard) for shard in shards] for name, shards in self._shards.items()}
        kinds = {
            name: Shape((shards[0].config.num_embeddings, shards[0].config.embedding_dim), shards[0].tensor.dtype)
            for name, shards in self._shards.items()
        }
        everyone = ranks.gathered((held, kinds))
        self.tables: dict[str, Shape] = {}
        self._pieces: dict[str, list[_Piece]] = {}
        for pieces, shapes in everyone:
            self.tables |= {name: shape for name, shape in shapes.items() if name not in self.tables}
            for name, more in pieces.items():
                self._pieces.setdefault(name, []).extend(more)
        self.tables = dict(sorted(self.tables.items()))
        self._pieces = {name: _once(name, held, self.tables[name]) for name, held in self._pieces.items()}
        self._dense = _dense_of(model)

    def blocks(self, names: Iterable[str]) -> Iterator[tuple[str, int, Tensor]]:
        """Yields (table, first row, whole rows), one table and block after the other; rows are valid on rank 0."""
        for name in names:
            for row, rows in self._rows(name):
                yield name, row, rows

    @torch.no_grad()
    def _rows(self, name: str) -> Iterator[tuple[int, Tensor]]:
        size, width = self.tables[name].size
        step = max(BLOCK_BYTES // max(self.tables[name].row_bytes, 1), 1)
        for start in range(0, size, step):
            stop = min(start + step, size)
            block = torch.empty(stop - start, width, dtype=self.tables[name].dtype)
            for piece in self._pieces[name]:
                first, last = max(start, piece.row), min(stop, piece.row + piece.rows)
                if first < last:
                    values = self._ranks.moved(self._values(name, piece, first, last), piece.rank)
                    if self._ranks.rank == 0:
                        block[first - start : last - start, piece.column : piece.column + piece.columns] = values
            yield start, block

    def dense(self) -> dict[str, Tensor]:
        """Returns, on rank 0, all weights and buffers that are in no table, by their names in the unsharded model."""
        known = self._ranks.gathered(sorted(self._dense))
        missing = {name for names in known for name in names} - set(known[0])
        holder = {name: next(rank for rank, names in enumerate(known) if name in names) for name in missing}
        sent = {name: self._dense[name] for name, rank in holder.items() if rank == self._ranks.rank}
        whole = dict(self._dense)
        for weights in self._ranks.gathered(sent):
            whole |= weights
        return dict(sorted(whole.items()))

    def _values(self, name: str, piece: _Piece, first: int, last: int) -> Tensor:
        if piece.rank != self._ranks.rank:
            return torch.empty(last - first, piece.columns, dtype=self.tables[name].dtype)
        shard = next(shard for shard in self._shards[name] if _piece(piece.rank, shard) == piece)
        return shard.tensor[first - piece.row : last - piece.row].detach().cpu().contiguous()


def _piece(rank: int, shard: Shard) -> _Piece:
    rows, columns = shard.tensor.shape
    return _Piece(rank, shard.row, shard.column, rows, columns)


def _once(name: str, pieces: list[_Piece], shape: Shape) -> list[_Piece]:
    """Chooses each rectangle of a table from the lowest rank that holds it."""
    chosen: dict[tuple[int, ...], _Piece] = {}
    for piece in sorted(pieces):
        if piece.rows and piece.columns:
            chosen.setdefault(piece[1:], piece)
    held = sum(piece.rows * piece.columns for piece in chosen.values())
    assert held == torch.Size(shape.size).numel(), f"table '{name}': {held} numbers of {shape.size} are held"
    return sorted(chosen.values(), key=lambda piece: piece[1:])


def _dense_of(model: nn.Module) -> dict[str, Tensor]:
    unwrapped = get_unwrapped_module(model)
    tables = {
        f"{path}.{key}" if path else key for path, collection in collections(model) for key in collection.state_dict()
    }
    return {
        name: value.detach().cpu().contiguous()
        for name, value in unwrapped.state_dict().items()
        if name not in tables and isinstance(value, Tensor) and not isinstance(value, ShardedTensor)
    }
