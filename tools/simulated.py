"""Keeps the outcomes of tests on simulated devices: `python tools/simulated.py NAME "DEVICE" -- PYTEST_ARGUMENTS`.

It runs pytest, and writes benchmarks/results/simulated/NAME.json: each test's outcome, the device, date and versions.
tools/docs.py makes the table of devices in docs/launch.md of them.
"""

import datetime
import importlib.metadata
import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def main(argv: Sequence[str]) -> int:
    """Runs the tests and writes their outcomes; returns pytest's exit code."""
    if len(argv) < 4 or argv[2] != "--":
        print('simulated.py: write NAME "DEVICE" -- PYTEST_ARGUMENTS', file=sys.stderr)
        return 1
    name, device, _, *arguments = argv
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "tests.xml"
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            f"--junitxml={report}",
            *arguments,
        ]
        status = subprocess.run(command, cwd=ROOT).returncode
        tests = {}
        for case in ElementTree.parse(report).iter("testcase"):
            outcome = next((child.tag for child in case), "passed")
            tests[f"{case.get('classname')}.{case.get('name')}"] = outcome
    versions = {
        package: importlib.metadata.version(package)
        for package in ("torch", "torchrec")
    }
    result = {
        "tests": tests,
        "device": device,
        "versions": versions,
        "date": datetime.date.today().isoformat(),
    }
    path = ROOT / "benchmarks" / "results" / "simulated" / f"{name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(result, indent=1) + "\n")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
