"""The image: its last stage is small and not root, and holds all that pip builds. A container cannot start here."""

import re
from pathlib import Path

import pytest

pytestmark = pytest.mark.unit
CLONE = Path(__file__).resolve().parents[2]
TEXT = (CLONE / "Dockerfile").read_text().replace("\\\n", "")
BUILD, LAST = re.split(r"^FROM ", TEXT, flags=re.MULTILINE)[1:]


def test_the_last_stage_is_small_and_not_root() -> None:
    assert "://" not in TEXT, "where packages come from is a build argument"
    assert not re.search(r"g\+\+|gcc|build-essential|cmake|-dev\b|\bpip\b", LAST)
    # By number, so that Kubernetes can see that it is not root.
    assert re.findall(r"^USER ([1-9]\d*:[1-9]\d*)$", LAST, re.MULTILINE)


def test_all_that_pip_builds_the_package_from_is_copied() -> None:
    copied = {
        word
        for line in re.findall(r"^COPY (?!--from)(.*)$", BUILD, re.MULTILINE)
        for word in line.split()[:-1]
    }
    code = {"torchrec_ext", "components", "torchx_apps"}
    assert code | {"pyproject.toml", "setup.py", "README.md", "LICENSE"} <= copied
    assert all((CLONE / source).exists() for source in copied)
