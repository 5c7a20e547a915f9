"""StepReads: how a step reads the tables of a user's model while Dynamo traces it: by look-ups of rows, each once.

look_up(): F.embedding and F.embedding_bag on rows that a step's table reads.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from torchrec_ext.capture.memory import Read, RowTable

_ONE = tuple(inspect.signature(F.embedding).parameters)
_BAG = tuple(inspect.signature(F.embedding_bag).parameters)
_MASK = 2**16  # elements, those of 256 features by 256: larger masks are of other kinds
_SAVED = 8.0  # columns: below it a second product costs more than it saves
# Operations that a GPU makes in the 10 us of the five more kernels that two products
# are, at 50 TFLOP/s. By data sheets, not measured.
_SAVED_ON_GPU = 2**29


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def the_loss(loss: Tensor) -> Tensor:
    """Marks the loss in a graph, whose outputs have no fixed order: what forward sets in Python is among them."""
    return loss.clone()


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def the_ids(ids: Tensor, weight: Tensor) -> Tensor:
    """Marks ids in a graph that rows of a weight are read by."""
    return ids.clone()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _writes(func: Any) -> bool:
    """Whether a call of torch's writes in place, by its name."""
    name = getattr(func, "__name__", "")
    is_in_place = name.endswith("_") and not name.endswith("__")
    return is_in_place or name == "__set__" or name[:3] == "__i"


class ConstantMask(NamedTuple):
    """A small boolean parameter of a model, as of a capture.

    Args:
        mask: the parameter, frozen as all of whole numbers are.
        positions: the positions (n,) of the flat mask at which it is true.
        version: torch's count of writes into the mask.
    """

    mask: Tensor
    positions: Tensor
    version: int

    def has_changed(self) -> bool:
        """Whether the mask is true at other positions now."""
        if self.mask._version == self.version:
            return False
        return not torch.equal(_positions(self.mask), self.positions)


def _positions(mask: Tensor) -> Tensor:
    return mask.flatten().nonzero().squeeze(1)


def constant_masks(model: nn.Module) -> list[ConstantMask]:
    """Returns the masks of a model by which its forward may choose pairs of features.

    No buffers: a forward that writes into a parameter is refused, and one may write into a buffer before it reads it.
    """
    masks = []
    for each in model.parameters():
        if each.dtype == torch.bool and each.numel() <= _MASK:
            masks.append(ConstantMask(each, _positions(each), each._version))
    return masks


class _Columns(NamedTuple):
    """Columns of a matrix (B, n) in which every row of ``rows`` stands ``repeats`` times, one after the other."""

    rows: Tensor
    repeats: int


