"""Towers of every kind: declared layers, pooling by its closed form, half-precision tables, refused declarations."""

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, KeyedJaggedTensor, PoolingType
from torchrec.modules.embedding_configs import DataType
from torchrec.sparse.jagged_tensor import JaggedTensor

from torchrec_ext.modules.layers import Residual, mlp
from torchrec_ext.modules.tower import AttentionPooling, Tower

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


def ids(**features: list[list[int]]) -> KeyedJaggedTensor:
    """One bag per row for each feature."""
    rows = [row for feature in features.values() for row in feature]
    return KeyedJaggedTensor(
        keys=list(features),
        values=torch.tensor(
            [value for row in rows for value in row], dtype=torch.int64
        ),
        lengths=torch.tensor([len(row) for row in rows], dtype=torch.int32),
    )


def every_parameter_moves(module: nn.Module, loss: Tensor) -> None:
    loss.backward()
    for name, parameter in module.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 1e-9, name


@pytest.mark.parametrize("activation", ["relu", "gelu", "silu", "tanh"])
@pytest.mark.parametrize("normalization", ["none", "layer", "batch"])
@pytest.mark.parametrize("residual", [False, True])
def test_every_parameter_of_an_mlp_receives_a_gradient(
    activation: str, normalization: str, residual: bool
) -> None:
    torch.manual_seed(0)
    layers = mlp(
        8,
        [8, 16, 4],
        activation=activation,
        normalization=normalization,
        residual=residual,
    )  # type: ignore[arg-type]
    every_parameter_moves(layers, layers(torch.randn(64, 8)).square().sum())


def test_a_residual_layer_adds_its_input_and_the_last_layer_does_not() -> None:
    layers = mlp(4, [4, 4, 4], residual=True)
    first, second, last = layers
    assert isinstance(first, Residual)
    x = torch.randn(3, 4)
    hidden = x + torch.relu(first[0](x))
    hidden = hidden + torch.relu(second[0](hidden))
    torch.testing.assert_close(layers(x), last(hidden))


def test_layers_stand_in_the_order_linear_norm_activation_dropout() -> None:
    kinds = [
        type(layer).__name__
        for layer in mlp(
            4, [6, 2], activation="gelu", normalization="layer", dropout=0.5
        )
    ]
    assert kinds == ["Linear", "LayerNorm", "GELU", "Dropout", "Linear"]


def test_attention_with_equal_scores_is_the_mean_and_an_empty_bag_gives_zeros() -> None:
    pool = AttentionPooling(4)
    values, lengths = torch.randn(5, 4), torch.tensor([3, 0, 2])
    nn.init.zeros_(pool.score[2].weight)  # type: ignore[arg-type]
    expected = torch.stack([values[:3].mean(0), torch.zeros(4), values[3:].mean(0)])
    torch.testing.assert_close(pool(JaggedTensor(values, lengths=lengths)), expected)


def test_attention_is_a_softmax_over_each_bag_also_where_scores_are_large() -> None:
    pool = AttentionPooling(4).double()
    values, lengths = torch.randn(7, 4, dtype=torch.float64), torch.tensor([3, 4])
    with torch.no_grad():
        pool.score[2].weight *= 2000  # type: ignore[operator]
    scores = pool.score(values).squeeze(1)
    expected = [
        torch.softmax(part, 0) @ bag
        for part, bag in zip(scores.split([3, 4]), values.split([3, 4]), strict=True)
    ]
    torch.testing.assert_close(
        pool(JaggedTensor(values, lengths=lengths)), torch.stack(expected)
    )


def test_a_tower_pools_each_table_as_it_is_declared() -> None:
    tower = Tower(
        [bags("a"), listed("b"), bags("c", pooling=PoolingType.MEAN)], [], dense=["x"]
    )
    assert tower.out_features == 13
    nn.init.zeros_(tower.attention.pools[0].score[2].weight)  # type: ignore[union-attr, index]
    sparse = ids(a=[[1, 2], []], b=[[3, 4, 5], []], c=[[6, 8], [7]])
    dense = torch.tensor([[0.5], [0.25]])
    table = {
        name: value for name, value in tower.named_parameters() if "embeddings." in name
    }
    a, c = (table[f"embeddings.embedding_bags.{name}.weight"] for name in "ac")
    b = table["sequences.embeddings.b.weight"]
    first = torch.cat([a[1] + a[2], (c[6] + c[8]) / 2, b[3:6].mean(0), dense[0]])
    second = torch.cat([torch.zeros(4), c[7], torch.zeros(4), dense[1]])
    torch.testing.assert_close(tower(sparse, dense), torch.stack([first, second]))


def test_a_tower_of_lists_alone_trains_every_parameter() -> None:
    torch.manual_seed(0)
    tower = Tower(
        [listed("a"), listed("b")], [8, 4], normalization="layer", residual=True
    )
    every_parameter_moves(
        tower,
        tower(ids(a=[[1, 2], [3]], b=[[4], [5, 6, 7]]), torch.empty(2, 0))
        .square()
        .sum(),
    )


@pytest.mark.parametrize("data_type", [DataType.FP16, DataType.BF16])
def test_a_tower_reads_half_precision_as_float32(data_type: DataType) -> None:
    tower = Tower([bags("a", data_type=data_type)], [])
    output = tower(ids(a=[[1, 2]]), torch.empty(1, 0))
    assert output.dtype == torch.float32
    table = tower.embeddings.embedding_bags["a"].weight  # type: ignore[union-attr]
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
            lambda: mlp(4, [1], activation="rel"),
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
        (
            lambda: mlp(4, [8, 4], residual=True),
            "residual=True with an input of width 4 and widths=[8, 4]: no hidden layer",
        ),
        (lambda: Tower([], [4]), "a Tower needs a table or a dense column"),
        (
            lambda: Tower([listed("a"), listed("b", dim=8)], [4]),
            "tables 'a' (D = 4) and 'b' (D = 8) are pooled by attention, and TorchRec's EmbeddingCollection holds "
            "tables of one",
        ),
    ],
)
def test_a_wrong_declaration_is_refused(
    make: Callable[[], nn.Module], text: str
) -> None:
    with pytest.raises(ValueError) as error:
        make()
    assert text in str(error.value)


def test_a_table_with_the_name_of_a_method_is_refused() -> None:
    """A torch ModuleDict would raise KeyError: attribute 'items' already exists."""
    with pytest.raises(
        ValueError,
        match="table 'items': TorchRec keeps tables in a torch ModuleDict, where this name is taken",
    ):
        Tower(
            [
                EmbeddingBagConfig(
                    name="items",
                    feature_names=["item_id"],
                    num_embeddings=5,
                    embedding_dim=4,
                )
            ],
            [4],
        )


@pytest.mark.parametrize("dim", [0, -3])
def test_a_table_without_columns_is_refused(dim: int) -> None:
    table = EmbeddingBagConfig(
        name="item", feature_names=["item"], num_embeddings=5, embedding_dim=dim
    )
    with pytest.raises(
        ValueError, match=f"table 'item': embedding_dim={dim}, must be 1 or more"
    ):
        Tower([table], [4])


def test_a_table_that_cannot_be_made_is_named_with_its_size() -> None:
    with pytest.raises(
        ValueError,
        match=r"table 'ad', num_embeddings=4,611,686,018,427,387,904: 73,786,976,294\.8 GB of weights",
    ):
        Tower([bags("user"), bags("ad", rows=2**62)], (4,))
