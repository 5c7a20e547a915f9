"""Skeleton: a network that takes weights, look-ups and dropout noise from outside, so that K networks run as one.

first_difference(): compares the shapes of networks, and names the first difference.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from torchrec_ext.needs_torch import loaded_class

import torch
from torch import Tensor, nn

from torchrec_ext.batch import DrawnStep, Resident, SharedRows, TowerBatch
from torchrec_ext.modules.losses import codistillation

# Networks without tables are stacked without TorchRec.
if TYPE_CHECKING:
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

_FIELDS = ("dense", "labels", "weights", "total_weight", "log_q", "targets")
_SHARED = ("dense", "index")


class StackError(ValueError):
    """These networks cannot be stacked; the message gives the cause and a remedy."""


def bags_class() -> Any:
    """Returns EmbeddingBagCollection for ``isinstance``; imports nothing."""
    return loaded_class("torchrec.modules.embedding_modules:EmbeddingBagCollection")


class JaggedStandIn:
    """Stand-in for a KeyedJaggedTensor of a batch; a network may pass it to a collection but not read it."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __getattr__(self, attribute: str) -> NoReturn:
        raise StackError(
            f"the network reads batch.{self.name}.{attribute}, ids outside of an EmbeddingBagCollection, which differ "
            "from member to member: it cannot be stacked; train it alone"
        )


def jagged_of(batch: TowerBatch, name: str) -> KeyedJaggedTensor:
    """Returns the KeyedJaggedTensor behind a :class:`JaggedStandIn` of this name."""
    if name == "shared.sparse":
        return batch.shared.sparse  # type: ignore[union-attr]
    return getattr(batch, name)


def tensors_of(batch: TowerBatch) -> dict[str, Tensor]:
    """Returns a batch's tensors other than ids, by name; absent ones are left out."""
    tensors = {name: getattr(batch, name) for name in _FIELDS}
    if batch.shared is not None:
        tensors |= {f"shared.{name}": getattr(batch.shared, name) for name in _SHARED}
    return {name: value for name, value in tensors.items() if value is not None}


