"""adopt() on the device, captured, trains as eager steps do on the CPU."""

import pytest
import torch
from torch import nn

from tests.adopt.test_gpu import CASES, trained

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
