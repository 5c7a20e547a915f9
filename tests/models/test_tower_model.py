"""Towers learn, every parameter of them, and wrong declarations are refused."""

import math

import pytest
import torch

from tests.examples import assert_every_gradient, batches, small_model, table
from torchrec_ext.distributed.tables import initialise_tables
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.modules.interaction import INTERACTIONS, DotProduct
from torchrec_ext.modules.tower import Tower

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("interaction", INTERACTIONS)
def test_every_parameter_receives_a_gradient(interaction: str) -> None:
    model = small_model(interaction=interaction)  # type: ignore[arg-type]
    initialise_tables(model, seed=1)
    assert_every_gradient(model, next(batches(1)))


def test_logits_are_the_interaction_of_the_towers() -> None:
    model, batch = small_model(), next(batches(1))
    outputs = [model.embed("user", batch), model.embed("item", batch)]
    assert [tuple(output.shape) for output in outputs] == [(24, 8), (24, 8)]
    torch.testing.assert_close(model.logits(batch), model.interaction(outputs))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: two_tower([table("a", 5)], [table("b", 5)], interaction="angle"),  # type: ignore[arg-type]
            "interaction='angle': must be one of top_nn, dot, cosine",
        ),
        (
            lambda: small_model().embed("users", next(batches(1))),
            "tower 'users' is not one of ['user', 'item']",
        ),
    ],
)
def test_a_wrong_declaration_is_refused(make: object, text: str) -> None:
    with pytest.raises(ValueError) as error:
        make()  # type: ignore[operator]
    assert text in str(error.value)


def test_a_dense_column_of_two_towers_is_refused() -> None:
    towers = {
        name: Tower([table(name, 5)], [4], dense=["age"]) for name in ("user", "item")
    }
    with pytest.raises(
        ValueError, match=r"dense columns \['age'\] are read by more than one tower"
    ):
        TowerModel(towers, DotProduct([4, 4]))


@pytest.mark.unit
@pytest.mark.parametrize("interaction", INTERACTIONS)
def test_an_untrained_model_begins_at_the_share_of_positives(interaction: str) -> None:
    model = small_model(interaction=interaction).eval()
    batch = next(batches(1, size=512))
    before, odds = model.logits(batch).mean(), math.log(0.02 / 0.98)
    if not model.interaction.last_biases:
        assert model.begin_at([0.02]) == []
        assert torch.equal(model.logits(batch).mean(), before)
        return
    *_, bias = model.interaction.last_biases  # type: ignore[misc]
    moved = odds - bias.item()
    assert model.begin_at([0.02]) == [odds]
    assert float(model.logits(batch).mean() - before) == pytest.approx(moved, abs=1e-4)
