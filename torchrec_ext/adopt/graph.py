"""ForwardGraph: a user's forward and loss as torch ops, traced by TorchDynamo, which guards what Python they have read.

Dynamo compares every Python value, hook, mode and module that the trace depended on before each call, and traces anew
where one has changed. Its graph names all tensors that the user's code reads: parameters, buffers, the batch, whatever
closures and globals hold. A parameter that look-ups alone read is a table.

traced_forward(): the user's function as Dynamo calls it.

untraceable(): Dynamo's errors in plain words, with the user's line.
"""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn
from torch.overrides import TorchFunctionMode

from torchrec_ext.adopt.checks import device_of, loss_and_output
from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.capture.captured import Reader
from torchrec_ext.capture.compiled import (
    SKIPPED,
    TRACERS,
    Backend,
    CompiledCall,
    real_inputs,
)
from torchrec_ext.capture.executors import depends_on_values
from torchrec_ext.observe.state_copy import random_state
from torchrec_ext.observe.user_lines import UNKNOWN, first_line, is_users_file

LossFunction = Callable[..., Any]

GRAPHS = 16  # states of the user's Python that are traced before those without a graph stay eager
_NUMBERS = itertools.count()
_WRITES = {operator.setitem, operator.iadd, operator.isub, operator.imul}
_ONE = (
    "input",
    "weight",
    "padding_idx",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "sparse",
)
_BAG = (
    "input",
    "weight",
    "offsets",
    "max_norm",
    "norm_type",
    "scale_grad_by_freq",
    "mode",
    "sparse",
    "per_sample_weights",
    "include_last_offset",
    "padding_idx",
)


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def the_loss(loss: Tensor) -> Tensor:
    """Marks the loss in a graph, whose outputs have no fixed order: what forward sets in Python is among them."""
    return loss.clone()


@torch.compiler.allow_in_graph  # type: ignore[untyped-decorator]
def the_mask(mask: Tensor) -> Tensor:
    """Marks a mask in a graph as constant, because its number of entries is one."""
    return mask.clone()


@torch.compiler.assume_constant_result  # type: ignore[untyped-decorator]
def _entries(mask: Tensor) -> int:
    """Counts the entries of a mask: Dynamo calls it with the values of its example."""
    return int(mask.sum())


class ConstantMasks(TorchFunctionMode):
    """Has masked_select be traced as index_select, whose size does not depend on values if the mask is a constant."""

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Calls ``func``, but for masked_select."""
        kwargs = kwargs or {}
        return (
            _selected(*args, **kwargs)
            if is_masked_select(func)
            else func(*args, **kwargs)
        )


def is_masked_select(func: Any) -> bool:
    """Whether a call of torch's selects by a mask."""
    return func is torch.masked_select or func is Tensor.masked_select


def _selected(input: Tensor, mask: Tensor) -> Tensor:  # noqa: A002
    shape = torch.broadcast_shapes(input.shape, mask.shape)  # type: ignore[no-untyped-call]
    # Of the dimensions that the mask has: along the others each slice of the input has
    # the same places.
    once = the_mask(mask).expand(shape[len(shape) - mask.dim() :]).flatten()
    places = torch.nonzero_static(once, size=_entries(once)).squeeze(1)
    return input.expand(shape).reshape(-1, len(once)).index_select(1, places).flatten()


def traced_forward(
    loss: LossFunction, backend: Backend, *, masks: bool
) -> Callable[..., tuple[Tensor, Any]]:
    """Returns the user's function of a batch, which Dynamo traces on its first call and guards on all others.

    Args:
        loss: takes a batch and returns the loss, (), or a tuple of the loss and a tree of tensors.
        backend: takes a graph and examples of its inputs, and returns what is called in place of the graph.
        masks: whether it selects by masks, see :class:`ConstantMasks`.
    """
    mode = ConstantMasks() if masks else nullcontext()

    def run(*batch: Any) -> tuple[Tensor, Any]:
        with mode:
            value, output = loss_and_output(loss(*batch))
        return the_loss(value), output

    traced = CompiledCall(run, backend, traces_gradients=False)

    def call(*batch: Any) -> Any:
        try:
            return traced(*batch)
        except Exception as error:
            if not type(error).__module__.startswith(TRACERS):
                raise
            inner = getattr(error, "inner_exception", None)
            if inner is not None:
                raise CannotAdopt(
                    f"{type(inner).__name__}: {first_line(inner)}"
                ) from error
            raise untraceable(error) from None

    return call