def tensors_apart(batch: TowerBatch, members: int) -> dict[str, Tensor]:
    """Returns :func:`tensors_of` a batch with the rows of K members one after another, (K, ...)."""
    tensors = {}
    for name, value in tensors_of(batch).items():
        # The weight of the batch is one number for each member already.
        if name != "total_weight":
            value = value.view(members, len(value) // members, *value.shape[1:])
        tensors[name] = value
    # Shared rows are counted over all members.
    if batch.shared is not None:
        first = (
            torch.arange(members, device=batch.labels.device)[:, None]
            * tensors["shared.dense"].shape[1]
        )
        tensors["shared.index"] = tensors["shared.index"] - first
    return tensors


class StackedSteps:
    """The steps of K members with all batches made as one, from the same rows in memory.

    Args:
        items: step of each member, in order.
        source: source of the batches of all members, one after another; of the one batch if all have one step.

    Attributes:
        members: number of members whose rows the batch holds: K, or 1 for all.
        tensors: tensors from which ``source`` makes the batch.
    """

    def __init__(self, items: Sequence[DrawnStep], source: Resident) -> None:
        self.items = list(items)
        self.source = source
        self.members = 1
        self.tensors: Sequence[Tensor] = items[0].tensors
        if not are_one(items):
            self.members = len(items)
            # Rows one member after another; scalars, such as the weight of a batch, one
            # for each member.
            tensors = zip(*(item.tensors for item in items), strict=True)
            self.tensors = [
                torch.cat(parts) if parts[0].dim() else torch.stack(parts)
                for parts in tensors
            ]

    @property
    def layout(self) -> tuple[object, ...]:
        """Returns the facts behind the shapes of the batch."""
        return (self.source, self.members, *(tensor.shape for tensor in self.tensors))

    def batches(self) -> list[TowerBatch]:
        """Makes the batch of each member, one for all if they have one step."""
        if self.members == 1:
            return [self.items[0].batch()] * len(self.items)
        return [item.batch() for item in self.items]


def are_one(items: Sequence[object]) -> bool:
    """Whether all items are one object, such as a batch that all members read."""
    return all(item is items[0] for item in items)


def unlike_members(values: Mapping[str, object]) -> tuple[str, str] | None:
    """Returns the first member and the first other one with another value; None if all have one.

    Example:
        >>> unlike_members({"a": 1, "b": 1, "c": 2})
        ('a', 'c')
    """
    first = next(iter(values))
    for name, value in values.items():
        if value != values[first]:
            return first, name
    return None


def joined_source(items: Sequence[DrawnStep], device: torch.device) -> Resident | None:
    """Returns the source of a :class:`StackedSteps`; None if the batches cannot be made as one on this device."""
    first = items[0]
    tensors = chain.from_iterable(item.source.tensors for item in items)
    if any(tensor.device != device for tensor in tensors):
        return None
    batch = first.batch()
    bags = [batch.sparse]
    if batch.shared is not None:
        bags.append(batch.shared.sparse)
    if batch.joint is not None or batch.weighted is not None:
        return None
    # One id in each bag: only then are the members' ids one tensor without offsets.
    if any(
        keyed.values().numel() != len(keyed.keys()) * keyed.stride() for keyed in bags
    ):
        return None
    shapes = [tensor.shape for tensor in first.tensors]
    if any([tensor.shape for tensor in item.tensors] != shapes for item in items):
        return None
    if are_one(items):
        return first.source
    return first.source.together([item.source for item in items[1:]])


class _MembersRows(SharedRows):
    """Selects rows by indexing: vmap runs it for all members at once; index_select would become a loop."""

    def spread(self, rows: Tensor) -> Tensor:
        return rows[self.index]


def batch_from_tensors(tensors: Mapping[str, Tensor]) -> TowerBatch:
    """Builds a batch of ``tensors``, with a :class:`JaggedStandIn` for each of its KeyedJaggedTensors."""
    shared: Any = None
    if "shared.index" in tensors:
        shared = _MembersRows(
            JaggedStandIn("shared.sparse"),
            *(tensors[f"shared.{name}"] for name in _SHARED),
        )
    fields: dict[str, Any] = {name: tensors.get(name) for name in _FIELDS}
    return TowerBatch(
        sparse=JaggedStandIn("sparse"),
        shared=shared,
        joint=JaggedStandIn("joint"),
        weighted=JaggedStandIn("weighted"),
        **fields,
    )


class _Tables(nn.Module):
    """Stand-in for an EmbeddingBagCollection; returns the pooled embeddings put into it."""

    def __init__(self, path: str, collection: EmbeddingBagCollection) -> None:
        from torchrec.modules.embedding_modules import get_embedding_names_by_table

        from torchrec_ext.capture.lowering import Pooled

        super().__init__()
        self._pooled_of = Pooled
        self.path = path
        self.reads = ""
        configs = list(collection.embedding_bag_configs())
        self.names = list(chain.from_iterable(get_embedding_names_by_table(configs)))
        self.widths: list[int] = []
        for table in configs:
            self.widths += [table.embedding_dim] * len(table.feature_names)
        self.pooled: Sequence[Tensor] | None = None
        self.strides: Mapping[str, int] = {}
        self.device = torch.device("cpu")

    def forward(self, features: JaggedStandIn) -> KeyedTensor:
        if self.pooled is not None:
            return self._pooled_of(self.names, self.pooled)
        if self.reads:
            raise StackError(
                f"the network looks up '{self.path}' more than once a step: it cannot be stacked; train it alone"
            )
        self.reads = features.name
        rows = self.strides[features.name]
        return self._pooled_of(
            self.names,
            [torch.zeros(rows, width, device=self.device) for width in self.widths],
        )


class _Dropout(nn.Module):
    """Stand-in for a dropout layer; multiplies by noise of the member's own generator."""

    def __init__(self) -> None:
        super().__init__()
        self.shape: torch.Size | None = None
        self.noise: Tensor | None = None

    def forward(self, values: Tensor) -> Tensor:
        self.shape = values.shape
        if self.noise is None:
            return values
        return values * self.noise


class Learner(nn.Module):
    """A network with its training loss: its own, or with codistillation."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(
        self,
        batch: TowerBatch,
        peers: Tensor | None = None,
        weight: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Returns loss () and detached logits (B,), with ``weight`` times the codistillation of ``peers`` (P, B)."""
        if peers is None or weight is None:
            loss, output = self.network(batch)
            return loss, output.logits.detach()
        logits = self.network.logits(batch)  # type: ignore[operator]
        loss = self.network.loss(logits, batch) + weight * codistillation(  # type: ignore[operator]
            logits, batch, peers
        )
        return loss, logits.detach()


class Skeleton:
    """A network with weights, look-ups and dropout noise from outside.

    Args:
        network: one network of a stack; its weights are not kept.
        batch: one of its batches, which shows what each collection reads and in which order dropout layers run.

    Raises:
        StackError: the network has parts that cannot be stacked.
    """

    def __init__(self, network: nn.Module, batch: TowerBatch) -> None:
        self.tables: dict[str, _Tables] = {}
        self.dropouts: list[_Dropout] = []
        replaced: dict[int, Any] = {}
        by_id = loaded_class("torchrec.modules.embedding_modules:EmbeddingCollection")
        for path, module in network.named_modules():
            if isinstance(module, (by_id, nn.modules.batchnorm._BatchNorm)):
                raise StackError(
                    f"layer '{path}' is a {type(module).__name__}: only EmbeddingBagCollections and layers that keep "
                    "no statistics are stacked; train the network alone"
                )
            if isinstance(module, bags_class()):
                self.tables[path] = replaced[id(module)] = _Tables(path, module)
            elif isinstance(module, nn.Dropout):
                dropout = _Dropout()
                replaced[id(module)] = dropout
                self.dropouts.append(dropout)
        # The copy has the weights of dense layers until a call passes others; tables
        # are not copied. `replaced` is the memo of the copy: it puts a stand-in
        # wherever a module of it was.
        self.learner = Learner(copy.deepcopy(network, replaced)).train()
        self.parameters = [name for name, _ in self.learner.named_parameters()]
        self._noise_shapes: dict[tuple[torch.Size, ...], list[torch.Size]] = {}
        self.dropouts = self._probe(batch)

    def noise_shapes(self, batch: TowerBatch) -> list[torch.Size]:
        """Returns the shape of each dropout layer's input for one member's batch, such as an epoch's shorter last."""
        shapes = tuple(value.shape for value in tensors_of(batch).values())
        if shapes not in self._noise_shapes:
            self._noise_shapes[shapes] = [
                layer.shape for layer in self._probe(batch) if layer.shape is not None
            ]
        return self._noise_shapes[shapes]

    def _probe(self, batch: TowerBatch) -> list[_Dropout]:
        """Runs the learner once on zeros; returns the dropout layers in order of execution."""
        tensors = tensors_of(batch)
        names = ["sparse", "joint", "weighted"]
        if batch.shared is not None:
            names.append("shared.sparse")
        strides = {}
        for name in names:
            bags = jagged_of(batch, name)
            if bags is not None:
                strides[name] = bags.stride()
        # The batch of a shorter last step has other strides; an empty `reads` marks a
        # collection as not yet read.
        for table in self.tables.values():
            table.strides = strides
            table.device = batch.dense.device
            table.reads = ""
        order: list[_Dropout] = []
        hooks = [
            layer.register_forward_hook(lambda layer, *_: order.append(layer))
            for layer in self.dropouts
        ]
        # On a stand-in of the batch, which raises where the network reads ids itself.
        with torch.no_grad():
            self.learner(batch_from_tensors(tensors))
        for hook in hooks:
            hook.remove()
        if len(set(order)) < len(order):
            raise StackError(
                "a dropout layer runs more than once a step: the network cannot be stacked; train it alone"
            )
        return order

    @contextmanager
    def holding(
        self, pooled: Mapping[str, Sequence[Tensor]], noise: Sequence[Tensor]
    ) -> Iterator[Learner]:
        """Yields the learner with ``pooled`` as its look-ups, by path, and ``noise`` in its dropout layers."""
        for path, table in self.tables.items():
            table.pooled = pooled[path]
        # There is no noise at all if no member has dropout.
        for layer, layer_noise in zip(self.dropouts, noise, strict=False):
            layer.noise = layer_noise
        try:
            yield self.learner
        finally:
            for table in self.tables.values():
                table.pooled = None
            for layer in self.dropouts:
                layer.noise = None


# The arguments of a module (Recorded) show in its attributes, but for dropout, whose
# rate may differ between members.
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "arguments", "made_of"})
_OF_A_TABLE = (
    "name",
    "num_embeddings",
    "embedding_dim",
    "feature_names",
    "pooling",
    "data_type",
)


