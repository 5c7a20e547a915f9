"""Captures that a later process finds in inductor's cache."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import torch
from torch import nn
from torch._dynamo.utils import counters
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
inductor = counters["inductor"]
print(inductor["fxgraph_cache_hit"], inductor["fxgraph_cache_miss"] + inductor["fxgraph_cache_bypass"])
"""


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path) -> None:
    printed = [
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={"TORCHINDUCTOR_CACHE_DIR": str(tmp_path), "PATH": "/usr/bin:/bin"},
            check=True,
            capture_output=True,
            text=True,
        ).stdout.split()[-2:]
        for _ in range(2)
    ]
    assert printed == [["0", "1"], ["1", "0"]]
