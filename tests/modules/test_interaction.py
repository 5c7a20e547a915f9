"""Interactions equal closed forms in float64, all pairs at once equal the pairs, and wrong widths are shown."""

from collections.abc import Callable
from itertools import combinations

import pytest
import torch
from torch import Tensor, nn

from torchrec_ext.modules.interaction import (
    HIDDEN_FLOATS,
    INTERACTIONS,
    Cosine,
    DeepCross,
    DotProduct,
    FactorizationMachine,
    TopMLP,
    interaction_layer,
)

pytestmark = pytest.mark.unit

# those for any number of towers
MANY = [name for name, kind in INTERACTIONS.items() if kind.towers is None]


def outputs(*widths: int, rows: int = 6) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randn(rows, width, generator=generator, dtype=torch.float64)
        for width in widths
    ]


@pytest.mark.parametrize(
    ("make", "widths"),
    [
        *(
            (lambda widths, name=name: interaction_layer(name, widths), (8, 8))
            for name in INTERACTIONS
        ),
        *(
            (lambda widths, name=name: interaction_layer(name, widths), (4, 4, 4))
            for name in MANY
        ),
        # one tower, no query
        *(
            (lambda widths, name=name: interaction_layer(name, widths), (8,))
            for name in ("top_nn", "dcn")
        ),
        (lambda widths: TopMLP(widths, [16, 4]), (8, 8)),
        (lambda widths: TopMLP(widths, []), (8, 8)),
        (lambda widths: TopMLP(widths, normalization="layer"), (8, 12)),
        (lambda widths: TopMLP(widths, activate_input=False), (8, 12)),
        (lambda widths: TopMLP(widths, [16, 8], normalization="batch").eval(), (8, 12)),
        (lambda widths: DeepCross(widths, [], layers=3), (8, 12)),
        # several blocks of candidates
        (lambda widths: TopMLP(widths, [HIDDEN_FLOATS // 10]), (3, 4)),
        # several blocks of queries
        (lambda widths: TopMLP(widths, [HIDDEN_FLOATS // 16]), (3, 4)),
    ],
)
def test_all_pairs_equal_the_pairs_one_by_one(
    make: Callable[[tuple[int, ...]], nn.Module], widths: tuple[int, ...]
) -> None:
    interaction = make(widths).double()
    *queries, candidates = outputs(*widths, rows=13)
    queries = [query[:5] for query in queries]
    query = torch.cat([torch.empty(5, 0, dtype=torch.float64), *queries], dim=1)
    scores = interaction.score_all(query, candidates)  # type: ignore[operator]
    one_by_one = interaction(
        [
            *(query.repeat_interleave(13, 0) for query in queries),
            candidates.repeat(5, 1),
        ]
    )
    torch.testing.assert_close(scores, one_by_one.view(5, 13), rtol=0, atol=1e-12)


def test_an_input_that_is_not_activated_keeps_its_negative_half() -> None:
    towers = [-output.abs() for output in outputs(8, 8)]
    blind, seeing = (
        interaction_layer("top_nn", [8, 8], activate_input=on).double()
        for on in (True, False)
    )
    assert torch.equal(
        blind(towers), blind([torch.zeros_like(output) for output in towers])
    )
    assert not torch.equal(
        seeing(towers), seeing([torch.zeros_like(output) for output in towers])
    )


def test_cosine_is_the_angle_over_the_temperature() -> None:
    query = torch.tensor([[3.0, 4.0], [1.0, 0.0]])
    candidate = torch.tensor([[6.0, 8.0], [0.0, 2.0]])
    torch.testing.assert_close(
        Cosine([2, 2], temperature=0.5)([query, candidate]), torch.tensor([2.0, 0.0])
    )
    assert Cosine([2, 2])([torch.zeros(1, 2), candidate[:1]]).item() == 0


@pytest.mark.parametrize("towers", [2, 3, 5])
def test_the_factorization_machine_adds_the_dot_products_of_all_pairs_of_towers(
    towers: int,
) -> None:
    machine, parts = FactorizationMachine([4] * towers).double(), outputs(*[4] * towers)
    dots = sum((a * b).sum(1) for a, b in combinations(parts, 2))
    torch.testing.assert_close(
        machine(parts), dots + machine.first_order(torch.cat(parts, 1)).squeeze(1)
    )


def test_crossing_layers_are_those_of_the_paper() -> None:
    model = DeepCross([5, 3], hidden=[], layers=2).double()
    first = x = torch.cat(outputs(5, 3), dim=1)
    for layer in range(2):
        weight = model.cross.kernels[layer]  # type: ignore[index]
        bias = model.cross.bias[layer].squeeze(1)  # type: ignore[index]
        x = first * (x @ weight.T + bias) + x
    torch.testing.assert_close(model(outputs(5, 3)), model.mlp(x).squeeze(1))


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (
            lambda: DotProduct([8, 16]),
            "DotProduct over towers of widths [8, 16]: needs 2 of one width; give them",
        ),
        (
            lambda: Cosine([8, 8, 8]),
            "Cosine over towers of widths [8, 8, 8]: needs 2 of one width; ",
        ),
        (
            lambda: FactorizationMachine([4, 4, 8]),
            "of widths [4, 4, 8]: needs 2 or more of one width; ",
        ),
        (lambda: DeepCross([4, 4], layers=0), "layers=0: must be 1 or more"),
        (
            lambda: Cosine([4, 4], temperature=0),
            "temperature=0: must be greater than 0",
        ),
        (
            lambda: interaction_layer("bilinear", [4, 4]),  # type: ignore[arg-type]
            f"interaction='bilinear': must be one of {', '.join(INTERACTIONS)}",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], nn.Module], text: str) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert text in str(error.value)
