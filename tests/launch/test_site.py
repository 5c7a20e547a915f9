"""The built site in headless Chromium, on a phone and a desk: no broken link or picture, no sideways scroll."""

import functools
import http.server
import json
import re
import subprocess
import sys
import threading
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote, urldefrag, urlparse

import pytest

from tests.browser import CHROMIUM, PHONE, needs_chromium
from tests.launch.test_docs import CLONE, DOCS
from tools.docs import exports

pytestmark = [pytest.mark.slow(minutes=1.5), pytest.mark.launch]
SITE = CLONE / "build" / "docs"
DESK = 1280  # pixels

# Shows one page after another in a frame, and sends what it sees of them to the server,
# which ends the browser.
DRIVER = """<!doctype html><body style="margin: 0"><iframe id="frame" style="border: 0" height="900"></iframe><script>
const frame = document.getElementById("frame"), seen = [];
const show = (path, width) => new Promise((done) => {
  frame.width = width;
  frame.onload = () => setTimeout(() => {
    const page = frame.contentDocument;
    seen.push({path, width, overflow: page.documentElement.scrollWidth - page.documentElement.clientWidth,
      wide: [...page.querySelectorAll("article *")].filter((each) => !each.closest("pre, .table-wrapper, .highlight"))
        .filter((each) => each.getBoundingClientRect().right > width + 1).map((each) => each.outerHTML.slice(0, 80)),
      broken: [...page.images].filter((each) => !each.complete || !each.naturalWidth).map((each) => each.src)});
    done();
  }, 50);
  frame.src = path;
});
(async () => {
  for (const width of WIDTHS) for (const path of PATHS) await show(path, width);
  await fetch("/seen", {method: "POST", body: JSON.stringify(seen)});
})();
</script></body>"""


class Links(HTMLParser):
    """The anchors of a page, and what it refers to."""

    def __init__(self) -> None:
        super().__init__()
        self.ids: set[str] = set()
        self.targets: list[str] = []

    def handle_starttag(
        self, tag: str, attributes: list[tuple[str, str | None]]
    ) -> None:
        values = dict(attributes)
        self.ids |= {
            value for name, value in attributes if name in ("id", "name") and value
        }
        self.targets += [
            value for name in ("href", "src") if (value := values.get(name))
        ]


@pytest.fixture(scope="module")
def site() -> Path:
    """The built site, made anew by the command of `make docs`."""
    pytest.importorskip("furo", reason="needs the extra docs: make docs")
    command = [
        sys.executable,
        "-m",
        "sphinx",
        "--quiet",
        "--fail-on-warning",
        str(DOCS),
        str(SITE),
    ]
    done = subprocess.run(
        command, cwd=CLONE, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return SITE


def read(page: Path) -> Links:
    links = Links()
    links.feed(page.read_text())
    return links


def test_each_link_leads_to_a_page_and_a_title(site: Path) -> None:
    pages = {page.resolve(): read(page) for page in site.rglob("*.html")}
    assert len(pages) > 50
    broken = []
    for page, links in pages.items():
        for target in links.targets:
            address, anchor = urldefrag(target)
            if urlparse(address).scheme:
                continue
            file = (
                (page.parent / unquote(address.partition("?")[0])).resolve()
                if address
                else page
            )
            if not file.exists() or (
                anchor and file in pages and unquote(anchor) not in pages[file].ids
            ):
                broken.append(f"{page.name}: {target}")
    assert broken == []


def test_every_exported_name_is_described(site: Path) -> None:
    described = {
        name for page in site.glob("reference/api/*.html") for name in read(page).ids
    }
    names = [
        f"{package}.{export.name}"
        for package in [
            f"torchrec_ext.{path.parent.name}"
            for path in sorted(CLONE.glob("torchrec_ext/*/__init__.pyi"))
        ]
        for export in exports(package)
    ]
    assert len(names) > 120
    homes = {name.rpartition(".")[2] for name in described}
    assert [
        name
        for name in names
        if name not in described and name.rpartition(".")[2] not in homes
    ] == []


@needs_chromium
def test_each_page_fits_a_phone_and_a_desk(site: Path, tmp_path: Path) -> None:
    paths = sorted("/" + str(page.relative_to(site)) for page in site.rglob("*.html"))
    seen: list[dict[str, Any]] = []
    told = threading.Event()
    driver = DRIVER.replace("WIDTHS", json.dumps([PHONE, DESK])).replace(
        "PATHS", json.dumps(paths)
    )

    class Handler(http.server.SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/driver":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html")
            self.end_headers()
            self.wfile.write(driver.encode())

        def do_POST(self) -> None:
            seen.extend(
                json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            )
            self.send_response(204)
            self.end_headers()
            told.set()

        def log_message(self, *arguments: Any) -> None:
            pass

    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(Handler, directory=str(site))
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    flags = [
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--enable-logging=stderr",
    ]
    flags += [
        f"--user-data-dir={tmp_path / 'profile'}",
        "--host-resolver-rules=MAP * ~NOTFOUND, EXCLUDE 127.0.0.1",
    ]
    address = f"http://127.0.0.1:{server.server_port}/driver"
    with (tmp_path / "log").open("w") as log:
        browser = subprocess.Popen(
            [str(CHROMIUM), *flags, "--window-size=1300,1000", address], stderr=log
        )
        try:
            assert told.wait(240)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
    assert len(seen) == 2 * len(paths)
    assert [
        page for page in seen if page["overflow"] > 0 or page["wide"] or page["broken"]
    ] == []
    assert re.findall(r".*CONSOLE.*", (tmp_path / "log").read_text()) == []
