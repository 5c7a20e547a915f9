"""Which optimizer each table and layer gets, what is refused and how, and RowAdam against closed forms."""

import math
import unittest.mock
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.optim.fused import EmptyFusedOptimizer
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from tests.contracts import run_ranks
from tests.examples import ITEMS, META, USERS, small_model
from torchrec_ext.capture import sharded as captured
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.distributed.optim import sharded
from torchrec_ext.distributed.optim.config import Choice, OptimizerConfig, Override
from torchrec_ext.distributed.optim.declared import (
    apply_optimizer_in_backward,
    chosen_optimizer,
    declare_table_optimizer,
    shardings,
    undeclared,
)
from torchrec_ext.distributed.optim.hybrid import HybridOptimizer
from torchrec_ext.distributed.optim.kinds import RowAdam
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.tables import collections
from torchx_apps.config import changed

pytestmark = pytest.mark.unit


def choice(kind: str) -> Choice:
    return Choice(kind=kind, lr=0.1, eps=1e-8, betas=(0.9, 0.999), weight_decay=0.0)


def test_of_several_exceptions_for_a_table_the_last_that_fits_wins_field_by_field() -> (
    None
):
    config = OptimizerConfig(
        tables_lr=0.1,
        tables_weight_decay=0.5,
        per_table={
            "look_ups": Override(kind="sgd", lr=0.2),
            "user_id": Override(lr=0.3),
            "?tem_id": Override(weight_decay=0),
        },
    )
    chosen = {
        name: (c.kind, c.lr, c.weight_decay)
        for name, c in config.for_tables(small_model(META)).items()
    }
    assert chosen == {
        "user_id": ("sgd", 0.3, 0.5),
        "history": ("sgd", 0.2, 0.5),
        "item_id": ("sgd", 0.2, 0.0),
    }


def test_a_module_path_fits_the_layers_below_it_and_no_other() -> None:
    names = [
        "towers.user.mlp.0.weight",
        "towers.user.mlp.0.bias",
        "towers.user_2.mlp.0.weight",
        "interaction.mlp.weight",
    ]
    config = OptimizerConfig(
        dense_lr=0.1,
        per_layer={
            "towers.user": Override(kind="sgd", lr=0.2),
            "*.bias": Override(weight_decay=0.5),
        },
    )
    chosen = {
        name: (c.kind, c.lr, c.weight_decay)
        for name, c in config.for_layers(names).items()
    }
    assert chosen == dict(
        zip(
            names,
            [
                ("sgd", 0.2, 0.0),
                ("sgd", 0.2, 0.5),
                ("adam", 0.1, 0.0),
                ("adam", 0.1, 0.0),
            ],
            strict=True,
        )
    )


def test_an_exception_that_fits_nothing_is_told_with_what_there_is() -> None:
    with pytest.raises(
        ValueError,
        match=r"^per_table: 'item' fits no table of the model, which are user_id, hist",
    ):
        OptimizerConfig(per_table={"item": Override(kind="sgd")}).for_tables(
            small_model(META)
        )
    with pytest.raises(
        ValueError,
        match=r"^per_layer: 'top' fits no dense layer of the model, which are a.weight, a.bias$",
    ):
        OptimizerConfig(per_layer={"top": Override(kind="sgd")}).for_layers(
            ["a.weight", "a.bias"]
        )


def test_l2_of_an_optimizer_that_does_not_move_every_row_is_refused_and_can_be_taken_back() -> (
    None
):
    config = OptimizerConfig(
        tables="adam",
        tables_l2=0.05,
        per_table={"history": Override(kind="adagrad"), "item_id": Override(l2=0)},
    )
    with pytest.raises(
        ValueError,
        match=r"^table 'history': l2=0.05 with the optimizer adagrad: .* choose adam, or weight_decay",
    ):
        config.for_tables(small_model(META))
    chosen = OptimizerConfig(
        tables="adam",
        tables_l2=0.05,
        per_table={
            "history": Override(kind="adagrad", l2=0),
            "item_id": Override(l2=0.5),
        },
    )
    assert [c.l2 for c in chosen.for_tables(small_model(META)).values()] == [
        0.05,
        0.0,
        0.5,
    ]


def declared_model(kind: type[torch.optim.Optimizer], **arguments: object) -> nn.Module:
    model = small_model(META)
    apply_optimizer_in_backward(
        kind, [dict(model.named_parameters())[USER_ID]], arguments
    )
    return model


USER_ID = "look_ups.collections.rows.embedding_bags.user_id.weight"


