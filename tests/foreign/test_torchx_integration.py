"""TorchX's integration test of components, which its wheel installs, runs each of ours to its end under local_cwd."""

import os
import signal
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from torchrec_ext.components import data, serve, train  # type: ignore[import-not-found]
from torchx.specs import AppDef
from torchx.specs.finder import get_components

from tests.contracts import free_ports
from tests.small_sets import write_ml_100k

_NEEDS = "this TorchX's wheel has no integration test of components"
integ_tests = pytest.importorskip(
    "torchx.components.integration_tests.integ_tests", reason=_NEEDS
)
component_provider = pytest.importorskip(
    "torchx.components.integration_tests.component_provider", reason=_NEEDS
)

pytestmark = [
    pytest.mark.launch,
    pytest.mark.slow,
    # of its own test
    pytest.mark.filterwarnings(
        "ignore:Custom session names are deprecated:FutureWarning:torchx"
    ),
]

SETTINGS = (
    "data.name=planted",
    "data.users=60",
    "data.items=50",
    "data.history_length=5",
    "train.epochs=1",
    "train.compile=off",
)
TINY = [f"--{setting}" for setting in SETTINGS]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the jobs run, with this Python; a local scheduler takes over two signals."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(
        "PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    )
    before = {
        number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)
    }
    yield tmp_path
    for number, handler in before.items():
        signal.signal(number, handler)


def all_succeed(folder: Path, **made: Callable[..., AppDef]) -> None:
    """Has TorchX's test run these, all at once, and wait for them; one that fails is an AssertionError of its own."""

    def provider(make: Callable[..., AppDef]) -> type:
        return type(
            "Provider",
            (component_provider.ComponentProvider,),
            {"get_app_def": lambda self: make(image=self._image)},
        )

    module = ModuleType("providers")
    vars(module).update({name: provider(make) for name, make in made.items()})
    config = {"log_dir": str(folder / "logs")}
    integ_tests.IntegComponentTest().run_components(
        module, image=str(folder), scheduler="local_cwd", cfg=config
    )


def end_when_ready(port: int) -> None:
    """SIGTERM to the job that listens there, once it answers."""
    end = time.monotonic() + 120
    while time.monotonic() < end:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5):
                break
        except OSError:
            time.sleep(0.5)
    for process in Path("/proc").glob("[0-9]*"):
        words = process.joinpath("cmdline").read_bytes().split(b"\0")
        if b"torchx_apps.serve" in words and str(port).encode() in words:
            os.kill(int(process.name), signal.SIGTERM)
            return


def test_every_component_runs_to_its_end(folder: Path) -> None:
    write_ml_100k(folder)
    (folder / "log").mkdir()
    (folder / "log" / "a.jsonl").write_text(
        '{"user_id": 7, "item_id": -1}\n{"user_id": 8, "item_id": 9}\n'
    )
    all_succeed(
        folder,
        hybrid=lambda image: train.hybrid(
            *TINY, "--export=require", "--run_dir=run", image=image
        ),
        networks=lambda image: train.networks(
            *("0", "1", "--", *TINY, "--run_dir=networks"),
            vary="train.seed",
            image=image,
        ),
        stream=lambda image: train.stream(
            *("--data.folder=log", "--data.until_idle_s=0.1", "--run_dir=stream"),
            image=image,
        ),
        preprocess=lambda image: data.preprocess(
            *("--config.folder=ml-100k", "--out=ready"),
            image=image,
        ),
    )
    items = {
        "item_id": np.arange(1, 51),
        "release_year": np.full(50, 1),
        "genres": [[1]] * 50,
    }
    pq.write_table(pa.table(items), folder / "items.parquet")
    (port,) = free_ports(1)
    ending = threading.Thread(target=end_when_ready, args=(port,), daemon=True)
    ending.start()
    all_succeed(
        folder,
        export=lambda image: serve.export("--out=bundle", run="run", image=image),
        embed=lambda image: serve.embed(
            *("--catalogue=items.parquet", "--id=item_id", "--out=vectors"),
            bundle="run",
            image=image,
        ),
        http=lambda image: serve.http(bundle="run", port=port, image=image),
    )
    left = {
        "run/summary.json",
        "networks/results.json",
        "ready/summary.json",
        "bundle/manifest.json",
        "stream/bundles/current",
        "vectors/manifest.json",
    }
    assert {name for name in left if not (folder / name).exists()} == set()
    ran = {
        "train.hybrid",
        "train.networks",
        "train.stream",
        "data.preprocess",
        "serve.export",
        "serve.embed",
        "serve.http",
    }
    assert {name for name in get_components() if name.startswith("rec.")} == {
        f"rec.{name}" for name in ran
    }
