"""`adopt`, `why_slow` and stacks of plain networks in an environment with torch, numpy and tqdm alone."""

import re
import subprocess
import venv
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch(minutes=0.3)

ROOT = Path(__file__).parents[1]
NEEDS_TORCHREC = (
    "from torchrec_ext import TowerModel",
    "from torchrec_ext import Tower",
    "from torchrec_ext import explain",
    "from torchrec_ext import export",
    "from torchrec_ext import hybrid_parallel",
    "from torchrec_ext import plan_sharding",
    "from torchrec_ext import two_tower",
    "from torchrec_ext.adopt import adopt_tables",
    "from torchrec_ext.distributed.optim.hybrid import HybridOptimizer",
    "from torchrec_ext.models.ncf import NCF",
    "from torchrec_ext.schema import BatchSchema",
    "from torchrec_ext.train import train",
    "from torchrec_ext.train.loop import TrainConfig",
    "import torchrec_ext.capture.sharded",
    "from torchrec_ext.batch import pack; pack(0, {}, dense=0, labels=0, weights=0, total_weight=0)",
)


def distributions(*names: str) -> set[str]:
    """These distributions and what they need, extras aside."""
    found: set[str] = set()
    to_do = list(names)
    while to_do:
        name = to_do.pop()
        if name in found:
            continue
        found.add(name)
        for line in metadata.requires(name) or ():
            requirement, _, marker = line.partition(";")
            if "extra" in marker:
                continue
            needed = re.split(r"[^\w.-]", requirement.strip())[0]
            try:
                metadata.distribution(needed)
            except metadata.PackageNotFoundError:
                continue  # of another platform
            to_do.append(needed)
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The interpreter of an environment with torch, numpy and tqdm, linked and not installed, and with the package."""
    root = tmp_path_factory.mktemp("torch_alone")
    venv.create(root, symlinks=True)
    (site,) = root.glob("lib/python*/site-packages")
    for name in distributions("torch", "numpy", "tqdm"):
        files = metadata.distribution(name).files or ()
        for top in {file.parts[0] for file in files} - {"..", "__pycache__"}:
            # Many distributions share NVIDIA's folder.
            if not (site / top).exists():
                (site / top).symlink_to(metadata.distribution(name).locate_file(top))
    (site / "torchrec_ext").symlink_to(ROOT / "torchrec_ext")
    return root / "bin" / "python"


SETS = """
import torch
from torch import nn
from torch.utils.data import Dataset

torch.set_num_threads(1)


class Pairs(Dataset):
    def __init__(self, count=2_000):
        draws = torch.Generator().manual_seed(0)
        self.user = torch.randint(300, (count,), generator=draws)
        self.item = torch.randint(200, (count,), generator=draws)

    def __len__(self):
        return len(self.user)

    def __getitem__(self, index):
        return self.user[index], self.item[index], torch.tensor(1.0)


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.user, self.item, self.top = nn.Embedding(300, 8), nn.Embedding(200, 8), nn.Linear(16, 1)

    def forward(self, user, item):
        return self.top(torch.cat([self.user(user), self.item(item)], 1)).squeeze(1)


data, model = Pairs(), Net()
optimizer = torch.optim.Adam(model.parameters(), 1e-2)
loss_fn = nn.BCEWithLogitsLoss()
"""


SAID = ("there:", "verdict:", "adopted:", "stacked:", "page:", "loaded:")
ALONE = (
    SETS
    + """
import sys
import time
from importlib.util import find_spec

import torchrec_ext
from torch.utils.data import DataLoader
from torchrec_ext import Rows, adopt, why_slow
from torchrec_ext.adopt import AdoptedStep, CannotAdopt, Popular, Uniform
from torchrec_ext.capture import executors
from torchrec_ext.diagnose.__main__ import main
from torchrec_ext.networks import Stack

# Op by op: what Inductor makes of a step needs no package besides torch.
executors.compile_graph = lambda graph, examples: graph

names = "torch numpy tqdm torchrec fbgemm_gpu tensordict torchmetrics torchx pyarrow safetensors duckdb".split()
print("there:", *[name for name in names if find_spec(name)])


def loss(user, item, label):
    return loss_fn(model(user, item), label)


def collate(rows):
    time.sleep(0.02)
    return torch.utils.data.default_collate(rows)


found = why_slow(model, optimizer, loss, DataLoader(data, 64, collate_fn=collate), budget_s=1)
print("verdict:", found.verdict)
rows = Rows({"user": data.user, "item": data.item, "label": torch.ones(len(data))}, 64, drop_last=True)
step = adopt(model, optimizer, loss, compile="require")
losses = [float(loss) for _ in range(2) for loss in step.epoch(rows)]
print("adopted:", step.describe().split()[0], losses[-1] < losses[0] / 2)
stacked = Stack([Net(), Net()], lambda net, *batch: loss_fn(net(*batch), torch.ones(64)), [1e-2, 3e-2], compile=False)
print("stacked:", *[len(stacked.step(data.user[:64], data.item[:64]))])
"""
    + f"""
for entry in {NEEDS_TORCHREC!r}:
    try:
        exec(entry)
    except ImportError as error:
        print("refused:", error)
print("page:", main(["--budget", "1", "loop.py"]))
print("loaded:", "torchrec" in sys.modules)
"""
)
LOOP = f"""{SETS}
from torch.utils.data import DataLoader

for epoch in range(100):
    for user, item, label in DataLoader(data, 64):
        optimizer.zero_grad()
        loss_fn(model(user, item), label).backward()
        optimizer.step()
"""


def test_a_training_and_a_script_are_diagnosed_and_the_rest_names_the_extra(
    python: Path, tmp_path: Path
) -> None:
    (tmp_path / "loop.py").write_text(LOOP)
    done = subprocess.run(
        [python, "-c", ALONE], capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    lines = done.stdout.splitlines()
    refused = [line for line in lines if line.startswith("refused:")]
    assert len(refused) == len(NEEDS_TORCHREC)
    assert all('pip install "torchrec-ext[sharded-cpu]"' in line for line in refused)
    assert [line for line in lines if line.startswith(SAID)] == [
        "there: torch numpy tqdm",
        "verdict: loader_waits",
        "adopted: captured True",
        "stacked: 2",
        "page: 0",
        "loaded: False",
    ]
    page = done.stdout[done.stdout.index(refused[-1]) :]
    assert "why is my training slow?" in page
    # Not measured where others keep the machine busy, which is told by the trial's name.
    assert "4 times the batch" in page or "quadruple" in page
