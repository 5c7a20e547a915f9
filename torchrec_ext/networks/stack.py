"""Stack: trains K networks of one shape as one, with their tables concatenated and their dense layers batched.

StackedTables: the tables of K networks as one EmbeddingBagCollection with K times the rows, looked up together.

StackedLayers: the dense weights of K networks as one matrix.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functionalize
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.functional import embedding_bag

from torchrec_ext.batch import DrawnStep, Resident, TowerBatch
from torchrec_ext.capture.executors import keep_freed_memory
from torchrec_ext.networks.graph import Inputs, leave_out_constants, trace
from torchrec_ext.networks.skeleton import (
    Skeleton,
    StackedSteps,
    StackError,
    are_one,
    bags_class,
    first_difference,
    jagged_of,
    joined_source,
    tensors_apart,
    tensors_of,
)

# Networks without tables are stacked without TorchRec.
if TYPE_CHECKING:
    from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
    from torchrec.modules.embedding_modules import EmbeddingBagCollection
    from torchrec.sparse.jagged_tensor import KeyedJaggedTensor


class _Bags(NamedTuple):
    """The bags of one feature of all members, K x S of them; ids are shifted to the rows of the stacked table.

    ``lengths`` is None if every bag has one id.
    """

    ids: Tensor
    lengths: Tensor | None = None
    weights: Tensor | None = None

    def pooled(self, table: Tensor, pooling: PoolingType) -> Tensor:
        """Returns the pooled bags, (K x S, D)."""
        from torchrec.modules.embedding_configs import PoolingType

        if self.lengths is None:
            return table.index_select(0, self.ids)
        ends = torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])
        mode = "sum"
        if pooling == PoolingType.MEAN:
            mode = "mean"
        return embedding_bag(
            self.ids,
            table,
            ends,
            mode=mode,
            per_sample_weights=self.weights,
            include_last_offset=True,
        )

    def one_each(self) -> tuple[Tensor, Tensor | None] | None:
        """Returns one row per bag (K x S,), any if empty, and a mask of filled bags (K x S, 1); None for lists."""
        if self.lengths is None:
            return self.ids, None
        if self.weights is not None or int(self.lengths.max()) > 1:
            return None
        ids = self.ids.new_zeros(len(self.lengths))
        ids[self.lengths.bool()] = self.ids
        return ids, self.lengths[:, None].float()

    def gradient(self, pooled: Tensor, pooling: PoolingType) -> Tensor:
        """Returns the gradient of each id's row, (n, D), from the gradient of the pooled bags (K x S, D)."""
        from torchrec.modules.embedding_configs import PoolingType

        if self.lengths is None:
            return pooled
        if pooling == PoolingType.MEAN:
            pooled = pooled / self.lengths.clamp(min=1)[:, None]
        rows = pooled.repeat_interleave(self.lengths, dim=0)
        if self.weights is None:
            return rows
        return rows * self.weights[:, None]


