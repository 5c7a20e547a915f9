"""adopt() on the device, captured, trains as eager steps do on the CPU."""

import copy
import warnings
from collections.abc import Sequence
from typing import Any

import pytest
import simulated_cuda
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch.fx import GraphModule

from tests.adopt.test_gpu import CASES, ITEMS, USERS, Pairs, adam, batches, trained
from torchrec_ext.adopt import Rows, Uniform, adopt, verify
from torchrec_ext.adopt.rows.rows import RowsOnDevice
from torchrec_ext.capture import executors, policy
from torchrec_ext.capture.policy import TrainingDivergedError

# Its autocast is of CUDA.
ON_CUDA_ONLY = ("bfloat16",)
# Its mask is drawn by other calls than the CPU's, in another order.
OTHER_NUMBERS: tuple[str, ...] = ()


@pytest.mark.parametrize("name", [name for name in CASES if name not in ON_CUDA_ONLY])
def test_a_captured_step_on_the_device_trains_as_an_eager_one_on_the_cpu(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    captured, model, step = trained("require", CASES[name])
    assert step.describe().startswith("captured since step 3"), step.describe()
    monkeypatch.setattr(torch.Tensor, "cuda", lambda tensor: tensor)
    monkeypatch.setattr(nn.Module, "cuda", lambda module: module)
    eager, plain, _ = trained("off", CASES[name])
    assert captured == pytest.approx(eager, rel=1e-5)
    for what, value in plain.state_dict().items():
        torch.testing.assert_close(
            model.state_dict()[what].cpu(),
            value,
            rtol=1e-3,
            atol=1e-4,
            msg=what.__add__,
        )


@pytest.mark.parametrize("draws_inside", [False, True])
def test_rows_on_the_device_train_as_those_on_the_cpu(
    draws_inside: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    losses = []
    for device in ("cpu", "cuda"):
        generator = torch.Generator().manual_seed(1)
        columns = {
            "user": torch.randint(USERS, (1000,), generator=generator),
            "item": torch.randint(ITEMS, (1000,), generator=generator),
        }
        negatives = Uniform(ITEMS, draws=4, exclude=("user", "item"))
        rows = Rows(columns, 64, negatives=negatives, drop_last=True)
        torch.manual_seed(0)
        model = Pairs().to(device)
        on_device = RowsOnDevice(rows, torch.device(device), draws_inside=draws_inside)
        monkeypatch.setattr(
            "torchrec_ext.adopt.step.RowsOnDevice", lambda *_, held=on_device: held
        )

        def loss(
            user: Tensor, item: Tensor, label: Tensor, model: Pairs = model
        ) -> Tensor:
            return F.binary_cross_entropy_with_logits(model(user, item), label)

        step = adopt(
            model,
            torch.optim.Adam(model.parameters(), 0.01),
            loss,
            compile="require",
        )
        losses.append([float(each) for _ in range(3) for each in step.epoch(rows)])
        assert step.describe().startswith("captured"), step.describe()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)


@pytest.mark.parametrize("reads", [False, True], ids=["goes on", "saves"])
def test_a_loss_that_is_not_finite_ends_the_run_with_its_step(
    reads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "FIRST", 0)
    model = Pairs().cuda()
    (optimizer,) = adam(model)

    def loss(user: Tensor, item: Tensor, label: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(model(user, item), label)

    step = adopt(model, optimizer, loss, compile="require")
    given = list(batches(8))
    for batch in given[:7]:
        step(*batch)
    good = copy.deepcopy([model.state_dict(), optimizer.state_dict()])
    user, item, label = given[7]
    step(user, item, label * float("nan"))

    def go_on() -> None:
        for batch in given[:7] * 10:
            step(*batch)

    text = "the loss is nan at step 8: the update of this step was written"
    with pytest.raises(TrainingDivergedError, match=text):
        optimizer.state_dict() if reads else go_on()
    model.load_state_dict(good[0])
    optimizer.load_state_dict(good[1])
    assert step(*given[0])[0].isfinite()
    step.settle()


def test_losses_of_captured_steps_stay_on_the_device(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(verify, "_CHECKED", 0.0)  # comparisons with eager steps do wait
    *_, step = trained("require", CASES["the loss alone"])
    given = list(batches(20))
    for batch in given:  # the first steps are timed
        step(*batch)
    step.settle()
    with simulated_cuda.observed() as events:
        for batch in given:
            step(*batch)
        assert [kind for kind, *_ in events if kind != "unordered"] == []


@pytest.mark.filterwarnings("ignore:the kernels of the captured step")
def test_a_step_that_inductor_cannot_fuse_keeps_torchs_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    expected, _, _ = trained("require", CASES["the loss alone"])
    monkeypatch.setattr(policy, "HAS_TRITON", True)
    with pytest.warns(UserWarning, match="torch's own, not fused"):
        losses, _, step = trained("require", CASES["the loss alone"])
    assert step.describe().startswith("captured since step 3")
    assert losses == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize("combines", [True, False], ids=["combined", "apart"])
def test_a_fused_step_trains_as_an_eager_one(
    combines: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled is the graph itself, as no kernel of Triton runs here; where kernels combine, or cannot."""

    def compiled(graph: GraphModule, examples: Sequence[Tensor]) -> Any:
        if inductor.combo_kernels and not combines:
            raise RuntimeError("no combined kernel compiles")
        trains = [each.requires_grad for each in examples]

        def call(*tensors: Tensor) -> Any:
            leaves = [
                each.detach().requires_grad_() if is_leaf else each
                for each, is_leaf in zip(tensors, trains, strict=True)
            ]
            return graph(*leaves)

        return call

    expected, _, _ = trained("off", CASES["the loss alone"])
    monkeypatch.setattr(policy, "HAS_TRITON", True)
    monkeypatch.setattr(executors, "compile_graph", compiled)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        losses, _, step = trained("require", CASES["the loss alone"])
    assert step.describe().startswith("captured since step 3")
    assert losses == pytest.approx(expected, rel=1e-5)
