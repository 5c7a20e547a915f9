"""A TowerBatch as a flat list of tensors whose shapes do not depend on its bags, and back.

What a captured step reads must have the shapes that it was captured with. A feature with one id in each bag is as it is; the ids of
any other are padded to a capacity, so its part of the KeyedJaggedTensor is longer than its bags, whose lengths stay true. A feature
has one id in each bag where its part has as many ids as there are bags: a capacity is never that number.

Capacities only grow, and at least to twice what outgrew them, so lists that grow over a run make few layouts, and a layout that
was outgrown never comes back.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.batch import SharedRows, TowerBatch

_HEADROOM = 1.25  # of a capacity over the first batch that needs it
_GROWTH = 2.0  # of a capacity over the batch that outgrew the one before: lists that grow do so in few steps
_GRAIN = 64


@dataclass(frozen=True)
class Bags:
    """A KeyedJaggedTensor without its tensors: S bags for each of its keys, and how many ids each key's part holds."""

    keys: tuple[str, ...]
    stride: int
    parts: tuple[int, ...]
    weighted: bool

    def keyed(self, tensors: list[Tensor]) -> KeyedJaggedTensor:
        """From (sum of parts,) ids, (F S,) lengths and, where weighted, the ids' weights."""
        return KeyedJaggedTensor(
            keys=list(self.keys),
            values=tensors[0],
            lengths=tensors[1],
            weights=tensors[2] if self.weighted else None,
            stride=self.stride,
            length_per_key=list(self.parts),
        )


@dataclass(frozen=True)
class Layout:
    """All of a batch but its tensors: what is there, by field, and each tensor's shape."""

    fields: tuple[tuple[str, Any], ...]

    @property
    def sizes(self) -> Layout:
        """The layout without the numbers of ids: what two batches have in common of which one's lists have outgrown the other's."""
        return Layout(tuple((name, _size(kind)) for name, kind in self.fields))

    def difference(self, other: Layout) -> str:
        """The first field in which two layouts differ, and how; empty where they are equal."""
        for (name, own), (_, theirs) in zip(self.fields, other.fields, strict=True):
            if own != theirs:
                return (
                    own.difference(theirs) if isinstance(own, Layout) and isinstance(theirs, Layout) else _told(name, own, theirs)
                )
        return ""

    def batch(self, tensors: list[Tensor]) -> TowerBatch:
        """The batch of the tensors that :meth:`Packer.pack` gave with this layout."""
        left = iter(tensors)
        return TowerBatch(**{name: _unpacked(kind, left) for name, kind in self.fields})


def _size(kind: Any) -> Any:
    if isinstance(kind, Bags):
        return dataclasses.replace(kind, parts=())
    return kind.sizes if isinstance(kind, Layout) else kind


def _told(name: str, own: Any, theirs: Any) -> str:
    shown = [f"{kind.stride} bags of {', '.join(kind.keys)}" if isinstance(kind, Bags) else str(kind) for kind in (own, theirs)]
    return f"'{name}' is {shown[0]} in one and {shown[1]} in another"


def _unpacked(kind: Any, left: Any) -> Any:
    if kind is None or isinstance(kind, int):
        return kind
    if isinstance(kind, Bags):
        return kind.keyed([next(left) for _ in range(3 if kind.weighted else 2)])
    if isinstance(kind, Layout):
        return SharedRows(**{name: _unpacked(own, left) for name, own in kind.fields})
    return next(left)


class Packer:
    """Packs batches; it remembers the capacities, so that batches of one size get one layout.

    A batch with more ids than a capacity gets a larger one, and with it another layout, as all batches after it do.
    """

    def __init__(self) -> None:
        self._capacities: dict[tuple[str, str, int], int] = {}

    def pack(self, batch: TowerBatch) -> tuple[Layout, list[Tensor]]:
        """The layout of a batch and its tensors."""
        tensors: list[Tensor] = []
        return self._fields("batch", batch, tensors), tensors

    def _fields(self, where: str, part: Any, tensors: list[Tensor]) -> Layout:
        found = []
        for field in dataclasses.fields(part):
            value = getattr(part, field.name)
            kind: Any = None
            if isinstance(value, KeyedJaggedTensor):
                kind = self._bags(f"{where}.{field.name}", value, tensors)
            elif isinstance(value, SharedRows):
                kind = self._fields(f"{where}.{field.name}", value, tensors)
            elif isinstance(value, int):
                kind = value
            elif value is not None:
                kind = (tuple(value.shape), value.dtype)
                tensors.append(value)
            found.append((field.name, kind))
        return Layout(tuple(found))

    def _bags(self, where: str, bags: KeyedJaggedTensor, tensors: list[Tensor]) -> Bags:
        stride, keys = bags.stride(), bags.keys()
        counts = bags.length_per_key()
        lengths = bags.lengths()
        lists = [(where, key, stride) in self._capacities for key in keys]  # once a list, padded for good
        whole = not any(lists) and (not keys or (counts == [stride] * len(keys) and bool(lengths.eq(1).all())))
        weights = bags.weights_or_none()
        if whole:
            parts, values = tuple(counts), bags.values()
        else:
            single = lengths.view(len(keys), stride).eq(1).all(dim=1).tolist() if stride else [True] * len(keys)
            padded = {key: count for key, count, one, known in zip(keys, counts, single, lists, strict=True) if known or not one}
            self._make_room(where, stride, padded)
            parts = tuple(
                self._capacities[where, key, stride] if key in padded else count for key, count in zip(keys, counts, strict=True)
            )
            values = _padded(bags.values(), counts, parts)
            weights = None if weights is None else _padded(weights, counts, parts)
        tensors += [values, lengths, *([weights] if weights is not None else [])]
        return Bags(tuple(keys), stride, parts, weights is not None)

    def _make_room(self, where: str, stride: int, counts: Mapping[str, int]) -> None:
        """Capacities for so many ids. Where one is outgrown all grow, since lists of one batch often grow together."""
        held = self._capacities
        outgrown = any(count > held.get((where, key, stride), count) for key, count in counts.items())
        for key, count in counts.items():
            known = held.get((where, key, stride), 0)
            if outgrown or not known:
                wanted = -(-int(count * (_GROWTH if known else _HEADROOM)) // _GRAIN) * _GRAIN or _GRAIN
                held[where, key, stride] = max(known, wanted + (wanted == stride))


def _padded(values: Tensor, counts: list[int], parts: tuple[int, ...]) -> Tensor:
    """The parts of the keys, each with zeros behind it."""
    padded, at, start = values.new_zeros(sum(parts)), 0, 0
    for count, part in zip(counts, parts, strict=True):
        padded[at : at + count] = values[start : start + count]
        at, start = at + part, start + count
    return padded