class StackedTables(nn.Module):
    """The collections at one path of K networks as one, with K times the rows, member after member.

    The members' own collections go on holding the same weights: their parameters become views of the stacked ones.

    Args:
        collections: one collection of each member, all of one shape.

    Raises:
        ValueError: a table is not fp32.
    """

    def __init__(self, collections: Sequence[EmbeddingBagCollection]) -> None:
        from torchrec.modules.embedding_modules import (
            EmbeddingBagCollection,
            get_embedding_names_by_table,
        )

        super().__init__()
        self.members = len(collections)
        self.tables: list[EmbeddingBagConfig] = list(
            collections[0].embedding_bag_configs()
        )
        self.names = list(
            chain.from_iterable(get_embedding_names_by_table(self.tables))
        )
        stacked = []
        for table in self.tables:
            rows = self.members * table.num_embeddings
            stacked.append(
                dataclasses.replace(table, num_embeddings=rows, init_fn=None)
            )
        weighted = collections[0].is_weighted()
        # Without memory of its own: each weight becomes the members' weights, one below
        # the other.
        self.collection = EmbeddingBagCollection(
            tables=stacked, is_weighted=weighted, device=torch.device("meta")
        )
        for table in self.tables:
            bags = [collection.embedding_bags[table.name] for collection in collections]
            if bags[0].weight.dtype != torch.float32:
                raise ValueError(
                    f"table '{table.name}' is {bags[0].weight.dtype}: only tables of fp32 are stacked"
                )
            weight = nn.Parameter(torch.cat([bag.weight.detach() for bag in bags]))
            weight.grad = torch.zeros_like(weight)
            self.collection.embedding_bags[table.name].weight = weight
            member_weights = (
                weight.detach().view(self.members, *bags[0].weight.shape).unbind()
            )
            for bag, member_weight in zip(bags, member_weights, strict=True):
                bag.weight.data = member_weight
        self._lookups: list[_Bags] = []

    def weight(self, table: EmbeddingBagConfig) -> nn.Parameter:
        """Returns the stacked weight of a table, (K x rows, D)."""
        return self.collection.embedding_bags[table.name].weight  # type: ignore[no-any-return]

    def read(self, parts: Sequence[KeyedJaggedTensor]) -> None:
        """Finds the look-ups' rows for the batches of K members, with S bags for each feature."""
        self._lookups = self._read(parts)

    def rows_of(self, bags: KeyedJaggedTensor, members: int) -> list[Tensor]:
        """Returns the rows (K x S,) of each look-up in bags of one id each, of ``members`` one after another."""
        values = bags.values().view(len(bags.keys()), members, -1).transpose(0, 1)
        # One batch for all members is read by each of them.
        reader = _OneEach(bags.keys(), values.expand(self.members, -1, -1))
        return [lookup.ids for lookup in self._of_each(reader)]

    def set_rows(self, rows: Sequence[Tensor]) -> None:
        """Makes the rows of :meth:`rows_of` the current look-ups."""
        self._lookups = [_Bags(ids) for ids in rows]

    def forward(self) -> list[Tensor]:
        """Returns the pooled bags (K, S, D) of each of ``names``, for the rows read last."""
        return self._pooled(
            self._lookups, [self.weight(table) for table in self.tables]
        )

    def look_up(
        self, parts: Sequence[KeyedJaggedTensor], weights: Sequence[Tensor]
    ) -> list[Tensor]:
        """Returns the pooled bags as if the tables had other ``weights``; no gradient is accumulated for them."""
        return self._pooled(self._read(parts), weights)

    def _read(self, parts: Sequence[KeyedJaggedTensor]) -> list[_Bags]:
        return self._of_each(_read_one_each(parts, self.members) or _Jagged(parts))

    def _of_each(self, reader: _OneEach | _Jagged) -> list[_Bags]:
        return [
            reader(feature, table.num_embeddings)
            for table in self.tables
            for feature in table.feature_names
        ]

    @torch.no_grad()
    def _pooled(
        self, lookups: Sequence[_Bags], weights: Sequence[Tensor]
    ) -> list[Tensor]:
        bags = iter(lookups)
        pooled = []
        for table, weight in zip(self.tables, weights, strict=True):
            for _ in table.feature_names:
                values = next(bags).pooled(weight, table.pooling)
                pooled.append(values.view(self.members, -1, table.embedding_dim))
        return pooled

    def one_each(self) -> list[tuple[Tensor, Tensor | None]]:
        """Returns the rows (K x S,) of each look-up read last, and a mask of filled bags (K x S, 1), or None for all.

        Raises:
            StackError: a bag has more than one id, or an id has a weight.
        """
        all_rows = []
        for bags in self._lookups:
            rows = bags.one_each()
            if rows is None:
                features = chain.from_iterable(
                    table.feature_names for table in self.tables
                )
                raise StackError(
                    f"one of the features {', '.join(dict.fromkeys(features))} has several ids or weights in some row; "
                    "a compiled step needs one id in each, such as with data.history_length=0"
                )
            all_rows.append(rows)
        return all_rows

    @torch.no_grad()
    def accumulate(self, gradients: Sequence[Tensor]) -> None:
        """Sets the tables' gradient from the gradients of the bags of the last :meth:`forward`."""
        lookups = iter(zip(self._lookups, gradients, strict=True))
        for table in self.tables:
            gradient = self.weight(table).grad
            gradient.zero_()  # type: ignore[union-attr]
            for _ in table.feature_names:
                bags, pooled = next(lookups)
                gradient.index_add_(  # type: ignore[union-attr]
                    0,
                    bags.ids,
                    bags.gradient(
                        pooled.reshape(-1, table.embedding_dim), table.pooling
                    ),
                )