class StepReads(TorchFunctionMode):
    """Reads rows of late tables, each once where the batch repeats it.

    Rows that stand several times in a batch are multiplied by a layer's weights once, and the products are repeated. A
    matrix of such rows, be it a column of the batch, what is looked up by one, or a concatenation with others, is
    followed as far as the layer that reads it, unless something is written in place before.

    Args:
        tables: the weights of late tables with their tables.
        repeats: tensors of the batch that repeat each value along their first dimension, with how often.
        is_exact: whether a sum of two products is that of one, as it is without autocast.
        masks: masks whose choice of elements is known, so that masked_select by them has a fixed shape.
    """

    def __init__(
        self,
        tables: Sequence[tuple[Tensor, RowTable]],
        *,
        repeats: Sequence[tuple[Tensor, int]] = (),
        is_exact: bool = True,
        masks: Sequence[ConstantMask] = (),
    ) -> None:
        super().__init__()
        self._tables = tables
        self._masks = masks
        self._repeats = list(repeats)
        self._is_exact = is_exact
        self._matrices: list[tuple[Tensor, list[_Columns]]] = []
        for leaf, count in repeats:
            if leaf.dim() == 2 and leaf.is_floating_point():
                rows = leaf.view(-1, count, leaf.shape[1])[:, 0]
                self._matrices.append((leaf, [_Columns(rows, count)]))

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func``, but for a look-up, a choice by a known mask and a layer on repeated rows."""
        kwargs = kwargs or {}
        if func is F.embedding or func is F.embedding_bag:
            return self._look_up(func, args, kwargs)
        if func is torch.masked_select or func is Tensor.masked_select:
            return self._masked_select(func, args, kwargs)
        if not self._repeats:
            return func(*args, **kwargs)
        if func is F.linear and len(args) > 1 and args[1].dim() == 2:
            columns = self._columns(args[0])
            if self._is_exact and _pays(columns, args[0], args[1]):
                return _linear(columns, *args[1:], **kwargs)
        result = func(*args, **kwargs)
        if func is torch.cat and args:
            self._note_concatenation(result, *args, **kwargs)
        # A write in place may be into anything that is followed. F.dropout takes its inplace=True by place, too.
        is_in_place = False
        for each in args:
            is_in_place = is_in_place or each is True
        if is_in_place or "out" in kwargs or kwargs.get("inplace") or _writes(func):
            self._forget()
        return result

    def _masked_select(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Chooses elements by their positions where a mask of the model chooses them in each matrix of a batch."""
        if len(args) == 2:
            values, mask = args
            for known in self._masks:
                if mask is known.mask and values.shape[-mask.dim() :] == mask.shape:
                    flat = values.flatten(-mask.dim())
                    return flat.index_select(-1, known.positions).flatten()
        return func(*args, **kwargs)

    def _forget(self) -> None:
        self._matrices = []
        self._repeats = []

    def _look_up(self, func: Any, args: Any, kwargs: Any) -> Tensor:
        is_bag = func is F.embedding_bag
        named = look_up_arguments(func, args, kwargs)
        ids = named["input"]
        repeats = self._repeats_of(named)
        if repeats > 1:
            named["input"] = ids.view(-1, repeats, *ids.shape[1:])[:, 0]
        rows = self._rows(func, named, is_bag)
        if repeats == 1:
            return rows
        result = rows.repeat_interleave(repeats, 0)
        if rows.dim() == 2:
            self._matrices.append((result, [_Columns(rows, repeats)]))
        return result

    def _repeats_of(self, named: Mapping[str, Any]) -> int:
        """Returns how often ids of a look-up repeat each value along their first dimension."""
        # Lists and weights of bags are not known to repeat with their ids.
        if named.get("offsets") is None and named.get("per_sample_weights") is None:
            for leaf, count in self._repeats:
                if leaf is named["input"]:
                    return count
        return 1

    def _rows(self, func: Any, named: dict[str, Any], is_bag: bool) -> Tensor:
        weight = named["weight"]
        ids = the_ids(named["input"], weight)
        for late, table in self._tables:
            if weight is late:
                return look_up(table.read, named, ids, is_bag)
        # The backward of embedding_bag is no kernel of inductor's.
        if is_bag and is_plain(named):
            return look_up(partial(F.embedding, weight=weight), named, ids, is_bag)
        # A sparse gradient has no kernel of inductor's; a dense one moves the same rows.
        return func(**{**named, "input": ids, "sparse": False})  # type: ignore[no-any-return]

    def _columns(self, matrix: Any) -> list[_Columns]:
        """Returns the columns of a matrix with repeated rows; empty without any."""
        for known, columns in self._matrices:
            if known is matrix:
                return columns
        return []

    def _note_concatenation(
        self, result: Any, tensors: Sequence[Any], dim: int = 0, **_: Any
    ) -> None:
        """Follows repeated columns into a matrix of several matrices beside each other."""
        if dim not in (1, -1):
            return
        columns: list[_Columns] = []
        repeats = False
        for each in tensors:
            if not isinstance(each, Tensor) or each.dim() != 2:
                return
            known = self._columns(each)
            repeats = repeats or len(known) > 0
            columns += known or [_Columns(each, 1)]
        if repeats:
            self._matrices.append((result, columns))


def _pays(columns: list[_Columns], matrix: Tensor, weight: Tensor) -> bool:
    """Whether a layer on a matrix (B, n) is cheaper with each repeated row multiplied once."""
    saved = 0.0
    for column in columns:
        saved += column.rows.shape[1] * (1 - 1 / column.repeats)
    if not weight.is_cuda:
        return saved >= _SAVED
    # A product, and in the backward two.
    return 6 * saved * matrix.shape[0] * weight.shape[0] >= _SAVED_ON_GPU