class OneGraphTooMany(CannotAdopt):
    """A call would need one more graph than are kept."""


def changed_between_calls() -> str:
    """Names the change since Dynamo's last graph that made it trace anew."""
    from torch._dynamo.utils import guard_failures

    line = UNKNOWN
    what = "a value"
    reasons = list(itertools.chain.from_iterable(guard_failures.values()))
    if reasons:
        line = _users_line(reasons[-1])
        guard = first_line(ValueError(reasons[-1])).partition(": ")[2]
        # The last name before a comparison: a key, an attribute or a string, of which
        # one group is not empty.
        names = re.findall(
            r"(?:\['(\w+)'\]|\.(\w+)|'(\w+)')\)? *(?:==|!=|is |in )",
            guard.partition("#")[0],
        )
        if names:
            what = f"'{''.join(names[-1])}'"
    return f"{line}: {what} changes from step to step; give it to the step as a tensor"


_VALUES = (
    "data-dependent",
    "data dependent",
    "tensor.item",
    "dynamic shape operator",
    "aten.nonzero",
    "unbacked",
    "dynamic output shape",
)
_REMEDY_OF_VALUES = "in place of .item(), if and boolean masks take torch.where, or a sum with weights of 0 and 1"


def untraceable(error: BaseException) -> CannotAdopt:
    """Returns what Dynamo could not trace in plain words, with the user's line."""
    text = str(error)
    line = _users_line(text)
    what = first_line(error)
    if "grad_scaler" in text.lower() or "gradscaler" in text.lower():
        return CannotAdopt(
            f"{line}: the loss is scaled by a GradScaler; return the loss itself, and compute in 16 bits by "
            "autocast=lambda: torch.autocast('cpu', torch.bfloat16)"
        )
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
            f"{line} reads a sparse matrix, not taken by torch.compile; its product is "
            "F.embedding_bag(columns, dense, row_starts, mode='sum', per_sample_weights=values)"
        )
    skipped = SKIPPED.search(text)
    if skipped:
        what = f"it leaves out {skipped[1]}()"
    return CannotAdopt(
        f"{line} cannot be traced by torch.compile ({what[:80]}); move it out of the loss and forward"
    )


def values_needed(line: str) -> str:
    """Says that a line of the user's depends on values, with the remedy."""
    remedy = _REMEDY_OF_VALUES
    if "torchrec/sparse/jagged_tensor.py" in line:
        # which reads how many ids each feature has
        remedy = "make the KeyedJaggedTensor with length_per_key=[...], the numbers of ids of its features"
    return f"{line} depends on values that a step computes; {remedy}"


def _users_line(text: str) -> str:
    """Returns the last of the user's lines in a text with lines of a traceback, as ``FILE:LINE (CODE)``."""
    frames = re.findall(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]*)', text)
    for file, number, code in reversed(frames):
        if is_users_file(file):
            return f"{file}:{number} ({code.strip()})"
    return UNKNOWN


def _line_of(node: fx.Node) -> str:
    """Returns the user's line that a node of a graph is from."""
    return _users_line(node.stack_trace or "")


class _IdRanges(NamedTuple):
    """Numbers of rows and names of the tables that ids are looked up in.

    Args:
        given: by the index of an input of the graph that is such ids.
        part: computes other ids from the inputs; None without any.
        computed: those of what ``part`` returns, in order.
    """

    given: dict[int, tuple[int, str]]
    part: fx.GraphModule | None
    computed: list[tuple[int, str]]


def _bad_id(ids: Tensor, rows: int, table: str) -> str:
    """Says which of some ids is outside of a table; empty if none is."""
    if not ids.numel():
        return ""
    least, most = torch.aminmax(ids)
    for number in (int(least), int(most)):
        if not 0 <= number < rows:
            return f"'{table}' has no row {number}: ids must be 0 to {rows - 1}; nothing was written by this step"
    return ""