class _OneEach:
    """Bags of one id each, (F, S) of each member; they need no offsets."""

    def __init__(self, keys: list[str], values: Tensor) -> None:
        self._index_of = {key: index for index, key in enumerate(keys)}
        self._values = values
        self._member = torch.arange(len(values), device=values.device)[:, None]
        self._row_ids: dict[tuple[str, int], Tensor] = {}

    def __call__(self, feature: str, rows: int) -> _Bags:
        # A feature of two tables with equally many rows has one sequence of ids.
        if (feature, rows) not in self._row_ids:
            ids = self._values[:, self._index_of[feature]]
            self._row_ids[feature, rows] = (ids + rows * self._member).view(-1)
        return _Bags(self._row_ids[feature, rows])


def _read_one_each(parts: Sequence[KeyedJaggedTensor], members: int) -> _OneEach | None:
    """Reads bags of one id each; None if a bag has another number of ids, or ids have weights."""
    first = parts[0]
    same = are_one(parts)
    different = parts
    if same:
        different = parts[:1]
    for batch in different:
        lengths = batch.lengths()
        if (
            batch.values().numel() != lengths.numel()
            or batch.weights_or_none() is not None
        ):
            return None
        # As many ids as bags, and no bag with two: each has one.
        if lengths.numel() and int(lengths.max()) != 1:
            return None
    values = torch.stack([batch.values() for batch in different]).view(
        len(different), len(first.keys()), first.stride()
    )
    if same:
        values = values.expand(members, -1, -1)
    return _OneEach(first.keys(), values)


class _Jagged:
    def __init__(self, parts: Sequence[KeyedJaggedTensor]) -> None:
        self._bags = [batch.to_dict() for batch in parts]

    def __call__(self, feature: str, rows: int) -> _Bags:
        by_member = [bags[feature] for bags in self._bags]
        weights = [bags.weights_or_none() for bags in by_member]
        # Member k's rows begin at row k x rows of the stacked table.
        ids = torch.cat(
            [bags.values() + rows * member for member, bags in enumerate(by_member)]
        )
        lengths = torch.cat([bags.lengths() for bags in by_member]).long()
        if weights[0] is None:
            return _Bags(ids, lengths)
        return _Bags(ids, lengths, torch.cat(weights))


# Relative tolerance of a loss in fp32: batched products add up in another order.
_TOLERANCE = 1e-4
StepBatches = Sequence[TowerBatch] | StackedSteps


class BatchMaker(NamedTuple):
    """Makes batches of one layout by the traced :meth:`Stack.made`.

    Args:
        graph: makes the rows of the look-ups, and the fields that differ from step to step.
        variable: names of these fields, in order.
        constants: fields that are the same in each step, such as the labels of a positive and its negatives.
        example: batch of one member.
    """

    graph: GraphModule
    variable: list[str]
    constants: dict[str, Tensor]
    example: TowerBatch


def _trace_maker(stack: Stack, steps: StackedSteps, example: TowerBatch) -> BatchMaker:
    resident = steps.source.tensors
    inputs = [*resident, *steps.tensors]
    names: list[str] = []

    def make(*tensors: Tensor) -> list[Any]:
        rows, fields = stack.made(
            steps, tensors[: len(resident)], tensors[len(resident) :]
        )
        names[:] = fields
        return [rows, *fields.values()]

    pure = functionalize(make, remove="mutations")
    graph = make_fx(pure, tracing_mode="fake")(*inputs)
    with torch.no_grad():
        _, *values = graph(*inputs)
    constants = dict(zip(names, values, strict=True))
    # Fields that depend on no input are computed here, once, and not in each step.
    variable = leave_out_constants(graph, names)
    for name in variable:
        del constants[name]
    constants = {name: value.clone() for name, value in constants.items()}
    return BatchMaker(graph, variable, constants, example)


