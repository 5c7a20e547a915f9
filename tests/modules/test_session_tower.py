"""SessionTower: the target is a step among the others, and what the tower cannot take is named."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec.modules.embedding_configs import EmbeddingConfig
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.modules.session_tower import SessionTower

pytestmark = pytest.mark.unit
ITEMS, GAPS = 30, 6
SESSIONS = [[3, 4, 5, 3], [], [7, 8]]
TARGETS = [5, 9, 7]


def tables(width: int = 8) -> list[EmbeddingConfig]:
    return [
        EmbeddingConfig(
            name="item",
            num_embeddings=ITEMS,
            embedding_dim=width,
            feature_names=["history", "item_id"],
        ),
        EmbeddingConfig(
            name="gaps", num_embeddings=GAPS, embedding_dim=width, feature_names=["gap"]
        ),
    ]


def tower(**options: Any) -> SessionTower:
    torch.manual_seed(0)
    settings = {
        "session": ["history", "gap"],
        "target": ["item_id"],
        "max_length": 4,
        "heads": 2,
        "mlp_widths": [16, 5],
    }
    return SessionTower(options.pop("tables", tables()), **settings | options)


def features(
    sessions: list[list[int]],
    targets: list[list[int]],
    gaps: list[list[int]] | None = None,
) -> KeyedJaggedTensor:
    gaps = gaps or [[item % GAPS for item in session] for session in sessions]
    rows = [*sessions, *targets, *gaps]
    return KeyedJaggedTensor(
        keys=["history", "item_id", "gap"],
        values=torch.tensor([value for row in rows for value in row]),
        lengths=torch.tensor([len(row) for row in rows]),
        stride=len(sessions),
    )


def batch() -> KeyedJaggedTensor:
    return features(SESSIONS, [[target] for target in TARGETS])


def outcome(model: SessionTower) -> dict[str, Tensor]:
    output = model.double()(batch(), torch.empty(3, 0, dtype=torch.float64))
    output.pow(2).sum().backward()
    return {"output": output.detach()} | {
        name: value.grad
        for name, value in model.named_parameters()
        if value.grad is not None
    }


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("pooling", ["flatten", "last", "mean"])
@pytest.mark.parametrize("attention", ["bucketed", "nested"])
def test_without_padding_outputs_and_gradients_are_those_with_padding(
    attention: str, pooling: str
) -> None:
    result, expected = (
        outcome(tower(attention=how, pooling=pooling)) for how in (attention, "padded")
    )
    assert result.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(
            result[name],
            value,
            rtol=0,
            atol=1e-10,
            msg=lambda text, name=name: f"{name}: {text}",
        )


@pytest.mark.parametrize("pooling", ["flatten", "last", "mean"])
def test_every_parameter_gets_a_gradient(pooling: str) -> None:
    model = tower(pooling=pooling)
    gradients = outcome(model)
    silent = [
        name
        for name, _ in model.named_parameters()
        if name not in gradients or not bool(gradients[name].any())
    ]
    assert silent == []


def test_flattened_steps_stand_by_their_distance_from_the_target() -> None:
    model = tower()
    steps, places = torch.arange(1.0, 10.0)[:, None].repeat(1, 8), []
    model.network.encoder.encode = lambda values, packing: steps  # type: ignore[method-assign]
    model.mlp.forward = lambda values: places.append(values.view(3, 5, 8)[:, :, 0])  # type: ignore[assignment, method-assign]
    model(batch(), torch.empty(3, 0))
    # 5, 1 and 3 steps with their targets, one after the other.
    assert places[0].tolist() == [[5, 4, 3, 2, 1], [6, 0, 0, 0, 0], [9, 8, 7, 0, 0]]


def test_the_target_is_among_the_steps_that_attend_to_each_other() -> None:
    model = tower().eval()
    seen: list[Tensor] = []
    encode = model.network.encoder.encode

    def kept(values: Tensor, packing: Any) -> Tensor:
        seen.append(encode(values, packing))
        return seen[-1]

    model.network.encoder.encode = kept  # type: ignore[method-assign]
    for targets in (TARGETS, [6, *TARGETS[1:]]):
        model(features(SESSIONS, [[target] for target in targets]), torch.empty(3, 0))
    moved = (seen[0] - seen[1]).abs().amax(dim=1) > 1e-6
    assert moved.tolist() == [True] * 5 + [False] * 4, (
        "all steps of the first row, no other row"
    )


def test_a_padding_row_has_neither_session_nor_target_and_gives_a_number() -> None:
    output = tower()(features([[], [3, 4]], [[], [5]]), torch.empty(2, 0))
    assert output.shape == (2, 5)
    assert bool(torch.isfinite(output).all())


def test_a_tower_of_the_session_alone() -> None:
    model = tower(
        target=[],
        tables=[
            EmbeddingConfig(
                name="item",
                num_embeddings=9,
                embedding_dim=8,
                feature_names=["history"],
            )
        ],
        session=["history"],
    )
    kjt = KeyedJaggedTensor(
        keys=["history"], values=torch.tensor([1, 2, 3]), lengths=torch.tensor([3, 0])
    )
    assert model(kjt, torch.empty(2, 0)).shape == (2, 5)


def test_dense_columns_reach_the_mlp() -> None:
    model = tower(dense=["hour"]).eval()
    outputs = [model(batch(), torch.full((3, 1), hour)) for hour in (0.0, 1.0)]
    assert bool(((outputs[0] - outputs[1]).abs().amax(dim=1) > 1e-6).all())


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            ([[1, 2, 3, 4, 5]], [[6]]),
            "a sequence of 6 steps in row 0 of the batch: must have at most max_length=5",
        ),
        (
            ([[1], [2]], [[6], [7, 8]]),
            "target feature 'item_id' has 2 values in row 1 of the batch: must be one item",
        ),
        (
            ([[1], [2, 3]], [[6], [7]], [[1], [2]]),
            "feature 'gap' has 1 values in row 1 of the batch and 'history' 2",
        ),
    ],
)
def test_rows_that_do_not_fit_are_named(arguments: tuple[Any, ...], text: str) -> None:
    with pytest.raises(ValueError) as error:
        tower()(features(*arguments), torch.empty(len(arguments[0]), 0))
    assert text in str(error.value)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"target": ["film_id"]},
            "target=['film_id']: must name features of the tables, one of the session at least; the tables read",
        ),
        (
            {"session": []},
            "session=[], target=['item_id']: must name features of the tables",
        ),
        (
            {"session": ["history"]},
            "features ['gap'] are read by the tables, but are in neither session nor target",
        ),
        (
            {"tables": [tables()[0], tables(4)[1]]},
            "tables have the widths {'item': 8, 'gaps': 4}",
        ),
        ({"pooling": "sum"}, "pooling='sum': must be one of flatten, last, mean"),
        ({"heads": 3}, "heads=3: must divide the width of a step, D=8"),
    ],
)
def test_a_wrong_setting_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        tower(**options)
    assert text in str(error.value)