class ForwardGraph:
    """One graph of Dynamo's, with the parts that its inputs play.

    Args:
        module: the graph.
        examples: Dynamo's examples of the inputs.
        model: the user's model.
        batch: leaves of the batch that the call was made with.
        trained: the parameters that optimizers move, by name.

    Attributes:
        number: number of the graph.
        parameters: index of each input that is a parameter which optimizers move, by its name.
        look_ups: the nodes that read a parameter, by its name, where nothing but look-ups does.
        matrices: the line that reads a looked-up parameter otherwise, by its name.
        penalties: names of the matrices that are only squared, or whose norm is taken, as in an L2 term.
        masks: the inputs of masks that must stay as they are, by their index: the line that selects, and the value.
        reached: names of the parameters that the loss depends on.
        outer: indices of the other inputs.
        of_batch: leaf of the batch by the index of an input.
        outputs: examples of the outputs.

    Raises:
        CannotAdopt: an input is no dense tensor, or needs a gradient.
    """

    def __init__(
        self,
        module: fx.GraphModule,
        examples: Sequence[Tensor],
        model: nn.Module,
        batch: Sequence[Any],
        trained: Mapping[str, nn.Parameter],
    ) -> None:
        self.number = next(_NUMBERS)
        self._module = module
        self._placeholders = [
            node for node in module.graph.nodes if node.op == "placeholder"
        ]
        real = real_inputs(module, examples)
        names = {id(parameter): name for name, parameter in trained.items()}
        leaves = {
            id(leaf): index
            for index, leaf in enumerate(batch)
            if isinstance(leaf, Tensor)
        }
        self.parameters: dict[str, int] = {}
        self.of_batch: dict[int, int] = {}
        for index, tensor in enumerate(real):
            # Each is known by its identity: a graph's inputs have names of Dynamo's
            # own.
            if id(tensor) in names:
                self.parameters[names[id(tensor)]] = index
                continue
            if id(tensor) in leaves:
                self.of_batch[index] = leaves[id(tensor)]
            self._check(index, tensor, model)
        self._refuse_constants()
        self._loss = next(iter(self._calls(the_loss)), None)
        self.look_ups: dict[str, list[fx.Node]] = {}
        self.matrices: dict[str, str] = {}
        self.penalties: set[str] = set()
        tables = {
            id(each.weight)
            for each in model.modules()
            if isinstance(each, nn.Embedding | nn.EmbeddingBag)
        }
        for name, index in self.parameters.items():
            self._look_at_readers(
                name, self._placeholders[index], id(trained[name]) in tables
            )
        self.masks: dict[int, tuple[str, Tensor]] = {}
        # The inputs that decide how many entries a mask has must stay as they are.
        changing = {
            self._placeholders[index]
            for index in (*self.of_batch, *self.parameters.values())
        }
        for mask in self._calls(the_mask):
            line = _line_of(mask)
            before = _ancestors(mask)
            if changing & before or self._draws(before, real):
                raise CannotAdopt(values_needed(line))
            for index, node in enumerate(self._placeholders):
                if node in before:
                    self.masks[index] = line, real[index].detach().clone()
        self._id_ranges = self._ids_to_check(real, model)
        self.reached = self._reached(real)
        # A parameter that the loss does not reach is not updated: it is read where it
        # is, as a buffer is.
        self.parameters = {
            name: index
            for name, index in self.parameters.items()
            if name in self.reached
        }
        results: Any = module.graph.output_node().args[0]
        not_outer = {*self.parameters.values(), *self.of_batch}
        self.outer = [index for index in range(len(real)) if index not in not_outer]
        self.outputs: list[Tensor] = [node.meta["example_value"] for node in results]

    def _calls(self, function: Any) -> list[Any]:
        """Returns the nodes of the graph that call a function."""
        return [node for node in self._module.graph.nodes if node.target is function]

    def _check(self, index: int, tensor: Any, model: nn.Module) -> None:
        """Refuses an input that is no trained parameter and that a captured step cannot take."""
        device = device_of(model)
        leaf = self.of_batch.get(index)
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
        if leaf is not None:
            raise CannotAdopt(
                "a tensor of the batch requires a gradient, which a captured step does not give; detach it"
            )
        # A parameter of the model that no optimizer moves needs no gradient here.
        if not any(tensor is parameter for parameter in model.parameters()):
            line = _line_of(next(iter(self._placeholders[index].users)))
            raise CannotAdopt(
                f"{line} reads a tensor of shape {tuple(tensor.shape)} that requires a gradient and is not the "
                "model's; put all modules of the loss into one: adopt(nn.ModuleList([model, other]), ...)"
            )

    def _refuse_constants(self) -> None:
        # Its value would be that of the trace in each step.
        for node in self._module.graph.nodes:
            if node.op == "get_attr":
                raise CannotAdopt(
                    f"{_line_of(node)} reads a tensor as a constant; make it a buffer of the model"
                )

    def _look_at_readers(self, name: str, parameter: fx.Node, is_table: bool) -> None:
        """Notes the look-ups of a parameter, and of a table the line that reads it otherwise."""
        # A table with one other reader is updated whole, and the user is told which
        # line it is.
        readers = list(parameter.users)
        others = [node for node in readers if not _is_look_up(node, parameter)]
        if readers and not others:
            self.look_ups[name] = readers
        elif others and (is_table or len(others) < len(readers)):
            self.matrices[name] = _line_of(others[0])
            if all(_is_penalty(node, parameter) for node in others):
                self.penalties.add(name)

    def _needs_the_step(self, nodes: Collection[fx.Node], real: Sequence[Any]) -> bool:
        """Whether some nodes cannot be computed before the step, once more, with the same result."""
        refused = {self._placeholders[index] for index in self.parameters.values()}
        for node in nodes:
            # Methods such as add_ write in place; names of placeholders may end like
            # that too.
            if node.op != "placeholder" and (
                node.target in _WRITES or str(node.target).endswith("_")
            ):
                refused.add(node)
        return bool(refused.intersection(nodes)) or self._draws(nodes, real)

    def _part(self, results: Sequence[Any]) -> fx.GraphModule:
        """Returns the part of the graph that computes some nodes from its inputs."""
        nodes = {*results}.union(*map(_ancestors, results))
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self._module.graph.nodes:
            if node.op == "placeholder" or node in nodes:
                copies[node] = graph.node_copy(node, copies.__getitem__)
        graph.output(tuple(copies[node] for node in results))
        return fx.GraphModule(self._module, graph)

    def _ids_to_check(self, real: Sequence[Any], model: nn.Module) -> _IdRanges:
        """Returns the ids of look-ups that are known before a step, and what they may be."""
        names = {id(each): name for name, each in model.named_parameters()}
        # Of two tables that are read by the same ids, the shorter one counts.
        ranges: dict[fx.Node, tuple[int, str]] = {}
        for node in self._module.graph.nodes:
            if node.target not in (F.embedding, F.embedding_bag):
                continue
            arguments = _arguments(node, node.args, node.kwargs)
            ids = arguments["input"]
            if arguments["weight"] not in self._placeholders:
                continue
            table = real[self._placeholders.index(arguments["weight"])]
            known = (len(table), names.get(id(table)) or _line_of(node))
            ranges[ids] = min(known, ranges.get(ids, known))
        given = {}
        computed = {}
        for ids, known in ranges.items():
            if ids in self._placeholders:
                given[self._placeholders.index(ids)] = known
            elif not self._needs_the_step({ids, *_ancestors(ids)}, real):
                computed[ids] = known
        part = self._part(list(computed)) if computed else None
        return _IdRanges(given, part, list(computed.values()))

    def bad_id(self, tensors: Sequence[Tensor]) -> str:
        """Names an id that is outside of its table; empty without one.

        A captured step would find it half way, with weights written. Ids that weights or random numbers decide are
        known to the step alone.
        """
        given, part, computed = self._id_ranges
        for index, known in given.items():
            if bad := _bad_id(tensors[index], *known):
                return bad
        if part is not None:
            for ids, known in zip(part(*tensors), computed, strict=True):
                if bad := _bad_id(ids, *known):
                    return bad
        return ""

    def _draws(self, nodes: Collection[fx.Node], real: Sequence[Any]) -> bool:
        """Whether some nodes of the graph draw random numbers."""
        runner = fx.Interpreter(self._module)
        device = real[0].device
        runner.env = dict(zip(self._placeholders, real, strict=True))
        with torch._guards.tracing(None), torch.no_grad(), torch.random.fork_rng():
            before = random_state(device)
            for node in self._module.graph.nodes:
                if node in nodes and node.op != "placeholder":
                    runner.env[node] = runner.run_node(node)
            return not torch.equal(before, random_state(device))

    def _reached(self, real: Sequence[Tensor]) -> set[str]:
        """Returns the names of the parameters on which the loss depends, by a backward without values."""
        from torch._subclasses.fake_tensor import FakeTensorMode

        mode = FakeTensorMode(allow_non_fake_inputs=True)
        # Outside of Dynamo's trace, whose own fake tensors would be mixed with these.
        with torch._guards.tracing(None), mode, torch.enable_grad():
            copies = [
                mode.from_tensor(tensor.detach(), static_shapes=True) for tensor in real
            ]
            leaves = {
                name: copies[index].requires_grad_()
                for name, index in self.parameters.items()
            }
            loss, outputs = self.run(copies, {})
            if self._loss is not None:
                outputs = [loss]
            roots = [each for each in outputs if each.requires_grad]
            if not roots or not leaves:
                return set()
            seeds = [torch.ones_like(root) for root in roots]
            grads = torch.autograd.grad(
                roots, list(leaves.values()), seeds, allow_unused=True
            )
        return {
            name for name, grad in zip(leaves, grads, strict=True) if grad is not None
        }

    def run(
        self,
        tensors: Sequence[Any],
        reading: Mapping[str, Reader],
        repeated: Any = None,
    ) -> tuple[Tensor, list[Any]]:
        """Runs the graph.

        Args:
            tensors: inputs of the graph; the weight of a table gives its shape alone.
            reading: the tables by name, through which look-ups read their rows.
            repeated: see :class:`~torchrec_ext.adopt.source.RepeatedRows`; None where no row of the batch repeats.

        Returns:
            The loss, (), of a graph that has one, and the graph's outputs.
        """
        tables: dict[fx.Node, str] = {}
        for name, nodes in self.look_ups.items():
            if name in reading:
                tables |= dict.fromkeys(nodes, name)
        runner = _Runner(self._module, tables, reading, repeated)
        outputs = runner.run(*tensors, enable_io_processing=False)
        loss = outputs[0] if self._loss is None else runner.env[self._loss]
        return loss, list(outputs)


