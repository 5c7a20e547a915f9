"""Changes one operator or constant of a file at a time, and runs the file's tests: nobody notices what they do not.

    python tools/mutants.py torchrec_ext/data/columns.py torchrec_ext/ids --count 20
    python tools/mutants.py torchrec_ext --reverted 1500 --subject 'refuse|never|again' --count 40

With --reverted a mutant is a piece of one of the last so many commits, taken back where it still can be: what a fix
mended is broken again. Pieces that change nothing but formatting, comments or texts are left out.

A mutant is made in a copy of the checkout. It is killed if a test fails or takes too long. The tests of a/b/c.py are
tests/a/b/test_c.py and then those in tests/a/b, or in tests/a; what tests of other folders would notice counts as
survived. Of a folder the mutants are drawn from all its files. The exit status is 0 whatever survives: read the lines.
"""

from __future__ import annotations

import argparse
import ast
import copy
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mult,
    ast.Mod: ast.Mult,
}
Change = Callable[[], None]
# The path asked for, the file, what is changed, and how it is changed in a copy of the checkout.
Mutant = tuple[str, Path, str, Callable[[Path], object]]


def changes(tree: ast.AST) -> Iterator[tuple[int, Change]]:
    """Yields the line of each possible change, and a function that makes it in the tree.

    Messages, annotations and docstrings are left alone: no test need hold a sentence.
    """
    waiting = [tree]
    while waiting:
        node = waiting.pop()
        for name, value in ast.iter_fields(node):
            if name not in ("annotation", "returns", "decorator_list"):
                parts = value if isinstance(value, list) else [value]
                waiting += [part for part in parts if isinstance(part, ast.AST)]
        if isinstance(node, ast.Raise | ast.JoinedStr | ast.Assert | ast.ImportFrom):
            for child in ast.walk(node):
                if child in waiting:
                    waiting.remove(child)
        yield from of_node(node)


def of_node(node: ast.AST) -> Iterator[tuple[int, Change]]:
    """Yields the changes of one node."""
    line = getattr(node, "lineno", 0)

    def put(name: str, value: object) -> tuple[int, Change]:
        return line, lambda: setattr(node, name, value)

    if isinstance(node, ast.Compare) and type(node.ops[0]) in COMPARED:
        yield put("ops", [COMPARED[type(node.ops[0])](), *node.ops[1:]])
    elif isinstance(node, ast.BinOp) and type(node.op) in COMPUTED:
        yield put("op", COMPUTED[type(node.op)]())
    elif isinstance(node, ast.BoolOp):
        yield put("op", ast.Or() if isinstance(node.op, ast.And) else ast.And())
    elif isinstance(node, ast.If | ast.While | ast.IfExp):
        yield put("test", ast.UnaryOp(ast.Not(), node.test))
    elif isinstance(node, ast.Constant) and isinstance(node.value, bool):
        yield put("value", not node.value)
    elif isinstance(node, ast.Constant) and isinstance(node.value, int):
        yield put("value", node.value + 1)


def tests_of(file: Path) -> list[Path]:
    """Returns what tests a module, in turn: the file of its name if there is one, and the folder around it."""
    folder = Path("tests", *file.parent.parts[1:])
    named = folder / f"test_{file.name}"
    while not (ROOT / folder).is_dir() or not any((ROOT / folder).glob("test_*.py")):
        folder = folder.parent
    if not (ROOT / named).is_file():
        return [folder]
    # Of a module of the root, not all tests there are.
    return [named] if folder == Path("tests") else [named, folder]


