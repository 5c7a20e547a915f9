"""split_at(): splits a traced step into several functions, with room for other work, such as exchanges, in between.

StepPart: one of these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from operator import getitem
from typing import Any

from torch import Tensor
from torch.fx import Graph, GraphModule, Node


@dataclass
class StepPart:
    """The ops of a step between two of its results.

    Args:
        graph: the ops.
        examples: tensors without values, of the shapes of its inputs.
        inputs: number of each input among the values of the step: first the step's own inputs, then the values handed
            on by its parts.
        outputs: number of each output among the values of the step.
    """

    graph: GraphModule
    examples: list[Tensor]
    inputs: list[int]
    outputs: list[int]


def split_at(
    graph: GraphModule, cuts: Sequence[int]
) -> tuple[list[StepPart], list[int | None]]:
    """Splits a traced step after the ops of some of its results.

    Values that a later part needs are handed on, except for views of the step's own inputs. These are taken anew,
    because a part may write into an input while it reads the view.

    Args:
        graph: step from :func:`traced`, with its ops in the order of the calls.
        cuts: indices of results, in the order of their computation.

    Returns:
        The parts, one more than there are cuts, and the number of each result among the values of the step; None for a
        result of None.
    """
    nodes = list(graph.graph.nodes)
    results = list(nodes[-1].args[0])
    # A part ends with the op of its cut: each op belongs to the first part that ends at
    # or after it.
    ends = [results[cut] for cut in cuts]
    origins = _Origins(nodes)
    bodies = [_Body(graph, origins) for _ in range(len(ends) + 1)]
    number = 0
    for node in nodes[:-1]:
        if node.op != "placeholder":
            origins.number[node] = number
            if node not in origins.views:
                bodies[number].add(node)
        # Two cuts may end with one op: the part between them is empty.
        number += ends.count(node)
    # A result that an op in place returns is the input that it has written.
    results = [
        None if result is None else origins.written(result) for result in results
    ]
    for result in filter(None, results):
        if result.op != "placeholder":
            # The last part returns views of inputs: only then are the inputs fully
            # written.
            number = -1 if result in origins.views else origins.number[result]
            bodies[number].give(result)
    # After the results, because making one an output may add inputs to its part.
    for body in bodies:
        for node in body.inputs:
            if node.op != "placeholder":
                bodies[origins.number[node]].give(node)
    numbers: dict[Node, int] = {}
    for node in nodes:
        if node.op == "placeholder":
            numbers[node] = len(numbers)
    for body in bodies:
        for node in body.outputs:
            numbers.setdefault(node, len(numbers))
    parts = [body.build(numbers) for body in bodies]
    return parts, [None if result is None else numbers[result] for result in results]


class _Origins:
    """Finds views of the step's inputs among the nodes; ``number`` is the part of each op."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.number: dict[Node, int] = {}
        self.views: set[Node] = set()
        self._writes: dict[Node, Node] = {}
        for node in nodes[:-1]:
            source, writes = _source(node)
            is_derived = source is not None and (
                source.op == "placeholder"
                or source in self.views
                or source in self._writes
            )
            if source is not None and is_derived and writes:
                self._writes[node] = source
            # A constant of the graph is taken anew in each part, as a view is.
            elif is_derived or node.op == "get_attr":
                self.views.add(node)

    def written(self, node: Node) -> Node:
        """Returns the input, or the view of it, written by an in-place op; any other node is returned unchanged."""
        while node in self._writes:
            node = self._writes[node]
        return node


def _source(node: Node) -> tuple[Node, bool] | tuple[None, bool]:
    """Returns the node that shares its memory with an op's result, or None, and whether the op writes there."""
    if node.op != "call_function":
        return None, False
    if node.target is getitem:
        source = node.args[0]
        return (source, False) if isinstance(source, Node) else (None, False)
    schema: Any = getattr(node.target, "_schema", None)
    returned = schema.returns[0].alias_info if schema and schema.returns else None
    for argument, value in zip(
        schema.arguments if schema else (), node.args, strict=False
    ):
        if argument.alias_info is None or not isinstance(value, Node):
            continue
        if not argument.alias_info.is_write:
            return value, False
        if (
            returned is not None
            and returned.before_set & argument.alias_info.before_set
        ):
            return value, True
    return None, False


@dataclass
class _Body:
    """Collects the ops of one part."""

    whole: GraphModule
    origins: _Origins
    graph: Graph = field(default_factory=Graph)
    inputs: list[Node] = field(default_factory=list)
    outputs: dict[Node, Node] = field(default_factory=dict)
    _copies: dict[Node, Node] = field(default_factory=dict)

    def add(self, node: Node) -> None:
        """Adds an op."""
        self._copies[node] = self.graph.node_copy(node, self._copy)

    def give(self, node: Node) -> None:
        """Makes the result of an op an output of the part."""
        self.outputs[node] = self._copy(node)

    def _copy(self, node: Node) -> Node:
        """Returns this part's copy of a node of the step; values of other parts become inputs."""
        if node not in self._copies:
            base = self.origins.written(node)
            if base is not node:
                self._copies[node] = self._copy(base)
            elif node in self.origins.views:
                self.add(node)
            else:
                self.inputs.append(node)
                # torch.fx needs all placeholders before the first op.
                first_op = next(
                    (
                        copied
                        for copied in self.graph.nodes
                        if copied.op != "placeholder"
                    ),
                    None,
                )
                with (
                    nullcontext()
                    if first_op is None
                    else self.graph.inserting_before(first_op)
                ):
                    self._copies[node] = self.graph.placeholder(node.name)
                self._copies[node].meta = dict(node.meta)
        return self._copies[node]

    def build(self, numbers: dict[Node, int]) -> StepPart:
        """Builds the part, with the numbers of its inputs and outputs."""
        self.graph.output(list(self.outputs.values()))
        self.graph.lint()
        return StepPart(
            graph=GraphModule(self.whole, self.graph),
            examples=[node.meta["val"] for node in self.inputs],
            inputs=[numbers[node] for node in self.inputs],
            outputs=[numbers[node] for node in self.outputs],
        )
