"""Id dropout: in training some ids become the out-of-vocabulary row, which so learns to stand for an id never seen."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import ResumableLoader, TowerBatch
from torchrec_ext.data.columns import Chunk, Column
from torchrec_ext.data.loader.sessions import SessionLoader
from torchrec_ext.data.negatives.random import device_uniform, mixed, stream
from torchrec_ext.schema import BatchSchema
from torchrec_ext.schema.features import SparseFeature
from torchrec_ext.schema.validation import listed


class IdDropout:
    """A loader whose batches lack some ids: whole bags of some features become the feature's out-of-vocabulary row.

    With the id gone, the other features must carry the score, and the out-of-vocabulary row is trained beside them: an
    item never seen, looked up by that row, gets a vector from its features (DropoutNet, Volkovs et al. 2017). It has to
    happen here, in the batch: TorchRec's pipelines send ids to their shards before the model's forward runs. Wrap the
    training loader only.

    What is dropped is a function of (seed, epoch, the row's ids), so it is the same on any number of ranks, at any
    batch size and after a resume; a user shared by 1 + N candidates is dropped for all of them or none. ``batch.users``
    and ``batch.items`` stay: in losses over the batch a dropped candidate is the item that was sampled, a negative of
    the other queries with its own log q, and only its vector is that of the out-of-vocabulary row.

    Args:
        loader: loader of the training batches.
        schema: schema of the batches; a feature's ``oov_id`` is the row that stands for dropped ids.
        rates: share of bags that are dropped, by feature, at least 0 and below 1.
        seed: seed of the choice.

    Raises:
        ValueError: a feature that the schema does not have, a rate outside 0 to 1, or a SessionLoader.

    Example::

        loader = IdDropout(training_loader(data, schema, config), schema, {"item_id": 0.2}, seed=job.train.seed)
    """

    def __init__(
        self, loader: ResumableLoader, schema: BatchSchema, rates: Mapping[str, float], *, seed: int = 0
    ) -> None:
        if rates and isinstance(loader, SessionLoader):
            feature, rate = next(iter(rates.items()))
            raise ValueError(
                f"id_dropout={feature}={rate} with a SessionLoader: its items are ids alone, without features that "
                "could stand for one that is dropped, and unknown items are no targets; leave id_dropout out"
            )
        for name, rate in rates.items():
            if schema.feature(name) is None:
                raise ValueError(
                    f"rates names '{name}', which is no sparse feature; the features are {listed(schema.keys)}"
                )
            if not 0 <= rate < 1:
                raise ValueError(f"rates: {name}={rate}: must be at least 0 and below 1; 0.1 to 0.3 is usual")
        self._loader, self._schema = loader, schema
        self._rates = {name: rate for name, rate in rates.items() if rate}
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[TowerBatch]:
        for batch in self._loader:
            yield drop_ids(batch, self._schema, self._rates, stream(self._seed, self._epoch))

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch``, counted from 0, at its first step."""
        self._epoch = epoch
        self._loader.set_epoch(epoch)

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Returns the state of the wrapped loader."""
        return self._loader.state_dict(step=step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues where ``state`` was taken, on any number of ranks."""
        self._epoch = int(state["epoch"])
        self._loader.load_state_dict(state)


def drop_ids(batch: TowerBatch, schema: BatchSchema, rates: Mapping[str, float], key: int) -> TowerBatch:
    """Replaces whole bags of the features in ``rates``; ``key`` and each row's ids decide which."""
    if not rates:
        return batch
    parts = _parts(batch, schema)
    numbers = _row_numbers(batch, parts)
    dropped: dict[str, tuple[Tensor, int]] = {}
    for name, rate in rates.items():
        feature = schema.feature(name)
        if feature is not None:
            rows = numbers[name in schema.shared]
            drawn = device_uniform(stream(key, _salt(name)), rows, torch.zeros_like(rows))
            dropped[name] = (drawn < rate, feature.oov_id)
    made = {name: _replaced(part, dropped) for name, part in parts.items()}
    shared = batch.shared
    if shared is not None and "shared" in made:
        shared = dataclasses.replace(shared, sparse=made["shared"])
    items = batch.items
    if items is None and schema.candidate and schema.candidate in rates:  # a loader of one's own
        items = batch.ids(schema.candidate)
    return dataclasses.replace(
        batch, sparse=made["sparse"], shared=shared, joint=made.get("joint"), weighted=made.get("weighted"), items=items
    )


def unseen_as_oov(rows: Chunk, train: Chunk, feature: SparseFeature) -> Chunk:
    """Returns ``rows`` in which the ids of ``feature`` that ``train`` does not hold are its out-of-vocabulary row.

    For evaluation and serving: the row of an id that was never trained holds its first random values, or was only ever
    pushed down, as a negative. The out-of-vocabulary row is trained where ids of the feature are dropped; else it holds
    its first values too, but the same for all such ids, which are then ranked by their other features.
    """
    seen = np.zeros(feature.num_embeddings, dtype=bool)
    trained = train[feature.name].values
    seen[trained[(trained >= 0) & (trained < feature.num_embeddings)]] = True
    column = rows[feature.name]
    values = column.values
    known = (values >= 0) & (values < feature.num_embeddings)
    known[known] = seen[values[known]]
    return rows.with_columns({feature.name: Column(np.where(known, values, feature.oov_id), column.offsets)})


class _Piece(NamedTuple):
    """Bags ``start`` to ``stop`` of a KeyedJaggedTensor: those of one feature, of shared rows or of the batch's."""

    feature: str
    shared: bool
    start: int
    stop: int


class _Part(NamedTuple):
    """A KeyedJaggedTensor of the batch, its pieces, and the bag in which each id stands."""

    ids: KeyedJaggedTensor
    pieces: list[_Piece]
    bags: Tensor


def _parts(batch: TowerBatch, schema: BatchSchema) -> dict[str, _Part]:
    """Returns the KeyedJaggedTensors of a batch by name: ``sparse``, ``shared``, ``joint`` and ``weighted``."""
    rows, keys = len(batch), batch.sparse.keys()
    parts = {"sparse": _part(batch.sparse, [[(name, False, rows)] for name in keys])}
    queries = 0
    if batch.shared is not None:
        shared = batch.shared.sparse
        queries, keys = shared.stride(), shared.keys()
        parts["shared"] = _part(shared, [[(name, True, queries)] for name in keys])
    for name, ids, pairs in (("joint", batch.joint, schema.joint), ("weighted", batch.weighted, schema.weighted)):
        if ids is not None:
            parts[name] = _part(ids, [[(pair.shared, True, queries), (pair.row, False, rows)] for pair in pairs])
    return parts


def _part(ids: KeyedJaggedTensor, keys: list[list[tuple[str | None, bool, int]]]) -> _Part:
    """Splits a KeyedJaggedTensor into pieces.

    ``keys`` names, for each key, the features whose bags follow one another: name, whether it is shared, and its bags.
    """
    pieces, start = [], 0
    for feature, shared, bags in (half for key in keys for half in key):
        if feature is not None:
            pieces.append(_Piece(feature, shared, start, start + bags))
        start += bags
    values, lengths = ids.values(), ids.lengths().long()
    numbers = torch.arange(start, device=values.device)
    return _Part(ids, pieces, torch.repeat_interleave(numbers, lengths, output_size=len(values)))


def _row_numbers(batch: TowerBatch, parts: Mapping[str, _Part]) -> dict[bool, Tensor]:
    """Returns numbers that the ids of a row decide: False -> (B,) of the batch's rows, True -> (Q,) of shared rows.

    Each depends on the ids of the other too, so that a user is not dropped for a whole epoch or not at all.
    """
    device = batch.labels.device
    queries = batch.shared.sparse.stride() if batch.shared is not None else 0
    alone = {False: torch.zeros(len(batch), dtype=torch.int64, device=device)}
    alone[True] = torch.zeros(queries, dtype=torch.int64, device=device)
    for part in parts.values():
        sums = torch.zeros(part.ids.lengths().numel(), dtype=torch.int64, device=device)
        sums.index_add_(0, part.bags, mixed(part.ids.values().long() + 1))
        for piece in part.pieces:
            alone[piece.shared].add_(sums[piece.start : piece.stop], alpha=_salt(piece.feature))
    if batch.shared is None:
        return alone
    index = batch.shared.index
    rows = mixed(alone[False])
    return {False: rows + alone[True][index], True: mixed(alone[True]).index_add(0, index, rows)}


def _replaced(part: _Part, dropped: Mapping[str, tuple[Tensor, int]]) -> KeyedJaggedTensor:
    pieces = [piece for piece in part.pieces if piece.feature in dropped]
    if not pieces:
        return part.ids
    values = part.ids.values()
    instead = torch.full((part.ids.lengths().numel(),), -1, dtype=values.dtype, device=values.device)
    for piece in pieces:
        rows, oov_id = dropped[piece.feature]
        instead[piece.start : piece.stop] = torch.where(rows, oov_id, -1)
    chosen = instead[part.bags]
    made = KeyedJaggedTensor(
        keys=part.ids.keys(),
        values=torch.where(chosen >= 0, chosen, values),
        lengths=part.ids.lengths(),
        weights=part.ids.weights_or_none(),
        stride=part.ids.stride(),
    )
    return made.pin_memory() if values.is_pinned() else made


@lru_cache
def _salt(name: str) -> int:
    """Returns an odd number within int64 that is particular to the feature."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little") | 1
