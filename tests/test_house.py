"""The house stays in order: one meaning for each public name, no circle of imports, no message longer than it may be.

ruff checks docstrings and the length of lines, and tests/test_layering.py who may import whom.
"""

import ast
from collections import defaultdict

import pytest

from tests.test_layering import ROOT, imported, parsed, sources

LONGEST_MESSAGE = 200

pytestmark = pytest.mark.unit


def message_length(node: ast.AST) -> int:
    """Returns the length of a literal text, in which a value in braces counts as 8; 0 for other nodes."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return len(node.value)
    if isinstance(node, ast.JoinedStr):
        return sum(
            message_length(part) if isinstance(part, ast.Constant) else 8
            for part in node.values
        )
    if isinstance(node, ast.BinOp):
        return message_length(node.left) + message_length(node.right)
    return 0


def long_messages(tree: ast.AST) -> list[int]:
    """The lines of errors and warnings whose message is longer than it may be."""
    lines = []
    for node in ast.walk(tree):
        is_warning = isinstance(node, ast.Call) and ast.unparse(node.func).endswith(
            "warn"
        )
        if isinstance(node, ast.Raise) or is_warning:
            longest = max(message_length(part) for part in ast.walk(node))
            if longest > LONGEST_MESSAGE:
                lines.append(node.lineno)
    return lines


def on_circles(graph: dict[str, set[str]]) -> set[str]:
    """The modules that import themselves by way of others."""

    def reachable(start: str) -> set[str]:
        seen: set[str] = set()
        waiting = [*graph[start]]
        while waiting:
            module = waiting.pop()
            if module not in seen:
                seen.add(module)
                waiting += graph.get(module, ())
        return seen

    return {module for module in graph if module in reachable(module)}


def imports() -> dict[str, set[str]]:
    """By module the modules of ours that it imports, also inside functions; packages export lazily and are left out."""
    packages = {
        name
        for name in sources()
        if (ROOT / name.replace(".", "/") / "__init__.py").exists()
    }
    graph = {}
    for name, source in sources().items():
        if name in packages:
            continue
        found = {target for _, target in imported(name, source, is_package=False)}
        found |= {target.rpartition(".")[0] for target in found}
        graph[name] = {
            target
            for target in found
            if target in sources() and target not in packages and target != name
        }
    return graph


def test_a_public_class_or_function_is_defined_once() -> None:
    places = defaultdict(list)
    for module, source in sources().items():
        if not module.startswith("torchrec_ext"):
            continue  # a component has the name of its app's main
        for node in parsed(source).body:
            public = isinstance(
                node, ast.ClassDef | ast.FunctionDef
            ) and not node.name.startswith("_")
            if public and node.name != "main":
                places[node.name].append(module)
    assert {name: modules for name, modules in places.items() if len(modules) > 1} == {}


def test_no_module_imports_itself_by_way_of_others() -> None:
    assert on_circles(imports()) == set()


def test_no_message_is_longer_than_it_may_be() -> None:
    assert {
        module: lines
        for module, source in sources().items()
        if (lines := long_messages(parsed(source)))
    } == {}


def test_the_checks_find_what_they_look_for() -> None:
    assert on_circles({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == {"b", "c"}
    assert long_messages(ast.parse(f"raise ValueError(f'{{value}}{'x' * 193}')")) == [1]
    assert long_messages(ast.parse(f"warnings.warn('{'x' * 200}')")) == []
