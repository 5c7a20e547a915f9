"""A projection scores stored halves as the whole interaction does, in every shape, activation and normalisation."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from torchrec_ext.models.ncf import NCFHead
from torchrec_ext.modules.interaction import (
    INTERACTIONS,
    Cosine,
    DeepCross,
    DeepFM,
    DotProduct,
    FactorizationMachine,
    GeneralizedMF,
    Reordered,
    TopMLP,
    interaction_layer,
)
from torchrec_ext.modules.layers import BatchNorm
from torchrec_ext.retrieval.index.projection import projection

pytestmark = pytest.mark.unit
ROWS = 7


def whole(
    interaction: nn.Module, query: Tensor, candidates: Tensor, widths: list[int]
) -> Tensor:
    """What the network says of each pair, run as in training."""
    towers = [
        part.expand(len(candidates), -1)
        for part in torch.split(query[None], widths[:-1], dim=1)
    ]
    return interaction.eval()([*towers, candidates])


def assert_equal(
    interaction: nn.Module,
    widths: list[int],
    projected: bool | None = None,
    within: float = 1e-6,
) -> None:
    """One query and several at once, and in double precision to the last digits."""
    for dtype, tolerance in ((torch.float32, within), (torch.float64, 1e-6 * within)):
        interaction = interaction.to(dtype)
        query = torch.randn(3, sum(widths[:-1]), dtype=dtype)
        candidates = torch.randn(ROWS, widths[-1], dtype=dtype)
        made = projection(interaction, widths[-1])
        stored = made.candidates(candidates)
        assert stored.shape == (ROWS, made.width)
        assert made.projected == (
            not torch.equal(stored[:, : made.width], candidates[:, : made.width])
        )
        expected = torch.stack(
            [whole(interaction, one, candidates, widths) for one in query]
        ).detach()
        queries = made.query(query)
        single = torch.stack([made.score(one, stored) for one in queries])
        several = made.score(queries, stored.expand(3, -1, -1))
        in_place = torch.stack(
            [made.score_in_place(one, stored.clone()) for one in queries]
        )
        assert torch.equal(in_place, single)
        torch.testing.assert_close(
            torch.stack([made.query_of_one(one) for one in query]), queries
        )
        scale = max(1.0, float(expected.abs().max()))
        assert float((single - expected).abs().max()) <= tolerance * scale
        assert float((several - expected).abs().max()) <= tolerance * scale
    if projected is not None:
        assert made.projected == projected


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_the_top_nn_scores_from_its_halves(data: st.DataObject) -> None:
    widths = data.draw(st.lists(st.integers(1, 12), min_size=2, max_size=4))
    hidden = data.draw(st.lists(st.integers(1, 16), max_size=3))
    torch.manual_seed(data.draw(st.integers(0, 1000)))
    top = TopMLP(
        widths,
        hidden,
        activation=data.draw(st.sampled_from(["relu", "gelu", "silu", "tanh"])),
        normalization=data.draw(st.sampled_from(["none", "layer", "batch"])),
        dropout=data.draw(st.sampled_from([0.0, 0.3])),
    )
    for module in top.modules():
        if isinstance(module, BatchNorm):  # as after training
            module.running_mean.normal_()
            module.running_var.uniform_(0.5, 2)
            nn.init.normal_(module.bias)
    # A layer's norm over few numbers that are nearly equal makes their last digits many
    # times larger.
    narrowest = min(
        (
            each.normalized_shape[0]
            for each in top.modules()
            if isinstance(each, nn.LayerNorm)
        ),
        default=None,
    )
    within = 1e-6
    if narrowest is not None:
        within = 1e-3 if narrowest < 4 else 1e-5
    assert_equal(top, widths, projected=[*hidden, 1][0] <= widths[-1], within=within)


@settings(max_examples=20, deadline=None)
@given(
    gmf=st.integers(1, 6),
    widths=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    seed=st.integers(0, 99),
)
def test_the_halves_of_ncf(gmf: int, widths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    width = gmf + widths[0]
    assert_equal(
        NCFHead(gmf, widths, activation="tanh", dropout=0.2),
        [width, width],
        projected=False,
    )


@pytest.mark.parametrize("towers", [2, 3, 4])
@pytest.mark.parametrize("name", INTERACTIONS)
def test_every_interaction_of_the_registry_scores_from_what_is_stored(
    name: str, towers: int
) -> None:
    if INTERACTIONS[name].towers not in (None, towers):
        pytest.skip(f"{name} takes {INTERACTIONS[name].towers} towers")
    torch.manual_seed(towers)
    widths = [8] * towers
    interaction = interaction_layer(name, widths, (8,))
    assert_equal(interaction, widths)
    # Weights that are all 1 or 0 at the beginning would hide that they are not read.
    for weight in interaction.parameters():
        nn.init.normal_(weight)
    assert_equal(interaction, widths)


@pytest.mark.parametrize("towers", [2, 3, 4])
def test_products(towers: int) -> None:
    torch.manual_seed(towers)
    widths = [8] * towers
    if towers == 2:
        for interaction in (DotProduct(widths), GeneralizedMF(widths)):
            assert_equal(interaction, widths, projected=False)
            assert projection(interaction, 8).linear
        assert_equal(Cosine(widths, temperature=0.5), widths, projected=True)
    assert_equal(FactorizationMachine(widths), widths, projected=False)
    assert_equal(DeepFM(widths, (8,)), widths, projected=False)
    assert_equal(DeepCross(widths, (8,), layers=2), widths, projected=False)


def test_an_interaction_of_ones_own_is_scored_pair_by_pair() -> None:
    class Distance(nn.Module):
        def forward(self, outputs: list[Tensor]) -> Tensor:
            return -(outputs[0] - outputs[1]).square().sum(dim=1)

    assert_equal(Distance(), [4, 4], projected=False)


def test_the_narrower_side_is_stored() -> None:
    assert [
        projection(TopMLP([9, 16], (width,)), 16).width for width in (4, 16, 17)
    ] == [4, 16, 16]


def test_what_stays_constant_within_a_request_is_folded_into_the_query() -> None:
    """A pair's work does not grow with the towers of the query: user alone, or user beside three kinds of context."""
    tops = {
        len(context): projection(TopMLP([*context, 16], (8,)), 16)
        for context in ([16], [16, 5, 5, 5])
    }
    assert (
        tops[1].query(torch.zeros(16)).shape
        == tops[4].query(torch.zeros(31)).shape
        == (8,)
    )


def test_later_training_does_not_change_what_was_projected() -> None:
    top = TopMLP([4, 4], (4,))
    made = projection(top, 4)
    query, candidates = torch.randn(4), torch.randn(3, 4)
    before = made.score(made.query(query), made.candidates(candidates))
    nn.init.normal_(top.mlp[0].weight)
    assert torch.equal(
        made.score(made.query(query), made.candidates(candidates)), before
    )


def test_a_candidate_that_was_trained_in_the_middle() -> None:
    """User, item, context as trained; a bundle has the candidate last."""
    top = TopMLP([4, 8, 3], (6,))
    assert_equal(Reordered(top, [0, 2, 1], [4, 3, 8]), [4, 3, 8], projected=True)
    assert_equal(Reordered(top, [2, 0, 1], [8, 3, 4]), [8, 3, 4], projected=False)
    cross = Reordered(DeepCross([4, 8], (6,)), [1, 0], [8, 4])
    assert_equal(cross, [8, 4], projected=False)
