"""TorchRec's managed collision with dynamic ids: it equals plain tables whose ids are mapped by hand.

Those equal static tables, and tables without an end, by the laws of test_training.py.
"""

from __future__ import annotations

import copy
import math
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec.fx import symbolic_trace
from torchrec.modules.embedding_configs import EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.modules.hash_mc_evictions import (
    HashZchEvictionConfig,
    HashZchEvictionPolicyName,
)
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.mc_embedding_modules import (
    ManagedCollisionEmbeddingBagCollection,
    ManagedCollisionEmbeddingCollection,
)
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    ManagedCollisionCollection,
    MCHManagedCollisionModule,
    average_threshold_filter,
)
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from tests.contracts import run_ranks
from tests.examples import META
from torchrec_ext.batch import Fresh
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.ids import Dynamic, DynamicIds, DynamicManagedCollision
from torchrec_ext.ids.managed_collision import with_dynamic_ids
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.state import Parts, model_state
from torchrec_ext.train.checkpoint.storage import CheckpointError
from torchrec_ext.train.loop import TrainConfig, train
from torchrec_ext.train.step.fresh_rows import FreshRows

TABLES = ("user", "item")
WIDTH, SIZE, STEPS, EVERY = 8, 48, 12, 2
ENOUGH, FEW = 400, 73
PLANS = [
    ("row_wise", "row_wise_adagrad"),
    ("table_wise", "row_wise_adagrad"),
    ("column_wise", "row_wise_adagrad"),
]
PLANS += [("row_wise", "adam"), ("data_parallel", "adam")]
POLICIES: dict[str, Dynamic] = {
    "lru": Dynamic(capacity=FEW, evict="lru"),
    "lfu": Dynamic(capacity=FEW, half_life=math.inf),
    "distance": Dynamic(capacity=FEW),
}


def mch(rows: int, eviction: Any = None, **settings: Any) -> MCHManagedCollisionModule:
    policy = eviction or DistanceLFU_EvictionPolicy()
    return MCHManagedCollisionModule(
        rows, META, policy, **{"eviction_interval": EVERY, **settings}
    )


def hashed(rows: int, **settings: Any) -> HashZchManagedCollisionModule:
    eviction = {
        "eviction_policy_name": HashZchEvictionPolicyName.LRU_EVICTION,
        "eviction_config": HashZchEvictionConfig(features=[], single_ttl=10),
    }
    return HashZchManagedCollisionModule(
        rows, META, total_num_buckets=1, **{**eviction, **settings}
    )


def configs(rows: int, kind: type = EmbeddingBagConfig) -> list[Any]:
    size = {"num_embeddings": rows, "embedding_dim": WIDTH}
    return [
        kind(name=name, feature_names=[name, f"{name}_before"], **size)
        for name in TABLES
    ]


class Model(nn.Module):
    """Two tables of two features each, with managed collision or without."""

    def __init__(
        self,
        rows: int,
        managed: dict[str, nn.Module] | None,
        device: torch.device = META,
        *,
        is_pooled: bool = True,
    ) -> None:
        super().__init__()
        torch.manual_seed(0)
        own = configs(rows, EmbeddingBagConfig if is_pooled else EmbeddingConfig)
        kind: Any = EmbeddingBagCollection if is_pooled else EmbeddingCollection
        tables: Any = kind(tables=own, device=device)
        if managed is not None:
            kind = (
                ManagedCollisionEmbeddingBagCollection
                if is_pooled
                else ManagedCollisionEmbeddingCollection
            )
            tables = kind(tables, ManagedCollisionCollection(managed, own))
        self.tables = tables
        self.is_pooled = is_pooled
        self.over = nn.Linear(2 * len(TABLES) * WIDTH, 1)

    def forward(self, features: KeyedJaggedTensor, labels: Tensor) -> Tensor:
        embedded = self.tables(features)
        if isinstance(embedded, tuple):
            embedded = embedded[0]
        if self.is_pooled:
            pooled = embedded.values()
        else:
            rows = [
                embedded[key].values().view(len(labels), -1, WIDTH).sum(1)
                for key in features.keys()  # noqa: SIM118
            ]
            pooled = torch.cat(rows, dim=1)
        return nn.functional.binary_cross_entropy_with_logits(
            self.over(pooled).squeeze(1), labels
        )


