"""Merged look-ups change no output and no gradient, keep every table's name, and read one weight in several ways."""

import dataclasses

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagConfig, PoolingType

from tests.examples import ITEMS, assert_every_gradient, gradients
from tests.models.merged_models import (
    DIM,
    ROWS,
    bags,
    batch,
    by_table,
    listed,
    model,
    towers,
)
from torchrec_ext.distributed.optim.config import OptimizerConfig, Override
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.interaction import TopMLP
from torchrec_ext.modules.session_tower import SessionTower
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged

pytestmark = pytest.mark.unit
KINDS = ("plain", "shared", "sequences")


@pytest.mark.parametrize("kind", KINDS)
def test_outputs_and_gradients_are_those_of_towers_that_look_up_apart(
    kind: str,
) -> None:
    apart = model(kind)
    merged = model(kind).merge_lookups()
    rows = batch(kind, 0, [0, 1])
    logits, grads = gradients(apart, rows)
    merged_logits, merged_grads = gradients(merged, rows)
    torch.testing.assert_close(merged_logits, logits, rtol=0, atol=1e-6)
    assert (
        by_table(merged_grads).keys()
        == by_table(grads).keys()
        == by_table(dict(apart.named_parameters())).keys()
    )
    for name, grad in by_table(grads).items():
        torch.testing.assert_close(
            by_table(merged_grads)[name], grad, rtol=0, atol=1e-6
        )
    assert_every_gradient(merged, rows)


@pytest.mark.parametrize("kind", KINDS)
def test_one_tower_is_embedded_as_before(kind: str) -> None:
    apart, merged, rows = model(kind), model(kind).merge_lookups(), batch(kind, 0, [1])
    for name in apart.towers:
        torch.testing.assert_close(
            merged.embed(name, rows), apart.embed(name, rows), rtol=0, atol=1e-6
        )


def test_a_tower_alone_looks_up_the_collections_that_it_reads_and_no_other() -> None:
    made, rows, seen = model("shared").merge_lookups(), batch("shared", 0, [0]), set()
    for name, collection in made.shared_tables.collections.items():  # type: ignore[union-attr]
        collection.register_forward_hook(lambda *_, name=name: seen.add(name))
    read = {}
    for tower in ("user", "item"):
        made.embed(tower, rows)
        read[tower], _ = set(seen), seen.clear()
    assert read == {"user": {"shared", "joint"}, "item": {"joint", "rows"}}
    made.logits(rows)
    assert seen == {"shared", "joint", "rows"}


def test_tables_over_the_same_rows_are_one_collection() -> None:
    collections = {
        kind: model(kind).merge_lookups().shared_tables.collections for kind in KINDS
    }  # type: ignore[union-attr]
    assert {kind: list(members) for kind, members in collections.items()} == {
        "plain": ["rows"],
        "shared": ["shared", "joint", "rows"],
        "sequences": ["rows_sequences_16", "rows"],
    }
    names = {
        name: [config.name for config in collection.embedding_configs()]
        for name, collection in collections["sequences"].items()
        if name != "rows"
    }  # type: ignore[operator]
    assert names == {"rows_sequences_16": ["item", "word"]}
    assert len(collections["plain"]["rows"].embedding_bag_configs()) == 8  # type: ignore[operator]


def test_the_values_of_the_tables_stay_and_merging_twice_changes_nothing() -> None:
    made = model("plain")
    before = by_table({name: value.clone() for name, value in made.named_parameters()})
    after = by_table(dict(made.merge_lookups().merge_lookups().named_parameters()))
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_an_optimizer_finds_tables_by_name_wherever_they_are_looked_up() -> None:
    config = OptimizerConfig(
        per_table={"item_id": Override(kind="sgd", lr=0.3), "user_*": Override(lr=0.2)}
    )
    apart = config.for_tables(model("plain"))
    merged = config.for_tables(model("plain").merge_lookups())
    assert merged == apart
    assert (merged["item_id"].kind, merged["user_id"].lr, merged["maker"].lr) == (
        "sgd",
        0.2,
        0.05,
    )


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_a_table_read_id_by_id_is_pooled_as_its_reader_says(
    pooling: PoolingType,
) -> None:
    """One weight: a session reads its rows, and a tower beside it pools bags of them, empty ones to zeros."""
    session = SessionTower(
        [listed("item", "steps")],
        session=["steps"],
        mlp_widths=[4],
        heads=2,
        pooling="mean",
    )
    pooled = Tower([bags("item", "likes", pooling=pooling)], ())
    made = TowerModel({"session": session, "likes": pooled}, TopMLP([4, DIM]))  # type: ignore[dict-item]
    assert [name for name, _ in made.named_parameters() if ".item.weight" in name] == [
        "shared_tables.collections.rows_sequences_16.embeddings.item.weight"
    ]
    steps = Jagged(torch.tensor([4, 5]))
    likes = Jagged(torch.tensor([1, 2, 2]), torch.tensor([3, 0]))
    rows = made.schema().assemble(
        {"steps": steps, "likes": likes}, labels=torch.zeros(2)
    )
    weight = dict(made.named_parameters())[
        "shared_tables.collections.rows_sequences_16.embeddings.item.weight"
    ]
    expected = torch.stack([weight[1] + 2 * weight[2], torch.zeros(DIM)]) / (
        3 if pooling == PoolingType.MEAN else 1
    )
    torch.testing.assert_close(made.embed("likes", rows), expected)
    made.embed("likes", rows)[0, 0].backward()
    share = 1 / 3 if pooling == PoolingType.MEAN else 1.0
    assert weight.grad is not None
    torch.testing.assert_close(
        weight.grad[:4, 0], torch.tensor([0, share, 2 * share, 0])
    )


