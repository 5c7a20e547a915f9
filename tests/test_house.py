"""The house stays in order: what tools/house.py measures, and that it finds what it looks for."""

from pathlib import Path

import pytest

from tools.house import MEASURES, House, is_fragment

ROOT = Path(__file__).parents[1]
MANY = ("modules with one importer", "variables called")
ZERO = [name for name in MEASURES if not name.startswith(MANY)]


@pytest.fixture(scope="module")
def house() -> House:
    return House(ROOT)


@pytest.mark.unit
@pytest.mark.parametrize("measure", ZERO)
def test_none_is_left(house: House, measure: str) -> None:
    assert MEASURES[measure](house) == []


@pytest.mark.unit
def test_few_modules_serve_one_sibling_alone_and_few_names_mean_nothing(house: House) -> None:
    assert len(MEASURES["modules with one importer, in their folder"](house)) < 20
    assert len(MEASURES["variables called by a word of no meaning"](house)) < 100


MADE_UP = {
    "torchrec_ext/__init__.py": "",
    "torchrec_ext/a.py": '"""A."""\n\nfrom torchrec_ext import b\n\n\nclass Bags:\n    """Of the batch."""\n',
    "torchrec_ext/b.py": '"""B."""\n\n\ndef Bags(own):\n    import torchrec_ext.a\n' + "# " + "x" * 120 + "\n",
    "torchrec_ext/c.py": '"""C."""\n\nraise ValueError(\n    f"{C}' + "x" * 100 + '"\n    "' + "y" * 93 + '"\n)\n',
    "components/a.py": '"""A."""\n\n\ndef train():\n    """Trains.\n\n    Args:\n        rows: of a table\n    """\n',
}


@pytest.mark.unit
def test_each_measure_finds_what_it_looks_for(tmp_path: Path) -> None:
    for name, text in MADE_UP.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    house = House(tmp_path)
    found = {name: [(path, line) for path, line, _ in measure(house)] for name, measure in MEASURES.items()}
    both = [("torchrec_ext/a.py", 6), ("torchrec_ext/b.py", 4)]
    assert found == {
        "modules with one importer, in their folder": [("torchrec_ext/a.py", 1), ("torchrec_ext/b.py", 1)],
        "public names defined more than once": both,
        "of them classes": [],
        "circles of files": [("torchrec_ext/a.py", 1)],
        "fragments in docstrings and argument lines": [("torchrec_ext/a.py", 6), ("components/a.py", 4)],
        "variables called by a word of no meaning": [("torchrec_ext/b.py", 4)],
        "public classes and functions without a docstring": [("torchrec_ext/b.py", 4)],
        "lines over 120 characters": [("torchrec_ext/b.py", 6)],
        "messages over 200 characters": [("torchrec_ext/c.py", 3)],
    }


@pytest.mark.unit
@pytest.mark.parametrize(
    ("sentence", "fragment"),
    [
        ("Of the bundle.", True),
        ("As it was.", True),
        ("The same, by rank.", True),
        ("", True),
        ("Returns matplotlib's Figure.", False),
        ("(B, D) float32, the outputs of a tower.", False),
    ],
)
def test_a_fragment_is_known_by_its_first_word(sentence: str, fragment: bool) -> None:
    assert is_fragment(sentence) == fragment
