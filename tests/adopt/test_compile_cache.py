"""Captures that a later process finds in inductor's cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

STEP = """
from torch import nn
from torchrec_ext.adopt import adopt

class Pairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(50, 4)
        self.top = nn.Sequential(nn.Dropout(0.2), nn.Linear(4, 1))

    def forward(self, items):
        return self.top(self.items(items)).squeeze(1)

model = Pairs()
step = adopt(model, torch.optim.Adam(model.parameters()), lambda i, y: ((model(i) - y) ** 2).mean(), compile="require")
for _ in range(5):
    step(torch.arange(20), torch.ones(20))
assert step.describe().startswith("captured"), step.describe()
"""
LOOK_UPS = """
from torchrec_ext.capture.executors import inductor
from torchrec_ext.ids import Dynamic, DynamicIds

ids = DynamicIds({"item": Dynamic(capacity=50)})
ids.compile_look_ups(inductor)
for _ in range(3):
    ids.step({"item": torch.arange(7)})
"""
COUNTS = """
inductor = counters["inductor"]
print(inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"])
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [STEP, LOOK_UPS], ids=["step", "look-ups of ids"])
def test_a_second_process_compiles_nothing(tmp_path: Path, program: str) -> None:
    imports = "import torch\nfrom torch._dynamo.utils import counters\n"
    runs = [
        subprocess.run(
            [sys.executable, "-c", imports + program + COUNTS],
            env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
            check=True,
            capture_output=True,
            text=True,
        )
        for _ in range(2)
    ]
    printed = [run.stdout.split()[-2:] for run in runs]
    assert printed == [["0", "1"], ["1", "0"]]
    assert "Traceback" not in "".join(run.stderr for run in runs)
