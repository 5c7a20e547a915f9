"""Id dropout: replaces some ids by the out-of-vocabulary row in training, to train that row for unseen ids."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import ResumableLoader, TowerBatch
from torchrec_ext.data.columns import Chunk
from torchrec_ext.data.loader.sessions import SessionLoader
from torchrec_ext.data.negatives.random import device_uniform, mixed, stream
from torchrec_ext.schema import BatchSchema
from torchrec_ext.schema.features import SparseFeature
from torchrec_ext.schema.validation import listed


class IdDropout:
    """Wraps a loader and replaces random bags of some features by the feature's out-of-vocabulary row.

    Without the id, the other features must carry the score, and the out-of-vocabulary row is trained beside them: an
    unseen item, looked up by that row, gets a vector from its features (DropoutNet, Volkovs et al. 2017). It has to
    happen here, in the batch: TorchRec's pipelines send ids to their shards before the model's forward runs. Wrap the
    training loader only.

    What is dropped is a function of (seed, epoch, the row's ids), so it is the same on any number of ranks, at any
    batch size and after a resume; a user shared by 1 + N candidates is dropped for all of them or none. ``batch.users``
    and ``batch.items`` stay: in losses over the batch a dropped candidate is the item that was sampled, a negative of
    the other queries with its own log q, and only its vector is that of the out-of-vocabulary row.

    Args:
        loader: loader of the training batches.
        schema: schema of the batches; a feature's ``oov_id`` is the row of dropped ids.
        rates: share of bags that are dropped, by feature, at least 0 and below 1.
        seed: seed of the choice.

    Raises:
        ValueError: a feature that the schema does not have, a rate outside 0 to 1, or a SessionLoader.

    Example::

        loader = IdDropout(training_loader(data, schema, config), schema, {"item_id": 0.2}, seed=job.train.seed)
    """

    def __init__(
        self,
        loader: ResumableLoader,
        schema: BatchSchema,
        rates: Mapping[str, float],
        *,
        seed: int = 0,
    ) -> None:
        if rates and isinstance(loader, SessionLoader):
            feature, rate = next(iter(rates.items()))
            raise ValueError(
                f"id_dropout={feature}={rate} with a SessionLoader: its items have no features to stand "
                "for a dropped id; leave id_dropout out"
            )
        for name, rate in rates.items():
            if schema.feature(name) is None:
                raise ValueError(
                    f"rates names '{name}', which is no sparse feature; the features are {listed(schema.keys)}"
                )
            if not 0 <= rate < 1:
                raise ValueError(
                    f"rates: {name}={rate}: must be at least 0 and below 1; 0.1 to 0.3 is usual"
                )
        self._loader = loader
        self._schema = schema
        self._rates = {name: rate for name, rate in rates.items() if rate}
        self._seed = seed
        self._epoch = 0

    def __len__(self) -> int:
        return len(self._loader)

    def __iter__(self) -> Iterator[TowerBatch]:
        for batch in self._loader:
            yield drop_ids(
                batch, self._schema, self._rates, stream(self._seed, self._epoch)
            )

    def set_epoch(self, epoch: int) -> None:
        """Starts ``epoch``, counted from 0, at its first step."""
        self._epoch = epoch
        self._loader.set_epoch(epoch)

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Returns the state of the wrapped loader."""
        return self._loader.state_dict(step=step)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues at the saved position, on any number of ranks."""
        self._epoch = int(state["epoch"])
        self._loader.load_state_dict(state)


def drop_ids(
    batch: TowerBatch, schema: BatchSchema, rates: Mapping[str, float], key: int
) -> TowerBatch:
    """Replaces whole bags of the features in ``rates``, chosen by ``key`` and each row's ids."""
    if not rates:
        return batch
    parts = parts_of(batch, schema)
    numbers = _row_numbers(batch, parts)
    dropped: dict[str, tuple[Tensor, int]] = {}
    for name, rate in rates.items():
        feature = schema.feature(name)
        if feature is not None:
            rows = numbers[name in schema.shared]
            # A stream for each feature, so that one is dropped whether or not another
            # is.
            uniform = device_uniform(
                stream(key, _salt(name)), rows, torch.zeros_like(rows)
            )
            dropped[name] = (uniform < rate, feature.oov_id)
    new_ids = {name: _replace_bags(part, dropped) for name, part in parts.items()}
    # A loader of the user's own may leave `items` to the ids of the batch, which are
    # dropped now.
    if batch.items is None and schema.candidate and schema.candidate in rates:
        batch = dataclasses.replace(batch, items=batch.ids(schema.candidate))
    return with_parts(batch, new_ids)


def with_parts(batch: TowerBatch, ids: Mapping[str, KeyedJaggedTensor]) -> TowerBatch:
    """Returns a batch with other KeyedJaggedTensors, by the names of :func:`parts_of`."""
    shared = batch.shared
    if shared is not None and "shared" in ids:
        shared = dataclasses.replace(shared, sparse=ids["shared"])
    return dataclasses.replace(
        batch,
        sparse=ids["sparse"],
        shared=shared,
        joint=ids.get("joint"),
        weighted=ids.get("weighted"),
    )


def unseen_as_oov(rows: Chunk, train: Chunk, feature: SparseFeature) -> Chunk:
    """Replaces the ids of ``feature`` that are absent in ``train`` by its out-of-vocabulary row.

    For evaluation and serving: the row of an id that was never trained holds its first random values, or was only ever
    pushed down, as a negative. The out-of-vocabulary row is trained if ids of the feature are dropped; else it holds
    its first values too, but the same for all such ids, which are then ranked by their other features.
    """
    trained = train[feature.name].values
    # An id outside of the table has no row, trained or not.
    trained = trained[(trained >= 0) & (trained < feature.num_embeddings)]
    return rows.with_columns(
        {feature.name: rows[feature.name].restricted(trained, feature.oov_id)}
    )


class BagRange(NamedTuple):
    """Bags ``start`` to ``stop`` of a KeyedJaggedTensor: those of one feature, of shared rows or of the batch's."""

    feature: str
    shared: bool
    start: int
    stop: int


@dataclasses.dataclass(frozen=True)
class BatchBags:
    """A KeyedJaggedTensor of the batch, and its pieces; empty bags need not belong to one."""

    ids: KeyedJaggedTensor
    pieces: list[BagRange]

    @cached_property
    def bags(self) -> Tensor:
        """The bag of each id."""
        lengths = self.ids.lengths().long()
        numbers = torch.arange(len(lengths), device=lengths.device)
        return torch.repeat_interleave(
            numbers, lengths, output_size=len(self.ids.values())
        )

    def ids_by_piece(self) -> list[Tensor]:
        """Returns the ids of each piece, in their order; together they are all ids."""
        if not self.pieces:
            return []
        offsets = self.ids.offsets()
        starts = torch.tensor(
            [piece.start for piece in self.pieces[1:]],
            dtype=torch.int64,
            device=offsets.device,
        )
        # Places to cut at are read on the host, so one copy brings all of them.
        return list(self.ids.values().tensor_split(offsets[starts].long().cpu()))


def parts_of(batch: TowerBatch, schema: BatchSchema) -> dict[str, BatchBags]:
    """Returns the KeyedJaggedTensors of a batch by name: ``sparse``, ``shared``, ``joint`` and ``weighted``."""
    rows = len(batch)
    parts = {
        "sparse": _part(
            batch.sparse,
            [(name, False, rows) for name in batch.sparse.keys()],  # noqa: SIM118
        )
    }
    queries = 0
    if batch.shared is not None:
        shared = batch.shared.sparse
        queries = shared.stride()
        parts["shared"] = _part(
            shared,
            [(name, True, queries) for name in shared.keys()],  # noqa: SIM118
        )
    for name, ids, pairs in (
        ("joint", batch.joint, schema.joint),
        ("weighted", batch.weighted, schema.weighted),
    ):
        if ids is not None:
            halves: list[tuple[str | None, bool, int]] = []
            for pair in pairs:
                # Shared rows have one bag for each query; a key has those first, then
                # the batch's own.
                halves += [(pair.shared, True, queries), (pair.row, False, rows)]
            parts[name] = _part(ids, halves)
    return parts


def _part(
    ids: KeyedJaggedTensor, features: Sequence[tuple[str | None, bool, int]]
) -> BatchBags:
    """Splits a KeyedJaggedTensor into pieces.

    ``features`` are those whose bags follow one another: name, whether it is shared, and its number of bags.
    """
    pieces = []
    start = 0
    for feature, shared, bags in features:
        if feature is not None:
            pieces.append(BagRange(feature, shared, start, start + bags))
        start += bags
    return BatchBags(ids, pieces)


def _row_numbers(
    batch: TowerBatch, parts: Mapping[str, BatchBags]
) -> dict[bool, Tensor]:
    """Hashes the ids of each row: False -> (B,) for the batch's rows, True -> (Q,) for shared rows.

    Each depends on the ids of the other too, so that a user is not dropped for a whole epoch or not at all.
    """
    queries = 0
    if batch.shared is not None:
        queries = batch.shared.sparse.stride()
    rows = torch.zeros(len(batch), dtype=torch.int64, device=batch.labels.device)
    numbers = {False: rows, True: rows.new_zeros(queries)}
    for part in parts.values():
        sums = rows.new_zeros(part.ids.lengths().numel())
        # A sum of hashes: the order of the ids in a bag does not matter, and an id of 0
        # counts.
        sums.index_add_(0, part.bags, mixed(part.ids.values().long() + 1))
        for piece in part.pieces:
            numbers[piece.shared].add_(
                sums[piece.start : piece.stop], alpha=_salt(piece.feature)
            )
    if batch.shared is None:
        return numbers
    index = batch.shared.index
    rows = mixed(rows)
    return {
        False: rows + numbers[True][index],
        True: mixed(numbers[True]).index_add(0, index, rows),
    }


def _replace_bags(
    part: BatchBags, dropped: Mapping[str, tuple[Tensor, int]]
) -> KeyedJaggedTensor:
    pieces = [piece for piece in part.pieces if piece.feature in dropped]
    if not pieces:
        return part.ids
    values = part.ids.values()
    # -1 for a bag that stays; no out-of-vocabulary row has that number.
    oov_of_bag = torch.full(
        (part.ids.lengths().numel(),), -1, dtype=values.dtype, device=values.device
    )
    for piece in pieces:
        rows, oov_id = dropped[piece.feature]
        oov_of_bag[piece.start : piece.stop] = torch.where(rows, oov_id, -1)
    oov_of_id = oov_of_bag[part.bags]
    return with_values(part.ids, torch.where(oov_of_id >= 0, oov_of_id, values))


def with_values(ids: KeyedJaggedTensor, values: Tensor) -> KeyedJaggedTensor:
    """Returns the same bags with other ids, in page-locked memory if the former ones are."""
    new_ids = KeyedJaggedTensor(
        keys=ids.keys(),
        values=values,
        lengths=ids.lengths(),
        offsets=ids.offsets_or_none(),
        weights=ids.weights_or_none(),
        stride=ids.stride(),
        length_per_key=ids.length_per_key_or_none(),
        offset_per_key=ids.offset_per_key_or_none(),
    )
    return new_ids.pin_memory() if ids.values().is_pinned() else new_ids


@lru_cache
def _salt(name: str) -> int:
    """Returns an odd number within int64 for the name of a feature."""
    # Odd, so that a product with it modulo 2^64 loses no bit. Python's own hash of a
    # text differs from run to run.
    return (
        int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        | 1
    )
