"""Writes the ids of skipped tests to a file: `pytest -p tests.skipped --skipped-to FILE`.

CI runs the whole suite as a stranger would, then with all extras and data those tests alone that a stranger's machine
skipped: `pytest @FILE`.
"""

from pathlib import Path

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--skipped-to",
        type=Path,
        metavar="FILE",
        help="write the ids of skipped tests to FILE, a line each",
    )


def pytest_configure(config: pytest.Config) -> None:
    file = config.getoption("--skipped-to")
    # Workers of xdist send their reports to the one process that asked for them.
    if file is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(_Recorder(file))


class _Recorder:
    def __init__(self, file: Path) -> None:
        self._file = file
        self._ids: set[str] = set()

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.skipped:
            self._ids.add(report.nodeid)

    # A module that skips itself has no tests to report.
    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.skipped:
            self._ids.add(report.nodeid)

    def pytest_sessionfinish(self) -> None:
        self._file.write_text("".join(f"{name}\n" for name in sorted(self._ids)))