class Losses(NamedTuple):
    """The detached ``loss`` (K,) and ``logits`` (K, B) of one step, and its number of counted ``rows`` (K,)."""

    loss: Tensor
    logits: Tensor
    rows: Tensor

    def finite(self) -> bool:
        """Whether every loss is a finite number."""
        return all(map(math.isfinite, self.loss.tolist()))


class StackedLayers:
    """The dense weights of K networks of one shape as one matrix, a row for each; their parameters become its views.

    Attributes:
        matrix: the weights, (K, P).
        grad: their gradient, (K, P).
        columns: the columns of each weight, by its name in the first network.
        weights: each weight of all networks, (K, ...), by this name.
        grads: their gradients, likewise.
    """

    def __init__(self, networks: Sequence[nn.Module]) -> None:
        names = list(dense_parameters(networks[0]))
        by_member = [dense_parameters(network).values() for network in networks]
        rows = []
        for parameters in by_member:
            flat = [weight.detach().reshape(-1) for weight in parameters]
            rows.append(torch.cat(flat))
        self.matrix = torch.stack(rows)
        self.grad = torch.zeros_like(self.matrix)
        self.columns: dict[str, slice] = {}
        self.weights: dict[str, nn.Parameter] = {}
        self.grads: dict[str, Tensor] = {}
        start = 0
        for name, *weights in zip(names, *by_member, strict=True):
            shape = (len(weights), *weights[0].shape)
            columns = slice(start, start + weights[0].numel())
            start = columns.stop
            values = self.matrix[:, columns].view(shape)
            self.columns[name] = columns
            self.weights[name] = nn.Parameter(values)
            self.grads[name] = self.grad[:, columns].view(shape)
            for weight, value in zip(weights, values.unbind(), strict=True):
                weight.data = value


