"""Fixtures, and what every test may assume."""

import collections
import importlib.util
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from hypothesis import settings

# One thread in each of several workers, and in all that they start: two each on two
# busy cores take up to 30 times as long. Apps, which a test calls in its own process or
# another, take all cores where this variable is not set.
if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")

warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")

# Hypothesis fails an example that takes longer than .2 s: on a busy machine any may,
# and a timing is no assertion.
settings.register_profile("untimed", deadline=None)
settings.register_profile("few", deadline=None, max_examples=20)
settings.load_profile("untimed")


def pytest_configure(config: pytest.Config) -> None:
    """Lets properties be tried on a few examples where only the fast tests are asked for."""
    if config.option.markexpr == "unit":
        settings.load_profile("few")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leaves out files without a fast test where only these are asked for: importing all takes as long as the tests."""
    if config.option.markexpr != "unit" or not collection_path.name.startswith("test_"):
        return None
    return "mark.unit" not in collection_path.read_text() or None


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(
    collector: pytest.Collector,
) -> Iterator[None]:
    """Skips files that need TorchRec and what comes with it, on a machine with torch alone: `make gpu INSTALL=no`."""
    report = yield
    if report.failed and importlib.util.find_spec("torchrec") is None:
        cause = report.call.excinfo.value.__cause__
        if isinstance(cause, ModuleNotFoundError):
            report.outcome = "skipped"
            report.longrepr = str(collector.path), 0, f"Skipped: needs {cause.name}"
    return report


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Hides this machine's real GPUs from a test not marked `gpu`, which says what holds on the CPU."""
    simulated = "SIMULATED_GPUS" in os.environ
    if item.get_closest_marker("gpu") or simulated or not torch.cuda.is_available():
        return (yield)
    with pytest.MonkeyPatch.context() as hidden:
        # For processes that the test starts; in this one CUDA may be in use already.
        hidden.setenv("CUDA_VISIBLE_DEVICES", "")
        hidden.setattr(torch.cuda, "is_available", lambda: False)
        hidden.setattr(torch.cuda, "device_count", lambda: 0)
        return (yield)


def pytest_runtest_setup() -> None:
    """Sets one thread in each of several workers, also where an earlier test has set another number."""
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.hookimpl(trylast=True)  # after pytest has left out what `-m` does not ask for
def pytest_collection_modifyitems(
    config: pytest.Config, items: list[pytest.Item]
) -> None:
    chosen = config.option.markexpr
    # `-m unit` replaces the `-m 'not slow'` of pyproject.toml, and is of no process,
    # whatever its file is marked with.
    unasked = [
        name
        for name in ("slow", *(["launch"] if "unit" in chosen else []))
        if chosen and name not in chosen
    ]
    left_out = [item for item in items if any(map(item.get_closest_marker, unasked))]
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        dropped = set(map(id, left_out))
        items[:] = [item for item in items if id(item) not in dropped]
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
    if "PYTEST_XDIST_WORKER" in os.environ:
        # In this order workers take files: with those of short tests last, they end
        # together.
        minutes: collections.Counter[Path] = collections.Counter()
        for item in items:
            minutes[item.path] += _minutes(item)
        items.sort(key=lambda item: -minutes[item.path])


def _minutes(item: pytest.Item) -> float:
    """Returns about how long a test takes, in the order of files."""
    for name, usual in (("slow", 0.1), ("launch", 0.05)):
        marker = item.get_closest_marker(name)
        if marker is not None:
            return float(marker.kwargs.get("minutes", usual))
    is_short = isinstance(item, pytest.DoctestItem) or item.get_closest_marker("unit")
    return 0.0 if is_short else 0.05


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> torch.device:
    """Every device that a path exists for; CUDA is skipped where there is none."""
    return torch.device(request.param)
