"""StepGraph: a whole step of a user's model as Dynamo traced it, with the parts that its inputs play.

Dynamo compares every Python value, hook, mode and module that the trace depended on before each call, and traces anew
where one has changed. Its graph names all tensors that the step reads: parameters, buffers, the batch, whatever
closures and globals hold, and the memory of the step.

untraceable(): Dynamo's errors in plain words, with the user's line.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from torchrec_ext.adopt.checks import device_of
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.adopt.reads import the_ids, the_loss
from torchrec_ext.capture.compiled import SKIPPED, real_inputs
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.executors import depends_on_values
from torchrec_ext.capture.step import trained
from torchrec_ext.observe.user_lines import (
    UNKNOWN,
    first_line,
    is_users_file,
    with_text,
)

LossFunction = Callable[..., Any]

# States of the user's Python that are traced before all steps stay eager.
MOST_STATES = 16
_NUMBERS = itertools.count()
_WRITES = (operator.setitem, operator.iadd, operator.isub, operator.imul)


class OtherMemory(CannotCaptureError):  # noqa: N818 - no error: the step is traced again with another memory
    """A graph needs another memory.

    Args:
        unreached: names of parameters that the loss does not depend on.
        read: names of parameters that it reads and that have no memory.
        matrices: the line that reads a late table otherwise than by look-ups, by its name.
    """

    def __init__(
        self,
        *,
        unreached: Collection[str] = (),
        read: Collection[str] = (),
        matrices: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__("another memory")
        self.unreached = set(unreached)
        self.read = set(read)
        self.matrices = dict(matrices or {})


def changed_between_calls() -> str:
    """Names the change since Dynamo's last graph that made it trace anew."""
    from torch._dynamo.utils import guard_failures

    reasons = list(itertools.chain.from_iterable(guard_failures.values()))
    line = _users_line(reasons[-1]) if reasons else UNKNOWN
    return f"{line}: a value changes from step to step; give it to the step as a tensor"


_STEP = trained.__code__.co_filename
_VALUES = (
    "data-dependent",
    "data dependent",
    "tensor.item",
    "dynamic shape operator",
    "aten.nonzero",
    "unbacked",
    "dynamic output shape",
)
_BUILTIN = re.compile(r"trace the builtin `(?:<unknown module>\.)?([^`]+?)\.?`")
_RAISED = re.compile(r"raised exception (\w+\(.*\))")


def untraceable(error: BaseException) -> CannotAdopt:
    """Returns what Dynamo could not trace in plain words, with the user's line."""
    text = str(error)
    line = _users_line(text)
    what = first_line(error)
    missing = re.search(r"ModuleNotFoundError: No module named '([^']*)'", text)
    if missing:
        return CannotAdopt(
            f"the user's module '{missing[1]}' is not in sys.modules, so torch.compile cannot find its globals; run "
            "the script as python SCRIPT, or import it"
        )
    if any(word in text.lower() for word in _VALUES):
        return CannotAdopt(values_needed(line))
    if "sparse tensor" in text.lower():
        return CannotAdopt(
            f"{line} reads a sparse matrix; take F.embedding_bag(columns, dense, row_ptr, mode='sum', "
            "per_sample_weights=values)"
        )
    skipped = SKIPPED.search(text) or _BUILTIN.search(text)
    raised = _RAISED.search(text)
    if skipped:
        what = f"it leaves out {skipped[1]}()"
    elif raised:
        what = f"in its trace it raises {raised[1]}"
    return CannotAdopt(
        f"{line} cannot be traced by torch.compile ({what[:49]}); take it out of the step"
    )


def values_needed(line: str) -> str:
    """Says that a line of the user's depends on values, with the remedy."""
    cause = "depends on values that a step computes (.item(), if, masks)"
    remedy = "take torch.where, or weights of 0 and 1"
    if "torchrec/sparse/jagged_tensor.py" in line:
        # which reads how many ids each feature has
        cause = "depends on values"
        remedy = "make the KeyedJaggedTensor with length_per_key=[...], the numbers of ids of its features"
    return f"{line} {cause}; {remedy}"


def _users_line(text: str) -> str:
    """Returns the last of the user's lines in a text with lines of a traceback, as ``FILE:LINE (CODE)``."""
    for file, number in reversed(re.findall(r'File "([^"]+)", line (\d+), in ', text)):
        if is_users_file(file):
            return with_text(f"{file}:{number}")
    return UNKNOWN


def _line_of(node: fx.Node) -> str:
    """Returns the user's line that a node of a graph is from."""
    return _users_line(node.stack_trace or "")