def _arguments(
    node: fx.Node, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> dict[str, Any]:
    names = _ONE if node.target is F.embedding else _BAG
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _is_look_up(node: fx.Node, parameter: fx.Node) -> bool:
    if node.target not in (F.embedding, F.embedding_bag):
        return False
    arguments = _arguments(node, node.args, node.kwargs)
    # A parameter may also be read as ids, or as the weights of a bag.
    if arguments["weight"] is not parameter or arguments["input"] is parameter:
        return False
    if arguments.get("max_norm") is not None or arguments.get("scale_grad_by_freq"):
        line = _line_of(node)
        raise CannotAdopt(
            f"{line} looks up with max_norm or scale_grad_by_freq, which have no captured form; leave them out"
        )
    return bool(arguments.get("mode", "mean") != "max")


def _ancestors(node: fx.Node) -> set[fx.Node]:
    """Returns all nodes that a node depends on."""
    ancestors = set[fx.Node]()
    nodes = [node]
    while nodes:
        new = set(nodes.pop().all_input_nodes) - ancestors
        ancestors |= new
        nodes += new
    return ancestors


def _is_penalty(node: fx.Node, parameter: fx.Node) -> bool:
    """Whether a node squares a parameter or takes its norm, as an L2 term of a loss does."""
    # A method is called by its name, a function by itself.
    name = str(getattr(node.target, "__name__", node.target))
    rest = [*node.args[1:], *node.kwargs.values()]
    if name == "mul":
        return rest == [parameter]
    return name.removeprefix("linalg_") in (
        "pow",
        "square",
        "norm",
        "vector_norm",
    ) and rest in ([], [2], ["fro"])


class _Runner(fx.Interpreter):
    """Runs a graph with tables in place of some parameters; values stay in ``env``."""

    def __init__(
        self,
        module: fx.GraphModule,
        tables: Mapping[fx.Node, str],
        reading: Mapping[str, Reader],
        repeated: Any,
    ) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.extra_traceback = False  # it would add lines to a message
        self._tables = tables
        self._reading = reading
        self._repeated = repeated

    def run_node(self, n: fx.Node) -> Any:
        """Runs one call of torch, or reads rows of a table.

        Raises:
            CannotAdopt: the call depends on values that a step computes.
        """
        from torch._subclasses.fake_tensor import (
            DataDependentOutputException,
            DynamicOutputShapeException,
        )
        from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

        try:
            if n in self._tables:
                args, kwargs = self.fetch_args_kwargs_from_env(n)
                table = self._reading[self._tables[n]]
                is_bag = n.target is F.embedding_bag
                result = look_up(
                    table, _arguments(n, args, kwargs), is_bag, self._repeated
                )
            else:
                result = super().run_node(n)
        except (
            DataDependentOutputException,
            DynamicOutputShapeException,
            GuardOnDataDependentSymNode,
        ):
            raise CannotAdopt(values_needed(_line_of(n))) from None
        if n.op.startswith("call") and depends_on_values(result):
            raise CannotAdopt(values_needed(_line_of(n)))
        return result


def look_up(
    table: Reader, arguments: Mapping[str, Any], is_bag: bool, repeated: Any
) -> Tensor:
    """Computes F.embedding or F.embedding_bag on rows read from a step's table.

    Args:
        table: the table inside the step.
        arguments: arguments of the call by name.
        is_bag: whether it is F.embedding_bag.
        repeated: knows which ids repeat, see :class:`~torchrec_ext.adopt.source.RepeatedRows`; or None.
    """
    ids = arguments["input"]
    weight = arguments["weight"]
    padding = arguments.get("padding_idx")
    offsets = arguments.get("offsets")
    weights = arguments.get("per_sample_weights")
    repeats = 1
    # Lists and weights of bags are not known to repeat with their ids.
    if repeated is not None and offsets is None and weights is None:
        repeats = repeated.repeats_of(ids)
    once = ids if repeats == 1 else ids.view(-1, repeats, *ids.shape[1:])[:, 0]
    rows, dim = weight.shape
    # A negative id would be read from the end; this one is out of range.
    flat = torch.where(once < 0, rows, once).reshape(-1).long()
    vectors = table.read(flat)
    # The row of the padding is read but never trained, as by torch.
    if padding is not None:
        vectors = torch.where((flat == padding)[:, None], vectors.detach(), vectors)
    vectors = vectors.reshape([*once.shape, dim])
    if is_bag:
        mode = arguments.get("mode", "mean")
        if offsets is None:
            vectors = _pooled(vectors, once, mode, padding, weights)
        else:
            last = bool(arguments.get("include_last_offset", False))
            vectors = _pooled_lists(
                vectors, once, offsets, mode, padding, weights, last
            )
    return vectors if repeats == 1 else repeated.repeat(vectors, repeats)


def _pooled(
    vectors: Tensor, ids: Tensor, mode: str, padding: int | None, weights: Tensor | None
) -> Tensor:
    """Returns the bags (B, D) of the vectors (B, L, D) of the ids (B, L)."""
    if weights is not None:
        vectors = vectors * weights[..., None]
    if padding is None:
        return vectors.mean(1) if mode == "mean" else vectors.sum(1)
    # Padding takes no part in a bag, also not in the number by which a mean divides.
    counts = ids != padding
    pooled = (vectors * counts[..., None]).sum(1)
    if mode == "mean":
        pooled = pooled / counts.sum(1).clamp(min=1)[:, None]
    return pooled


def _pooled_lists(
    vectors: Tensor,
    ids: Tensor,
    offsets: Tensor,
    mode: str,
    padding: int | None,
    weights: Tensor | None,
    last: bool,
) -> Tensor:
    """Returns the bags (B, D) of the vectors (N, D) of the ids (N,), where each bag begins at one of the offsets."""

    def bags(rows: Tensor, mode: str, of_each: Tensor | None = None) -> Tensor:
        places = torch.arange(len(rows), device=rows.device)
        return F.embedding_bag(
            places,
            rows,
            offsets.long(),
            mode=mode,
            per_sample_weights=of_each,
            include_last_offset=last,
        )

    if padding is None:
        return bags(vectors, mode, weights)
    counts = (ids != padding).to(vectors.dtype)[:, None]
    pooled = bags(vectors * counts, "sum", weights)
    if mode == "mean":
        pooled = pooled / bags(counts, "sum").clamp(min=1)
    return pooled