@pytest.mark.parametrize(
    ("kind", "arguments", "expected"),
    [
        (torch.optim.SGD, {"lr": 0.3}, ("sgd", 0.3, 1e-8)),
        (RowWiseAdagrad, {"lr": 0.1, "eps": 1e-6}, ("row_wise_adagrad", 0.1, 1e-6)),
        (
            torch.optim.Adam,
            {"lr": 0.2, "betas": (0.9, 0.999)},
            ("lazy_adam", 0.2, 1e-8),
        ),
        (torch.optim.Adagrad, {}, ("adagrad", 0.01, 1e-8)),
    ],
)
def test_an_optimizer_declared_by_apply_optimizer_in_backward_is_that_of_its_table(
    kind: type[torch.optim.Optimizer],
    arguments: dict[str, object],
    expected: tuple[str, float, float],
) -> None:
    model = declared_model(kind, **arguments)
    for _ in range(2):
        # a plan declares ours in its place, and hybrid_parallel() asks again
        chosen = chosen_optimizer(model, None)
        user = chosen.for_tables(model)["user_id"]
        assert (user.kind, user.lr, user.eps) == expected
        assert (
            chosen.for_tables(model)["item_id"]
            == OptimizerConfig().for_tables(model)["item_id"]
        )
        assert undeclared(model) == ["history", "item_id"]
        declare_table_optimizer(model, chosen)


def test_a_declared_optimizer_beside_one_given_or_beyond_words_is_refused() -> None:
    model = declared_model(torch.optim.SGD, lr=0.3)
    with pytest.raises(
        ValueError,
        match=r"optimizer= is given, but .* declared SGD\(lr=0.3\) for table 'user_id'; leave out one",
    ):
        chosen_optimizer(model, OptimizerConfig())
    with pytest.raises(
        ValueError,
        match=r"table 'user_id': .* SGD\(momentum=0.9\); only lr and eps of sgd, adagrad",
    ):
        chosen_optimizer(declared_model(torch.optim.SGD, lr=0.3, momentum=0.9), None)
    with pytest.raises(
        ValueError,
        match=r"table 'user_id': .* declared AdamW\(.*; only lr and eps of sgd, adagrad",
    ):
        chosen_optimizer(declared_model(torch.optim.AdamW), None)
    assert chosen_optimizer(small_model(META), None) == OptimizerConfig()


@pytest.mark.parametrize(
    ("flag", "value", "why"),
    [
        ("per_table", "sgd", "'sgd': put the name into the flag, --KEY.NAME.{kind,"),
        ("per_table.user_id", "sgd", "write --per_table.NAME.{kind,lr,"),
        ("per_table.user_id.kind", "rmsprop", "'rmsprop'"),
        ("per_table.user_id.lr", "nan", "lr=nan: must be a number of 0 or more"),
        ("per_table.user_id.momentum", "1", "--momentum"),
        ("per_layer.towers.kind", "lazy_adam", "per_layer.towers.kind='lazy_adam'"),
    ],
)
def test_an_exception_that_cannot_be_read_is_told(
    flag: str, value: str, why: str
) -> None:
    with pytest.raises(ValueError) as error:
        changed(OptimizerConfig(), [f"--{flag}={value}"])
    assert why in str(error.value)
    assert flag.rpartition(".")[0] in str(error.value)
    assert len(str(error.value)) <= 200


def test_an_exception_that_changes_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="give one of kind, lr"):
        Override()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tables_weight_decay", -0.1),
        ("dense_weight_decay", math.inf),
        ("tables_l2", math.nan),
        ("clip_norm", -1.0),
        ("betas", (0.9, 1.0)),
        ("betas", (0.9,)),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_value(
    field: str, value: Any
) -> None:
    with pytest.raises(ValueError) as error:
        OptimizerConfig(**{field: value})
    assert str(error.value).startswith(f"{field}={value}: must be ")


TABLE = small_model(META).towers["item"].tables[0]


def decided(kind: str, asked: str, device: str, table: Any = TABLE) -> str:
    return shardings([table], {"item_id": choice(kind)}, {"item_id": asked}, device)[
        "item_id"
    ]


@pytest.mark.parametrize("kind", ["adam", "lazy_adam"])
def test_what_the_cpu_has_no_kernel_for_is_kept_on_every_rank_where_the_plan_is_free(
    kind: str,
) -> None:
    assert decided(kind, "auto", "cpu") == "data_parallel"
    assert decided("sgd", "auto", "cpu") == "auto"


def test_on_cuda_the_kernels_run_all_but_dense_adam() -> None:
    assert decided("lazy_adam", "auto", "cuda") == "auto"
    assert decided("adam", "auto", "cuda") == "data_parallel"


