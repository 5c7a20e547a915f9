"""TowerSharder: towers at the same time on ranks of their own, at the granularity of processes.

TorchRec's ``EmbeddingTowerSharder`` pins a tower to one host, runs on CUDA alone and pays exchanges of its own for each tower. Here
a tower has any ranks: TorchRec shards its tables over them in any way, DistributedDataParallel replicates its dense layers on them,
and all towers share one exchange each way (:mod:`torchrec_ext.distributed.tower_exchange`). Outputs and gradients are the flat
model's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_sharding import KJTListSplitsAwaitable
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyGetItemMixin, ModuleSharder, ShardedModule, ShardingEnv
from torchrec.optim.fused import FusedOptimizerModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Multistreamable

from torchrec_ext.distributed.placement import TowerPlan
from torchrec_ext.distributed.tables import collections
from torchrec_ext.distributed.tower_exchange import Exchange, TowerRows, Widths, cut, joined, packed, packed_size, padded, unpacked
from torchrec_ext.distributed.tower_ranks import needs_equal_rows, on_ranks, tower_groups, tower_sharders
from torchrec_ext.modules.towers import Towers


class _Route(NamedTuple):
    """By rank the towers for which this rank sends it rows, and those for which it sends this rank rows; alike on both sides."""

    to: list[list[str]]
    coming: list[list[str]]


@dataclass
class _Step(Multistreamable):
    """What one batch leaves for its outputs: by rank the rows sent to it for each tower, and by tower those that each rank sent."""

    route: _Route = field(default_factory=lambda: _Route([], []))
    sent: list[list[int]] = field(default_factory=list)
    served: dict[str, list[int]] = field(default_factory=dict)

    def record_stream(self, stream: torch.Stream) -> None:
        """Nothing: there are numbers alone."""


@dataclass
class _Arrived(Multistreamable):
    rows: dict[str, TowerRows]

    def record_stream(self, stream: torch.Stream) -> None:
        for rows in self.rows.values():
            for part in rows:
                part.record_stream(stream)


class _After(Awaitable[Any]):
    """What ``follow`` returns once a collective has ended."""

    def __init__(self, work: dist.Work, follow: Callable[[], Any]) -> None:
        super().__init__()
        self._work, self._follow = work, follow

    def _wait_impl(self) -> Any:
        self._work.wait()
        return self._follow()


class _Outputs(LazyGetItemMixin[str, Tensor], LazyAwaitable[dict[str, Tensor]]):
    def __init__(self, outputs: dict[str, Tensor]) -> None:
        super().__init__()
        self._outputs = outputs

    def _wait_impl(self) -> dict[str, Tensor]:
        return self._outputs


class ShardedTowers(ShardedModule[KJTList, dict[str, Tensor], dict[str, Tensor], _Step], FusedOptimizerModule):
    """:class:`Towers` of which each rank holds and runs those that its plan gives it; called as Towers is, by all ranks together.

    Args:
        module: unsharded; dense layers and buffers of all ranks become those of rank 0.
        plan: the ranks of each tower, and how its tables are sharded over them.
        sharders: by type of collection.
        env: all ranks.
        device: of this rank.
        timeout: of the collectives of each tower.
    """

    def __init__(
        self,
        module: Towers,
        plan: TowerPlan,
        sharders: Mapping[type, ModuleSharder[nn.Module]],
        env: ShardingEnv,
        device: torch.device,
        timeout: timedelta,
    ) -> None:
        super().__init__()
        self._placement, self._device = plan.placement, device
        self._group: dist.ProcessGroup = env.process_group
        self._rank, self._world_size = env.rank, env.world_size
        self._reads = dict(module.reads)
        towers: dict[str, Any] = dict(module.items())
        self._features = {name: _features(tower) for name, tower in towers.items()}
        self._widths = {name: Widths(len(self._features[name]), len(tower.dense)) for name, tower in towers.items()}
        self._out: dict[str, int] = {name: tower.out_features for name, tower in towers.items()}
        self._equal_rows = [name for name, own in plan.tables.items() if needs_equal_rows(own.values(), plan.placement.ranks[name])]
        self._busiest: dict[tuple[str, tuple[int, ...]], int] = {}
        self._routes: dict[tuple[str, ...], _Route] = {}
        self._run: dict[str, Callable[[KeyedJaggedTensor, Tensor], Tensor]] = {}
        groups = tower_groups(plan.placement, self._group, timeout)
        for name, tower in towers.items():
            for value in (*tower.parameters(), *tower.buffers()):
                if value.device.type != "meta":
                    dist.broadcast(value.detach(), src=0, group=self._group)
            if name in groups:
                self.add_module(name, tower)
                self._run[name] = on_ranks(tower, plan.tables[name], sharders, groups[name], device)

    def create_context(self) -> _Step:
        """For one batch."""
        return _Step()

    def input_dist(
        self,
        ctx: _Step,
        sparse: KeyedJaggedTensor,
        dense: Tensor,
        shared_sparse: KeyedJaggedTensor | None = None,
        shared_dense: Tensor | None = None,
        *,
        names: Sequence[str] | None = None,
    ) -> KJTListSplitsAwaitable[_Step]:
        """Begins to send each row to the ranks of its towers; the arguments are those of :meth:`Towers.forward`."""
        names = tuple(self._reads) if names is None else tuple(names)
        ctx.route = self._route(names)
        own = {}
        for name in names:
            shared, columns = self._reads[name]
            rows, matrix = (shared_sparse, shared_dense) if shared else (sparse, dense)
            own[name] = _rows(rows, matrix[:, columns], self._features[name])  # type: ignore[index]
        cuts = {name: iter(self._placement.cuts(name, self._rank, rows.height)) for name, rows in own.items()}
        parts = [[cut(own[name], *next(cuts[name])) for name in to] for to in ctx.route.to]
        ctx.sent = [[part.height for part in to] for to in parts]
        counts = [len(dense), 0 if shared_dense is None else len(shared_dense)]
        header = [number for to in parts for number in (*counts, *(size for p in to for size in (p.height, len(p.values))))]
        sizes = [2 + 2 * len(coming) for coming in ctx.route.coming]
        arriving = torch.empty(sum(sizes), dtype=torch.int64, device=self._device)
        announced = dist.all_to_all_single(
            arriving,
            torch.tensor(header, device=self._device),
            sizes,
            [2 + 2 * len(to) for to in ctx.route.to],
            group=self._group,
            async_op=True,
        )
        return KJTListSplitsAwaitable([_After(announced, lambda: self._send(ctx, parts, arriving, sizes))], ctx)

    def _route(self, names: tuple[str, ...]) -> _Route:
        if names not in self._routes:
            ranks, targets = range(self._world_size), self._placement.targets
            to = [[name for name in names if rank in targets(name, self._rank)] for rank in ranks]
            coming = [[name for name in names if self._rank in targets(name, rank)] for rank in ranks]
            self._routes[names] = _Route(to, coming)
        return self._routes[names]

    def _send(self, ctx: _Step, parts: list[list[TowerRows]], arriving: Tensor, sizes: list[int]) -> _After:
        headers = [header.tolist() for header in torch.split(arriving.cpu(), sizes)]
        coming = [
            list(zip(names, header[2::2], header[3::2], strict=True))
            for names, header in zip(ctx.route.coming, headers, strict=True)
        ]
        received = [sum(packed_size(rows, ids, self._widths[name]) for name, rows, ids in some) for some in coming]
        going = [
            [(rows, self._widths[name]) for name, rows in zip(names, some, strict=True)]
            for names, some in zip(ctx.route.to, parts, strict=True)
        ]
        counts = [sum(packed_size(rows.height, len(rows.values), widths) for rows, widths in some) for some in going]
        sent = packed([part for some in going for part in some], self._device)
        out = sent.new_empty(sum(received))
        work = dist.all_to_all_single(out, sent, received, counts, group=self._group, async_op=True)
        return _After(work, lambda: self._arrived(ctx, coming, out, headers))

    def _arrived(self, ctx: _Step, coming: list[list[tuple[str, int, int]]], payload: Tensor, headers: list[list[int]]) -> _Arrived:
        parts: dict[str, list[TowerRows]] = {}
        start = 0
        for name, rows, ids in (announced for some in coming for announced in some):
            stop = start + packed_size(rows, ids, self._widths[name])
            parts.setdefault(name, []).append(unpacked(payload[start:stop], rows, ids, self._widths[name]))
            start = stop
        ctx.served = {name: [part.height for part in found] for name, found in parts.items()}
        found = {name: joined(some) for name, some in parts.items()}
        for name in self._equal_rows:
            if name in found:
                found[name] = padded(found[name], self._most(name, tuple(h[self._reads[name].shared] for h in headers)))
        return _Arrived(found)

    def _most(self, name: str, counts: tuple[int, ...]) -> int:
        if (name, counts) not in self._busiest:
            self._busiest[name, counts] = self._placement.busiest(name, counts)
        return self._busiest[name, counts]

    def compute(self, ctx: _Step, dist_input: KJTList) -> dict[str, Tensor]:
        """The outputs of this rank's towers for all rows that came, in the order of the ranks that they came from."""
        arrived: _Arrived = dist_input[0]
        outputs = {}
        for name, rows in arrived.rows.items():
            kjt = KeyedJaggedTensor(self._features[name], rows.values, lengths=rows.lengths.reshape(-1), stride=rows.height)
            output = self._run[name](kjt, rows.dense).float()
            scale = len(self._placement.ranks[name]) / self._world_size
            if output.requires_grad and scale != 1:
                # TorchRec and DistributedDataParallel average over the tower's ranks, in the flat model over all.
                output.register_hook(lambda gradient, scale=scale: gradient * scale)  # type: ignore[no-untyped-call]
            outputs[name] = output
        return outputs

    def output_dist(self, ctx: _Step, output: dict[str, Tensor]) -> LazyAwaitable[dict[str, Tensor]]:
        """Each row's outputs on the rank that it came from."""
        served = {name: iter(torch.split(output[name][: sum(rows)], rows)) for name, rows in ctx.served.items()}
        sending = [[next(served[name]).reshape(-1) for name in coming] for coming in ctx.route.coming]
        # A rank without a tower takes part too, and in the backward.
        nothing = torch.empty(0, device=self._device, requires_grad=torch.is_grad_enabled())
        sent = torch.cat([nothing, *(part for some in sending for part in some)])
        names = [name for to in ctx.route.to for name in to]
        sizes = [
            [rows * self._out[name] for name, rows in zip(*some, strict=True)] for some in zip(ctx.route.to, ctx.sent, strict=True)
        ]
        counts = [sum(map(len, some)) for some in sending]
        got: Tensor = Exchange.apply(sent, counts, [sum(some) for some in sizes], self._group)  # type: ignore[no-untyped-call]
        pieces: dict[str, list[Tensor]] = {}
        for name, piece in zip(names, torch.split(got, [size for some in sizes for size in some]), strict=True):
            pieces.setdefault(name, []).append(piece.view(-1, self._out[name]))
        return _Outputs({name: found[0] if len(found) == 1 else torch.cat(found) for name, found in pieces.items()})

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """As part of a model with the towers' modules; asked directly, itself alone.

        TorchRec's pipelines take over the input dist of every collection within a module that they pipeline, so that it begins a
        batch ahead; those of the towers run inside :meth:`compute`.
        """
        return iter([(prefix, self)]) if memo is None else super().named_modules(memo, prefix, remove_duplicate)

    def named_parameters(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Parameter]]:
        """Those of this rank's towers."""
        for name, tower in self.named_children():
            yield from tower.named_parameters(f"{prefix}.{name}" if prefix else name, recurse, remove_duplicate)

    def named_buffers(self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True) -> Iterator[tuple[str, Tensor]]:
        """Those of this rank's towers."""
        for name, tower in self.named_children():
            yield from tower.named_buffers(f"{prefix}.{name}" if prefix else name, recurse, remove_duplicate)

    @property
    def fused_optimizer(self) -> KeyedOptimizer:
        """Of the tables of this rank's towers."""
        return CombinedOptimizer(
            [
                (f"{name}.{path}", collection.fused_optimizer)
                for name, tower in self.named_children()
                for path, collection in collections(tower)
            ]
        )

    def holders(self, model: nn.Module, names: Iterable[str]) -> dict[str, int]:
        """How many ranks hold each of these parameters of ``model``, by name."""
        path = next(path for path, module in model.named_modules() if module is self)
        counts = {f"{path}.{tower}.".lstrip("."): len(self._placement.ranks[tower]) for tower in self._run}
        return {name: next((n for tower, n in counts.items() if name.startswith(tower)), self._world_size) for name in names}

    @property
    def unsharded_module_type(self) -> type[nn.Module]:
        """Towers."""
        return Towers