class Layer(NamedTuple):
    """A module of a network: its path, and all that its computation depends on but its weights."""

    path: str
    facts: dict[str, Any]


def layers(network: nn.Module) -> Iterator[Layer]:
    """Yields the modules of ``network`` in order, without dropout layers: their rates may differ between members."""
    inside: tuple[str, ...] = ()
    for path, module in network.named_modules():
        if isinstance(module, nn.Dropout) or path.startswith(inside):
            continue
        if isinstance(module, bags_class()):
            inside += (f"{path}.",)
            tables = {
                table.name: _fact(table) for table in module.embedding_bag_configs()
            }
            yield Layer(
                path,
                {
                    "tables": tuple(tables),
                    **tables,
                    "is_weighted": module.is_weighted(),
                },
            )
            continue
        shapes = {
            name: tuple(weight.shape)
            for name, weight in module.named_parameters(recurse=False)
        }
        facts = {
            name: _fact(value)
            for name, value in vars(module).items()
            if name not in _OF_EVERY_MODULE
        }
        yield Layer(path, {"layer": type(module).__qualname__, **facts, **shapes})


def first_difference(networks: Mapping[str, nn.Module]) -> str | None:
    """Names the first difference of a network from the first network; None if all have one shape.

    Example:
        >>> first_difference({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})
        "out_features is 2 in 'a' and 3 in 'b'"
        >>> first_difference({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
    """
    (first, reference), *others = (
        (name, list(layers(network))) for name, network in networks.items()
    )
    for name, other_layers in others:
        for layer, other in zip(reference, other_layers, strict=False):
            # The fields of both: one of them may lack a field.
            for field in [*layer.facts, *other.facts]:
                mine = layer.facts.get(field, "absent")
                theirs = other.facts.get(field, "absent")
                if mine != theirs:
                    where = field
                    # The path of the network itself is empty.
                    if layer.path:
                        where = f"{layer.path}: {field}"
                    return f"{where} is {mine} in '{first}' and {theirs} in '{name}'"
        if len(reference) != len(other_layers):
            return f"'{first}' has {len(reference)} layers and '{name}' {len(other_layers)}"
    return None


def _fact(value: Any) -> Any:
    """Returns a form of ``value`` to compare by content; None for other objects, such as modules and tensors."""
    if isinstance(
        value, loaded_class("torchrec.modules.embedding_configs:BaseEmbeddingConfig")
    ):
        return tuple(
            f"{name}={_shown(getattr(value, name))}"
            for name in _OF_A_TABLE
            if hasattr(value, name)
        )
    if isinstance(value, functools.partial):
        return (_fact(value.func), _fact(value.args), _fact(value.keywords))
    if callable(value) and hasattr(value, "__qualname__"):
        # Two functions of one name may have closed over different values.
        closed = tuple(
            _fact(cell.cell_contents)
            for cell in getattr(value, "__closure__", None) or ()
        )
        return (value.__module__, value.__qualname__, *closed)
    if isinstance(value, Mapping):
        return tuple((key, _fact(entry)) for key, entry in value.items())
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(str, value)))
    if isinstance(value, list | tuple):
        return tuple(_fact(entry) for entry in value)
    if isinstance(value, int | float | str | bytes):
        return value
    if isinstance(value, slice):
        return repr(value)
    return None


def _shown(value: object) -> str:
    return str(getattr(value, "name", value))
