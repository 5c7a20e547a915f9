"""A model's tables are looked up once for all towers: by hand, by collection, and one weight read in several ways."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.examples import ITEMS, assert_every_gradient, pair_batches, redrawn
from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.session_tower import SessionSteps
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged

pytestmark = pytest.mark.unit
DIM = 16
LENGTHS = {"history": 3, "likes": 2, "genres": 2}


def table(name: str, *features: str, kind: Any, **options: Any) -> Any:
    return kind(
        name=name,
        feature_names=list(features or (name,)),
        num_embeddings=ITEMS,
        embedding_dim=DIM,
        **options,
    )


def bags(
    name: str, *features: str, pooling: PoolingType = PoolingType.MEAN
) -> EmbeddingBagConfig:
    return table(name, *features, kind=EmbeddingBagConfig, pooling=pooling)  # type: ignore[no-any-return]


# Towers over rows of their own; a user's over shared rows; an item table of three towers:
# pooled, of one id, and as the steps of a session.
KINDS: dict[str, Any] = {
    "plain": lambda: {
        "user": Tower([bags("user_id", pooling=PoolingType.SUM), bags("history")], [8]),
        "item": Tower([bags("item_id"), bags("genres", pooling=PoolingType.SUM)], [8]),
    },
    "shared": lambda: {
        "user": Tower([bags("user_id"), bags("item", "history", "likes")], [8]),
        "item": Tower([bags("candidate", "item_id"), bags("genres")], [8]),
    },
    "sequences": lambda: {
        "session": SessionSteps(
            [table("item", "history", kind=EmbeddingConfig)],
            session=["history"],
            max_length=3,
        ),
        "likes": Tower([bags("item", "likes"), bags("genres")], [8]),
        "item": Tower([bags("item", "item_id"), bags("user_id")], [8]),
    },
}


def batch(made: TowerModel) -> TowerBatch:
    """Of few items, so that histories, likes and candidates meet in the same rows of a table."""
    schema = made.schema()
    ids = {name: (ITEMS // 5, LENGTHS.get(name, 1)) for name in schema.keys}
    of_query = ("user_id", "history", "likes")
    (rows,) = pair_batches(schema, 1, ids, of_query=of_query, queries=8, width=3)
    return rows


def weights_of(made: TowerModel) -> dict[str, Tensor]:
    return {
        name.split(".")[-2]: weight for name, weight in made.look_ups.named_parameters()
    }


def pooled_by_hand(
    rows: TowerBatch, feature: str, weight: Tensor, pooling: PoolingType
) -> Tensor:
    pooled = []
    for ids in rows.bags(feature).to_dense():
        total = weight[ids].sum(0)
        pooled.append(total / len(ids) if pooling == PoolingType.MEAN else total)
    return torch.stack(pooled)


@pytest.mark.parametrize("kind", KINDS)
def test_each_feature_of_each_table_has_the_rows_of_its_bags(kind: str) -> None:
    towers = KINDS[kind]()
    widths = [tower.out_features for tower in towers.values()]
    shared = ["user"] if kind == "shared" else []
    made = redrawn(TowerModel(towers, TopMLP(widths), shared=shared), tables=3)
    rows = batch(made)
    found = made.look_ups(rows, list(towers))
    features = set()
    for tower in towers.values():
        for config in tower.tables:
            weight = weights_of(made)[config.name]
            for feature in config.feature_names:
                features.add(f"{feature}@{config.name}")
                value = found[f"{feature}@{config.name}"]
                if isinstance(value, JaggedTensor):
                    expected = weight[rows.bags(feature).values()]
                    torch.testing.assert_close(value.values(), expected)
                else:
                    expected = pooled_by_hand(rows, feature, weight, config.pooling)
                    torch.testing.assert_close(value, expected)
    assert features == set(found)
    assert_every_gradient(made, rows)


class _Own(nn.Module):
    """A tower of a user's own, with the attributes that a TowerModel reads."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = [bags("item", "item_id")]
        self.dense: tuple[str, ...] = ()
        self.out_features = DIM

    def forward(self, vectors: dict[str, Tensor], dense: Tensor) -> Tensor:
        del dense
        return vectors["item_id@item"] * 2


def test_a_tower_of_a_users_own_shares_tables_with_others() -> None:
    made = TowerModel(
        {"user": Tower([bags("item", "likes")], ()), "own": _Own()},  # type: ignore[dict-item]
        TopMLP([DIM, DIM]),
    )
    ids = {name: Jagged(torch.tensor([3])) for name in ("likes", "item_id")}
    rows = made.schema().assemble(ids, labels=torch.zeros(1))
    torch.testing.assert_close(made.embed("own", rows), 2 * made.embed("user", rows))
