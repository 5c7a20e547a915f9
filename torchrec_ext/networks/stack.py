"""Stack: K networks of one shape as one, their tables laid below one another, their dense layers run as batched products."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.fx import GraphModule
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from torchrec_ext.batch import TowerBatch
from torchrec_ext.networks.allocator import keep_freed_memory
from torchrec_ext.networks.lookups import StackedTables
from torchrec_ext.networks.same_shape import difference
from torchrec_ext.networks.skeleton import Skeleton, StackError, part_of, tensors_of
from torchrec_ext.networks.tracing import Inputs, trace

_CLOSE = 1e-4


class Losses(NamedTuple):
    """Of one step, member after member and detached: ``loss`` (K,), ``logits`` (K, B)."""

    loss: Tensor
    logits: Tensor


class Stack(nn.Module):
    """K networks of one shape that learn side by side, each as it would alone.

    A step of a small network is mostly the time between its kernels: K of them as one take one look-up for each table, over K times
    the rows, and one batched product for each layer (HFTA, Wang et al. 2021). Each member has its own rows, first weights, rate of
    dropout and generator for it; optimizers are :class:`StackedOptimizer`'s.

    The members stay what they were: their parameters become views of the stacked ones, so that ``stack.networks["a"]`` is at any
    time the network as trained so far, to evaluate or to save. What runs is a graph of their forward and backward, traced once for
    each shape of batch by ``vmap`` and ``make_fx`` and executed kernel by kernel, without autograd; its first step is compared with
    the members' own forwards.

    Args:
        networks: by name, on one device: modules as :func:`torchrec_ext.train.loop.train` takes them, such as TowerModels, whose
            rates of dropout alone may differ. Each has weights of its own.
        seeds: of each member's dropout, by name: with it a member draws the noise that nn.Dropout draws alone on the CPU after
            ``torch.manual_seed(seed)``. 0 where not given.

    Raises:
        StackError: networks of different shapes; says which field differs.

    Example::

        stack = Stack({"a": model_a, "b": model_b})
        optimizer = StackedOptimizer(stack, {"a": OptimizerConfig(dense_lr=1e-3), "b": OptimizerConfig(dense_lr=3e-3)})
        for batch in loader:
            losses = stack.backward([batch, batch])
            optimizer.step()
        torch.save(stack.state_of("a"), "a.pt")
    """

    def __init__(self, networks: Mapping[str, nn.Module], *, seeds: Mapping[str, int] | None = None) -> None:
        super().__init__()
        if not networks:
            raise StackError("a stack needs at least one network")
        if len({id(network) for network in networks.values()}) < len(networks):
            raise StackError(f"two of {list(networks)} are one network; give each member weights of its own")
        if (differs := difference(networks)) is not None:
            raise StackError(
                f"{differs}: a stack holds networks of one shape; give both the same, or train them beside each other on rank "
                "groups"
            )
        keep_freed_memory()
        self.networks = dict(networks)  # not as submodules: their weights are views of the stack's
        self.generators = {name: torch.Generator().manual_seed((seeds or {}).get(name, 0)) for name in networks}
        self.tables = self._lay_tables_below_one_another()
        self.skeleton: Skeleton | None = None
        self._graphs: dict[tuple[object, ...], GraphModule] = {}
        self.dense: dict[str, nn.Parameter] = {}
        self._lay_dense_together()

    @property
    def members(self) -> list[str]:
        """Their names."""
        return list(self.networks)

    def state_of(self, member: str) -> dict[str, Tensor]:
        """An ordinary state dict of one member: copies, under the names that the network alone has."""
        return {name: value.clone() for name, value in self.networks[member].state_dict().items()}

    def without(self, members: Collection[str]) -> Stack:
        """A stack of the others, with the weights and the generators of now; those that leave keep theirs as their own."""
        kept = {name: network for name, network in self.networks.items() if name not in members}
        for name in members:
            for weight in self.networks[name].parameters():
                weight.data = weight.data.clone()
        stack = Stack(kept)
        stack.generators = {name: self.generators[name] for name in kept}
        return stack

    def own_names(self, member: str) -> list[str]:
        """The names that one member has for the dense weights, in the order of ``dense``, which has the first member's."""
        return [name for name, _ in _dense_parameters(self.networks[member])]

    def dense_grads(self) -> dict[str, Tensor]:
        """By name the gradient of the dense weights, (K, ...)."""
        return dict(zip(self.dense, self._dense_grads, strict=True))

    def _lay_tables_below_one_another(self) -> dict[str, StackedTables]:
        """By the path that their collection has in every network."""
        first = next(iter(self.networks.values()))
        paths = [path for path, module in first.named_modules() if isinstance(module, EmbeddingBagCollection)]
        return {path: StackedTables([network.get_submodule(path) for network in self.networks.values()]) for path in paths}

    def _lay_dense_together(self) -> None:
        """One (K, P) matrix of all dense weights, a row for each member, and the gradient likewise: optimizers take it whole."""
        own = [_dense_parameters(network) for network in self.networks.values()]
        sizes = [weight.numel() for _, weight in own[0]]
        self.flat = torch.stack([torch.cat([weight.detach().reshape(-1) for _, weight in parameters]) for parameters in own])
        self.flat_grad = torch.zeros_like(self.flat)
        self._dense_grads: list[Tensor] = []
        for place, (name, weight) in enumerate(own[0]):
            shape = (len(own), *weight.shape)
            columns = slice(sum(sizes[:place]), sum(sizes[: place + 1]))
            self.dense[name] = nn.Parameter(self.flat[:, columns].view(shape))
            self._dense_grads.append(self.flat_grad[:, columns].view(shape))
            for parameters, values in zip(own, self.dense[name].detach().unbind(), strict=True):
                parameters[place][1].data = values

    def _prepare(self, batch: TowerBatch) -> Skeleton:
        # The network with the most dropout layers: who has a rate of 0 may have left the layer out.
        self.skeleton = Skeleton(max(self.networks.values(), key=lambda network: len(_dropouts(network))), batch)
        self._rates = []
        for name, network in self.networks.items():
            rates = [layer.p for layer in _dropouts(network)] or [0.0] * len(self.skeleton.dropouts)
            if len(rates) != len(self.skeleton.dropouts):
                raise StackError(f"'{name}' has {len(rates)} dropout layers, another network {len(self.skeleton.dropouts)}")
            self._rates.append(rates)
        return self.skeleton

    def backward(self, batches: Sequence[TowerBatch], *, peers: Tensor | None = None, weight: float = 1.0) -> Losses:
        """The gradient of each member's loss on its own batch, in ``grad`` of the stacked weights.

        Args:
            batches: of each member, in order, all of one shape; one and the same batch for all is read once.
            peers: (K, P, B) logits of each member's P stale peers for its rows, towards which :func:`codistillation` draws it.
            weight: of that term.

        Raises:
            StackError: batches of different shapes, or networks that cannot be stacked after all.
        """
        inputs = self.inputs(batches, peers, weight)
        key = inputs.shapes()
        if key not in self._graphs:
            self._graphs[key] = trace(self.skeleton, inputs)  # type: ignore[arg-type]
            if peers is None and not inputs.noise:
                self._prove(self._graphs[key], inputs, batches)
        with torch.no_grad():
            loss, logits, *gradients = self._graphs[key](*inputs.flat())
        torch._foreach_copy_(self._dense_grads, gradients[: len(self.dense)])
        rest = iter(gradients[len(self.dense) :])
        for tables in self.tables.values():
            tables.accumulate([next(rest) for _ in tables.names])
        return Losses(loss, logits)

    @torch.no_grad()
    def _prove(self, graph: GraphModule, inputs: Inputs, batches: Sequence[TowerBatch]) -> None:
        """The first step's losses must be those that the members' own forwards give."""
        found = graph(*inputs.flat())[0].tolist()
        for (name, network), batch, loss in zip(self.networks.items(), batches, found, strict=True):
            own = float(network(batch)[0])
            if abs(own - loss) > _CLOSE * max(1.0, abs(own)):
                raise StackError(
                    f"'{name}' has a loss of {own} on its first batch alone and of {loss} in the stack: its forward depends on "
                    "more than its weights and the batch's tensors, so it cannot be stacked; train it alone"
                )

    def inputs(
        self, batches: Sequence[TowerBatch], peers: Tensor | None = None, weight: float = 1.0, *, look_up: bool = True
    ) -> Inputs:
        """What a step on ``batches`` reads; arguments as of :meth:`backward`. The rows looked up are kept for their gradient.

        Args:
            batches: of each member.
            peers: see there.
            weight: see there.
            look_up: also look them up; else ``pooled`` is empty.
        """
        skeleton = self.skeleton or self._prepare(batches[0])
        fields = self._fields(batches)
        pooled: list[list[Tensor]] = []
        for path, tables in self.tables.items():
            parts = [part_of(batch, skeleton.tables[path].reads) for batch in batches]
            if look_up:
                pooled.append(tables(parts))
            else:
                tables.read(parts)
        drawn = [] if peers is None else [peers, peers.new_full((len(self.networks),), weight)]
        shared = all(batch is batches[0] for batch in batches)
        return Inputs(list(self.dense.values()), list(self.tables), pooled, fields, self._draw(skeleton), drawn, shared)

    def _fields(self, batches: Sequence[TowerBatch]) -> dict[str, Tensor]:
        """The tensors of the batches below one another, those of one batch for all as they are."""
        if len(batches) != len(self.networks):
            raise StackError(f"{len(batches)} batches for {len(self.networks)} networks: give one for each, {self.members}")
        shared = all(batch is batches[0] for batch in batches)
        tensors = [tensors_of(batch) for batch in (batches[:1] if shared else batches)]
        for name, other in zip(self.members, tensors, strict=False):
            for field in {**tensors[0], **other}:
                mine, theirs = tensors[0].get(field), other.get(field)
                if mine is None or theirs is None or mine.shape != theirs.shape:
                    raise StackError(
                        f"batch.{field} is {_shape(mine)} for '{self.members[0]}' and {_shape(theirs)} for '{name}': members of a "
                        "stack take batches of one shape; give both the same batch_size and negatives"
                    )
        return tensors[0] if shared else {name: torch.stack([own[name] for own in tensors]) for name in tensors[0]}

    def _draw(self, skeleton: Skeleton) -> list[Tensor]:
        """The noise of each dropout layer, (K, ...), as nn.Dropout draws it; nothing where no member has any."""
        if not any(rate for rates in self._rates for rate in rates):
            return []
        drawn = []
        for place, layer in enumerate(skeleton.dropouts):
            noise = torch.ones(len(self.networks), *layer.shape)  # type: ignore[misc]
            for own, rates, generator in zip(noise, self._rates, self.generators.values(), strict=True):
                if rates[place]:
                    own.bernoulli_(1 - rates[place], generator=generator).div_(1 - rates[place])
            drawn.append(noise.to(self.flat.device))
        return drawn


def _dense_parameters(network: nn.Module) -> list[tuple[str, nn.Parameter]]:
    inside = tuple(f"{path}." for path, module in network.named_modules() if isinstance(module, EmbeddingBagCollection))
    return [(name, weight) for name, weight in network.named_parameters() if not name.startswith(inside or ("\0",))]


def _dropouts(network: nn.Module) -> list[nn.Dropout]:
    return [module for module in network.modules() if isinstance(module, nn.Dropout)]


def _shape(tensor: Tensor | None) -> str:
    return "absent" if tensor is None else str(tuple(tensor.shape))
