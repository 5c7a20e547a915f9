"""Interactions: the pairwise form equals the form over pairs, and widths that do not fit are shown."""

import pytest
import torch

from torchrec_ext.modules.interaction import DotProduct, TopMLP
from torchrec_ext.modules.tower import mlp

pytestmark = pytest.mark.unit


@pytest.mark.parametrize("interaction", [DotProduct([8, 8]), TopMLP([8, 8], [16, 4]), TopMLP([8, 12]), TopMLP([8, 8], [])])
def test_all_pairs_equal_the_pairs_one_by_one(interaction: DotProduct | TopMLP) -> None:
    widths = getattr(interaction, "widths", (8, 8))
    query, candidates = torch.randn(5, widths[0]), torch.randn(7, widths[1])
    scores = interaction.score_all(query, candidates)
    one_by_one = interaction([query.repeat_interleave(7, 0), candidates.repeat(5, 1)]).view(5, 7)
    torch.testing.assert_close(scores, one_by_one, rtol=0, atol=1e-5)


def test_a_dot_product_of_unequal_widths_shows_both_shapes() -> None:
    with pytest.raises(ValueError, match=r"two towers of equal width, got \(B, 8\), \(B, 16\); .*TopMLP"):
        DotProduct([8, 16])


def test_all_pairs_need_two_towers() -> None:
    with pytest.raises(ValueError, match="this model has 3 towers"):
        TopMLP([8, 8, 8]).score_all(torch.zeros(1, 8), torch.zeros(1, 8))


@pytest.mark.parametrize(
    ("arguments", "text"),
    [(((4, []), {}), "widths=[]"), (((4, [0]), {}), "widths=[0]"), (((4, [1]), {"activation": "rel"}), "activation='rel'")],
)
def test_a_wrong_mlp_is_refused(arguments: tuple[tuple[object, ...], dict[str, object]], text: str) -> None:
    with pytest.raises(ValueError) as error:
        mlp(*arguments[0], **arguments[1])  # type: ignore[arg-type]
    assert text in str(error.value)
