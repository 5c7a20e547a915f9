"""The compressing layer: widths by the formula, the identity where nothing is compressed, a gradient for everything."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor

from torchrec_ext.modules.compression import CompressingLayer, Compression
from torchrec_ext.modules.tower import Tower

pytestmark = pytest.mark.unit

N, ROWS = 8, 32
KINDS: list[dict[str, Any]] = [
    {"dim": 4, "per_feature": 1, "flat": 0},
    {"dim": 4, "per_feature": 2, "flat": 3},
    {"dim": 4, "per_feature": 0, "flat": 2},
    {"kind": "cross", "dim": 4, "per_feature": 1, "flat": 0},
    {"kind": "cross", "dim": 4, "per_feature": 0, "flat": 2, "layers": 2},
]


def tables(*widths: int) -> list[EmbeddingBagConfig]:
    return [
        EmbeddingBagConfig(
            name=f"f{i}",
            feature_names=[f"f{i}"],
            num_embeddings=20,
            embedding_dim=width,
        )
        for i, width in enumerate(widths)
    ]


def rows(features: int, dense: int) -> tuple[KeyedJaggedTensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(20, (features * ROWS,), generator=generator)
    lengths = torch.ones(features * ROWS, dtype=torch.int32)
    sparse = KeyedJaggedTensor(
        keys=[f"f{i}" for i in range(features)], values=ids, lengths=lengths
    )
    return sparse, torch.randn(ROWS, dense, generator=generator)


@pytest.mark.parametrize("config", KINDS, ids=str)
@pytest.mark.parametrize("dense", [0, 2])
@pytest.mark.parametrize("mlp_widths", [[], [6, 3]])
def test_every_parameter_receives_a_gradient_and_the_width_is_that_of_the_formula(
    config: dict[str, Any], dense: int, mlp_widths: list[int]
) -> None:
    torch.manual_seed(0)
    compress = Compression(**config)
    tower = Tower(
        tables(N, N, N),
        mlp_widths,
        dense=[f"d{i}" for i in range(dense)],
        compress=compress,
    )
    output = tower(*rows(3, dense))
    expected = 4 * (compress.per_feature * 3 + compress.flat) + (
        dense if not compress.flat else 0
    )
    assert compress.out_features(3, dense) == expected
    assert (
        output.shape
        == (ROWS, mlp_widths[-1] if mlp_widths else expected)
        == (ROWS, tower.out_features)
    )
    output.square().sum().backward()
    for name, parameter in tower.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 1e-9, name


@pytest.mark.parametrize(
    "compress",
    [
        Compression(dim=N, per_feature=1, flat=0),  # each bag to itself
        Compression(dim=3 * N + 2, per_feature=0, flat=1),  # all of it to itself
        Compression(dim=N // 2, per_feature=2, flat=0),  # two vectors of half the width
    ],
    ids=str,
)
def test_what_compresses_nothing_starts_as_the_tower_without_it(
    compress: Compression,
) -> None:
    plain = Tower(tables(N, N, N), [], dense=["a", "b"])
    tower = Tower(tables(N, N, N), [], dense=["a", "b"], compress=compress)
    tower.load_state_dict(plain.state_dict(), strict=False)
    torch.testing.assert_close(tower(*rows(3, 2)), plain(*rows(3, 2)), rtol=0, atol=0)
    assert tower.out_features == plain.out_features


def test_a_narrower_start_keeps_products_that_lie_in_as_many_columns() -> None:
    """Orthogonal rows: of a bag in the layer's row space no length is lost."""
    torch.manual_seed(0)
    layer = CompressingLayer([N, N], 0, Compression(dim=4, per_feature=1, flat=0))
    weight = layer.each.weight.detach()  # type: ignore[union-attr]
    inside = torch.randn(ROWS, 2, 4) @ weight
    narrow = layer(inside.flatten(1)).view(ROWS, 2, 4)
    torch.testing.assert_close(
        (narrow[:, 0] * narrow[:, 1]).sum(1),
        (inside[:, 0] * inside[:, 1]).sum(1),
        rtol=1e-4,
        atol=1e-5,
    )


def test_one_layer_reads_every_bag_and_the_flat_one_all_of_it() -> None:
    torch.manual_seed(0)
    layer = CompressingLayer([N, N], 2, Compression(dim=3, per_feature=2, flat=1))
    x = torch.randn(ROWS, 2 * N + 2)
    each, whole = layer.each.weight, layer.all  # type: ignore[union-attr]
    expected = torch.cat(
        [
            x[:, :N] @ each.T,
            x[:, N : 2 * N] @ each.T,
            nn.functional.linear(x, whole.weight, whole.bias),
        ],
        dim=1,
    )  # type: ignore[union-attr, operator, arg-type]
    torch.testing.assert_close(layer(x), expected)


def test_bags_under_attention_are_compressed_with_the_others() -> None:
    lists = EmbeddingConfig(
        name="f1", feature_names=["f1"], num_embeddings=20, embedding_dim=N
    )
    tower = Tower(
        [lists, *tables(N)], [], compress=Compression(dim=2, per_feature=1, flat=1)
    )
    assert tower(*rows(2, 0)).shape == (ROWS, 2 * (2 + 1)) == (ROWS, tower.out_features)


@pytest.mark.parametrize(
    ("arguments", "why"),
    [
        ({"kind": "dot"}, "kind='dot': must be one of linear, cross"),
        ({"dim": 0}, "dim=0: must be 1 or more"),
        ({"per_feature": -1}, "per_feature=-1: must be 0 or more"),
        ({"flat": 0}, "per_feature=0 and flat=0: nothing would leave the tower"),
    ],
)
def test_a_wrong_compression_is_refused(arguments: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        Compression(**arguments)


def test_bags_of_different_widths_have_flat_vectors_only() -> None:
    with pytest.raises(
        ValueError, match=r"per_feature=1 with bags \[8, 4\] wide.*per_feature=0"
    ):
        Tower(tables(8, 4), [], compress=Compression(dim=4, per_feature=1))
    assert Tower(tables(8, 4), [], compress=Compression(dim=4)).out_features == 4
    with pytest.raises(ValueError, match="nothing to compress"):
        CompressingLayer([], 3, Compression())
