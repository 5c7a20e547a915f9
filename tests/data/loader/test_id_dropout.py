"""Id dropout: the same on any number of ranks and after a resume."""

import itertools
from typing import Any

import pytest
import torch
from torchrec import EmbeddingBagConfig, PoolingType

from tests.examples import META
from tests.small_sets import planted_data
from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.loader.id_dropout import drop_ids
from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig, training_loader
from torchrec_ext.data.prepared import Prepared
from torchrec_ext.models.retrieval import RetrievalModel
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.modules.interaction import DotProduct
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import BatchSchema

RATES = {"item_id": 0.3, "user_id": 0.2, "history": 0.1}


def small() -> Prepared:
    return planted_data(users=60, items=60, clusters=4, history_length=5)


def tables_of(data: Prepared, *names: str) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=name,
            feature_names=[name],
            num_embeddings=data.vocab[name],
            embedding_dim=16,
            pooling=PoolingType.MEAN,
        )
        for name in names
    ]


def model(
    data: Prepared,
    *,
    shared: bool = True,
    device: torch.device | None = META,
    **options: Any,
) -> TowerModel:
    users = tables_of(data, "user_id", "occupation", "history")
    items = tables_of(data, "item_id", "genres")
    return two_tower(
        users, items, shared=("user",) if shared else (), device=device, **options
    )


def loader(
    data: Prepared,
    schema: BatchSchema,
    rank: int = 0,
    world_size: int = 1,
    **config: Any,
) -> ChunkLoader:
    config = {"batch_size": 32, "negatives": 3} | config
    return training_loader(
        data, schema, LoaderConfig(**config), rank=rank, world_size=world_size
    )


def bags(batch: TowerBatch, name: str) -> list[list[int]]:
    part = (
        batch.shared.sparse
        if batch.shared is not None and name in batch.shared.sparse.keys()  # noqa: SIM118
        else batch.sparse
    )
    values, offsets = part[name].values().tolist(), part[name].offsets().tolist()
    return [values[begin:end] for begin, end in itertools.pairwise(offsets)]


def epoch(
    made: ChunkLoader, names: tuple[str, ...], number: int = 0
) -> list[dict[str, list[list[int]]]]:
    made.set_epoch(number)
    return [{name: bags(batch, name) for name in names} for batch in made]


def joined(batches: list[dict[str, list[list[int]]]], name: str) -> list[list[int]]:
    return [bag for batch in batches for bag in batch[name]]


@pytest.mark.unit
@pytest.mark.parametrize("shared", [True, False])
def test_ids_become_the_oov_row_at_the_rate_asked_for_and_nothing_else_changes(
    shared: bool,
) -> None:
    data = small()
    schema = model(data, shared=shared).schema(oov_ids={"item_id": 7})
    names = ("item_id", "user_id", "history", "genres", "occupation")
    before, after = (
        epoch(made, names)
        for made in (
            loader(data, schema),
            drop_ids(loader(data, schema), schema, RATES),
        )
    )
    for name in names:
        old, new = joined(before, name), joined(after, name)
        oov = 7 if name == "item_id" else 0
        assert [len(bag) for bag in new] == [len(bag) for bag in old], name
        pairs = list(
            zip(
                itertools.chain.from_iterable(new),
                itertools.chain.from_iterable(old),
                strict=True,
            )
        )
        changed = [after for after, before in pairs if after != before]
        assert all(after == oov for after in changed), name
        could = sum(before != oov for _, before in pairs)
        rate = RATES.get(name, 0.0)
        assert (
            abs(len(changed) - rate * could) <= 5 * (rate * (1 - rate) * could) ** 0.5
        ), name


@pytest.mark.unit
@pytest.mark.parametrize("shared", [True, False])
def test_the_choice_is_the_same_on_any_number_of_ranks_and_at_any_batch_size(
    shared: bool,
) -> None:
    data = small()
    schema = model(data, shared=shared).schema()

    def items(
        rank: int = 0, world_size: int = 1, **config: Any
    ) -> list[list[list[int]]]:
        made = drop_ids(
            loader(data, schema, rank, world_size, drop_last=True, **config),
            schema,
            RATES,
            seed=3,
        )
        return [batch["item_id"] for batch in epoch(made, ("item_id",))]

    alone, ranks = items(), [items(rank, 2) for rank in range(2)]
    assert [first + second for first, second in zip(*ranks, strict=True)] == alone
    small_steps = [bag for batch in items(batch_size=16) for bag in batch]
    assert small_steps[: 32 * 4 * len(alone)] == [
        bag for batch in alone for bag in batch
    ]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("rates", "text"),
    [
        (
            {"item": 0.1},
            "rates names 'item', which is no sparse feature; the features are user_id, occupation, history",
        ),
        ({"item_id": 1.0}, "rates: item_id=1.0: must be at least 0 and below 1"),
        ({"item_id": -0.1}, "rates: item_id=-0.1"),
    ],
)
def test_wrong_rates_are_refused(rates: dict[str, float], text: str) -> None:
    data = small()
    schema = model(data).schema()
    with pytest.raises(ValueError) as error:
        drop_ids(loader(data, schema), schema, rates)
    assert text in str(error.value)


@pytest.mark.unit
def test_what_was_sampled_stays_beside_what_is_looked_up() -> None:
    data = small()
    made = RetrievalModel(
        {
            "user": Tower(tables_of(data, "user_id"), (8,)),
            "item": Tower(tables_of(data, "item_id"), (8,)),
        },
        DotProduct([8, 8]),
    )
    schema = made.schema()
    plain = loader(data, schema, negatives=0)
    for old, new in zip(
        list(plain), drop_ids(plain, schema, {"item_id": 0.3}), strict=True
    ):
        looked_up, was = (batch.ids("item_id") for batch in (new, old))
        assert torch.equal(new.items, was)  # type: ignore[arg-type]
        dropped = looked_up != was
        assert dropped.any()
        assert not looked_up[dropped].any()
