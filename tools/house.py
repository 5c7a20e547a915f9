"""Measures how hard it is to find one's way in the code: `python tools/house.py [FOLDER] [--list MEASURE] [--walk]`.

FOLDER is a checkout, such as a worktree of an older commit; this one where not given. Its sources are read and not run,
except by `--walk`: three small jobs, of which the files and the calls from file to file are counted.
"""

import argparse
import ast
import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

TOPS = ("torchrec_ext", "torchx_apps", "components")
# First words that only make sense to a reader who has read something else before.
_ADVERBIAL = (
    "of as by in from for with without to at on than it its they their them that those which who whom whose where when "
    "while "
    "what likewise also same and but or so if unless until because such nothing alike however otherwise"
)
_DANGLING = frozenset(_ADVERBIAL.split())
_DANGLING_ARGUMENT = _DANGLING - {"nothing", "what"}
_ARGUMENT = re.compile(r"^(\s+)(\*{0,2}\w+)(?: \([^)]*\))?: (.*)$")
_PRAGMA = re.compile(r"  # (type: ignore|noqa).*$")
_SECTIONS = ("Args:", "Attributes:", "Arguments:")

_DEFINITIONS = (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)

Place = tuple[str, int, str]


class House:
    """The sources below a folder, parsed.

    Args:
        root: folder of a checkout.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.paths = [p for top in TOPS for p in sorted((root / top).rglob("*.py")) if "__pycache__" not in p.parts]
        self.texts = {path: path.read_text() for path in self.paths}
        self.trees = {path: ast.parse(text) for path, text in self.texts.items()}
        self.modules = {self._module(path): path for path in self.paths}

    def _module(self, path: Path) -> str:
        parts = path.relative_to(self.root).with_suffix("").parts
        return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)

    def name(self, path: Path) -> str:
        """The path of a file inside the checkout."""
        return str(path.relative_to(self.root))

    def imports(self, path: Path, *, lazy: bool) -> Iterator[str]:
        """Modules of ours that a file imports.

        Args:
            path: the file.
            lazy: include imports inside functions and those for type checkers alone.
        """
        module = self._module(path)
        package = module if path.name == "__init__.py" else module.rpartition(".")[0]
        stub = path.with_suffix(".pyi")  # of a subpackage: the names it exports, imported when first used
        tree = ast.parse(stub.read_text()) if lazy and stub.exists() else self.trees[path]
        for node in self._nodes(tree, lazy=lazy):
            names: list[str] = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                parents = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
                base = ".".join([*parents, *([node.module] if node.module else [])])
                names = [f"{base}.{alias.name}" for alias in node.names]
            for name in names:
                target = name if name in self.modules else name.rpartition(".")[0]
                if target in self.modules and target != module:
                    yield target

    def _nodes(self, tree: ast.AST, *, lazy: bool) -> Iterator[ast.AST]:
        for child in ast.iter_child_nodes(tree):
            only_types = isinstance(child, ast.If) and "TYPE_CHECKING" in ast.dump(child.test)
            if not lazy and (isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) or only_types):
                continue
            yield child
            yield from self._nodes(child, lazy=lazy)

    def functions(self) -> Iterator[tuple[Path, ast.FunctionDef | ast.AsyncFunctionDef]]:
        """Every function and method."""
        for path, tree in self.trees.items():
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                    yield path, node

    def public(self, path: Path) -> Iterator[ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]:
        """Public classes and functions at the top of a file."""
        for node in self.trees[path].body:
            if isinstance(node, _DEFINITIONS) and not node.name.startswith("_"):
                yield node

    def documented(self) -> Iterator[tuple[Path, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef]]:
        """Public classes, their public methods, and public functions, wherever they have a docstring."""
        for path in self.paths:
            for node in self.public(path):
                methods = node.body if isinstance(node, ast.ClassDef) else []
                for each in (node, *methods):
                    if isinstance(each, _DEFINITIONS) and ast.get_docstring(each) and not each.name.startswith("_"):
                        yield path, each


def duplicate_names(house: House) -> list[Place]:
    """Public classes and functions whose name stands in two files; except components and `main`."""
    where = defaultdict(list)
    for path in house.paths:
        if path.relative_to(house.root).parts[0] == "components":
            continue
        for node in house.public(path):
            if node.name != "main":
                where[node.name].append((house.name(path), node.lineno, node.name))
    return [place for places in where.values() if len(places) > 1 for place in places]


def duplicate_classes(house: House) -> list[Place]:
    """Public classes whose name stands in two files."""
    classes = {(house.name(p), n.lineno) for p in house.paths for n in house.public(p) if isinstance(n, ast.ClassDef)}
    places = [place for place in duplicate_names(house) if place[:2] in classes]
    counts = defaultdict(int)
    for _, _, name in places:
        counts[name] += 1
    return [place for place in places if counts[place[2]] > 1]


def single_importers(house: House) -> list[Place]:
    """Modules whose one importer is a file in the same folder."""
    importers: defaultdict[str, set[Path]] = defaultdict(set)
    for path in house.paths:
        for target in house.imports(path, lazy=True):
            importers[target].add(path)
    alone = []
    for module, path in house.modules.items():
        by = importers[module] - {path}
        if path.name == "__init__.py" or len(by) != 1:
            continue
        (importer,) = by
        if importer.parent == path.parent and importer.name != "__init__.py":
            alone.append((house.name(path), 1, f"imported by {house.name(importer)} alone"))
    return alone


def circles(house: House) -> list[Place]:
    """Groups of files that import one another, counting imports inside functions and for types."""
    graph = {
        house.name(path): {house.name(house.modules[m]) for m in house.imports(path, lazy=True)} for path in house.paths
    }
    graph = {
        a: {b for b in bs if not b.endswith("__init__.py")} for a, bs in graph.items() if not a.endswith("__init__.py")
    }
    reach = {a: _reachable(graph, a) for a in graph}
    groups = {tuple(sorted(b for b in reach[a] if a in reach[b])) for a in graph if a in reach[a]}
    return [(group[0], 1, " <-> ".join(group)) for group in sorted(groups)]


def _reachable(graph: Mapping[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    waiting = list(graph[start])
    while waiting:
        node = waiting.pop()
        if node not in seen:
            seen.add(node)
            waiting += graph.get(node, ())
    return seen


def is_fragment(sentence: str, dangling: frozenset[str] = _DANGLING) -> bool:
    """Whether the beginning of a docstring or of an argument's line needs the line above it to be understood.

    Example:
        >>> is_fragment("Of the bundle."), is_fragment("As it was."), is_fragment("Returns the bundle's folder.")
        (True, True, False)
    """
    words = re.findall(r"[\w'`.]+", sentence)
    if not words:
        return True
    return words[0].lower() in dangling or (words[0].lower() == "the" and words[1:2] == ["same"])


def fragments(house: House) -> list[Place]:
    """First sentences of public docstrings, and lines of their arguments, that no stranger understands."""
    places = []
    for path, node in house.documented():
        text = ast.get_docstring(node) or ""
        first = text.split("\n\n")[0].replace("\n", " ")
        if is_fragment(first):
            places.append((house.name(path), node.lineno, first))
        for argument, line in _arguments(text):
            if is_fragment(line, _DANGLING_ARGUMENT):
                places.append((house.name(path), node.lineno, f"{argument}: {line}"))
    return places


def _arguments(docstring: str) -> Iterator[tuple[str, str]]:
    indent = inside = None
    for line in docstring.splitlines():
        if line.strip() in _SECTIONS:
            inside, indent = True, None
        elif inside and line.strip() and not line.startswith(" "):
            inside = False
        elif inside and (match := _ARGUMENT.match(line)) and (indent is None or match[1] == indent):
            indent = match[1]
            yield match[2], match[3]


def long_lines(house: House, limit: int = 120) -> list[Place]:
    """Lines of more than 120 characters, not counting what a line tells mypy or ruff."""
    return [
        (house.name(path), number, f"{len(line)} characters")
        for path, text in house.texts.items()
        for number, line in enumerate(text.splitlines(), 1)
        if len(_PRAGMA.sub("", line)) > limit
    ]


_DIALECT = {"found", "own", "at", "place", "one", "told", "said", "lent", "joint", "lane", "side", "part"}


def dialect(house: House) -> list[Place]:
    """Variables, arguments and attributes called by a word that says nothing, such as `found` or `own`."""
    places = []
    for path, tree in house.trees.items():
        for node in ast.walk(tree):
            name, line = "", 0
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                name, line = node.id, node.lineno
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                name, line = node.attr, node.lineno
            elif isinstance(node, ast.arg):
                name, line = node.arg, node.lineno
            if name.lstrip("_") in _DIALECT:
                places.append((house.name(path), line, name))
    return places


def long_messages(house: House, limit: int = 200) -> list[Place]:
    """Messages of errors and warnings with more than 200 characters, a value in braces counted as 8."""
    places = []
    for path, tree in house.trees.items():
        for node in ast.walk(tree):
            warns = isinstance(node, ast.Call) and ast.unparse(node.func).split(".")[-1] == "warn"
            if isinstance(node, ast.Raise) or warns:
                longest = max(map(_text_length, ast.walk(node)))
                if longest > limit:
                    places.append((house.name(path), node.lineno, f"{longest} characters"))
    return places


def _text_length(node: ast.AST) -> int:
    """Returns the length of a literal text, in which a value in braces counts as 8; 0 for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return len(node.value)
    if isinstance(node, ast.JoinedStr):
        return sum(_text_length(part) if isinstance(part, ast.Constant) else 8 for part in node.values)
    if isinstance(node, ast.BinOp):
        return _text_length(node.left) + _text_length(node.right)
    return 0