def _linear(
    columns: list[_Columns], weight: Tensor, bias: Tensor | None = None
) -> Tensor:
    """Returns a layer's output (B, m), each repeated row multiplied once; the bias is added once."""
    blocks = torch.split(weight, [column.rows.shape[1] for column in columns], 1)
    total = bias
    # Columns that repeat alike are one product.
    for repeats in sorted({column.repeats for column in columns}, reverse=True):
        rows = []
        weights = []
        for column, block in zip(columns, blocks, strict=False):
            if column.repeats == repeats:
                rows.append(column.rows)
                weights.append(block)
        product = F.linear(torch.cat(rows, 1), torch.cat(weights, 1))
        if repeats > 1:
            product = product.repeat_interleave(repeats, 0)
        total = product if total is None else product + total
    assert total is not None
    return total


def look_up_arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    """Returns the arguments of a call of F.embedding or F.embedding_bag by name."""
    names = _BAG if func is F.embedding_bag else _ONE
    return {**dict(zip(names, args, strict=False)), **kwargs}


def is_plain(named: Mapping[str, Any]) -> bool:
    """Whether a call of F.embedding or F.embedding_bag reads rows as they are; its arguments are given by name."""
    if named.get("max_norm") is not None or named.get("scale_grad_by_freq"):
        return False
    return bool(named.get("mode") != "max")


def look_up(
    read: Read, arguments: Mapping[str, Any], ids: Tensor, is_bag: bool
) -> Tensor:
    """Computes F.embedding or F.embedding_bag on rows read from a step's table.

    Args:
        read: reads rows of the table inside the step.
        arguments: arguments of the call by name.
        ids: its ids, or one of each that repeats.
        is_bag: whether it is F.embedding_bag.
    """
    weight = arguments["weight"]
    padding = arguments.get("padding_idx")
    offsets = arguments.get("offsets")
    weights = arguments.get("per_sample_weights")
    rows, dim = weight.shape
    if padding is not None:
        # From the end, as by torch.
        padding %= rows
    # A negative id would be read from the end; this one is out of range.
    flat = torch.where(ids < 0, rows, ids).reshape(-1).long()
    vectors = read(flat)
    # The row of the padding is read but never trained, as by torch.
    if padding is not None:
        vectors = torch.where((flat == padding)[:, None], vectors.detach(), vectors)
    vectors = vectors.reshape([*ids.shape, dim])
    if not is_bag:
        return vectors
    mode = arguments.get("mode", "mean")
    if offsets is None:
        return _pooled(vectors, ids, mode, padding, weights)
    last = bool(arguments.get("include_last_offset", False))
    return _pooled_lists(vectors, ids, offsets, mode, padding, weights, last)


def _pooled(
    vectors: Tensor, ids: Tensor, mode: str, padding: int | None, weights: Tensor | None
) -> Tensor:
    """Returns the bags (B, D) of the vectors (B, L, D) of the ids (B, L)."""
    if weights is not None:
        vectors = vectors * weights[..., None]
    if padding is None:
        return vectors.mean(1) if mode == "mean" else vectors.sum(1)
    # Padding takes no part in a bag, also not in the number by which a mean divides.
    counts = ids != padding
    pooled = (vectors * counts[..., None]).sum(1)
    if mode == "mean":
        pooled = pooled / counts.sum(1).clamp(min=1)[:, None]
    return pooled


def _pooled_lists(
    vectors: Tensor,
    ids: Tensor,
    offsets: Tensor,
    mode: str,
    padding: int | None,
    weights: Tensor | None,
    last: bool,
) -> Tensor:
    """Returns the bags (B, D) of the vectors (N, D) of the ids (N,), where each bag begins at one of the offsets."""
    places = torch.arange(len(vectors), device=vectors.device)
    bags = torch.searchsorted(offsets.long(), places, right=True) - 1
    # What stands behind a last offset is of no bag.
    size = len(offsets)
    counts = torch.ones_like(bags) if padding is None else (ids != padding).long()
    vectors = vectors * counts.to(vectors.dtype)[:, None]
    if weights is not None:
        vectors = vectors * weights[:, None]
    pooled = vectors.new_zeros(size, vectors.shape[1]).index_add(0, bags, vectors)
    if mode == "mean":
        numbers = counts.new_zeros(size).index_add(0, bags, counts)
        pooled = pooled / numbers.clamp(min=1).to(pooled.dtype)[:, None]
    return pooled[:-1] if last else pooled