class Stack(nn.Module):
    """K networks of one shape, trained side by side, each as it would be alone.

    A step of a small network is mostly the time between its kernels: K of them as one take one look-up for each table,
    over K times the rows, and one batched product for each layer (HFTA, Wang et al. 2021). Each member has its own
    rows, first weights, rate of dropout and generator for it; optimizers are :class:`StackedOptimizer`'s.

    The members' parameters become views of the stacked ones, so that ``stack.networks["a"]`` is at any time the network
    as trained so far, to evaluate or to save. A step runs a graph of the members' forward and backward, traced once for
    each shape of batch by ``vmap`` and ``make_fx`` and executed kernel by kernel, without autograd; the losses of the
    first step are compared with those of the members' own forwards.

    Args:
        networks: networks by name, on one device: modules as :func:`torchrec_ext.train.loop.train` takes them, such as
            TowerModels, of which only the dropout rates may differ. No two share weights.
        seeds: seed of each member's dropout, by name, with which it draws the noise that nn.Dropout draws alone on the
            CPU after ``torch.manual_seed(seed)``; 0 by default.

    Raises:
        StackError: the networks have different shapes; the message says which field differs.

    Example::

        stack = Stack({"a": model_a, "b": model_b})
        optimizer = StackedOptimizer(stack, {"a": OptimizerConfig(dense_lr=1e-3), "b": OptimizerConfig(dense_lr=3e-3)})
        for batch in loader:
            losses = stack.backward([batch, batch])
            optimizer.step()
        torch.save(stack.state_of("a"), "a.pt")
    """

    def __init__(
        self,
        networks: Mapping[str, nn.Module],
        *,
        seeds: Mapping[str, int] | None = None,
    ) -> None:
        super().__init__()
        if not networks:
            raise StackError("a stack needs at least one network")
        if len({id(network) for network in networks.values()}) < len(networks):
            raise StackError(
                f"two of {list(networks)} are one network; give each member weights of its own"
            )
        if (differs := first_difference(networks)) is not None:
            raise StackError(
                f"{differs}: a stack holds networks of one shape; give both the same, or train them beside each other "
                "on rank groups"
            )
        # For the whole process: a step's matrices would be mapped and faulted in anew
        # each time.
        keep_freed_memory()
        # They are no submodules, because their weights are views of the stack's.
        self.networks = dict(networks)
        seeds = seeds or {}
        self.generators = {
            name: torch.Generator().manual_seed(seeds.get(name, 0)) for name in networks
        }
        # Concatenate the members' tables, by the path of their collection.
        self.tables: dict[str, StackedTables] = {}
        for path, module in next(iter(networks.values())).named_modules():
            if isinstance(module, bags_class()):
                self.tables[path] = StackedTables(
                    [network.get_submodule(path) for network in networks.values()]
                )
        self.skeleton: Skeleton | None = None
        self._graphs: dict[tuple[object, ...], GraphModule] = {}
        self._makers: dict[tuple[object, ...], BatchMaker] = {}
        self._sources: dict[tuple[Resident, ...], Resident | None] = {}
        self.dense = StackedLayers(list(networks.values()))
        self.device = self.dense.matrix.device

    @property
    def members(self) -> list[str]:
        """The names of the members."""
        return list(self.networks)

    def state_of(self, member: str) -> dict[str, Tensor]:
        """Copies the state dict of one member, under the names of the network alone."""
        return {
            name: value.clone()
            for name, value in self.networks[member].state_dict().items()
        }

    def without(self, members: Collection[str]) -> Stack:
        """Returns a stack of the other members, with their weights and generators; leaving members keep copies."""
        others = {
            name: network
            for name, network in self.networks.items()
            if name not in members
        }
        for name in members:
            for weight in self.networks[name].parameters():
                weight.data = weight.data.clone()
        stack = Stack(others)
        stack.generators = {name: self.generators[name] for name in others}
        return stack

    def _skeleton_for(self, batch: TowerBatch) -> Skeleton:
        """Returns the skeleton, made for a first batch of one member."""
        if self.skeleton is None:
            # The network with the most dropout layers: a network with a rate of 0 may
            # have no such layer.
            networks = self.networks.values()
            most = max(networks, key=lambda network: len(_dropout_rates(network)))
            self.skeleton = Skeleton(most, batch)
            self._rates = _rates_of_all(self.networks, len(self.skeleton.dropouts))
        return self.skeleton

    def joined(
        self, items: Sequence[DrawnStep | TowerBatch]
    ) -> Sequence[TowerBatch] | StackedSteps:
        """Joins the members' steps into one with a common batch; returns their batches if that is impossible."""
        steps = [item for item in items if isinstance(item, DrawnStep)]
        # Whether rows can be read together is found once for each combination of
        # sources.
        if len(steps) == len(items):
            sources = tuple(item.source for item in steps)
            if sources not in self._sources:
                self._sources[sources] = joined_source(steps, self.device)
            if (source := self._sources[sources]) is not None:
                return StackedSteps(steps, source)
        # By identity: a batch that several members share is made and moved once, and
        # stays one object.
        batches: dict[int, TowerBatch] = {}
        for item in items:
            if id(item) not in batches:
                batch = item.batch() if isinstance(item, DrawnStep) else item
                if batch.labels.device != self.device:
                    batch = batch.to(self.device)
                batches[id(item)] = batch
        return [batches[id(item)] for item in items]

    def backward(
        self, batches: StepBatches, *, peers: Tensor | None = None, weight: float = 1.0
    ) -> Losses:
        """Computes each member's loss on its batch, and its gradient into ``grad`` of the stacked weights.

        Args:
            batches: one batch for each member, in order, all of one shape; a batch common to all is read once. Or the
                result of :meth:`joined`.
            peers: logits of each member's P stale peers for its rows, (K, P, B), towards which :func:`codistillation`
                draws it.
            weight: weight of the codistillation in the loss.

        Raises:
            StackError: the batches have different shapes, or the networks cannot be stacked after all.
        """
        inputs = self.inputs(batches, peers, weight)
        key = inputs.shapes()
        # Traced once for each shape; the first is checked, unless peers or noise make
        # the losses others.
        if key not in self._graphs:
            self._graphs[key] = trace(self.skeleton, inputs)  # type: ignore[arg-type]
            if peers is None and not inputs.noise:
                self._check_losses(self._graphs[key], inputs, batches)
        with torch.no_grad():
            loss, logits, *gradients = self._graphs[key](*inputs.flat())
        grads = list(self.dense.grads.values())
        torch._foreach_copy_(grads, gradients[: len(grads)])
        rest = iter(gradients[len(grads) :])
        for tables in self.tables.values():
            tables.accumulate([next(rest) for _ in tables.names])
        return Losses(loss, logits, inputs.rows())

    @torch.no_grad()
    def _check_losses(
        self, graph: GraphModule, inputs: Inputs, batches: StepBatches
    ) -> None:
        """Checks the losses of the first step against the members' own forwards."""
        if isinstance(batches, StackedSteps):
            batches = batches.batches()
        losses = graph(*inputs.flat())[0].tolist()
        for (name, network), batch, loss in zip(
            self.networks.items(), batches, losses, strict=True
        ):
            alone = float(network(batch)[0])
            if abs(alone - loss) > _TOLERANCE * max(1.0, abs(alone)):
                raise StackError(
                    f"'{name}' has a loss of {alone} on its first batch alone and of {loss} in the stack: its "
                    "forward depends on more than weights and batch; train it alone"
                )

    def inputs(
        self, batches: StepBatches, peers: Tensor | None = None, weight: float = 1.0
    ) -> Inputs:
        """Returns the input tensors of a step; the tables keep the rows for their gradient. See :meth:`backward`."""
        if isinstance(batches, StackedSteps):
            fields = self._make(batches)
            shared = batches.members == 1
        else:
            fields = stacked_fields(self.members, batches)
            shared = are_one(batches)
            self.read(batches)
        noise, stale = self.drawn(batches, peers, weight)
        return Inputs(
            list(self.dense.weights.values()),
            list(self.tables),
            [tables() for tables in self.tables.values()],
            fields,
            noise,
            stale,
            shared,
        )

    def drawn(
        self, batches: StepBatches, peers: Tensor | None, weight: float
    ) -> tuple[list[Tensor], list[Tensor]]:
        """Draws the noise of a step's dropout; returns it and the peers' inputs, see :meth:`inputs`."""
        example = self._example(batches)
        skeleton = self._skeleton_for(example)
        noise: list[Tensor] = []
        # There is no noise at all if no member has dropout.
        if any(map(any, self._rates)):
            shapes = skeleton.noise_shapes(example)
            for shape, *rates in zip(shapes, *self._rates, strict=False):
                layer_noise = _noise(shape, rates, self.generators.values())
                noise.append(layer_noise.to(self.device))
        if peers is None:
            return noise, []
        return noise, [peers, peers.new_full((len(self.networks),), weight)]

    def _example(self, batches: StepBatches) -> TowerBatch:
        if isinstance(batches, StackedSteps):
            return self.maker(batches).example
        return batches[0]

    def read(self, batches: Sequence[TowerBatch]) -> None:
        """Finds the look-ups' rows of ``batches``, for :class:`StackedTables` or a compiled step."""
        skeleton = self._skeleton_for(batches[0])
        for path, tables in self.tables.items():
            tables.read(
                [jagged_of(batch, skeleton.tables[path].reads) for batch in batches]
            )

    def made(
        self, steps: StackedSteps, resident: Sequence[Tensor], drawn: Sequence[Tensor]
    ) -> tuple[list[list[Tensor]], dict[str, Tensor]]:
        """Makes the batch of all members by torch ops alone.

        Args:
            steps: steps whose batch is made.
            resident: tensors of ``steps.source``, or their stand-ins in a trace.
            drawn: ``steps.tensors``, or their stand-ins.

        Returns:
            The rows (K x S,) of each look-up of each collection, and the ``fields`` of :class:`Inputs`.
        """
        assert self.skeleton is not None, "the maker's example prepares it"
        batch = steps.source.assemble(resident, drawn)
        rows = []
        for path, tables in self.tables.items():
            bags = jagged_of(batch, self.skeleton.tables[path].reads)
            rows.append(tables.rows_of(bags, steps.members))
        if steps.members == 1:
            return rows, tensors_of(batch)
        return rows, tensors_apart(batch, steps.members)

    def maker(self, steps: StackedSteps) -> BatchMaker:
        """Returns the maker of batches of this layout, traced once."""
        if steps.layout not in self._makers:
            example = steps.items[0].batch()
            self._skeleton_for(example)
            self._makers[steps.layout] = _trace_maker(self, steps, example)
        return self._makers[steps.layout]

    @torch.no_grad()
    def _make(self, steps: StackedSteps) -> dict[str, Tensor]:
        """Makes the batch of all members; the tables keep the rows of its look-ups."""
        maker = self.maker(steps)
        rows, *values = maker.graph(*steps.source.tensors, *steps.tensors)
        for tables, of_collection in zip(self.tables.values(), rows, strict=True):
            tables.set_rows(of_collection)
        return maker.constants | dict(zip(maker.variable, values, strict=True))


