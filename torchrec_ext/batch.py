"""TowerBatch: the input of a training step, in a form that TorchRec's pipelines can copy and trace.

pack(): the one function that lays out a TowerBatch, whatever its rows come from.
"""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

import torchrec_ext.needs_torch  # noqa: F401

import torch
from torch import Tensor
from typing_extensions import Self

# Bags of ids are TorchRec's. Batches of dense columns alone need none of it, but where
# it is installed its pipelines must know every batch.
if TYPE_CHECKING or find_spec("torchrec"):
    from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

    from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor
    from torchrec.streamable import Pipelineable
else:
    Pipelineable = object

# Each KeyedJaggedTensor brings torch's notice on `is_fx_tracing`, because its metaclass in
# torch calls that function: neither its user nor TorchRec can call another.
logging.getLogger("torch.fx._symbolic_trace").addFilter(
    lambda record: not str(record.msg).startswith("is_fx_tracing")
)

# Length of a loader that does not know yet how many batches it will give, until it has
# given the last one.
ENDLESS = sys.maxsize


class _Fields(Pipelineable):
    """Gives a dataclass TorchRec's pipeline methods, applied field by field; numbers and None stay as they are."""

    def to(self, device: torch.device, non_blocking: bool = False) -> Self:
        """Returns a copy on ``device``."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Self:
        """Returns a copy in page-locked memory, for asynchronous copies to a GPU."""
        return self._map(lambda tensor: tensor.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Marks these tensors as in use on ``stream``, for the allocator."""
        # record_stream returns nothing, so the result of _map, a batch of None, is
        # dropped.
        self._map(lambda tensor: tensor.record_stream(stream))

    def _map(self, function: Callable[[Any], Any]) -> Self:
        values = {
            field.name: getattr(self, field.name) for field in dataclasses.fields(self)
        }
        # A number, such as ``queries``, has no device, and the lengths in a dict stay
        # on the host.
        plain_types = (int, tuple, dict, type(None))
        for name, value in values.items():
            if not isinstance(value, plain_types):
                values[name] = function(value)
        return type(self)(**values)


@dataclass
class SharedRows(_Fields):
    """Q rows shared by several rows of a batch, such as a user with 1 + N candidates: their tower runs once.

    Args:
        sparse: bags of the shared towers' features, stride Q.
        dense: dense columns of the shared towers, (Q, Fd) float32.
        index: shared row of each row of the batch, (B,) int64.
    """

    sparse: KeyedJaggedTensor
    dense: Tensor
    index: Tensor

    def spread(self, rows: Tensor) -> Tensor:
        """Returns the shared row of each row of the batch: (B, ...) from (Q, ...)."""
        # Not rows[index], because its backward adds number by number.
        return rows.index_select(0, self.index)


class Fresh(NamedTuple):
    """A note of :class:`torchrec_ext.ids.DynamicIds` about a table, for whoever holds its weights.

    Args:
        table: name of the table.
        rows: rows that begin anew with this batch, weights and optimizer state, (n,) int64.
        ids: the id of each of these rows, (n,) int64.
        evicted: ids that have lost their row, (m,) int64.
    """

    table: str
    rows: Tensor
    ids: Tensor
    evicted: Tensor


@dataclass
class TowerBatch(_Fields):
    """B rows for all towers at once.

    All sparse features of a kind are one KeyedJaggedTensor, and an attribute of the batch. ``TrainPipelineSparseDist``
    overlaps the input dist only if it can follow a module's input by ``getattr`` from the batch.

    Args:
        sparse: bags of F features, stride B.
        dense: dense columns, (B, Fd) float32; Fd may be 0.
        labels: labels, (B,) float32.
        weights: weights of the rows, (B,) float32; 0 marks a padding row, which no loss and no metric counts.
        total_weight: sum of ``weights`` over all ranks divided by R, () float32. Dividing the weighted loss by it makes
            the mean of the ranks' losses the mean over the global batch, however unevenly padding is spread. A
            loader's is never quite 0, so that rows without a weight have the loss 0.
        log_q: log-probability with which each row's candidate was sampled, (B,) float32, or None.
        shared: features of the model's shared towers, which are then in neither ``sparse`` nor ``dense``; None without
            shared towers.
        targets: labels of the second and further tasks, (B, T - 1) float32; None for one task.
        items: item of each row, (B,) int64, as sampled: id dropout changes the look-up and not this. 0 for padding.
            Losses that compare rows read it; None if the schema names no such column.
        queries: number of first rows that have a query; the rows after them are candidates alone. If given, as by a
            loader, the batches of all ranks have one size; None: every row has a query, and ranks may differ.
        lists: keys whose bags may hold any number of ids, all others hold one; None: to be found in the lengths, for
            which a captured step on a GPU waits.
        fresh: what changed in tables with dynamic ids before this batch, empty if nothing did; None without such
            tables.
    """

    sparse: KeyedJaggedTensor
    dense: Tensor
    labels: Tensor
    weights: Tensor
    total_weight: Tensor
    log_q: Tensor | None = None
    shared: SharedRows | None = None
    targets: Tensor | None = None
    items: Tensor | None = None
    queries: int | None = None
    lists: tuple[str, ...] | None = None
    fresh: tuple[Fresh, ...] | None = None

    def __len__(self) -> int:
        return self.labels.numel()

    @property
    def shared_weights(self) -> Tensor | None:
        """Returns the summed weights of each shared row's readers, (Q,) float32; None without shared rows."""
        if self.shared is None:
            return None
        return self.weights.new_zeros(self.shared.dense.shape[0]).index_add(
            0, self.shared.index, self.weights
        )

    def ids(self, name: str | Sequence[str]) -> Tensor:
        """Returns the first id of each bag of a feature, 0 for an empty bag: (B,) int64, or (Q,) if it is shared.

        Of several names it returns a column for each: (B, F).
        """
        if not isinstance(name, str):
            return torch.stack([self.ids(each) for each in name], 1)
        ids: Tensor = self.bags(name).to_padded_dense(1)[:, 0].long()
        return ids

    def bags(self, name: str) -> JaggedTensor:
        """Returns the bags of one feature, in whichever field it is: B of them, or Q if the feature is shared."""
        whole = [self.sparse]
        if self.shared is not None:
            whole.append(self.shared.sparse)
        for bags in whole:
            if name in bags.keys():  # noqa: SIM118
                return bags[name]
        raise KeyError(f"no feature '{name}' in the batch")


