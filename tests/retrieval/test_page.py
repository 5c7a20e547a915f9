"""The page in headless Chromium: a user's liked and recommended items, the certificate, and its messages on errors."""

from __future__ import annotations

import math
import re
import shutil
import subprocess
from collections.abc import Iterator
from html import unescape
from pathlib import Path

import pytest

from tests.retrieval.running import Server, serving
from tests.retrieval.small import Small

CHROMIUM = (
    shutil.which("chromium")
    or shutil.which("chromium-browser")
    or shutil.which("google-chrome")
)
pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium or Chrome on the PATH"),
]


@pytest.fixture(scope="module")
def running(folder: Path) -> Iterator[Server]:
    with serving(folder) as found:
        yield found


def shown(running: Server, path: str, profile: Path) -> str:
    """The page's elements when its requests have been answered; refused by no policy, with no error of a script."""
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        f"--user-data-dir={profile}",
    ]
    flags += ["--enable-logging=stderr", "--virtual-time-budget=20000", "--dump-dom"]
    url = f"http://127.0.0.1:{running.port}{path}"
    done = subprocess.run(
        [str(CHROMIUM), *flags, url],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    console = [
        line
        for line in done.stderr.splitlines()
        if "CONSOLE" in line and "status of 4" not in line and "[DOM]" not in line
    ]
    assert console == []
    return done.stdout


def texts(dom: str, name: str) -> list[str]:
    return [
        unescape(re.sub(r"<[^>]*>", "", found))
        for found in re.findall(rf'<span class="{name}"[^>]*>(.*?)</span>', dom)
    ]


def status_of(dom: str) -> str:
    line = re.search(r'<p id="status"[^>]*>.*?</p>', dom)
    assert line
    return line[0]


def test_a_user_sees_what_was_liked_and_what_is_recommended(
    running: Server, tmp_path: Path
) -> None:
    dom = shown(running, "/#user=7&k=4", tmp_path)
    parts = []
    for part in ("items", "liked"):
        found = re.search(rf'<ol id="{part}".*?</ol>', dom, re.DOTALL)
        assert found
        parts.append(found[0])
    recommended, liked = parts
    body = {"user": {"user": 7}, "k": 4, "titles": True, "liked": 10}
    answer = running.client().post("/v1/recommend", body).json
    assert texts(recommended, "name") == answer["titles"]
    assert texts(recommended, "score") == [f"{score:.3f}" for score in answer["scores"]]
    chances = [f"{100 / (1 + math.exp(-score)):.1f} %" for score in answer["scores"]]
    assert texts(recommended, "chance") == chances, "the loss is a binary cross entropy"
    assert texts(liked, "name") == answer["liked_titles"]
    assert "4 recommendations." in dom
    assert f'"digest": "{answer["bundle"]}"' in unescape(dom), "the manifest"
    assert re.search(
        r"Greatest difference from the trained model</dt><dd>[-\d.e]+ over 140 pairs<",
        dom,
    )


def test_someone_new_has_a_form_of_the_columns(tmp_path: Path) -> None:
    """And the page opens on it, if the bundle knows nobody."""
    Small().write(tmp_path / "bundle", users=False)
    with serving(tmp_path / "bundle") as running:
        dom = shown(running, "/", tmp_path / "profile")
    assert re.findall(r'<label for="feature-(\w+)">', dom) == ["user", "history", "age"]
    assert "10 recommendations for someone new" in status_of(dom)
