"""Towers of every kind: declared layers, pooling by its closed form, half-precision tables, refused declarations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.layers import mlp
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged

pytestmark = pytest.mark.unit


def bags(
    name: str, rows: int = 10, dim: int = 4, **options: object
) -> EmbeddingBagConfig:
    return EmbeddingBagConfig(
        name=name,
        feature_names=[name],
        num_embeddings=rows,
        embedding_dim=dim,
        **options,
    )  # type: ignore[arg-type]


def listed(name: str, rows: int = 10, dim: int = 4) -> EmbeddingConfig:
    return EmbeddingConfig(
        name=name, feature_names=[name], num_embeddings=rows, embedding_dim=dim
    )


def every_parameter_moves(module: nn.Module, loss: Tensor) -> None:
    loss.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 1e-9, name


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh"])
@pytest.mark.parametrize("normalization", ["none", "layer", "batch"])
def test_every_parameter_of_an_mlp_receives_a_gradient(
    activation: str, normalization: str
) -> None:
    torch.manual_seed(0)
    layers = mlp(
        8,
        [8, 16, 4],
        activation=activation,
        normalization=normalization,
    )  # type: ignore[arg-type]
    every_parameter_moves(layers, layers(torch.randn(64, 8)).square().sum())


def vectors(tower: Tower, batch: int = 2) -> dict[str, Tensor]:
    """Embeddings of the tower's features, all of them different."""
    generator = torch.Generator().manual_seed(0)
    return {
        f"{name}@{table.name}": torch.randn(
            batch, table.embedding_dim, generator=generator
        )
        for table in tower.tables
        for name in table.feature_names
    }


def test_a_tower_puts_its_columns_side_by_side() -> None:
    tower = Tower([bags("a"), bags("c", dim=3)], [], dense=["x"])
    assert tower.out_features == 8
    embedded = vectors(tower) | {"other@table": torch.zeros(2, 9)}
    dense = torch.tensor([[0.5], [0.25]])
    expected = torch.cat([embedded["a@a"], embedded["c@c"], dense], dim=1)
    torch.testing.assert_close(tower(embedded, dense), expected)


@pytest.mark.parametrize("pooling", [PoolingType.SUM, PoolingType.MEAN])
def test_rows_looked_up_one_by_one_are_pooled_as_the_table_says(
    pooling: PoolingType,
) -> None:
    tower = Tower([bags("a", pooling=pooling)], [])
    rows = torch.randn(3, 4)
    bag = JaggedTensor(rows, lengths=torch.tensor([3, 0]))
    expected = torch.stack([rows.sum(0), torch.zeros(4)])
    if pooling == PoolingType.MEAN:
        expected = expected / 3
    torch.testing.assert_close(tower({"a@a": bag}, torch.empty(2, 0)), expected)


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_a_tower_reads_half_precision_as_float32(data_type: DataType) -> None:
    model = TowerModel({"a": Tower([bags("a", data_type=data_type)], [])}, nn.Module())
    ids = Jagged(torch.tensor([1, 2]), torch.tensor([2]))
    batch = model.schema().assemble({"a": ids}, labels=torch.zeros(1))
    output = model.embed("a", batch)
    assert output.dtype == torch.float32
    (table,) = model.look_ups.parameters()
    assert table.dtype in (torch.float16, torch.bfloat16)
    torch.testing.assert_close(
        output[0], table[1:3].float().sum(0), rtol=1e-2, atol=1e-2
    )


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: mlp(4, []), "widths=[]: an MLP needs at least one layer"),
        (lambda: mlp(4, [0]), "widths=[0]"),
        (
            lambda: mlp(4, [2, 1], activation="rel"),
            "activation='rel': must be one of relu, gelu, silu, tanh",
        ),  # type: ignore[arg-type]
        (
            lambda: mlp(4, [1], normalization="group"),
            "normalization='group': must be one of none, layer, batch",
        ),  # type: ignore[arg-type]
        (
            lambda: mlp(4, [1], dropout=1.0),
            "dropout=1.0: must be at least 0 and below 1",
        ),
        (lambda: Tower([], [4]), "a Tower needs a table or a dense column"),
        (
            lambda: Tower([bags("a"), listed("b")], [4]),  # type: ignore[list-item]
            "table 'b': a EmbeddingConfig, which does not pool; give an EmbeddingBagConfig",
        ),
        # A torch ModuleDict would raise KeyError: attribute 'items' already exists.
        (
            lambda: Tower([bags("items")], [4]),
            "table 'items': TorchRec keeps tables in a torch ModuleDict, where this name is taken",
        ),
        (
            lambda: Tower([bags("item", dim=-3)], [4]),
            "table 'item': embedding_dim=-3, must be 1 or more",
        ),
    ],
)
def test_a_wrong_declaration_is_refused(
    make: Callable[[], nn.Module], text: str
) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert text in str(error.value)