def bad_id(ids: Tensor, rows: int, table: str) -> str:
    """Names an id outside of a table; empty if there is none."""
    if not ids.numel():
        return ""
    least, most = torch.aminmax(ids)
    for number in (int(least), int(most)):
        if not 0 <= number < rows:
            return f"'{table}' has no row {number}: ids must be 0 to {rows - 1}; nothing was written by this step"
    return ""


class StepGraph:
    """One graph of Dynamo's.

    Args:
        module: the graph.
        examples: Dynamo's examples of the inputs.
        model: the user's model.
        batch: leaves of the batch that the call was made with.
        trained: the parameters that optimizers move, by name.
        updated: names of those that the step updates.
        late: names of those that it updates row by row.
        memory: other tensors of the step.

    Attributes:
        number: number of the graph.
        module: the graph.
        parameters: index of each input that is a parameter which the step updates, by its name.
        outer: indices of inputs that are neither updated parameters, nor of the batch, nor of the memory.
        of_batch: indices of inputs that are leaves of the batch.
        loss: index of the loss among the outputs.

    Raises:
        CannotAdopt: an input is no dense tensor, or needs a gradient.
        OtherMemory: it needs another memory.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        examples: Sequence[Tensor],
        *,
        model: nn.Module,
        batch: Sequence[Any],
        trained: Mapping[str, nn.Parameter],
        updated: Collection[str],
        late: Collection[str],
        memory: Sequence[Tensor],
    ) -> None:
        self.number = next(_NUMBERS)
        self.module = module
        nodes = list(module.graph.nodes)
        self._placeholders = [node for node in nodes if node.op == "placeholder"]
        real = real_inputs(module, examples)
        names = {id(parameter): name for name, parameter in trained.items()}
        leaves = {id(leaf) for leaf in batch if isinstance(leaf, Tensor)}
        of_step = set(map(id, memory))
        self.parameters: dict[str, int] = {}
        self.of_batch: list[int] = []
        self.outer: list[int] = []
        read = set()
        for index, tensor in enumerate(real):
            # Each is known by its identity: a graph's inputs have names of Dynamo's
            # own.
            if id(tensor) in names:
                name = names[id(tensor)]
                if name in updated:
                    self.parameters[name] = index
                    continue
                read.add(name)
            if id(tensor) in of_step:
                continue
            if id(tensor) in leaves:
                self.of_batch.append(index)
            else:
                self.outer.append(index)
            self._check(index, tensor, model)
        gradient = [node for node in nodes if node.target is torch.autograd.grad][-1]
        self._forward = nodes[: nodes.index(gradient)]
        for node in self._forward:
            self._refuse(node)
        unreached = self._unreached(gradient, updated)
        if read or unreached:
            raise OtherMemory(unreached=unreached, read=read)
        matrices = self._matrices(late)
        if matrices:
            raise OtherMemory(matrices=matrices)
        ranges = self._ids_to_check(real, model)
        self._ids = self._part(list(ranges)).forward
        self._ranges = list(ranges.values())
        self.loss = self._place_of_loss()

    def _calls(self, function: Any) -> list[Any]:
        """Returns the nodes of the graph that call a function."""
        return [node for node in self.module.graph.nodes if node.target is function]

    def _check(self, index: int, tensor: Any, model: nn.Module) -> None:
        """Refuses an input of the graph, no trained parameter, for which a captured step has no place."""
        device = device_of(model)
        if not isinstance(tensor, Tensor):
            raise CannotAdopt(
                f"forward reads a {type(tensor).__name__} that changes; give it as a tensor"
            )
        if tensor.device != device or tensor.layout is not torch.strided:
            raise CannotAdopt(
                f"the step reads a tensor on {tensor.device} of layout {tensor.layout}; give dense ones on {device}"
            )
        if not tensor.requires_grad:
            return
        if index in self.of_batch:
            raise CannotAdopt(
                "a tensor of the batch requires a gradient, which a captured step does not give; detach it"
            )
        # A parameter of the model that no optimizer moves needs no gradient here.
        if not any(tensor is parameter for parameter in model.parameters()):
            line = _line_of(next(iter(self._placeholders[index].users)))
            raise CannotAdopt(
                f"{line} reads a tensor that requires a gradient and is not the model's; make it the model's parameter"
            )

    def _refuse(self, node: fx.Node) -> None:
        """Refuses a node that a captured step would not compute as the user's own."""
        if node.op == "get_attr":
            self._refuse_part(node)
        if node.target in (F.embedding, F.embedding_bag) and (
            node.kwargs.get("max_norm") is not None
            or node.kwargs.get("scale_grad_by_freq")
        ):
            raise CannotAdopt(
                f"{_line_of(node)} looks up with max_norm or scale_grad_by_freq, which have no captured form; leave "
                "them out"
            )
        value = node.meta.get("example_value")
        if node.op.startswith("call") and depends_on_values(value):
            raise CannotAdopt(values_needed(_line_of(node)))

    def _refuse_part(self, node: fx.Node) -> None:
        """Refuses what a graph holds, but for forward and backward of an autograd.Function."""
        part = getattr(node.graph.owning_module, str(node.target))
        if isinstance(part, Tensor):
            # Its value would be that of the trace in each step.
            raise CannotAdopt(
                f"{_line_of(node)} reads a tensor as a constant; make it a buffer of the model"
            )
        if {str(user.target) for user in node.users} != {"autograd_function_apply"}:
            raise CannotAdopt(
                f"{_line_of(node)} gives torch a function to call, as a hook or a checkpoint; call it yourself, or "
                "take an autograd.Function"
            )
        for each in part.graph.nodes:
            self._refuse(each)

    def _unreached(self, gradient: fx.Node, updated: Collection[str]) -> set[str]:
        """Returns the names of the parameters without a gradient; those of late tables have a leaf for each look-up."""
        values = gradient.meta["example_value"]
        reached = set()
        leaves: Any = gradient.args[1]
        for leaf, value in zip(leaves, values, strict=True):
            if value is None:
                continue
            reached |= {leaf, *_ancestors(leaf)}
        return {
            name
            for name in updated
            if name not in self.parameters
            or self._placeholders[self.parameters[name]] not in reached
        }

    def _matrices(self, late: Collection[str]) -> dict[str, str]:
        """Returns the line that reads a late table otherwise than by look-ups, by its name."""
        matrices = {}
        for name in late:
            for node in self._placeholders[self.parameters[name]].users:
                frames = re.findall(r'File "([^"]+)"', node.stack_trace or "")
                # the_ids() names the table, and trained() detaches it.
                is_own = node.target is the_ids or frames[-1:] == [_STEP]
                if not is_own and node in self._forward:
                    matrices[name] = _line_of(node)
        return matrices

    def _place_of_loss(self) -> int:
        (marked,) = self._calls(the_loss)
        results: Any = self.module.graph.output_node().args[0]
        for index, node in enumerate(results):
            if node is marked or marked in getattr(node, "all_input_nodes", ()):
                return index
        raise AssertionError("the loss is no output")

    def _needs_the_step(self, nodes: Collection[fx.Node]) -> bool:
        """Whether some nodes cannot be computed before the step, once more, with the same result."""
        weights = {self._placeholders[index] for index in self.parameters.values()}
        for node in nodes:
            # Methods such as add_ write in place; names of placeholders may end like
            # that too.
            writes = node.target in _WRITES or str(node.target).endswith("_")
            if node in weights or (writes and node.op != "placeholder"):
                return True
        return False

    def _part(self, results: Sequence[Any]) -> fx.GraphModule:
        """Returns the part of the graph that computes some nodes from its inputs."""
        nodes = {*results}.union(*map(_ancestors, results))
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.module.graph.nodes:
            if node.op == "placeholder" or node in nodes:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in results))
        return fx.GraphModule(self.module, graph)

    def _ids_to_check(
        self, real: Sequence[Any], model: nn.Module
    ) -> dict[fx.Node, tuple[int, str]]:
        """Returns ids of look-ups that are known before a step, with the number of rows and the name of their table."""
        names = {id(each): name for name, each in model.named_parameters()}
        ranges: dict[fx.Node, tuple[int, str]] = {}
        for node in self._calls(the_ids):
            ids, weight = node.args
            is_known = not self._needs_the_step({ids, *_ancestors(ids)})
            if weight in self._placeholders and is_known:
                table = real[self._placeholders.index(weight)]
                known = (len(table), names.get(id(table)) or _line_of(node))
                # Of two tables that are read by the same ids, the shorter one counts.
                ranges[ids] = min(known, ranges.get(ids, known))
        return ranges

    def bad_id(self, tensors: Sequence[Tensor]) -> str:
        """Names an id that is outside of its table; empty without one.

        A captured step would find it half way, with weights written. Ids that weights decide are known to the step
        alone; random numbers on which ids depend are drawn here too.
        """
        for ids, known in zip(self._ids(*tensors), self._ranges, strict=True):
            if bad := bad_id(ids, *known):
                return bad
        return ""


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """Returns all nodes that a node depends on."""
    ancestors = set[fx.Node]()
    nodes = [node]
    while nodes:
        new = set(nodes.pop().all_input_nodes) - ancestors
        ancestors |= new
        nodes += new
    return ancestors
