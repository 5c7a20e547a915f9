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

pytest.importorskip("uvicorn", reason="needs the extra `serve`")
pytest.importorskip("starlette", reason="needs the extra `serve`")
pytest.importorskip("prometheus_client", reason="needs the extra `serve`")

from tests.retrieval.server.running import Running, running_server
from tests.retrieval.small_bundle import SmallBundle
from torchrec_ext.retrieval.bundle.bundle import Bundle

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
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    return SmallBundle(tmp_path_factory.mktemp("made") / "bundle").bundle


@pytest.fixture(scope="module")
def running(bundle: Bundle) -> Iterator[Running]:
    with running_server(bundle) as found:
        yield found


def shown(running: Running, path: str, profile: Path) -> str:
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
        for _, found in re.findall(
            rf'<(span|button) class="{name}"[^>]*>(.*?)</\1>', dom
        )
    ]


def test_a_user_sees_what_was_liked_and_what_is_recommended(
    running: Running, tmp_path: Path
) -> None:
    dom = shown(running, "/#user=7&k=4", tmp_path)
    recommended, liked = (
        re.search(rf'<ol id="{part}".*?</ol>', dom, re.DOTALL)[0]
        for part in ("items", "liked")
    )  # type: ignore[index]
    answer = (
        running.client()
        .post(
            "/v1/recommend",
            {"user": {"user_id": 7}, "k": 4, "titles": True, "liked": 10},
        )
        .json
    )
    assert texts(recommended, "name") == answer["titles"], (
        "as text: titles with markup in them stay text"
    )
    assert texts(recommended, "score") == [f"{score:.3f}" for score in answer["scores"]]
    chances = [f"{100 / (1 + math.exp(-score)):.1f} %" for score in answer["scores"]]
    assert texts(recommended, "chance") == chances, "the loss is a binary cross entropy"
    assert texts(liked, "name") == answer["liked_titles"]
    assert "4 recommendations." in dom
    assert re.search(r'id="latency"[^>]*>[\d.]+ ms', dom)
    assert f'"digest": "{answer["bundle"]}"' in unescape(dom), "the manifest"
    assert re.search(
        r"Greatest difference from the trained model</dt><dd>[-\d.e]+ over \d+ pairs<",
        dom,
    )


def test_an_unknown_user_is_said_and_a_wrong_id_is_an_error_in_words(
    running: Running, tmp_path: Path
) -> None:
    assert "This user is unknown: the answer is the model's for someone new" in shown(
        running, "/#user=99999", tmp_path
    )
    wrong = shown(running, "/#user=anna", tmp_path)
    status = re.search(r'<p id="status"[^>]*>(.*?)</p>', wrong)
    assert status
    assert "error" in status[0]
    assert "anna" in status[1]


def status_of(dom: str) -> str:
    line = re.search(r'<p id="status"[^>]*>.*?</p>', dom)
    assert line
    return line[0]


def test_the_page_opens_on_a_recommendation_on_this_machine(
    bundle: Bundle, tmp_path: Path
) -> None:
    with running_server(
        bundle, allowed_hosts=("localhost", "127.0.0.1", "::1")
    ) as running:
        dom = shown(running, "/", tmp_path)
    assert "10 recommendations." in status_of(dom)
    assert len(texts(dom, "score")) == 10


def test_the_page_asks_for_a_user_where_it_may_offer_none(
    running: Running, tmp_path: Path
) -> None:
    dom = shown(running, "/", tmp_path)
    assert "Type the id of a user, then press Recommend." in status_of(dom)
    assert "error" not in status_of(dom)
    assert re.search(r'<div class="columns" id="answer" hidden="">', dom), (
        "no empty cards"
    )


def test_an_item_shows_its_nearest_items(running: Running, tmp_path: Path) -> None:
    item = (
        running.client()
        .post("/v1/recommend", {"user": {"user_id": 7}, "k": 2})
        .json["items"][1]
    )
    dom = shown(running, f"/#user=7&k=2&item={item}", tmp_path)
    answer = running.client().post("/v1/nearest", {"item": item, "titles": True}).json
    nearest = re.search(r'<ol id="nearest".*?</ol>', dom, re.DOTALL)
    assert nearest
    assert texts(nearest[0], "name") == answer["titles"]
    assert texts(nearest[0], "score") == [f"{score:.3f}" for score in answer["scores"]]


def test_someone_new_has_a_form_of_the_columns(tmp_path: Path) -> None:
    """And the page opens on it, if the bundle knows nobody."""
    bundle = SmallBundle(tmp_path / "bundle", users=False).bundle
    with running_server(bundle) as running:
        dom = shown(running, "/", tmp_path)
    assert re.findall(r'<label for="feature-(\w+)">', dom) == [
        "user_id",
        "history",
        "age",
    ]
    assert re.search(r'<fieldset id="person">', dom)
    assert "10 recommendations for someone new" in status_of(dom)
    assert len(texts(dom, "score")) == 10


def test_a_token_is_asked_for(bundle: Bundle, tmp_path: Path) -> None:
    with running_server(bundle, token="a token of this test") as running:
        dom = shown(running, "/", tmp_path)
    assert "This server asks for a token" in dom
    assert re.search(r'<div class="field" id="token-field">', dom)


def test_the_interface_is_described_without_the_internet(
    running: Running, tmp_path: Path
) -> None:
    dom = shown(running, "/docs", tmp_path)
    for said in (
        "POST /v1/recommend",
        "user.user_id *",
        "user.history",
        "The id alone, or with features",
        "GET /readyz",
        "exclude_seen",
        "entries at most 10000",
        "known values: 1, 2, 3",
        "POST /v1/nearest",
        '-d \'{"user":{',
        '"titles": ["Item &lt;b&gt;',
        '"answered": 3',
    ):
        assert said in dom
