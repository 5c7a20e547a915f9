"""The README and the pages of docs: every program runs as it stands, every command of a `sh` block too.

A `console` block shows commands that need what a test has not, such as a server that stays, Redis, Spark or a cluster.
"""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.small_sets import write_ml_100k
from tools.docs import main as write_docs

CLONE = Path(__file__).resolve().parents[2]
README = CLONE / "README.md"
DOCS = CLONE / "docs"
# Pages of docs/reference/api are Sphinx' directives, written by tools/docs.py.
PAGES = [
    README,
    *(
        page
        for page in sorted(DOCS.rglob("*.md"))
        if "```{eval-rst}" not in page.read_text()
    ),
]
PROGRAMS = re.compile(r"^```(python|sh)$", re.MULTILINE)
LANGUAGES = {"python", "py", "sh", "console", "diff", ""}  # `py` is an excerpt


def page_name(page: Path) -> str:
    """The page's path in the clone without its ending."""
    return str(page.relative_to(CLONE).with_suffix(""))


@dataclass(frozen=True)
class Block:
    """A fenced block of a page: a program, commands, or what they print.

    Args:
        language: language of the block.
        text: its lines.
        printed: whether the block before it prints these lines on every machine.
    """

    language: str
    text: str
    printed: bool = False

    @property
    def name(self) -> str:
        """The file that the program's first line names."""
        return self._header()[0]

    @property
    def commands(self) -> list[str]:
        """The commands of a `sh` block, over one or several lines, or the one in the first line of a program."""
        if self.language == "sh":
            return [line for line in self.text.replace("\\\n", "").splitlines() if line]
        return [self._header()[1]]

    def _header(self) -> tuple[str, str]:
        match = re.match(
            r"# (\S+\.py): ((?:\.venv/bin/|torchx ).*?)(, or .*)?\n", self.text
        )
        assert match, f"its first line must be `# NAME.py: COMMAND`: {self.text[:80]!r}"
        return match[1], match[2]


def blocks(page: Path) -> Iterator[Block]:
    """All fenced blocks of a page, in its order."""
    pattern = r"^(<!-- printed by the block above -->\n)?```(\w*)\n(.*?)^```$"
    for mark, language, text in re.findall(
        pattern, page.read_text(), re.DOTALL | re.MULTILINE
    ):
        yield Block(language, text, bool(mark))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A reader's folder: an environment, the MovieLens of the tests, a click log."""
    (tmp_path / ".venv").symlink_to(sys.prefix)
    write_ml_100k(tmp_path)
    random = np.random.default_rng(0)
    columns = {
        f"c{index}": pa.array(random.integers(0, 1000, 5000)) for index in range(12)
    }
    columns |= {
        f"d{index}": pa.array(random.random(5000, dtype=np.float32))
        for index in range(2)
    }
    columns["history"] = pa.array([[1, 2], []] * 2500, pa.list_(pa.int64()))
    columns["label"] = pa.array((random.random(5000) < 0.3).astype(np.float32))
    (tmp_path / "clicks").mkdir()
    pq.write_table(
        pa.table(columns), tmp_path / "clicks" / "part-0.parquet", row_group_size=2000
    )
    return tmp_path


def run(command: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs one command as a reader would, in ``folder``."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        # As with the environment activated.
        "PATH": os.pathsep.join([str(folder / ".venv/bin"), os.environ["PATH"]]),
        "TORCHREC_EXT_DATA": str(folder),
    }
    words = shlex.split(command, comments=True)
    done = subprocess.run(
        words,
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
    )
    assert done.returncode == 0, (
        f"{command}\n{done.stdout[-2000:]}\n{done.stderr[-3000:]}"
    )
    assert "Traceback" not in done.stderr
    return done


def run_program(program: Block, folder: Path) -> subprocess.CompletedProcess[str]:
    (folder / program.name).write_text(program.text)
    (command,) = program.commands
    return run(command, folder)


@pytest.mark.unit
@pytest.mark.parametrize("page", PAGES, ids=page_name)
def test_every_block_says_what_it_is(page: Path) -> None:
    for each in blocks(page):
        assert each.language in LANGUAGES
        assert each.language != "python" or each.commands
    assert page.read_text().count("```") == 2 * len(list(blocks(page)))


def _without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$|`[^`\n]*`", "", text, flags=re.DOTALL | re.MULTILINE)


@pytest.mark.unit
def test_links_between_pages_lead_somewhere() -> None:
    """Their anchors, and that the index has every page, are seen where the site is built."""
    for page in PAGES:
        text = _without_code(page.read_text())
        for target in re.findall(r"\]\((?!https?:|#)([^)#]*)", text):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.unit
def test_the_pages_made_from_code_and_figures_are_up_to_date(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert write_docs(["--check"]) == 0, capsys.readouterr().err


@pytest.mark.slow(minutes=0.8)
@pytest.mark.launch
@pytest.mark.parametrize(
    "page",
    [page for page in PAGES[1:] if PROGRAMS.search(page.read_text())],
    ids=page_name,
)
def test_a_page_runs_from_top_to_bottom(page: Path, folder: Path) -> None:
    """What one block makes, such as a run folder or a bundle, the next ones take."""
    done = []
    for each in blocks(page):
        if each.language == "python":
            done = [run_program(each, folder)]
        elif each.language == "sh":
            done = [run(command, folder) for command in each.commands]
        if each.printed:
            # TorchX prints a local job's output on stderr, behind the role's name.
            printed = "".join(
                re.sub(r"^\w+/0 ", "", one.stdout + one.stderr, flags=re.MULTILINE)
                for one in done
            )
            # A line that is shortened ends with an ellipsis.
            missing = [
                line
                for line in each.text.splitlines()
                if line.removesuffix(" ...") not in printed
            ]
            assert missing == []


@pytest.mark.unit
def test_the_troubles_are_in_the_words_of_the_code() -> None:
    """`...` in a quoted message stands for what the code puts there."""
    files = [
        path
        for folder in ("torchrec_ext", "torchx_apps")
        for path in (CLONE / folder).rglob("*.py")
    ]
    # A message that is written over several lines, as one.
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files))
    text = (DOCS / "troubleshooting.md").read_text()
    quotes = re.findall(r"^> (.*)$", text, re.MULTILINE)
    assert len(quotes) >= 19
    parts = [part.strip(" :,;(") for quote in quotes for part in quote.split("...")]
    assert [part for part in parts if part not in code] == []