def test_a_sequence_of_a_shared_tower_and_a_bag_of_another_stand_in_one_key() -> None:
    """The sequence has Q rows of any length, the bags B; the table is looked up once, split where they meet."""
    user, item = [listed("item", "history")], [bags("item", "item_id")]
    made = TowerModel(
        {"user": Tower(user, [4]), "item": Tower(item, ())},
        TopMLP([4, DIM]),
        shared=["user"],
    )
    apart = TowerModel({"user": Tower(user, [4])}, torch.nn.Identity())
    apart.load_state_dict(
        {
            name: dict(made.named_parameters())[_moved(name)]
            for name in apart.state_dict()
        },
        strict=False,
    )
    history = Jagged(torch.tensor([7, 8, 9]), torch.tensor([1, 2]))
    columns = {"history": history, "item_id": Jagged(torch.tensor([3, 4, 5]))}
    rows = made.schema().assemble(
        columns,
        labels=torch.zeros(3),
        index=torch.tensor([0, 1, 1]),
        shared_rows=torch.arange(2),
    )
    weight = dict(made.named_parameters())[
        "shared_tables.collections.joint_sequences_16.embeddings.item.weight"
    ]
    torch.testing.assert_close(made.embed("item", rows), weight[3:6])
    alone = apart.schema().assemble({"history": history}, labels=torch.zeros(2))
    torch.testing.assert_close(made.embed("user", rows), apart.embed("user", alone))


def _moved(name: str) -> str:
    return (
        name
        if "sequences" not in name
        else "shared_tables.collections.joint_sequences_16.embeddings.item.weight"
    )


def test_what_cannot_be_merged_is_refused_with_the_remedy() -> None:
    weighted = Tower(
        [bags("item", "likes", pooling=PoolingType.SUM)], [4], weights={"likes": "ages"}
    )
    with pytest.raises(
        ValueError,
        match=r"table 'item' pools 'likes' by weights, and another of the towers .* reads it id by id",
    ):
        TowerModel(
            {"user": weighted, "item": Tower([listed("item", "item_id")], [4])},
            TopMLP([4, 4]),
        )
    narrow = dataclasses.replace(listed("item", "item_id"), embedding_dim=8)
    with pytest.raises(
        ValueError,
        match="two tables are called 'item', with embedding_dim=16 and embedding_dim=8",
    ):
        TowerModel(
            {"user": Tower([bags("item", "likes")], [4]), "item": Tower([narrow], [4])},
            TopMLP([4, 4]),
        )
    made = model("plain")
    made.towers[
        "user"
    ].embeddings = nn.Identity()  # as sharding puts something else in its place
    with pytest.raises(
        ValueError,
        match="table 'user_id' is sharded already; merge the look-ups before it is planned",
    ):
        made.merge_lookups()
    made = TowerModel(
        {"user": Tower([bags("user_id")], [4]), "own": _Own()}, TopMLP([4, 4])
    )  # type: ignore[dict-item]
    with pytest.raises(
        ValueError,
        match=r"table 'item' is named by the towers .*'own' is a _Own, which cannot do without tables",
    ):
        made.merge_lookups()


class _Own(nn.Module):
    """A tower of a user's own, with the attributes that a TowerModel reads and no way to release a table."""

    def __init__(self) -> None:
        super().__init__()
        self.tables: list[EmbeddingBagConfig] = [bags("item", "item_id")]
        self.dense: tuple[str, ...] = ()
        self.out_features = 4
        self.embeddings = Tower(self.tables, ()).embeddings


def test_the_examples_have_what_their_laws_need() -> None:
    assert [len(tower.tables) for tower in towers("plain", None).values()] == [4, 4]
    rows = batch("shared", 0, [0])
    assert rows.joint is not None
    assert (len(rows), rows.joint.stride()) == (ROWS, 2 * ROWS + 16)
    assert int(rows.joint.values().max()) < ITEMS
