"""Keys that name the features of towers: from the command line to the model."""

from types import SimpleNamespace
from typing import Any

import pytest

from torchx_apps.config import with_settings
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.recipes.n_tower import build_n_tower

pytestmark = pytest.mark.unit

ROWS, IDS, FEATURES = 3000, 40, ("user_id", "item_id", "c0", "c1", "c2", "c3")


def data() -> Any:
    """What a recipe reads of a set to build its towers."""
    return SimpleNamespace(
        name="planted",
        features=FEATURES,
        dense=("d",),
        vocab=dict.fromkeys(FEATURES, IDS) | {"c0": 10 * IDS},
        tables={name: name for name in FEATURES},
        towers={
            "user": (("user_id",), ()),
            "context": (FEATURES[2:], ("d",)),
            "item": (("item_id",), ()),
        },
    )


def towers_of(*overrides: str) -> dict[str, Any]:
    job: Any = with_settings(load_recipe("n_tower"), overrides)
    return dict(build_n_tower(job.model, data()).towers.items())


def features_of(towers: dict[str, Any]) -> set[frozenset[str]]:
    return {
        frozenset(name for table in tower.tables for name in table.feature_names)
        for tower in towers.values()
    }


PLANTED = {frozenset({"user_id", "c1", "c3"}), frozenset({"item_id", "c0", "c2"})}


def test_towers_may_be_said() -> None:
    result = towers_of(
        "model.towers.user=user_id,c1,c3", "model.towers.item=item_id,c0,c2,d"
    )
    assert features_of(result) == PLANTED
    assert {name: list(tower.dense) for name, tower in result.items()} == {
        "user": [],
        "item": ["d"],
    }
    assert set(towers_of()) == {"user", "item", "context"}


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (
            ["user=user_id,c9", "item=item_id"],
            "tower 'user' names 'c9', which no column is; the columns are user_id, item_id",
        ),
        (["user=user_id", "item=item_id"], "column 'c0' stands in no tower"),
        (["user=*", "item=item_id"], "'item_id' is in the towers 'user' and 'item'"),
    ],
)
def test_what_the_data_does_not_have_is_told(
    overrides: list[str], message: str
) -> None:
    with pytest.raises(ValueError) as error:
        towers_of(*(f"model.towers.{text}" for text in overrides))
    assert message in str(error.value)