def undocumented(house: House) -> list[Place]:
    """Public classes and functions without a docstring."""
    return [
        (house.name(path), node.lineno, node.name)
        for path in house.paths
        for node in house.public(path)
        if not ast.get_docstring(node)
    ]


MEASURES = {
    "modules with one importer, in their folder": single_importers,
    "public names defined more than once": duplicate_names,
    "of them classes": duplicate_classes,
    "circles of files": circles,
    "fragments in docstrings and argument lines": fragments,
    "variables called by a word of no meaning": dialect,
    "public classes and functions without a docstring": undocumented,
    "lines over 120 characters": long_lines,
    "messages over 200 characters": long_messages,
}


def sizes(lengths: Sequence[int]) -> str:
    """Median, 90th percentile and largest of some lengths."""
    ordered = sorted(lengths)
    return f"{statistics.median(ordered):.0f} / {ordered[int(0.9 * len(ordered))]} / {ordered[-1]}"


def summary(house: House) -> dict[str, str | int]:
    """Every measure of a checkout by its name."""
    code = [path for path in house.paths if path.name != "__init__.py"]
    files = [len(house.texts[path].splitlines()) for path in code]
    functions = [(node.end_lineno or node.lineno) - node.lineno + 1 for _, node in house.functions()]
    return {
        "files": len(house.paths),
        "lines": sum(len(text.splitlines()) for text in house.texts.values()),
        "lines of a file: median / p90 / longest": sizes(files),
        "lines of a function: median / p90 / longest": sizes(functions),
        **{name: _count(name, measure(house)) for name, measure in MEASURES.items()},
    }


