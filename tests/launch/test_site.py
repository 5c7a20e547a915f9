"""The site is built without a warning, such as one of a broken link, and describes every exported name."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.launch.test_docs import CLONE, DOCS
from tools.docs import exports

pytestmark = [pytest.mark.slow(minutes=1), pytest.mark.launch]


def test_every_exported_name_is_described(tmp_path: Path) -> None:
    pytest.importorskip("furo", reason="needs the extra docs: make docs")
    command = [sys.executable, "-m", "sphinx", "--quiet", "--fail-on-warning"]
    done = subprocess.run(
        [*command, str(DOCS), str(tmp_path)],
        cwd=CLONE,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    described = {
        name.rpartition(".")[2]
        for page in tmp_path.glob("reference/api/*.html")
        for name in re.findall(r'id="([\w.]+)"', page.read_text())
    }
    names = {
        export.name
        for path in CLONE.glob("torchrec_ext/*/__init__.pyi")
        for export in exports(f"torchrec_ext.{path.parent.name}")
    }
    assert len(names) > 100
    assert names <= described