class Jagged(NamedTuple):
    """One sparse feature of a batch: its ids in ``values`` (sum of lengths,), and the ``lengths`` (B,) of its bags.

    ``lengths=None`` is one id per row.
    """

    values: Tensor
    lengths: Tensor | None = None


class KeyLayout(NamedTuple):
    """The features of ``batch.sparse`` and of ``batch.shared.sparse``, in order; None without shared rows."""

    rows: tuple[str, ...]
    shared: tuple[str, ...] | None = None


def pack(
    layout: KeyLayout,
    bags: Mapping[str, Jagged],
    *,
    dense: Tensor,
    labels: Tensor,
    weights: Tensor,
    total_weight: Tensor,
    log_q: Tensor | None = None,
    targets: Tensor | None = None,
    items: Tensor | None = None,
    queries: int | None = None,
    lists: tuple[str, ...] | None = None,
    shared_dense: Tensor | None = None,
    index: Tensor | None = None,
) -> TowerBatch:
    """Lays out a batch of B rows and Q shared rows; see :class:`TowerBatch` for its tensors.

    Args:
        layout: features of each tensor, in their order.
        bags: int64 ids of each feature by name; empty bags follow those of fewer rows, and stand for a missing feature.
        dense: (B, Fd) float32.
        labels: (B,) float32.
        weights: (B,) float32.
        total_weight: () float32.
        log_q: (B,) float32.
        targets: (B, T - 1) float32.
        items: (B,) int64.
        queries: number of rows that have a query.
        lists: see :class:`TowerBatch`.
        shared_dense: (Q, Fd) float32, the dense columns of the shared rows; needed if the layout has such rows.
        index: (B,) int64, the shared row of each row; needed if the layout has shared rows.
    """
    # Bags of ids are TorchRec's.
    from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

    size = labels.numel()
    shared = None
    if layout.shared is not None:
        assert shared_dense is not None
        assert index is not None
        of_shared = _keyed(layout.shared, bags, len(shared_dense), labels.device)
        shared = SharedRows(of_shared, shared_dense, index)
    return TowerBatch(
        sparse=_keyed(layout.rows, bags, size, labels.device),
        dense=dense,
        labels=labels,
        weights=weights,
        total_weight=total_weight,
        log_q=log_q,
        shared=shared,
        targets=targets,
        items=items,
        queries=queries,
        lists=lists,
    )


def _keyed(
    names: Sequence[str], bags: Mapping[str, Jagged], size: int, device: torch.device
) -> KeyedJaggedTensor:
    """Puts the bags of the features ``names`` one after the other, ``size`` bags of each."""
    columns = [bags.get(name) for name in names]
    values = [column.values for column in columns if column is not None]
    # Most have one id in each bag; the others are written into these ones.
    lengths = torch.ones(len(names) * size, dtype=torch.int32, device=device)
    for column, of_feature in zip(columns, torch.split(lengths, size), strict=False):
        if not column or column.lengths is not None or len(column.values) != size:
            of_feature.copy_(_lengths(column, size, device))
    return KeyedJaggedTensor(
        keys=list(names),
        # torch.cat refuses an empty list.
        values=torch.cat(values)
        if values
        else torch.empty(0, dtype=torch.int64, device=device),
        lengths=lengths,
        stride=size,
        # Told its ids, it does not wait for a GPU to count them.
        length_per_key=[len(column.values) if column else 0 for column in columns],
    )


def _lengths(column: Jagged | None, size: int, device: torch.device) -> Tensor:
    """(size,) int32 lengths of the column's bags, and 0 after them."""
    if column is None:
        return torch.zeros(size, dtype=torch.int32, device=device)
    if column.lengths is None:
        lengths = torch.ones(len(column.values), dtype=torch.int32, device=device)
    else:
        lengths = column.lengths.int()
    if len(lengths) == size:
        return lengths
    return torch.cat([lengths, lengths.new_zeros(size - len(lengths))])


@runtime_checkable
class ResumableLoader(Protocol):
    """A loader with a position to save and restore, such as those of ``torchrec_ext.data``."""

    def __iter__(self) -> Iterator[TowerBatch]: ...

    def __len__(self) -> int: ...

    def set_epoch(self, epoch: int) -> None:
        """Starts an epoch at its first step."""

    def state_dict(self, *, step: int | None = None) -> dict[str, Any]:
        """Returns the stream's position after ``step`` steps of this epoch."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continues from the position in ``state``.

        Raises:
            ValueError: it is of another stream.
        """