def _features(tower: Any) -> list[str]:
    return list(dict.fromkeys(feature for table in tower.tables for feature in table.feature_names))


def _rows(kjt: KeyedJaggedTensor, dense: Tensor, features: list[str]) -> TowerRows:
    keys = kjt.keys()
    own = kjt if keys == features else kjt.permute([keys.index(name) for name in features])
    return TowerRows(own.values().long(), own.lengths().int().view(len(features), own.stride()), dense)


class TowerSharder(ModuleSharder[Towers]):
    """Makes :class:`ShardedTowers` of the :class:`Towers` for which a plan has a :class:`TowerPlan`.

    Args:
        timeout: of the collectives of each tower.
    """

    def __init__(self, timeout: timedelta) -> None:
        super().__init__()
        self._sharders = {sharder.module_type: sharder for sharder in tower_sharders()}
        self._timeout = timeout

    def shard(
        self,
        module: Towers,
        params: TowerPlan,
        env: ShardingEnv,
        device: torch.device | None = None,
        module_fqn: str | None = None,
    ) -> ShardedTowers:
        """Sharded as ``params`` says; every rank calls it."""
        return ShardedTowers(module, params, self._sharders, env, device or torch.device("cpu"), self._timeout)

    def shardable_parameters(self, module: Towers) -> dict[str, nn.Parameter]:
        """None of its own: the tables of each tower are planned by themselves."""
        return {}

    @property
    def module_type(self) -> type[Towers]:
        """Towers."""
        return Towers