def _count(name: str, places: Sequence[Place]) -> int:
    return len({place[2] for place in places}) if "names" in name or "classes" in name.split()[-1:] else len(places)


# Runs in FOLDER, in a process of its own: counts functions of ours that call functions in another file of ours.
_TRACER = """
import inspect, json, os, sys, threading
root, job = sys.argv[1], sys.argv[2]
tops = tuple(os.path.join(root, top) + os.sep for top in ("torchrec_ext", "torchx_apps", "components"))
calls, files = set(), set()
def profile(frame, event, _):
    code = frame.f_code
    if event != "call" or not code.co_filename.startswith(tops) or not code.co_flags & inspect.CO_OPTIMIZED:
        return  # bodies of modules and classes run at import
    caller = frame.f_back
    while caller is not None and not caller.f_code.co_filename.startswith(tops):
        caller = caller.f_back
    if caller is not None and not caller.f_code.co_flags & inspect.CO_OPTIMIZED:
        return
    files.add(code.co_filename)
    if caller is not None and caller.f_code.co_filename != code.co_filename:
        calls.add((caller.f_code, code))
sys.path.insert(0, root)
sys.argv = ["house"]
threading.setprofile(profile)
sys.setprofile(profile)
try:
    exec(compile(job, "job", "exec"), {"__name__": "job"})
finally:
    sys.setprofile(None)
    threading.setprofile(None)
print("\\n" + json.dumps({"files": len(files), "hops": len(calls)}))
"""
_TINY = ["data.name=planted", "data.users=60", "data.items=60", "train.epochs=1"]
_TRAIN = f"""
from torchx_apps.train import main
sets = {_TINY!r} + ["export=require"]
assert main([word for item in sets for word in ("--set", item)] + ["--run-dir", "run"]) == 0
"""
_ANSWER = """
import importlib
from torchrec_ext import Bundle, Scorer
for module in ("torchrec_ext.retrieval", "torchrec_ext.retrieval.scorer.requests", "torchrec_ext.retrieval.requests"):
    try:
        Request = importlib.import_module(module).RecommendRequest
        break
    except (ImportError, AttributeError):
        pass
assert Scorer(Bundle.load("run/bundle")).recommend(Request(user={"user_id": 1}, k=3))
"""
_KEY = """
from torchx_apps.train import main
assert main(["--set", "loader.batch_size=64", "--dry-run"]) == 0
"""
_ID = """
import pyarrow as pa, pyarrow.parquet as pq
from torchrec import EmbeddingBagConfig
from torchrec_ext import ChunkLoader, LoaderConfig, ParquetSource, two_tower
columns = {"user": [1, 2, 3, 4], "item": [3, 1, 2, 1], "label": pa.array([1, 0, 1, 0], pa.float32())}
pq.write_table(pa.table(columns), "a.parquet")
tables = [[EmbeddingBagConfig(name=n, feature_names=[n], num_embeddings=9, embedding_dim=4)] for n in ("user", "item")]
model = two_tower(*tables)
config = LoaderConfig(batch_size=2, negatives=0, label="label")
for batch in ChunkLoader(ParquetSource("a.parquet"), model.schema(), config=config, rank=0, world_size=1):
    model(batch)
"""
WALKS = {
    "a row of data to the answer of a request": _TRAIN + _ANSWER,
    "--set loader.batch_size to the recipe it changes": _KEY,
    "an id in a parquet file to its embedding": _ID,
}


