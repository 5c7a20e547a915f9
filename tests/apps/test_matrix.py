"""Every recipe learns planted rows, exports and answers; what cannot go together is refused before the first step."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.contracts import mostly_slow
from tests.files import summary
from tests.settings import with_settings
from torchrec_ext.retrieval.bundle import AUDIT, Bundle
from torchrec_ext.retrieval.catalogue import read_table
from torchrec_ext.retrieval.scorer import RecommendRequest, Scorer
from torchx_apps import recipes
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe


class Planted(NamedTuple):
    """A recipe on planted data: overrides that let it learn from few rows, and the least figure that is not chance."""

    overrides: tuple[str, ...]
    figure: str = "hr@10"
    above: float = 0.13  # ten items at random of the 87 that a user has not taken: .115


_RATINGS = (
    "data.name=planted",
    "data.users=600",
    "data.items=100",
    "loader.batch_size=256",
    "train.epochs=2",
)
_ROWS = (
    "data.name=planted",
    "loader.batch_size=1024",
    "optimizer.tables_lr=0.02",
    "optimizer.dense_lr=0.01",
    "train.epochs=2",
)
_ADAM = ("optimizer.tables_lr=0.02", "optimizer.dense_lr=0.01")
RECIPES = {
    "two_tower": Planted(_RATINGS),
    "retrieval": Planted(
        (
            *_RATINGS,
            "data.history_length=20",
            "model.embedding_dim=16",
            "model.tower_widths=32",
        )
    ),
    "ncf": Planted((*_RATINGS, *_ADAM)),
    "contextual_ncf": Planted(
        (*_ROWS, "model.embedding_std=0.1", "train.early_stop.metric="),
        figure="auc",
        above=0.55,
    ),
    "n_tower": Planted(
        (
            *(
                *_ROWS,
                "model.top_widths=32",
                "model.embedding_std=0.1",
                "model.dropout=0",
                "optimizer.tables_l2=0",
            ),
            *(
                "train.schedule.kind=constant",
                "train.early_stop.metric=",
            ),
        ),
        figure="auc",
        above=0.55,
    ),
    "stream": Planted(
        (
            *(
                "data.name=planted",
                "loader.batch_size=512",
                "train.epochs=3",
                "model.embedding_std=0.1",
            ),
            *(
                "optimizer.tables_lr=0.1",
                "optimizer.dense_lr=0.01",
                "train.early_stop.metric=",
            ),
        ),
        figure="auc",
        above=0.55,
    ),
    "bst": Planted(
        (
            *(
                "data.name=planted",
                "data.ranked=40",
                "loader.batch_size=256",
                "train.epochs=7",
                "model.top_widths=64",
            ),
            *(
                "model.embedding_dim=16",
                "model.heads=2",
                "model.dropout=0",
                "train.early_stop.metric=",
            ),
        ),
        figure="auc",
        above=0.55,
    ),
    "multi_task": Planted(
        (
            *(
                "data.name=planted",
                "data.ranked=200",
                "loader.batch_size=256",
                "train.epochs=3",
            ),
            *(
                "model.embedding_std=0.1",
                "optimizer.tables_lr=0.1",
                "optimizer.dense_lr=0.01",
            ),
        ),
        figure="conversion_auc",
        above=0.55,
    ),
    "session": Planted(
        (
            *(
                "data.name=planted",
                "data.users=600",
                "data.items=100",
                "model.embedding_dim=16",
                "model.hidden=32",
            ),
            *("train.epochs=4", "loader.batch_size=64", "train.early_stop.metric="),
        ),
        above=0.2,
    ),
}


def trained(recipe: str, settings: str, folder: Path) -> None:
    overrides = [*RECIPES[recipe].overrides, *settings.split()]
    run_training(with_settings(load_recipe(recipe), overrides), folder)


def answered(folder: Path) -> list[float]:
    """Returns the scores of five recommendations to the bundle's first user, in the context of an audited request."""
    bundle = Bundle.load(folder)
    needed = set(bundle.query.columns.raw)
    known = {}
    if bundle.users is not None:
        (first,) = bundle.users.ids.ids([0])
        known = {bundle.users.key: first}
        needed -= set(bundle.users.block(0, 1).schema.names)
    rows = read_table(folder / AUDIT).slice(0, 1).select(sorted(needed))
    request = RecommendRequest(user={**rows.to_pylist()[0], **known}, k=5)
    return Scorer(bundle).recommend(request).scores


@pytest.mark.parametrize("recipe", mostly_slow(RECIPES, "two_tower"))
def test_a_recipe_trains_exports_and_answers(recipe: str, tmp_path: Path) -> None:
    trained(recipe, "export=require", tmp_path)
    ended = summary(tmp_path)
    figures, figure = ended["test"], RECIPES[recipe].figure
    assert all(map(math.isfinite, figures.values())), figures
    best = {name.lower(): value for name, value in ended["best"].items()}
    # Of 600 held-out items the share that is hit has a standard deviation of .02.
    assert RECIPES[recipe].above < figures[figure] < best[figure] + 0.06, figures
    scores = answered(tmp_path / "bundle")
    assert len(scores) == 5
    assert scores == sorted(scores, reverse=True)


_DOT = "model.interaction=dot loader.negatives=0"
_IDS = "ids.features.item_id.capacity=200"
_TOWERS = (
    "model.towers.user=user_id,history,history_category_id,history_gap "
    "model.towers.item=item_id,category_id,timestamp_hour"
)
REFUSED = [
    ("two_tower", f"model.loss=catalogue {_DOT} {_IDS}", "model.loss=catalogue"),
    ("two_tower", f"train.early_stop.metric=hr@10 {_IDS}", "train.early_stop.metric"),
    ("two_tower", f"id_dropout.item_id=0.1 {_IDS}", "id_dropout.item_id"),
    (
        "two_tower",
        f"model.loss=catalogue {_DOT} loader.device=cpu",
        "loader.device='cpu'",
    ),
    ("two_tower", "loader.device=cuda", "loader.device=cuda: the job trains on cpu"),
    ("two_tower", "ids.features.itm.capacity=9", "ids.features.itm: is no column of"),
    ("ncf", "model.loss=in_batch", "model.loss=in_batch"),
    ("session", "id_dropout.session=0.1", "id_dropout=session=0.1"),
    ("session", f"{_IDS}", "ids.features.item_id"),
    ("n_tower", f"{_TOWERS} export=require", "export=require"),
    ("stream", f"{_TOWERS} model.interaction=dot model.loss=catalogue", "model.loss"),
    ("stream", "loader.negatives=4", "loader.negatives=4"),
]


@pytest.mark.parametrize(("recipe", "settings", "named"), REFUSED)
def test_what_excludes_each_other_is_refused_by_name_before_the_first_step(
    recipe: str, settings: str, named: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=re.escape(named)):
        trained(recipe, settings, tmp_path)
    assert not (tmp_path / "summary.json").exists()


@pytest.mark.unit
def test_no_recipe_is_left_out() -> None:
    assert RECIPES.keys() == recipes.RECIPES.keys()