def failed(copied: Path, tests: Path, limit_s: float) -> str:
    """Returns why the tests failed; empty if they pass."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--no-header", str(tests)]
    environment = {"PYTHONPATH": str(copied), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        ["env", *(f"{name}={value}" for name, value in environment.items()), *command],
        cwd=copied,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return "a test" if process.wait(limit_s) else ""
    except subprocess.TimeoutExpired:
        return "time"
    finally:
        subprocess.run(["pkill", "-9", "-s", str(process.pid)], check=False)


def drawn(file: Path, number: int) -> tuple[int, str, str]:
    """Returns the line of a file's change ``number``, the changed statement's text, and the whole changed text."""
    tree: Any = ast.parse((ROOT / file).read_text())
    before = copy.deepcopy(tree)
    line, make = list(changes(tree))[number]
    make()
    text = ast.unparse(ast.fix_missing_locations(tree))
    old = ast.unparse(before).splitlines()
    new = text.splitlines()
    shown = next((b for a, b in zip(old, new, strict=False) if a != b), "")
    return line, shown.strip()[:90], text


def reverted(
    paths: list[Path], commits: int, about: str
) -> list[tuple[str, str, Path]]:
    """Returns the pieces of the last commits that can be taken back: what they are, the patch, and its file."""
    pieces = []
    command = ["log", "--no-merges", f"-{commits}", "--format=%h %s", "--"]
    for line in git(*command, *map(str, paths)).splitlines():
        commit, subject = line.split(" ", 1)
        if not re.search(about, subject):
            continue
        shown = git("show", "--format=", commit, "--", *map(str, paths))
        for of_file in re.split(r"(?m)^(?=diff --git )", shown)[1:]:
            head, *hunks = re.split(r"(?m)^(?=@@ )", of_file)
            file = Path(head.splitlines()[-1].removeprefix("+++ b/"))
            is_whole = re.search(r"(?m)^(new file|deleted|rename)", head)
            if file.suffix != ".py" or is_whole or not (ROOT / file).exists():
                continue
            for hunk in hunks:
                patch = head + hunk
                if taken_back(patch, ROOT, "--check"):
                    where = hunk.split("@@")[1].strip()
                    pieces.append((f"{commit} {subject[:60]}, {where}", patch, file))
    return pieces


def code_of(file: Path) -> str:
    """Returns a file's code without formatting, comments and texts."""
    try:
        tree = ast.parse(file.read_text())
    except SyntaxError:
        return "none"
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            node.value = ""
    return ast.dump(tree)


def git(*words: str) -> str:
    """Returns what git prints in the checkout."""
    command = ["git", *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout


def taken_back(patch: str, folder: Path, *options: str) -> bool:
    """Takes a patch back in a folder that need be no checkout; returns whether that can be done."""
    command = ["git", "apply", "--reverse", *options]
    done = subprocess.run(
        command, cwd=folder, input=patch, capture_output=True, text=True, check=False
    )
    return not done.returncode


def mutants(options: argparse.Namespace) -> Iterator[Mutant]:
    """Yields what the command line asks for, at random."""
    if options.reverted:
        pieces = reverted(options.paths, options.reverted, options.subject)
        for told, patch, file in random.sample(pieces, min(options.count, len(pieces))):
            yield "pieces", file, told, partial(taken_back, patch)
        return
    for path in options.paths:
        files = sorted(path.rglob("*.py")) if path.is_dir() else [path]
        places = [
            (file, number)
            for file in files
            for number in range(len(list(changes(ast.parse(file.read_text())))))
        ]
        for file, number in random.sample(places, min(options.count, len(places))):
            line, change, text = drawn(file, number)

            def make(copied: Path, file: Path = file, text: str = text) -> None:
                (copied / file).write_text(text)

            yield str(path), file, f"{line}: {change}", make


def main() -> int:
    """Prints a line for each survivor, and how many mutants of each file were killed."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("paths", nargs="+", type=Path, help="files or folders")
    parser.add_argument("--count", type=int, default=10, help="mutants of each path")
    parser.add_argument(
        "--reverted", type=int, metavar="N", help="take back pieces of N commits"
    )
    parser.add_argument("--subject", default="", help="regex of these commits")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--limit_s", type=float, default=300.0)
    options = parser.parse_args()
    random.seed(options.seed)
    passing: dict[Path, bool] = {}  # without a change
    killed: Counter[str] = Counter()
    made: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        copied = Path(folder) / "copy"
        ignored = shutil.ignore_patterns(
            ".venv*", ".git", "runs", "build", "*.egg-info"
        )
        shutil.copytree(ROOT, copied, ignore=ignored)
        for path, file, told, make in mutants(options):
            for tests in tests_of(file):
                if tests not in passing:
                    passing[tests] = not failed(copied, tests, options.limit_s)
            if not all(passing[tests] for tests in tests_of(file)):
                print(f"{file}:{told}: left out: its tests fail without it, too")
                continue
            make(copied)
            if code_of(copied / file) == code_of(ROOT / file):
                shutil.copy(ROOT / file, copied / file)
                continue
            start = time.monotonic()
            why = ""
            for tests in tests_of(file):
                why = why or failed(copied, tests, options.limit_s)
            shutil.copy(ROOT / file, copied / file)
            made[path] += 1
            killed[path] += bool(why)
            took = f"{time.monotonic() - start:.0f} s"
            verdict = f"killed by {why}" if why else "SURVIVED"
            print(f"{file}:{told}: {verdict}, {took}", flush=True)
    for name, count in made.items():
        print(f"{name}: {killed[name]} of {count} killed")
    print(f"all: {sum(killed.values())} of {sum(made.values())} killed")
    return 0


if __name__ == "__main__":
    sys.exit(main())
