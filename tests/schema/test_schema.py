"""Bad input is refused in words that name feature, table, value, row and remedy; the oov policy maps it."""

from typing import Any

import pytest
import torch
from torch import Tensor
from torchrec import EmbeddingBagConfig, KeyedJaggedTensor

from torchrec_ext.schema import BatchSchema, DataError, Jagged

pytestmark = pytest.mark.unit


def schema(**options: object) -> BatchSchema:
    tables = [
        EmbeddingBagConfig(
            name="users", feature_names=["user_id"], num_embeddings=5, embedding_dim=4
        ),
        EmbeddingBagConfig(
            name="items",
            feature_names=["item_id", "history"],
            num_embeddings=8,
            embedding_dim=4,
        ),
        EmbeddingBagConfig(
            name="items_small",
            feature_names=["item_id"],
            num_embeddings=6,
            embedding_dim=4,
        ),
    ]
    return BatchSchema.from_tables(tables, dense=["age"], **options)  # type: ignore[arg-type]


def columns(**changes: Jagged) -> dict[str, Jagged]:
    return {
        "user_id": Jagged(torch.tensor([0, 4])),
        "item_id": Jagged(torch.tensor([1, 5])),
        "history": Jagged(torch.tensor([7, 2, 3]), torch.tensor([0, 3])),
    } | changes


AGE = {"age": torch.tensor([0.5, 1.0])}
LABELS = torch.tensor([1.0, 0.0])


def test_the_tables_say_what_a_batch_holds() -> None:
    made = schema()
    assert made.keys == ["user_id", "item_id", "history"]
    assert {feature.name: feature.num_embeddings for feature in made.sparse} == {
        "user_id": 5,
        "item_id": 6,
        "history": 8,
    }
    assert made.sparse[1].tables == ("items", "items_small")


def test_an_array_column_is_packed_by_its_elements_and_a_name_of_the_user_s_own_wins() -> (
    None
):
    table = EmbeddingBagConfig(
        name="t", feature_names=["user_id"], num_embeddings=5, embedding_dim=4
    )
    names = ["profile[0]", "age", "profile[1]"]
    made = BatchSchema.from_tables([table], dense=names)
    ids = {"user_id": Jagged(torch.tensor([0, 4]))}
    profile = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    batch = made.assemble(ids, {**AGE, "profile": profile}, labels=LABELS)
    assert batch.dense.tolist() == [[1.0, 0.5, 2.0], [3.0, 1.0, 4.0]]
    own = torch.tensor([7.0, 8.0])
    given = {**AGE, "profile": profile, "profile[0]": own}
    batch = made.assemble(ids, given, labels=LABELS)
    assert batch.dense.tolist() == [[7.0, 0.5, 2.0], [8.0, 1.0, 4.0]]


def test_columns_are_packed_in_order() -> None:
    batch = schema().assemble(columns(), AGE, labels=LABELS)
    assert batch.sparse.keys() == ["user_id", "item_id", "history"]
    assert batch.sparse.values().tolist() == [0, 4, 1, 5, 7, 2, 3]
    assert batch.sparse.lengths().tolist() == [1, 1, 1, 1, 0, 3]
    assert batch.sparse.values().dtype == torch.int64
    assert batch.dense.tolist() == [[0.5], [1.0]]
    assert batch.weights.tolist() == [1.0, 1.0]
    assert float(batch.total_weight) == 2.0


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        (
            {"user_id": Jagged(torch.tensor([0, 5]))},
            "row 1 of the batch, column 'user_id': id 5 is outside table 'users' (0 to 4; 1 such ids)",
        ),
        (
            {"item_id": Jagged(torch.tensor([-1, 5]))},
            "row 0 of the batch, column 'item_id': id -1 is outside table 'items', 'items_small' (0 to 5",
        ),
        (
            {"history": Jagged(torch.tensor([1, 8, 3]), torch.tensor([1, 2]))},
            "row 1 of the batch, column 'history': id 8",
        ),
        (
            {"user_id": Jagged(torch.tensor([0.0, 4.0]))},
            "feature 'user_id': ids are float32, must be integers",
        ),
        (
            {"history": Jagged(torch.tensor([1, 2, 3]), torch.tensor([4, -1]))},
            "feature 'history': lengths that add up to 3, the least -1, for 3 ids",
        ),
        (
            {"history": Jagged(torch.tensor([1, 2]), torch.tensor([0, 3]))},
            "lengths that add up to 3, the least 0, for 2 ids",
        ),
        (
            {"user_id": Jagged(torch.tensor([0, 4, 1]))},
            "feature 'user_id': 3 rows, must be (2,)",
        ),
        (
            {"history": Jagged(torch.tensor([1, 2, 3]), torch.tensor([1.5, 1.5]))},
            "feature 'history': lengths are float32, must be",
        ),
        (
            {"user_id": torch.tensor([0, 4])},
            "feature 'user_id': a Tensor, must be Jagged(values, lengths) of tensors",
        ),
        (
            {"user_id": Jagged(torch.tensor([[0], [4]]))},
            "feature 'user_id': ids have shape (2, 1), must have one dimension",
        ),
    ],
)
def test_a_bad_column_is_named(changes: dict[str, Jagged], text: str) -> None:
    with pytest.raises(DataError) as error:
        schema().assemble(columns(**changes), AGE, labels=LABELS)
    assert text in str(error.value)


@pytest.mark.parametrize(("name", "part"), [("user_id", "sparse"), ("age", "dense")])
def test_a_missing_column_is_named_with_what_is_there(name: str, part: str) -> None:
    sparse, dense = columns(), dict(AGE)
    del (sparse if part == "sparse" else dense)[name]
    with pytest.raises(
        DataError,
        match=f"column '{name}' is missing; the batch has .*, the schema needs",
    ):
        schema().assemble(sparse, dense, labels=LABELS)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", ["age", "label", "weight"])