def walk(root: Path, job: str) -> dict[str, int]:
    """Runs a job with the sources of a checkout, and counts what it passes through.

    Args:
        root: folder of the checkout.
        job: Python source.

    Returns:
        ``files`` of ours in which a function ran, and ``hops``: pairs of functions in two files of which one called the
        other.

    Raises:
        RuntimeError: the job failed.
    """
    env = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-c", _TRACER, str(root.resolve()), job]
        done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise RuntimeError(done.stderr[-2000:])
    counts: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return counts


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the measures, or the places of one."""
    parser = argparse.ArgumentParser(
        prog="house", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", nargs="?", type=Path, default=Path(__file__).parents[1], help="a checkout")
    parser.add_argument(
        "--walk", action="store_true", help="run three small jobs, and count the files they pass through"
    )
    parser.add_argument("--list", metavar="MEASURE", help="places of the first measure whose name holds this word")
    args = parser.parse_args(argv)
    house = House(args.folder)
    if args.list:
        measure = next(measure for name, measure in MEASURES.items() if args.list in name)
        for path, line, text in measure(house):
            print(f"{path}:{line}: {text}")
        return 0
    for name, value in summary(house).items():
        print(f"{name:50} {value}")
    for name, job in WALKS.items() if args.walk else ():
        counts = walk(args.folder, job)
        print(f"{name:50} {counts['hops']} hops in {counts['files']} files")
    return 0


if __name__ == "__main__":
    sys.exit(main())
