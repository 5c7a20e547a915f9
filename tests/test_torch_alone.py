"""`adopt`, `why_slow` and stacks of plain networks in an environment with torch, numpy and tqdm alone."""

import re
import subprocess
import venv
from importlib import metadata
from pathlib import Path

import pytest

pytestmark = pytest.mark.launch

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
    "from torchrec_ext.batch import skip_fx_notice; skip_fx_notice()",
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
            (site / top).symlink_to(metadata.distribution(name).locate_file(top))
    (site / "torchrec_ext").symlink_to(ROOT / "torchrec_ext")
    return root / "bin" / "python"


def ran(python: Path, tmp_path: Path, code: str, *words: str) -> str:
    """The output of a script of this code, or of a module of `words` on it."""
    script = tmp_path / "script.py"
    script.write_text(code)
    done = subprocess.run(
        [python, *words, script],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_nothing_else_is_there(python: Path, tmp_path: Path) -> None:
    code = """
from importlib.util import find_spec
names = "torch numpy tqdm torchrec fbgemm_gpu tensordict torchmetrics torchx pyarrow safetensors duckdb".split()
print(*[name for name in names if find_spec(name)])
"""
    assert ran(python, tmp_path, code) == "torch numpy tqdm\n"


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


def test_an_adopted_training_with_rows_ends_captured(
    python: Path, tmp_path: Path
) -> None:
    code = f"""{SETS}
import sys
import torchrec_ext
from torchrec_ext import Rows, adopt
from torchrec_ext.adopt import AdoptedStep, CannotAdopt, Popular, Uniform

rows = Rows({{"user": data.user, "item": data.item, "label": torch.ones(len(data))}}, 64, drop_last=True)
step = adopt(
    model, optimizer, lambda user, item, label: loss_fn(model(user, item), label), compile="require", rows=rows
)
losses = [float(loss) for _ in range(2) for loss in step.epoch()]
print(step.describe().split()[0], losses[-1] < losses[0] / 2, "torchrec" in sys.modules)
"""
    assert ran(python, tmp_path, code).splitlines()[-1] == "captured True False"


def test_a_slow_loop_is_explained(python: Path, tmp_path: Path) -> None:
    code = f"""{SETS}
import sys
import time
from torch.utils.data import DataLoader
from torchrec_ext import why_slow


def collate(rows):
    time.sleep(0.02)
    return torch.utils.data.default_collate(rows)


found = why_slow(
    model, optimizer, lambda user, item, label: loss_fn(model(user, item), label),
    DataLoader(data, 64, collate_fn=collate), budget_s=3,
)
print("torchrec" in sys.modules, found.verdict)
"""
    assert ran(python, tmp_path, code).splitlines()[-1] == "False loader_waits"


def test_a_script_is_diagnosed(python: Path, tmp_path: Path) -> None:
    code = f"""{SETS}
from torch.utils.data import DataLoader

for epoch in range(100):
    for user, item, label in DataLoader(data, 64):
        optimizer.zero_grad()
        loss_fn(model(user, item), label).backward()
        optimizer.step()
"""
    output = ran(python, tmp_path, code, "-m", "torchrec_ext.diagnose", "--budget", "5")
    assert "why is my training slow?" in output
    assert "4 times the batch" in output


def test_plain_networks_are_stacked(python: Path, tmp_path: Path) -> None:
    """K networks by one step learn what each learns alone."""
    code = """
import torch
from torch import nn
from torchrec_ext.networks import Stack


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1))


def batches():
    draws = torch.Generator().manual_seed(0)
    for _ in range(20):
        dense = torch.randn(32, 4, generator=draws)
        yield dense, (dense.sum(1) > 0).float()


def loss(network, dense, label):
    return nn.functional.binary_cross_entropy_with_logits(network(dense).squeeze(1), label)


alone, networks, rates = [net(0), net(1)], [net(0), net(1)], [1e-2, 3e-2]
for network, rate in zip(alone, rates):
    optimizer = torch.optim.Adam(network.parameters(), rate)
    for batch in batches():
        optimizer.zero_grad()
        loss(network, *batch).backward()
        optimizer.step()
stacked = Stack(networks, loss, rates, compile=False)
for batch in batches():
    stacked.step(*batch)
stacked.unstack()
pairs = zip(alone, networks)
print(max(float((p - q).detach().abs().max()) for a, b in pairs for p, q in zip(a.parameters(), b.parameters())) < 2e-6)
try:
    Stack([nn.Linear(4, 2), nn.Linear(4, 3)], loss, rates)
except ValueError as error:
    print(str(error).split(":")[0])
"""
    assert ran(python, tmp_path, code).splitlines() == [
        "True",
        "out_features is 3 in network 1, 2 in network 0",
    ]


def test_what_needs_torchrec_names_the_extra(python: Path, tmp_path: Path) -> None:
    code = f"""
for entry in {NEEDS_TORCHREC!r}:
    try:
        exec(entry)
    except ImportError as error:
        print(error)
    else:
        print("works:", entry)
"""
    lines = ran(python, tmp_path, code).splitlines()
    expected = 'pip install "torchrec-ext[sharded-cpu]"'
    assert [line for line in lines if not line.endswith(expected)] == []
    assert len(lines) == len(NEEDS_TORCHREC)