def test_a_value_that_is_not_finite_is_named(column: str, value: float) -> None:
    bad = torch.tensor([0.5, value])
    age = {"age": bad} if column == "age" else AGE
    with pytest.raises(
        DataError,
        match=f"column '{column}': value {value} in row 1 of the batch must be finite",
    ):
        schema().assemble(
            columns(),
            age,
            labels=bad if column == "label" else LABELS,
            weights=bad if column == "weight" else None,
        )


def test_oov_maps_to_the_out_of_vocabulary_row() -> None:
    made = schema(out_of_range="oov", oov_ids={"user_id": 3})
    changes = {
        "user_id": Jagged(torch.tensor([-7, 5])),
        "history": Jagged(torch.tensor([7, 8, 99]), torch.tensor([0, 3])),
    }
    assert made.assemble(
        columns(**changes), AGE, labels=LABELS
    ).sparse.values().tolist() == [3, 3, 1, 5, 7, 0, 0]


def kjt(users: Tensor, **more: Any) -> KeyedJaggedTensor:
    values = torch.cat([users, torch.tensor([1, 5, 7, 2, 3])])
    lengths = torch.tensor([1, 1, 1, 1, 0, 3], dtype=torch.int32)
    keys = ["user_id", "item_id", "history"]
    return KeyedJaggedTensor(keys=keys, values=values, lengths=lengths, **more)


def test_a_keyed_jagged_tensor_of_ones_own_is_checked() -> None:
    good = kjt(torch.tensor([0, 4]))
    assert torch.equal(schema().check(good).values(), good.values())
    with pytest.raises(DataError, match="row 1 of the batch, column 'user_id': id 6"):
        schema().check(kjt(torch.tensor([0, 6])))
    broken = KeyedJaggedTensor(
        ["user_id"], torch.arange(3), lengths=torch.ones(2).int()
    )
    with pytest.raises(DataError, match=r"by its keys \(.* sum exactly to 3"):
        schema().check(broken)
    weights = torch.arange(7.0)
    bad = kjt(torch.tensor([0, 6]), weights=weights)
    mapped = schema(out_of_range="oov").check(bad)
    assert mapped.values().tolist() == [0, 0, 1, 5, 7, 2, 3]
    assert mapped.keys() == good.keys()
    assert torch.equal(mapped.weights(), weights)
    weights[5] = float("nan")
    with pytest.raises(DataError, match=r"weights of .*history: one is not finite"):
        schema().check(kjt(torch.tensor([0, 4]), weights=weights))


@pytest.mark.parametrize("out_of_range", ["error", "oov"])
def test_keys_of_another_order_and_further_keys_are_put_right(
    out_of_range: str,
) -> None:
    good = kjt(torch.tensor([0, 4]), weights=torch.arange(7.0))
    other = KeyedJaggedTensor(
        keys=["other", "history", "user_id", "item_id"],
        values=torch.tensor([42, 7, 2, 3, 0, 4, 1, 5]),
        weights=torch.tensor([9.0, 4.0, 5.0, 6.0, 0.0, 1.0, 2.0, 3.0]),
        lengths=torch.tensor([1, 0, 0, 3, 1, 1, 1, 1], dtype=torch.int32),
    )
    made = schema(out_of_range=out_of_range).check(other)
    assert made.keys() == good.keys()
    for name, column in good.to_dict().items():
        assert torch.equal(made[name].values(), column.values())
        assert torch.equal(made[name].weights(), column.weights())
        assert torch.equal(made[name].lengths(), column.lengths())


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"out_of_range": "ignore"},
            "out_of_range='ignore': must be one of error, oov",
        ),
        (
            {"oov_ids": {"user_id": 5}},
            "feature 'user_id': oov_id=5 is not a row of table 'users'",
        ),
        ({"oov_ids": {"user": 0}}, "oov_ids names ['user'], which no table reads"),
    ],
)
def test_a_wrong_schema_is_refused(options: dict[str, object], text: str) -> None:
    with pytest.raises(ValueError) as error:
        schema(**options)
    assert text in str(error.value)


def test_a_column_cannot_be_sparse_and_dense() -> None:
    table = EmbeddingBagConfig(
        name="t", feature_names=["age"], num_embeddings=5, embedding_dim=4
    )
    with pytest.raises(ValueError, match=r"columns \['age'\] appear twice"):
        BatchSchema.from_tables([table], dense=["age"])
    with pytest.raises(ValueError, match=r"give a list of names, \['age'\]"):
        BatchSchema.from_tables([table], dense="age")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (
            {"labels": torch.tensor([5.0, 4.0])},
            "column 'label': value 5 in row 0 of the batch must be finite, from 0 to 1; mend",
        ),
        (
            {"weights": torch.tensor([-1.0, 1.0])},
            "column 'weight': value -1 in row 0 of the batch must be finite, from 0 to inf",
        ),
        ({"weights": torch.zeros(2)}, "total_weight=0.0: must be greater than 0"),
    ],
)
def test_labels_and_weights_are_checked(
    arguments: dict[str, Tensor], text: str
) -> None:
    with pytest.raises(DataError) as error:
        schema().assemble(columns(), AGE, **({"labels": LABELS} | arguments))  # type: ignore[arg-type]
    assert text in str(error.value)


def test_any_label_where_the_schema_says_so() -> None:
    batch = schema(label_range=None).assemble(
        columns(), AGE, labels=torch.tensor([5.0, -4.0])
    )
    assert batch.labels.tolist() == [5.0, -4.0]