def managed_model(rows: int, *, is_pooled: bool = True) -> Model:
    # In another order than the configs', by which TorchRec alone would mix the tables
    # up.
    return Model(
        rows, {name: mch(rows) for name in reversed(TABLES)}, is_pooled=is_pooled
    )


def batches(
    rank: int, world_size: int, drift: int
) -> list[tuple[KeyedJaggedTensor, Tensor]]:
    """A rank's share of batches whose ids drift; the first feature has one id a row, the one before it two."""
    generator = torch.Generator().manual_seed(3)
    names = torch.randint(
        -(2**62), 2**62, (len(TABLES), 40 + drift * STEPS), generator=generator
    )
    share = slice(rank * SIZE // world_size, (rank + 1) * SIZE // world_size)
    result = []
    for step in range(STEPS):
        values = []
        lengths = []
        for number in range(len(TABLES)):
            places = (
                torch.rand(SIZE, 3, generator=generator) ** 3 * 40
            ).long() + step * drift
            ids = names[number][places][share]
            values += [ids[:, 0], ids[:, 1:].reshape(-1)]
            lengths += [torch.full((len(ids),), 1), torch.full((len(ids),), 2)]
        keys = [feature for config in configs(1) for feature in config.feature_names]
        features = KeyedJaggedTensor(
            keys, torch.cat(values), lengths=torch.cat(lengths)
        )
        result.append(
            (features, torch.randint(0, 2, (SIZE,), generator=generator).float()[share])
        )
    return result


def sharded_model(
    runtime: Runtime, model: Model, plan: tuple[str, str]
) -> tuple[Any, Any]:
    optimizers = OptimizerConfig(
        tables=plan[1], tables_lr=0.1, dense="sgd", dense_lr=0.05
    )  # type: ignore[arg-type]
    placed = plan_sharding(
        model, runtime, PlanConfig(sharding=plan[0]), optimizer=optimizers
    )  # type: ignore[arg-type]
    return hybrid_parallel(model, runtime, plan=placed, optimizer=optimizers, seed=3)


def step(
    model: nn.Module, optimizer: Any, batch: tuple[KeyedJaggedTensor, Tensor]
) -> None:
    optimizer.zero_grad()
    model(*batch).backward()
    optimizer.step()


def parts(model: nn.Module, optimizer: Any) -> dict[str, list[Tensor]]:
    state = model_state(model, optimizer).everything().items()
    tables = {
        name: [part.tensor.clone() for part in value.parts]
        for name, value in state
        if isinstance(value, Parts)
    }
    return tables | {
        name: [value.clone()] for name, value in state if isinstance(value, Tensor)
    }


def trained(
    runtime: Runtime, plan: tuple[str, str], rows: int, drift: int, *, is_pooled: bool
) -> dict[str, list[Tensor]]:
    model, optimizer = sharded_model(
        runtime, managed_model(rows, is_pooled=is_pooled), plan
    )
    for batch in batches(runtime.rank, runtime.world_size, drift):
        step(model, optimizer, batch)
    return parts(model, optimizer)


def by_hand(
    runtime: Runtime,
    plan: tuple[str, str],
    rows: int,
    drift: int,
    *,
    is_pooled: bool,
    is_static: bool,
) -> dict[str, list[Tensor]]:
    """The same training of plain tables; with ``is_static`` each id has its row from the beginning."""
    model, optimizer = sharded_model(
        runtime, Model(rows, None, is_pooled=is_pooled), plan
    )
    fresh = FreshRows(model, optimizer)
    ids = DynamicIds({name: Dynamic(capacity=rows) for name in TABLES}, every=EVERY)
    mapped = batches(runtime.rank, runtime.world_size, drift)
    notes: list[tuple[Fresh, ...]] = []
    for features, _ in mapped:
        lengths = features.length_per_key()
        user, item = torch.split(
            features.values(), [sum(lengths[:2]), sum(lengths[2:])]
        )
        found, notes_of_step = ids.step({"user": user, "item": item})
        features.values().copy_(torch.cat([found["user"], found["item"]]))
        notes.append(notes_of_step)
    if is_static:
        for notes_of_step in notes:
            fresh(notes_of_step)
    for batch, notes_of_step in zip(mapped, notes, strict=True):
        if not is_static:
            fresh(notes_of_step)
        step(model, optimizer, batch)
    assert bool(ids.counts["evicted"]) != is_static
    return parts(model, optimizer)


def all_laws(
    runtime: Runtime, plans: list[tuple[str, str]], kinds: tuple[bool, ...]
) -> None:
    for plan, is_pooled in product(plans, kinds):
        if plan[0] == "data_parallel" and not is_pooled:
            continue  # no plan replicates a table that is read id by id
        for rows, drift, is_static in ((FEW, 6, False), (ENOUGH, 2, True)):
            managed = trained(runtime, plan, rows, drift, is_pooled=is_pooled)
            plain = by_hand(
                runtime, plan, rows, drift, is_pooled=is_pooled, is_static=is_static
            )
            for name in plain:
                for one, other in zip(
                    managed[name.replace("dense.tables.", "")], plain[name], strict=True
                ):
                    assert torch.equal(one, other), (plan, rows, name)


def test_two_ranks_equal_tables_whose_ids_are_mapped_by_hand() -> None:
    run_ranks(all_laws, 2, PLANS[:1], (True,))


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_every_plan_equals_tables_whose_ids_are_mapped_by_hand(world_size: int) -> None:
    run_ranks(all_laws, world_size, PLANS, (True, False), timeout_s=300)


def interrupted(runtime: Runtime, folder: str, plan: tuple[str, str]) -> None:
    whole, whole_optimizer = sharded_model(runtime, managed_model(FEW), plan)
    own = batches(runtime.rank, runtime.world_size, 6)
    for batch in own:
        step(whole, whole_optimizer, batch)
    model, optimizer = sharded_model(runtime, managed_model(FEW), plan)
    # An odd number, so that ids wait for their admission in the checkpoint.
    for batch in own[:7]:
        step(model, optimizer, batch)
    checkpointer = Checkpointer(folder, runtime)
    checkpointer.save(7, model_state(model, optimizer))
    checkpointer.close()
    model, optimizer = sharded_model(runtime, managed_model(FEW), plan)
    checkpointer = Checkpointer(folder, runtime)
    path = checkpointer.last_good()
    assert path is not None
    checkpointer.load(path, model_state(model, optimizer))
    for batch in own[7:]:
        step(model, optimizer, batch)
    resumed = parts(model, optimizer)
    for name, values in parts(whole, whole_optimizer).items():
        if name.endswith(".counts"):
            # Look-ups are counted by rank, and saved by one.
            continue
        assert all(
            torch.equal(one, other)
            for one, other in zip(values, resumed[name], strict=True)
        ), name
    plain, plain_optimizer = sharded_model(runtime, Model(FEW, None), plan)
    with pytest.raises(CheckpointError, match=r"ids\.\w+\.\w+ is not in this model"):
        checkpointer.load(path, model_state(plain, plain_optimizer))
    checkpointer.save(9, model_state(plain, plain_optimizer))
    checkpointer.wait()
    with pytest.raises(CheckpointError, match=r"ids\.\w+\.ids was not saved"):
        checkpointer.load(checkpointer.folder.path(9), model_state(model, optimizer))
    checkpointer.close()


def test_resumed_equals_uninterrupted(tmp_path: Path) -> None:
    run_ranks(interrupted, 2, str(tmp_path), PLANS[0])


def unsharded() -> tuple[Model, Any]:
    """The model and its optimizer in a loop of one process, without hybrid_parallel."""
    policies = {name: Dynamic(capacity=FEW) for name in TABLES}
    managed: dict[str, nn.Module] = {
        name: DynamicManagedCollision(name, policy, every=EVERY)
        for name, policy in policies.items()
    }
    model = Model(FEW, managed, torch.device("cpu"))
    optimizer = KeyedOptimizerWrapper(
        dict(model.named_parameters()),
        lambda weights: torch.optim.Adagrad(weights, lr=0.1, eps=1e-8),
    )
    for name in TABLES:
        managed[name].begin_rows = FreshRows(model, optimizer)  # type: ignore[assignment]
    return model, optimizer


def sharded_losses(runtime: Runtime) -> list[float]:
    model, _ = unsharded()
    optimizers = OptimizerConfig(
        tables="adagrad", tables_lr=0.1, dense="adagrad", dense_lr=0.1
    )
    placed = plan_sharding(
        model, runtime, PlanConfig(sharding="row_wise"), optimizer=optimizers
    )
    # TorchRec plans the managed collection, not the one inside of it.
    placed.plan = {"tables": placed.plan["tables._embedding_module"]}
    start = {
        name: value.detach().clone()
        for name, value in model.state_dict().items()
        if name.endswith(".weight")
    }
    sharded, optimizer = hybrid_parallel(
        model, runtime, plan=placed, optimizer=optimizers
    )
    for name, value in model_state(sharded).tensors.items():
        for part in value.parts if isinstance(value, Parts) else ():
            saved = next(
                tensor
                for path, tensor in start.items()
                if path.endswith(f"{name.split('.')[1]}.weight")
            )
            part.tensor.copy_(
                saved[part.offsets[0] : part.offsets[0] + len(part.tensor)]
            )
    losses = []
    for batch in batches(runtime.rank, runtime.world_size, 6):
        loss = sharded(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_sharded_equals_unsharded() -> None:
    model, optimizer = unsharded()
    by_rank = run_ranks(sharded_losses, 2)
    for number, batch in enumerate(batches(0, 1, 6)):
        loss = model(*batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert math.isclose(
            loss.item(), (by_rank[0][number] + by_rank[1][number]) / 2, rel_tol=1e-5
        )


def collection_of(kind: type, managed: nn.Module, rows: int) -> Any:
    config: Any = (
        EmbeddingBagConfig
        if kind is ManagedCollisionEmbeddingBagCollection
        else EmbeddingConfig
    )
    tables = [
        config(name="t", feature_names=["f", "g"], num_embeddings=rows, embedding_dim=4)
    ]
    is_pooled = kind is ManagedCollisionEmbeddingBagCollection
    inner = (
        EmbeddingBagCollection(tables=tables)
        if is_pooled
        else EmbeddingCollection(tables=tables)
    )
    return kind(
        inner,
        ManagedCollisionCollection({"t": managed}, tables),
        return_remapped_features=True,
    )


def features_of(*ids: int) -> KeyedJaggedTensor:
    lengths = torch.tensor([1] * len(ids) + [0] * len(ids))
    return KeyedJaggedTensor(["f", "g"], torch.tensor(ids), lengths=lengths)


@pytest.mark.parametrize(
    "kind",
    [ManagedCollisionEmbeddingBagCollection, ManagedCollisionEmbeddingCollection],
)
def test_takes_the_settings_and_the_place_of_torchrecs_module(kind: type) -> None:
    collection = collection_of(
        kind,
        mch(5, input_hash_func=lambda ids, size: ids % size, input_hash_size=100),
        5,
    )
    (ids,) = with_dynamic_ids(collection)
    assert (
        ids.output_size(),
        ids.input_size(),
        ids.buckets(),
        ids.open_slots().item(),
    ) == (5, 100, 1, 4)
    _, waiting = collection(features_of(107, 8, 307))
    _, mapped = collection(features_of(107, 8, 307))
    assert waiting.values().tolist() == [0, 0, 0]
    assert mapped.values()[0] == mapped.values()[2] != mapped.values()[1]
    assert ids.open_slots().item() == 2
    collection.eval()
    embedded, read = collection(features_of(7, 9))
    assert read.values().tolist() == [int(mapped.values()[0]), 0]
    assert set(embedded.keys()) == {"f", "g"}
    twin = copy.deepcopy(collection)
    again = collection_of(
        kind, DynamicManagedCollision("t", Dynamic(capacity=5), every=EVERY), 5
    )
    again.load_state_dict(collection.state_dict())
    for other in (twin, again.eval()):
        assert other(features_of(7, 9))[1].values().tolist() == read.values().tolist()
    symbolic_trace(collection._managed_collision_collection)


def test_a_row_begins_anew_and_evict_names_it() -> None:
    ids = DynamicManagedCollision("t", Dynamic(capacity=3, evict="lru"))
    collection = collection_of(ManagedCollisionEmbeddingBagCollection, ids, 3)
    optimizer = KeyedOptimizerWrapper(
        dict(collection.named_parameters()),
        lambda weights: torch.optim.Adagrad(weights, lr=1.0),
    )
    ids.begin_rows = FreshRows(
        collection,
        optimizer,
        begin=lambda _, names: names[:, None].expand(-1, 4).float(),
    )
    (weight,) = collection.parameters()
    for names in ((5, 6), (6, 7), (8, 7), (5, 8)):
        pooled, rows = collection(features_of(*names))
        assert pooled["f"][:, 0].tolist()[names.index(min(names))] <= min(names)
        assert pooled["f"][names.index(max(names)), 0] <= max(names)
        optimizer.zero_grad()
        pooled["f"].sum().backward()
        optimizer.step()
    # 5 went and came back: it has made one step, with the state of one.
    row = int(rows["f"].values()[0])
    assert weight[row, 0].item() == pytest.approx(4.0)
    assert optimizer.state[weight]["sum"][row, 0].item() == pytest.approx(1.0)
    assert ids.remap(features_of(9).to_dict())["f"].values().item() == row
    assert ids.evict().tolist() == [row]  # type: ignore[union-attr]
    assert ids.evict() is None


@pytest.mark.parametrize(
    ("managed", "policy"),
    [
        (lambda: mch(FEW, LRU_EvictionPolicy()), "lru"),
        (lambda: mch(FEW, LFU_EvictionPolicy()), "lfu"),
        (lambda: mch(FEW), "distance"),
        (lambda: hashed(FEW), "lru"),
    ],
)
def test_policies_are_taken_over(managed: Any, policy: str) -> None:
    (ids,) = with_dynamic_ids(
        collection_of(ManagedCollisionEmbeddingBagCollection, managed(), FEW)
    )
    assert ids.policy == POLICIES[policy]


def full() -> MCHManagedCollisionModule:
    module = MCHManagedCollisionModule(
        FEW, torch.device("cpu"), LFU_EvictionPolicy(), 1
    )
    module(collection_features())
    return module


def collection_features() -> Any:
    return features_of(1, 2, 3).to_dict()


class OwnModule(MCHManagedCollisionModule):
    """A user's own kind."""


@pytest.mark.parametrize(
    ("managed", "part"),
    [
        (
            lambda: mch(FEW, LFU_EvictionPolicy(average_threshold_filter)),
            "threshold_filtering_func: ids are admitted",
        ),
        (
            lambda: mch(FEW, DistanceLFU_EvictionPolicy(decay_exponent=2.0)),
            "decay_exponent=2.0: counts fade",
        ),
        (
            lambda: OwnModule(FEW, META, LFU_EvictionPolicy(), 1),
            "OwnModule: is a kind of its own",
        ),
        (full, "it holds ids already"),
        (
            lambda: hashed(FEW, eviction_policy_name=None),
            "eviction_policy_name=None: must be LRU_EVICTION",
        ),
        (
            lambda: hashed(
                FEW, eviction_policy_name=HashZchEvictionPolicyName.SINGLE_TTL_EVICTION
            ),
            "eviction_policy_name=SINGLE_TTL_EVICTION: must be LRU_EVICTION",
        ),
        (
            lambda: hashed(FEW, disable_fallback=True),
            "disable_fallback: has no counterpart",
        ),
        (
            lambda: hashed(FEW, opt_in_prob=50, percent_reserved_slots=10),
            "opt_in_prob: has no counterpart",
        ),
        (lambda: hashed(FEW, track_id_freq=True), "track_id_freq: has no counterpart"),
    ],
)
def test_other_settings_are_refused_in_one_line(managed: Any, part: str) -> None:
    with pytest.raises(
        ValueError, match=r"declare DynamicManagedCollision\('t', "
    ) as error:
        with_dynamic_ids(
            collection_of(ManagedCollisionEmbeddingBagCollection, managed(), FEW)
        )
    assert part in str(error.value)
    assert len(str(error.value)) <= 200


def refusals(runtime: Runtime) -> dict[str, str]:
    messages = {}

    def refused(name: str, call: Any) -> None:
        with pytest.raises(ValueError, match=r".") as error:
            call()
        messages[name] = str(error.value)

    refused(
        "copies", lambda: hybrid_parallel(managed_model(FEW), runtime, table_copies=2)
    )
    shared = mch(FEW)
    refused(
        "shared", lambda: with_dynamic_ids(Model(FEW, dict.fromkeys(TABLES, shared)))
    )
    refused(
        "alone",
        lambda: with_dynamic_ids(
            ManagedCollisionCollection({"user": mch(FEW)}, configs(FEW)[:1])
        ),
    )
    in_place = managed_model(FEW)
    in_place.tables._allow_in_place_embed_weight_update = True
    refused("in place", lambda: with_dynamic_ids(in_place))
    ids = DynamicManagedCollision("user", Dynamic(capacity=FEW))
    floats = JaggedTensor(torch.tensor([0.5]), lengths=torch.tensor([1]))
    refused("float", lambda: ids.remap({"user": floats}))
    refused(
        "weights",
        lambda: ids.remap(collection_features(), write_weights=torch.zeros(3)),
    )
    refused("shard", lambda: ids.rebuild_with_output_id_range((0, 9), [0, 9]))
    model, optimizer = sharded_model(runtime, managed_model(FEW), PLANS[1])
    refused(
        "train", lambda: train(model, optimizer, [], runtime, TrainConfig(epochs=1))
    )  # type: ignore[arg-type]
    return messages


def test_what_cannot_be_is_refused_in_one_line() -> None:
    (messages,) = run_ranks(refusals, 1)
    expected = {
        "copies": "sync.table_copies=2: table 'user' has dynamic ids",
        "shared": "tables 'user' and 'item' share one managed collision module",
        "alone": "'' maps ids outside of a ManagedCollisionEmbeddingBagCollection",
        "in place": "allow_in_place_embed_weight_update=True: a row would begin anew before",
        "float": "table 'user': ids are torch.float32, must be whole numbers",
        "weights": "table 'user': write_weights: dynamic ids hold no further values",
        "shard": "table 'user': dynamic ids are mapped before they are sent to shards",
        "train": "train(): table 'user' has managed collision",
    }
    for name, part in expected.items():
        assert part in messages[name]
        assert len(messages[name]) <= 200
