"""The README and the pages of docs read easily, and the messages that they quote are those of the code."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.launch.test_docs import CLONE, DOCS, PAGES, page_name
from tools.docs import MADE

WRITTEN = [page for page in PAGES if not page.read_text().startswith(MADE)]

MEAN, LONGEST, SEMICOLONS = 16.0, 35, 3


def sentences(text: str) -> Iterator[str]:
    """The sentences of a page, without its code, tables, titles and generated parts.

    Example:
        >>> text = "# Title\\n\\nA `b c`, of [d](e.md). Next: one\\nmore.\\n\\n| a | b |\\n\\n- item\\n- other"
        >>> list(sentences(text))
        ['A Code, of d.', 'Next: one more.', 'item', 'other']
    """
    text = re.sub(
        r"^```.*?^```$|^:::.*?^:::$|<!-- .*?-->",
        "",
        text,
        flags=re.DOTALL | re.MULTILINE,
    )
    text = re.sub(r"^(#|\||>).*$", "", text, flags=re.MULTILINE)
    text = re.sub(r"!?\[([^]]*)\]\([^)]*\)", r"\1", re.sub(r"`[^`]+`", "Code", text))
    for block in re.split(r"\n\s*\n|\n\s*(?=[-*] |\d+\. )", text):
        words = " ".join(
            re.sub(r"^\s*([-*]|\d+\.) ", "", block).replace("**", "").split()
        )
        yield from (
            sentence
            for sentence in re.split(r"(?<=[.?!])\s+(?=\W?[A-Z])", words)
            if sentence
        )


def figures(text: str) -> tuple[float, int, int]:
    """Mean and greatest number of words of a sentence, and the number of semicolons."""
    found = list(sentences(text))
    lengths = [
        len(re.findall(r"[\w.'%@/+-]*\w[\w.'%@/+-]*", sentence)) for sentence in found
    ]
    return (
        sum(lengths) / max(len(lengths), 1),
        max(lengths, default=0),
        sum(each.count(";") for each in found),
    )


@pytest.mark.unit
@pytest.mark.parametrize("page", WRITTEN, ids=page_name)
def test_sentences_are_short(page: Path) -> None:
    most = (MEAN, LONGEST, SEMICOLONS)
    found = figures(page.read_text())
    too_long = [
        each for each in sentences(page.read_text()) if len(each.split()) > most[1]
    ]
    assert all(number <= limit for number, limit in zip(found, most, strict=True)), (
        f"{found}; {too_long}"
    )


@pytest.mark.unit
def test_the_troubles_are_in_the_words_of_the_code() -> None:
    """`...` in a quoted message stands for what the code puts there."""
    files = [
        path
        for folder in ("torchrec_ext", "torchx_apps")
        for path in sorted((CLONE / folder).rglob("*.py"))
    ]
    # A message that is written over several lines, as one.
    code = re.sub(r'"\s*\n\s*f?"', "", "\n".join(path.read_text() for path in files))
    quotes = re.findall(
        r"^> (.*)$", (DOCS / "troubleshooting.md").read_text(), re.MULTILINE
    )
    assert len(quotes) >= 20
    missing = [
        part
        for quote in quotes
        for part in quote.split("...")
        if part.strip(" :,;(") not in code
    ]
    assert missing == []