@pytest.mark.parametrize(
    ("kind", "per_row"),
    [
        ("sgd", 0),
        ("row_wise_adagrad", 4),
        ("adagrad", 64),
        ("adam", 128),
        ("lazy_adam", 128),
    ],
)
def test_bytes_of_state_are_those_that_the_torch_optimizer_takes(
    kind: str, per_row: int
) -> None:
    table = small_model(META).towers["item"].tables[0]
    assert choice(kind).state_bytes(table) == ITEMS * per_row
    weight = torch.nn.Parameter(torch.randn(ITEMS, 16))
    make, arguments = choice(kind).unfused()
    optimizer = make([weight], **arguments)
    weight.grad = torch.randn(ITEMS, 16)
    optimizer.step()
    tensors = [
        value
        for value in optimizer.state[weight].values()
        if torch.is_tensor(value) and value.dim() > 0
    ]
    assert sum(4 * value.numel() for value in tensors) == ITEMS * per_row


def step_by_step(
    optimizer: Any, weight: torch.nn.Parameter, grads: list[torch.Tensor]
) -> torch.Tensor:
    for grad in grads:
        weight.grad = grad.clone()
        optimizer.step()
    return weight.detach()


def test_row_adam_is_adam_where_every_row_has_a_gradient_and_leaves_the_others_alone() -> (
    None
):
    start = torch.randn(USERS, 4, dtype=torch.float64)
    grads = [torch.randn(USERS, 4, dtype=torch.float64) for _ in range(10)]
    lazy, dense = (torch.nn.Parameter(start.clone()) for _ in range(2))
    expected = step_by_step(torch.optim.Adam([dense], lr=0.1), dense, grads)
    torch.testing.assert_close(
        step_by_step(RowAdam([lazy], lr=0.1), lazy, grads), expected, rtol=0, atol=1e-12
    )

    for grad in grads:
        grad[7] = 0  # a row that no batch reads
    untouched = torch.nn.Parameter(start.clone())
    moved = step_by_step(RowAdam([untouched], lr=0.1), untouched, grads)
    assert torch.equal(moved[7], start[7])
    torch.testing.assert_close(moved[:7], expected[:7], rtol=0, atol=1e-12)


def test_a_row_that_rests_keeps_its_moments_and_the_bias_correction_counts_steps() -> (
    None
):
    weight = torch.nn.Parameter(torch.ones(1, 1, dtype=torch.float64))
    one = torch.ones(1, 1, dtype=torch.float64)
    none = torch.zeros(1, 1, dtype=torch.float64)
    step_by_step(
        RowAdam([weight], lr=1.0, betas=(0.5, 0.5), eps=0.0), weight, [one, none, one]
    )
    # First step: both moments .5, corrected by 1 - .5 to 1. Third: .75, corrected by 1
    # - .5 ** 3.
    assert float(weight.detach()) == pytest.approx(
        1 - 1 - (0.75 / 0.875) / math.sqrt(0.75 / 0.875)
    )


def test_a_step_clips_by_the_norm() -> None:
    layer = nn.Parameter(torch.zeros(2))
    keyed = KeyedOptimizerWrapper(
        {"layer": layer}, lambda parameters: torch.optim.SGD(parameters, lr=1.0)
    )
    for group in keyed.param_groups:
        group["decay"] = 0.0
    optimizer = HybridOptimizer(
        EmptyFusedOptimizer(), [], [("dense", keyed)], clip_norm=1.0
    )
    for scale in (1.0, 10.0):
        layer.grad = scale * torch.tensor([3.0, 4.0])
        optimizer.step()
    assert layer.tolist() == pytest.approx([-1.2, -1.6])


def cached(runtime: Runtime) -> tuple[list[str], str]:
    """The order in which a state dict calls the kernels of cached tables, and why their step is not captured."""
    model = small_model(META)
    kernels = dict.fromkeys(("user_id", "history", "item_id"), "fused_uvm_caching")
    with (
        unittest.mock.patch.object(sharded, "kernels_by_table", return_value=kernels),
        unittest.mock.patch.object(captured, "kernels_by_table", return_value=kernels),
    ):
        plan = plan_sharding(model, runtime, PlanConfig(sharding="table_wise"))
        parallel, optimizer = hybrid_parallel(model, runtime, plan=plan)
        calls: list[str] = []
        _, collection = next(collections(parallel))
        for kernel in sharded.kernels_of(collection):
            kernel.emb_module.flush = lambda: calls.append("written back")
            kernel.emb_module.reset_cache_states = lambda: calls.append("emptied")
        collection.state_dict()
        with pytest.raises(CannotCaptureError) as error:
            captured.moved_parameters(parallel, optimizer)
    return calls, str(error.value)


@pytest.mark.launch
def test_what_asks_for_cached_tables_finds_them_written_back_and_the_caches_empty() -> (
    None
):
    ((calls, refusal),) = run_ranks(cached, 1)
    kernels = len(calls) // 2
    assert calls == ["written back"] * kernels + ["emptied"] * kernels
    assert kernels > 0
    assert (
        "has kernel=fused_uvm_caching, whose rows a captured step does not reach"
        in refusal
    )
