"""DynamicManagedCollision: TorchRec's managed collision with dynamic ids, on any device and under any sharding.

with_dynamic_ids(): puts it in the place of TorchRec's own modules in a model.

TorchRec's modules map the ids of one shard, after they were sent there: so they shard by rows alone, their rows depend
on the number of ranks, and on a CPU they stop at the first eviction. Here every rank maps the ids of its own batch, by
one map for all ranks, before they are sent. So the collection behind is an ordinary one, which takes any plan.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.hash_mc_evictions import HashZchEvictionPolicyName
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    BaseManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    ManagedCollisionModule,
    MCHManagedCollisionModule,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_ext.batch import Fresh
from torchrec_ext.ids.dynamic import DynamicIds
from torchrec_ext.ids.policy import Dynamic

Features = dict[str, JaggedTensor]


class DynamicManagedCollision(ManagedCollisionModule):
    """Maps the ids of one table to rows by :class:`DynamicIds`, in a ``ManagedCollisionCollection``.

    Each forward in training mode is a step, which all ranks take together. It counts the ids, admits and evicts. In
    eval mode a forward reads, and an id without a row is row 0.

    :func:`hybrid_parallel` sets ``begin_rows``. In a model that is not sharded, set it to ``FreshRows(model,
    optimizer)``, because TorchRec's own collection leaves evicted rows as they are.

    Args:
        table: name of the table.
        policy: how its ids come and go; ``capacity`` is its number of rows.
        every: steps between two admissions, see :class:`DynamicIds`.
        input_hash_size: number of ids before the mapping, passed to ``input_hash_func``.
        input_hash_func: function from (ids, ``input_hash_size``) to the ids to map; None maps them as they are.
        group: ranks that share the ids, see :class:`DynamicIds`; over gloo.

    Attributes:
        group: as given; read at the first step.
        begin_rows: called in a step with what changed, before the rows are looked up: it begins the rows of new ids
            anew, weights and optimizer state. None leaves them as they are.

    Example:
        >>> users = DynamicManagedCollision("user", Dynamic(capacity=4))
        >>> features = {"user": JaggedTensor(torch.tensor([900, -7, 900]), lengths=torch.tensor([2, 1]))}
        >>> users(features)["user"].values().tolist(), users.evict().tolist(), users.open_slots().tolist()
        ([2, 1, 2], [1, 2], [1])
    """

    def __init__(
        self,
        table: str,
        policy: Dynamic,
        *,
        every: int = 1,
        input_hash_size: int = 2**63 - 1,
        input_hash_func: Callable[[Tensor, int], Tensor] | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        # One segment: all ranks map by one index, so the rows of no shard are apart.
        super().__init__(torch.device("cpu"), output_segments=[0, policy.capacity])
        # They serve TorchRec's own sharder alone.
        for name, buffer in list(self.named_buffers()):
            self.register_buffer(name, buffer, persistent=False)
        self.table = table
        self.policy = policy
        self._every = every
        self._input_hash_size = input_hash_size
        self._input_hash_func = input_hash_func
        self.group = group
        self.begin_rows: Callable[[tuple[Fresh, ...]], None] | None = None
        self._new_rows: Tensor | None = None

    @cached_property
    def ids(self) -> DynamicIds:
        """The ids; not made before the first step, because a model may be made before its process group."""
        return DynamicIds(
            {self.table: self.policy}, every=self._every, group=self.group
        )

    def forward(self, features: Features, mutate_miss_lengths: bool = True) -> Features:
        """Returns the features with rows in place of ids; see :meth:`remap`."""
        return _remapped(self, features)

    def preprocess(self, features: Features) -> Features:
        """Returns the features with their ids hashed by ``input_hash_func``."""
        if self._input_hash_func is None:
            return features
        return {
            name: _with(feature, self._hashed(feature.values()))
            for name, feature in features.items()
        }

    def _hashed(self, ids: Tensor) -> Tensor:
        assert self._input_hash_func is not None
        return self._input_hash_func(ids, self._input_hash_size)

    def profile(self, features: Features) -> Features:
        """Returns the features: :meth:`remap` counts them."""
        return features

    @torch.no_grad()
    def remap(
        self,
        features: Features,
        mutate_miss_lengths: bool = True,
        write_weights: Tensor | None = None,
    ) -> Features:
        """Returns the features with rows in place of ids; in training mode a step, collective.

        Raises:
            ValueError: ids that are no whole numbers, or ``write_weights``, which are no part of dynamic ids.
        """
        if write_weights is not None:
            raise ValueError(
                f"table '{self.table}': write_weights: dynamic ids hold no further values; leave it out"
            )
        values = [feature.values() for feature in features.values()]
        wrong = [ids.dtype for ids in values if ids.is_floating_point()]
        if wrong:
            raise ValueError(
                f"table '{self.table}': ids are {wrong[0]}, must be whole numbers"
            )
        raw = {
            self.table: torch.cat(
                [
                    torch.empty(0, dtype=torch.int64),
                    *(ids.long().cpu() for ids in values),
                ]
            )
        }
        if self.training:
            rows, notes = self.ids.step(raw)
            new_rows = [note.rows for note in notes if len(note.rows)]
            self._new_rows = new_rows[0].sort().values if new_rows else None
            # Here, because the collection looks the rows up next.
            if notes and self.begin_rows is not None:
                self.begin_rows(notes)
        else:
            rows = self.ids.rows(raw)
        pieces = torch.split(rows[self.table], [len(ids) for ids in values])
        remapped = zip(features.items(), pieces, strict=True)
        return {
            name: _with(feature, piece.to(feature.values().device))
            for (name, feature), piece in remapped
        }

    def evict(self) -> Tensor | None:
        """Returns the rows that the last step began anew, ascending, once; None if there are none."""
        rows = self._new_rows
        self._new_rows = None
        return rows

    def open_slots(self) -> Tensor:
        """Returns the number of rows without an id, but for row 0; (1,) int64."""
        return torch.tensor([self.policy.capacity - 1 - self.ids.live[self.table]])

    def output_size(self) -> int:
        """Returns the number of rows."""
        return self.policy.capacity

    def input_size(self) -> int:
        """Returns ``input_hash_size``."""
        return self._input_hash_size

    def buckets(self) -> int:
        """Returns 1: the ids are in no parts."""
        return 1

    def validate_state(self) -> None:
        """Does nothing, because a state is checked as it is loaded."""

    def rebuild_with_output_id_range(
        self,
        output_id_range: tuple[int, int],
        output_segments: list[int],
        device: torch.device | None = None,
    ) -> ManagedCollisionModule:
        """Refuses to become the module of one shard, whose rows would depend on the number of ranks.

        Raises:
            ValueError: always.
        """
        raise ValueError(
            f"table '{self.table}': dynamic ids are mapped before they are sent to shards; shard the "
            "model by hybrid_parallel(), not by TorchRec's sharder"
        )

    def get_extra_state(self) -> dict[str, Tensor]:
        """Returns the state of the ids as tensors, alike on every rank. Collective."""
        state = self.ids.state_dict()
        counts = torch.tensor(list(state["counts"].values()))
        tensors = {
            "now": torch.tensor(state["now"]),
            "counts": counts,
            "waiting": state["waiting"],
        }
        return tensors | {
            name: torch.as_tensor(value)
            for name, value in state["tables"][self.table].items()
        }

    def set_extra_state(self, state: Mapping[str, Tensor]) -> None:
        """Continues from a state of :meth:`get_extra_state`, on any number of ranks.

        Raises:
            ValueError: see :meth:`DynamicIds.load_state_dict`.
        """
        table: dict[str, Any] = {
            name: state[name]
            for name in state
            if name not in ("now", "counts", "waiting")
        }
        counts = dict(zip(self.ids.counts, state["counts"].tolist(), strict=True))
        tables = {self.table: {**table, "used": int(table["used"])}}
        self.ids.load_state_dict(
            {
                "now": int(state["now"]),
                "counts": counts,
                "waiting": state["waiting"],
                "tables": tables,
            }
        )


@torch.fx.wrap
def _remapped(module: DynamicManagedCollision, features: Features) -> Features:
    """Maps ids; a function of its own, because fx cannot trace what depends on their values."""
    return module.remap(module.preprocess(features))


def _with(feature: JaggedTensor, values: Tensor) -> JaggedTensor:
    return JaggedTensor(
        values,
        lengths=feature.lengths(),
        offsets=feature.offsets(),
        weights=feature.weights_or_none(),
    )


def with_dynamic_ids(model: nn.Module) -> list[DynamicManagedCollision]:
    """Puts a :class:`DynamicManagedCollision` of the same settings in the place of TorchRec's modules, in place.

    Args:
        model: module that may hold ManagedCollisionEmbeddingBagCollections or ManagedCollisionEmbeddingCollections.

    Returns:
        The dynamic ids of all tables that have some.

    Raises:
        ValueError: a setting that dynamic ids cannot take over.
    """
    owned = [
        module
        for module in model.modules()
        if isinstance(module, BaseManagedCollisionEmbeddingCollection)
    ]
    collections = [module._managed_collision_collection for module in owned]
    everything: list[DynamicManagedCollision] = []
    table_of: dict[int, str] = {}
    for path, module in model.named_modules():
        if isinstance(module, ManagedCollisionCollection) and not any(
            module is other for other in collections
        ):
            raise ValueError(
                f"'{path}' maps ids outside of a ManagedCollisionEmbeddingBagCollection, so that nobody knows whose "
                "rows they are; make one of it and its tables"
            )
    for module in owned:
        if module._allow_in_place_embed_weight_update:
            raise ValueError(
                "allow_in_place_embed_weight_update=True: a row would begin anew before the backward of "
                "the id that had it; leave it out"
            )
    for collection in collections:
        modules: dict[str, DynamicManagedCollision] = {}
        # In the order of the configs: TorchRec hands out features in theirs and looks
        # modules up in the dict's.
        for config in collection.embedding_configs():
            module = collection._managed_collision_modules[config.name]
            other = table_of.setdefault(id(module), config.name)
            if other != config.name:
                raise ValueError(
                    f"tables '{other}' and '{config.name}' share one managed collision module; give each its own"
                )
            modules[config.name] = _dynamic(config.name, module)
        collection._managed_collision_modules = nn.ModuleDict(modules)
        everything += modules.values()
    return everything


def _dynamic(table: str, module: Any) -> DynamicManagedCollision:
    if isinstance(module, DynamicManagedCollision):
        return module
    # Not isinstance: a subclass maps ids in a way of its own.
    if type(module) is MCHManagedCollisionModule:
        dynamic = DynamicManagedCollision(
            table,
            _of_sorted(table, module),
            every=module._eviction_interval,
            input_hash_size=module.input_size(),
            input_hash_func=module._input_hash_func,
        )
    elif type(module) is HashZchManagedCollisionModule:
        policy = _of_hashed(table, module)
        dynamic = DynamicManagedCollision(
            table, policy, input_hash_size=module.input_size()
        )
    else:
        raise _refusal(table, type(module).__name__, "is a kind of its own")
    dynamic.train(module.training)
    return dynamic


def _of_sorted(table: str, module: MCHManagedCollisionModule) -> Dynamic:
    eviction = module._eviction_policy
    if eviction._threshold_filtering_func is not None:
        raise _refusal(
            table,
            "threshold_filtering_func",
            "ids are admitted by their number of sightings alone",
        )
    if (
        module.device.type != "meta"
        and int(module.open_slots()) < module.output_size() - 1
    ):
        raise _refusal(
            table, "open_slots()", "it holds ids already, whose rows are others here"
        )
    capacity = module.output_size()
    if type(eviction) is LRU_EvictionPolicy:
        return Dynamic(capacity=capacity, evict="lru")
    if type(eviction) is LFU_EvictionPolicy:
        return Dynamic(capacity=capacity, half_life=math.inf)
    if type(eviction) is DistanceLFU_EvictionPolicy:
        if eviction._decay_exponent != 1.0:
            raise _refusal(
                table,
                f"decay_exponent={eviction._decay_exponent}",
                "counts fade by Dynamic's half_life",
            )
        return Dynamic(capacity=capacity)
    raise _refusal(table, type(eviction).__name__, "is a policy of its own")


def _of_hashed(table: str, module: HashZchManagedCollisionModule) -> Dynamic:
    eviction = module._eviction_policy_name
    if eviction is not HashZchEvictionPolicyName.LRU_EVICTION:
        name = eviction.value if eviction else None
        raise _refusal(
            table,
            f"eviction_policy_name={name}",
            "must be LRU_EVICTION, because ids age by steps here",
        )
    for setting, is_set in (
        ("disable_fallback", module.disable_fallback),
        ("opt_in_prob", module._opt_in_prob > 0),
        ("track_id_freq", module._track_id_freq),
        ("write_runtime_meta_dim", module._write_runtime_meta_dim > 0),
        ("enable_per_feature_lookups", module._enable_per_feature_lookups),
    ):
        if is_set:
            raise _refusal(table, setting, "has no counterpart here")
    if module.device.type != "meta" and bool((module._hash_zch_identities != -1).any()):
        raise _refusal(
            table,
            "_hash_zch_identities",
            "it holds ids already, whose rows are others here",
        )
    return Dynamic(capacity=module.output_size(), evict="lru")


def _refusal(table: str, setting: str, reason: str) -> ValueError:
    return ValueError(
        f"table '{table}': managed collision with {setting}: {reason}; declare DynamicManagedCollision('{table}', "
        "Dynamic(capacity=...)) instead"
    )