def _dropout_rates(network: nn.Module) -> list[float]:
    return [layer.p for layer in network.modules() if isinstance(layer, nn.Dropout)]


def _rates_of_all(networks: Mapping[str, nn.Module], count: int) -> list[list[float]]:
    """Returns the rates of each network's ``count`` dropout layers; 0 for a network without any."""
    rates_of_all = []
    for name, network in networks.items():
        rates = _dropout_rates(network) or [0.0] * count
        if len(rates) != count:
            raise StackError(
                f"'{name}' has {len(rates)} dropout layers, another network {count}"
            )
        rates_of_all.append(rates)
    return rates_of_all


def _noise(
    shape: torch.Size, rates: Sequence[float], generators: Iterable[torch.Generator]
) -> Tensor:
    """Draws the noise of a dropout layer, (K, ...), as nn.Dropout does for each member alone on the CPU."""
    noise = torch.ones(len(rates), *shape)
    for of_member, rate, generator in zip(noise, rates, generators, strict=True):
        if rate:
            of_member.bernoulli_(1 - rate, generator=generator).div_(1 - rate)
    return noise


def stacked_fields(
    members: Sequence[str], batches: Sequence[TowerBatch]
) -> dict[str, Tensor]:
    """Stacks the tensors of the batches, (K, ...); those of one batch for all stay as they are."""
    if len(batches) != len(members):
        raise StackError(
            f"{len(batches)} batches for {len(members)} networks: give one for each, {list(members)}"
        )
    # One object for all members is read once, without a copy for each of them.
    shared = are_one(batches)
    different = batches
    if shared:
        different = batches[:1]
    tensors = [tensors_of(batch) for batch in different]
    for name, other in zip(members, tensors, strict=False):
        for field in {**tensors[0], **other}:
            mine = tensors[0].get(field)
            theirs = other.get(field)
            if mine is None or theirs is None or mine.shape != theirs.shape:
                raise StackError(
                    f"batch.{field} is {_shape(mine)} for '{members[0]}' and {_shape(theirs)} for '{name}': "
                    "members of a stack take batches of one shape; give both the same batch_size and negatives"
                )
    if shared:
        return tensors[0]
    stacked = {}
    for name in tensors[0]:
        stacked[name] = torch.stack([fields[name] for fields in tensors])
    return stacked


def table_weights(stack: Stack) -> dict[str, nn.Parameter]:
    """Returns the stacked weight of each table, (K x rows, D), by ``PATH.TABLE``."""
    weights = {}
    for path, stacked in stack.tables.items():
        for table in stacked.tables:
            weights[f"{path}.{table.name}"] = stacked.weight(table)
    return weights


def dense_parameters(network: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters outside of tables, by name."""
    inside = tuple(
        f"{path}."
        for path, module in network.named_modules()
        if isinstance(module, bags_class())
    )
    return {
        name: weight
        for name, weight in network.named_parameters()
        if not name.startswith(inside)
    }


def _shape(tensor: Tensor | None) -> str:
    if tensor is None:
        return "absent"
    return str(tuple(tensor.shape))
