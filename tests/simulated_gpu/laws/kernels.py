"""How many kernels of a GPU a captured step has, fused by inductor, held at the numbers of kernels.json.

Inductor writes the fused ones in Triton, which has to be installed, but nothing compiles or runs them here.
SIMULATED_GPU_RENEW=1 with tests/simulated_gpu/test_laws.py writes the file anew.
"""

import importlib
import json
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._inductor import async_compile, graph
from torch._inductor import config as inductor
from torch.nn.functional import binary_cross_entropy_with_logits

from tests.simulated_gpu import build
from tests.simulated_gpu.laws.training import train
from tests.simulated_gpu.laws.waits import (
    CAPTURED,
    HOST_ROWS,
    NEVER_CAPTURED,
    ON_DEVICE,
)
from torchrec_ext.adopt import Rows, Uniform, adopt
from torchrec_ext.adopt.rows.rows import RowsOnDevice
from torchrec_ext.capture import executors, policy
from torchrec_ext.distributed import row_rule
from torchrec_ext.ids import Dynamic, DynamicIds
from torchx_apps.recipes import RECIPES

FILE = Path(__file__).parents[1] / "kernels.json"
ROWS = 1_280
Kernels = dict[str, list[int]]
ATOMIC = "tl.atomic_add("


class _WrittenError(Exception):
    """The code of the kernels is known."""


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[Kernels]:
    """Collects the numbers of kernels of each graph that is captured."""
    triton = pytest.importorskip("triton")
    counts: Kernels = {"fused": [], "atomic": []}

    def written(lowering: Any) -> None:
        code = lowering.codegen()[0]
        code = getattr(code, "value", code)
        counts["atomic"].append(code.count(ATOMIC))
        calls = code.split("def call(")[-1]
        launched = re.findall(
            r"\.run\(|extern_kernels\.\w+\(|torch\.ops\.[\w.]+\(", calls
        )
        counts["fused"].append(len(launched))
        raise _WrittenError

    monkeypatch.setattr(executors, "COMBINES", (True,))  # the way that is tried first
    monkeypatch.setattr(graph.GraphLowering, "compile_to_module", written)
    monkeypatch.setattr(async_compile.AsyncCompile, "triton", lambda *_, **__: None)
    monkeypatch.setattr("torch.utils._triton.triton_hash_with_backend", lambda: "")
    monkeypatch.setattr("torch.utils._triton.has_triton", lambda: True)
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)  # an H100
    driver = types.SimpleNamespace(get_current_target=lambda: target)
    triton.runtime.driver.set_active(driver)
    # Its patterns run pieces of a graph on the device, with events that are no CUDA's.
    with inductor.patch(pattern_matcher=False, force_disable_caches=True):
        yield counts


def held(name: str, counts: Kernels) -> None:
    """Compares the number of the first graph, that of full batches, with the stored one."""
    name = f"{name}, fused"
    found = counts["fused"][0]
    stored = json.loads(FILE.read_text()) if FILE.exists() else {}
    if "SIMULATED_GPU_RENEW" in os.environ:
        text = json.dumps({**stored, name: found}, indent=1, sort_keys=True)
        FILE.write_text(text + "\n")
        return
    assert found == stored[name]


def adopted(shape: str, *, draws: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Makes four steps of the benchmarks' Contextual NCF, adopted."""
    sys.path.insert(0, str(build.ROOT / "benchmarks"))
    plain = importlib.import_module("plain_ncf")
    sizes = plain.SHAPES[shape]
    torch.manual_seed(0)
    model = plain.PlainNCF(sizes.users, sizes.items).cuda()

    def loss(user: Tensor, item: Tensor, context: Tensor, label: Tensor) -> Tensor:
        return binary_cross_entropy_with_logits(model(user, item, context), label)

    optimizer = torch.optim.Adam(model.parameters(), 1e-3)
    step = adopt(model, optimizer, loss, compile="require")
    positives = 4 * ROWS // 5
    columns = {
        "user": torch.randint(sizes.users, (positives,)),
        "item": torch.randint(sizes.items, (positives,)),
        "context": torch.rand(positives, plain.CONTEXT),
    }
    negatives = Uniform(sizes.items, draws=4, exclude=("user", "item"))
    rows = Rows(columns, ROWS // 5, negatives=negatives)
    if draws:
        on_device = RowsOnDevice(rows, torch.device("cuda"), draws_inside=True)
        monkeypatch.setattr(
            "torchrec_ext.adopt.step.RowsOnDevice", lambda *_: on_device
        )
        list(step.epoch(rows))
    else:
        for batch in rows:
            step(*(each.cuda() for each in batch))
    assert step.describe().startswith("captured"), step.describe()


@pytest.mark.parametrize("draws", [False, True], ids=["given", "drawn inside"])
@pytest.mark.parametrize("shape", ["small", "full"])
@pytest.mark.filterwarnings("ignore:the kernels of the captured step")
def test_an_adopted_step_has_no_more_kernels(
    shape: str,
    draws: bool,
    kernels: Kernels,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "HAS_TRITON", True)
    adopted(shape, draws=draws, monkeypatch=monkeypatch)
    held(f"adopted {shape}, {'drawn inside' if draws else 'given'}", kernels)


@pytest.mark.filterwarnings("ignore:the kernels of the captured step")
def test_look_ups_of_dynamic_ids_have_no_more_kernels(
    kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(policy, "HAS_TRITON", True)
    ids = DynamicIds(dict.fromkeys("abcd", Dynamic(capacity=900)), device="cuda")
    ids.compile_look_ups(executors.fused_cuda_graph)
    for _ in range(3):
        ids.step(dict(zip("abcd", torch.arange(1_024).cuda().view(4, -1), strict=True)))
    held("look-ups of dynamic ids", kernels)


@pytest.mark.parametrize("by_rows", [False, True], ids=["whole tables", "by rows"])
@pytest.mark.filterwarnings("ignore:the kernels of the captured step")
def test_deterministic_algorithms_add_nothing_atomically(
    by_rows: bool, kernels: Kernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's own switch makes a captured step equal to the bit between runs: sums of rows are sorted first."""
    monkeypatch.setattr(policy, "HAS_TRITON", True)
    if by_rows:
        monkeypatch.setattr(row_rule, "WEIGHTS_ON_GPU", 0)
    adopted("full", draws=False, monkeypatch=monkeypatch)
    torch.use_deterministic_algorithms(True)
    try:
        adopted("full", draws=False, monkeypatch=monkeypatch)
    finally:
        torch.use_deterministic_algorithms(False)
    by_default, deterministic = kernels["atomic"]
    assert by_default > 0
    assert deterministic == 0


@pytest.mark.parametrize(
    "recipe", [name for name in RECIPES if name not in NEVER_CAPTURED]
)
@pytest.mark.filterwarnings("ignore:the kernels of the captured step")
def test_a_recipes_step_has_no_more_kernels(
    recipe: str,
    kernels: Kernels,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(policy, "HAS_TRITON", True)
    on_device = () if recipe in HOST_ROWS else (ON_DEVICE,)
    train(recipe, tmp_path / "run", "device=cuda", CAPTURED, *on_device)
    held(recipe, kernels)
