"""The encoder equals torch's transformer, looks neither ahead nor into other sequences, and refuses wrong input."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchrec_ext.modules.session_encoder import SessionEncoder, TransformerLayer

pytestmark = pytest.mark.unit
WIDTH, LENGTHS = 8, [4, 1, 6, 0, 3]


def steps(seed: int = 0) -> Tensor:
    return torch.randn(
        sum(LENGTHS),
        WIDTH,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(seed),
    )


def encoder(**options: Any) -> SessionEncoder:
    torch.manual_seed(0)
    return (
        SessionEncoder(WIDTH, 6, **{"layers": 2, "heads": 2, "hidden": 16} | options)
        .double()
        .eval()
    )


def same_weights(ours: TransformerLayer, torchs: nn.TransformerEncoderLayer) -> None:
    pairs = [
        (torchs.self_attn.in_proj_weight, ours.projection.weight),
        (torchs.self_attn.in_proj_bias, ours.projection.bias),
        (torchs.self_attn.out_proj.weight, ours.output.weight),
        (torchs.self_attn.out_proj.bias, ours.output.bias),
        *zip(torchs.linear1.parameters(), ours.first.parameters(), strict=True),
        *zip(torchs.linear2.parameters(), ours.second.parameters(), strict=True),
        *zip(torchs.norm1.parameters(), ours.attention_norm.parameters(), strict=True),
        *zip(torchs.norm2.parameters(), ours.network_norm.parameters(), strict=True),
    ]
    with torch.no_grad():
        for theirs, own in pairs:
            own.copy_(torch.randn_like(own))
            theirs.copy_(own)


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("causal", [False, True])
def test_layers_equal_torchs_own(causal: bool, norm_first: bool) -> None:
    model = encoder(
        causal=causal, norm_first=norm_first, position="none", activation="gelu"
    )
    model.norm = nn.Identity()
    packed, lengths = steps(), torch.tensor(LENGTHS)
    for row, one in enumerate(torch.split(packed, LENGTHS)):
        expected = one[None]
        for layer in model.layers:
            assert isinstance(layer, TransformerLayer)
            reference = nn.TransformerEncoderLayer(
                WIDTH,
                2,
                16,
                0.0,
                activation="gelu",
                batch_first=True,
                norm_first=norm_first,
                dtype=torch.float64,
            ).eval()
            torch.manual_seed(row)
            same_weights(layer, reference)
            mask = torch.ones(len(one), len(one)).triu(1).bool() if causal else None
            if len(one):
                expected = reference(expected, src_mask=mask)
        result = model.packed(
            packed, lengths
        )  # with the weights that were drawn for this row
        torch.testing.assert_close(
            torch.split(result, LENGTHS)[row], expected[0], rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("position", ["start", "end", "none"])
def test_a_later_step_changes_no_earlier_output(position: str) -> None:
    model = encoder(causal=True, position=position)
    packed, lengths = steps(), torch.tensor(LENGTHS)
    changed = packed.clone()
    changed[2] = changed[5]  # the third step of the first sequence
    difference = (
        (model.packed(changed, lengths) - model.packed(packed, lengths))
        .abs()
        .amax(dim=1)
    )
    assert bool((difference[2:4] > 1e-6).all()), "the step itself and the one after it"
    assert bool((difference[:2] == 0).all())
    assert bool((difference[4:] == 0).all()), "nor any other sequence"


def test_positions_count_from_the_side_that_is_named() -> None:
    lengths, zeros = torch.tensor([1, 2]), torch.zeros(3, WIDTH, dtype=torch.float64)
    for position, place in (("start", [0, 0, 1]), ("end", [0, 1, 0])):
        model = encoder(position=position, layers=1)
        assert model.positions is not None
        weight = model.positions.weight
        weight.grad = None
        model.layers = nn.ModuleList()
        model.norm = nn.Identity()
        torch.testing.assert_close(model.packed(zeros, lengths), weight[place])


def test_a_sequence_longer_than_the_limit_is_refused() -> None:
    with pytest.raises(
        ValueError,
        match="a sequence of 7 steps in row 1 of the batch: must have at most max_length=6; keep the most",
    ):
        encoder().packed(
            torch.zeros(9, WIDTH, dtype=torch.float64), torch.tensor([2, 7])
        )


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"heads": 3}, "heads=3: must divide the width of a step, D=8"),
        ({"layers": 0}, "layers=0: must be 1 or more"),
        ({"position": "middle"}, "position='middle': must be one of start, end, none"),
    ],
)
def test_a_wrong_setting_is_named(options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError) as error:
        encoder(**options)
    assert text in str(error.value)
