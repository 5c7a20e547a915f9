"""A model's tables are looked up once for all towers: by hand, by collection, and one weight read in several ways."""

import pytest
import torch
from torch import Tensor, nn
from torchrec import PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.examples import assert_every_gradient
from tests.models.merged_models import DIM, bags, batch, model, towers
from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged

pytestmark = pytest.mark.unit
KINDS = ("plain", "shared", "sequences")


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
    made, rows = model(kind), batch(kind, 0, [0, 1])
    found = made.look_ups(rows, list(made.towers))
    features = set()
    for tower in towers(kind).values():
        for table in tower.tables:
            weight = weights_of(made)[table.name]
            for feature in table.feature_names:
                features.add(f"{feature}@{table.name}")
                value = found[f"{feature}@{table.name}"]
                if isinstance(value, JaggedTensor):
                    expected = weight[rows.bags(feature).values()]
                    torch.testing.assert_close(value.values(), expected)
                else:
                    expected = pooled_by_hand(rows, feature, weight, table.pooling)
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
