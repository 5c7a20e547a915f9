"""A model's tables are looked up once for all towers: by hand, by collection, and one weight read in several ways."""

import pytest
import torch
from torch import Tensor, nn
from torchrec import PoolingType
from torchrec.sparse.jagged_tensor import JaggedTensor

from tests.examples import assert_every_gradient
from tests.models.merged_models import DIM, bags, batch, listed, model, towers
from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.session_tower import SessionSteps
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


def test_a_tower_alone_looks_up_the_collections_that_it_reads_and_no_other() -> None:
    made, rows, seen = model("shared"), batch("shared", 0, [0]), set()
    for name, collection in made.look_ups.collections.items():
        collection.register_forward_hook(lambda *_, name=name: seen.add(name))
    read = {}
    for tower in ("user", "item"):
        made.embed(tower, rows)
        read[tower], _ = set(seen), seen.clear()
    assert read == {"user": {"shared", "joint"}, "item": {"joint", "rows"}}
    made.logits(rows)
    assert seen == {"shared", "joint", "rows"}


def test_tables_over_the_same_rows_are_one_collection() -> None:
    collections = {kind: model(kind).look_ups.collections for kind in KINDS}
    assert {kind: list(members) for kind, members in collections.items()} == {
        "plain": ["rows"],
        "shared": ["shared", "joint", "rows"],
        "sequences": ["rows_sequences_16", "rows"],
    }
    (item,) = collections["sequences"]["rows_sequences_16"].embedding_configs()  # type: ignore[operator]
    assert item.name == "item"
    assert item.feature_names == ["history", "likes", "item_id"]
    assert len(collections["plain"]["rows"].embedding_bag_configs()) == 8  # type: ignore[operator]


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_a_table_read_id_by_id_is_pooled_as_its_reader_says(
    pooling: PoolingType,
) -> None:
    """One weight: a session reads its rows, and a tower beside it pools bags of them, empty ones to zeros."""
    session = SessionSteps([listed("item", "steps")], session=["steps"], max_length=1)
    pooled = Tower([bags("item", "likes", pooling=pooling)], ())
    made = TowerModel(
        {"session": session, "likes": pooled},  # type: ignore[dict-item]
        TopMLP([session.out_features, DIM]),
    )
    assert [name for name, _ in made.named_parameters() if ".item.weight" in name] == [
        "look_ups.collections.rows_sequences_16.embeddings.item.weight"
    ]
    steps = Jagged(torch.tensor([4, 5]))
    likes = Jagged(torch.tensor([1, 2, 2]), torch.tensor([3, 0]))
    rows = made.schema().assemble(
        {"steps": steps, "likes": likes}, labels=torch.zeros(2)
    )
    weight = weights_of(made)["item"]
    share = 1 / 3 if pooling == PoolingType.MEAN else 1.0
    expected = torch.stack([weight[1] + 2 * weight[2], torch.zeros(DIM)]) * share
    torch.testing.assert_close(made.embed("likes", rows), expected)
    made.embed("likes", rows)[0, 0].backward()
    assert weight.grad is not None
    torch.testing.assert_close(
        weight.grad[:4, 0], torch.tensor([0, share, 2 * share, 0])
    )


def test_a_sequence_of_a_shared_tower_and_a_bag_of_another_stand_in_one_key() -> None:
    """The sequence has Q rows of any length, the bags B; the table is looked up once, split at the Q-th bag."""
    user = SessionSteps([listed("item", "history")], session=["history"], max_length=2)
    made = TowerModel(
        {"user": user, "item": Tower([bags("item", "item_id")], ())},  # type: ignore[dict-item]
        TopMLP([user.out_features, DIM]),
        shared=["user"],
    )
    history = Jagged(torch.tensor([7, 8, 9]), torch.tensor([1, 2]))
    columns = {"history": history, "item_id": Jagged(torch.tensor([3, 4, 5]))}
    rows = made.schema().assemble(
        columns,
        labels=torch.zeros(3),
        index=torch.tensor([0, 1, 1]),
    )
    assert list(made.look_ups.collections) == ["joint_sequences_16"]
    weight = weights_of(made)["item"]
    torch.testing.assert_close(made.embed("item", rows), weight[3:6])
    steps = made.embed("user", rows).view(2, 2, DIM + 1)
    assert steps[:, :, -1].tolist() == [[1, 0], [1, 1]]
    torch.testing.assert_close(steps[0, 0, :-1], weight[7])
    torch.testing.assert_close(steps[1, :, :-1], weight[8:10])


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
