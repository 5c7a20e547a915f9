"""TracedModel: splits a user's module into two towers and an interaction, by following each column's influence.

torch.export records forward as a graph of torch's operators. Operators on columns of the catalogue alone form the
candidate tower. Operators on columns of the queries alone form the query tower. The rest is the interaction, which runs
for each pair. All three are written as programs, so that a bundle needs none of the user's code.
"""

from __future__ import annotations

import inspect
import operator
import re
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import torch
import torchrec
from torch import Tensor, nn
from torch.export import Dim, ExportedProgram
from torch.fx import Node
from torchrec.modules.embedding_configs import EmbeddingBagConfig

from torchrec_ext.batch import TowerBatch
from torchrec_ext.data.preprocess.columns import raw_type
from torchrec_ext.modules.interaction import DotProduct, InteractionLayer, TopMLP
from torchrec_ext.modules.layers import Made, how_made
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.bundle.operators import OPERATORS, PLACES
from torchrec_ext.retrieval.bundle.program import EXACT_IDS, ProgramTop, ProgramTower
from torchrec_ext.retrieval.bundle.request_columns import with_oov_row
from torchrec_ext.retrieval.bundle.tables import even_rows
from torchrec_ext.schema import BatchSchema
from torchrec_ext.schema.array_columns import source_columns
from torchrec_ext.schema.validation import listed

Modules = str | Sequence[str]
_ROWS = 64  # rows of the traced example, from both tables evenly
_CHECKED_ROWS = 4  # rows to compute again, each in a small batch
_SAME = 1e-5  # of the greatest logit: sums may run in another order
_LIBRARIES = tuple(
    str(Path(str(module.__file__)).parent) for module in (torch, torchrec)
)
_SHAPES = (
    "view",
    "reshape",
    "squeeze",
    "unsqueeze",
    "flatten",
    "contiguous",
    "to",
    "_to_copy",
    "select",
    "slice",
)
_MULTILINEAR = {
    *_SHAPES,
    "mul",
    "sum",
    "bmm",
    "matmul",
    "transpose",
    "permute",
    "t",
    "einsum",
    "detach",
    "expand",
    "div",
}
_SIZES = {
    operator.add: "size_add",
    operator.sub: "size_sub",
    operator.mul: "size_mul",
    operator.floordiv: "size_div",
}
_ACTIVATIONS = {
    "relu.default": "relu",
    "gelu.default": "gelu",
    "silu.default": "silu",
    "tanh.default": "tanh",
    "leaky_relu.default": "leaky_relu",
}


class TracedModel(nn.Module):
    """A user's module as a query tower, a candidate tower and an interaction, together equal to its forward.

    Args:
        model: module with a forward from tensors by column name, or from one dict of them, to logits (B,) or (B, 1).
        towers: query tower, then candidate tower: name and the paths of its modules in ``model``.
        queries: rows of raw columns of the queries.
        catalogue: rows of raw columns of the candidates.
        oov_ids: row that ids outside of a column's table read, by column.

    Raises:
        BundleError: forward cannot be traced or split; the message names the module, the line and the remedy.
        DataError: an id is outside of its table, and its column has no out-of-vocabulary row.
    """

    def __init__(
        self,
        model: nn.Module,
        towers: Mapping[str, Modules],
        *,
        queries: pa.Table,
        catalogue: pa.Table,
        oov_ids: Mapping[str, int],
    ) -> None:
        super().__init__()
        # Brings lagging rows of an adopted step up to date, or raises with a remedy.
        model.state_dict()
        paths = _paths(model, towers)
        self._call, columns = _inputs(model, queries, catalogue)
        # Not a submodule: the programs hold its weights, which must not be exported
        # twice.
        self.__dict__["_model"] = model
        with torch.no_grad():
            split = _Split(_trace(model, self._call, columns), columns, list(towers))
            split.check(paths)
            programs = split.towers()
            self.interaction, scale = _interaction_of(split)
        if scale != 1:
            programs[0].scale(scale)
        self.towers = nn.ModuleDict()
        self.made_of: dict[str, Made] = {}
        self._tables: list[EmbeddingBagConfig] = []
        self._dense: list[str] = []
        for name, program in zip(towers, programs, strict=True):
            tower = program.tower(model)
            self.towers[name] = tower
            self.made_of[name] = how_made(tower)
            self._tables += tower.tables
            self._dense += tower.dense
        self.eval().requires_grad_(False)
        # The model itself is checked, so its ids must be rows: unknown ones are
        # replaced as in a request.
        example = {name: column.values for name, column in columns.items()}
        oov_rows = {name: row for name, row in oov_ids.items() if row >= 0}
        for feature in BatchSchema.from_tables(self._tables, oov_ids=oov_rows).sparse:
            ids = with_oov_row(
                feature,
                example[feature.name].numpy(),
                strict=feature.name not in oov_rows,
            )
            example[feature.name] = torch.from_numpy(ids)
        self._check_rows(example)

    def schema(self) -> BatchSchema:
        """Returns the schema of the batches for :meth:`logits`."""
        return BatchSchema.from_tables(self._tables, dense=self._dense)

    @property
    def features(self) -> list[str]:
        """Columns of ids with a table."""
        names: list[str] = []
        for table in self._tables:
            names += table.feature_names
        return list(dict.fromkeys(names))

    def read_columns(self, table: pa.Table) -> pa.Table:
        """Selects the columns that the towers read."""
        schema = self.schema()
        names = {*schema.keys, *source_columns(schema.dense, table.column_names)}
        return table.select([name for name in table.column_names if name in names])

    @torch.no_grad()
    def logits(self, batch: TowerBatch) -> Tensor:
        """Returns (B,) logits of the user's forward."""
        columns: dict[str, Tensor] = {}
        start = 0
        for tower in self.towers.values():
            width = len(tower.dense)  # type: ignore[arg-type]
            columns |= tower.columns_of(
                batch.sparse, batch.dense[:, start : start + width]
            )  # type: ignore[operator]
            start += width
        return self._model_logits(columns)

    def _model_logits(self, columns: Mapping[str, Tensor]) -> Tensor:
        model: Any = self._model
        return _call_model(model, self._call, columns).reshape(-1).float()  # type: ignore[no-any-return]

    @torch.no_grad()
    def _check_rows(self, columns: Mapping[str, Tensor]) -> None:
        """Refuses a forward if the logit of a row depends on other rows of its batch."""
        try:
            logits = self._model_logits(columns)
        except IndexError as error:
            raise BundleError(
                f"model: forward raises '{error}': an id that it computes is no row of its table; give queries and a "
                "catalogue whose ids the tables have"
            ) from None
        for row in np.unique(even_rows(len(logits), _CHECKED_ROWS)).tolist():
            # Three rows instead of one, because squeeze() and the like treat a batch of
            # one differently.
            among = [number % len(logits) for number in range(row, row + 3)]
            alone = self._model_logits(
                {name: values[among] for name, values in columns.items()}
            )[0]
            allowed = _SAME * max(1.0, float(logits.abs().max()))
            if not abs(float(alone - logits[row])) <= allowed:
                raise BundleError(
                    f"model: forward's logit of row {row} is {float(logits[row]):.6g} among {len(logits)} "
                    f"rows and {float(alone):.6g} among 3: it depends on other rows; compute it from its own "
                    "columns"
                )


def _paths(model: nn.Module, towers: Mapping[str, Modules]) -> dict[str, list[str]]:
    """Checks and returns the paths of each tower's modules."""
    module_paths = [path for path, _ in model.named_modules() if path]
    if len(towers) != 2:
        raise BundleError(
            f"towers={dict(towers)!r}: {len(towers)} names; give two, of what reads the queries and of what reads the "
            "candidates, each with the path of its module, or of several"
        )
    paths = {}
    for name, modules in towers.items():
        paths[name] = [modules] if isinstance(modules, str) else list(modules)
        if not name.isidentifier() or not paths[name]:
            raise BundleError(
                f"towers={dict(towers)!r}: '{name}' must be a word, and have a module's path"
            )
        for path in paths[name]:
            if path not in module_paths:
                raise BundleError(
                    f"towers: {name}={path!r} is no module of {type(model).__name__}: {listed(module_paths)}"
                )
    return paths


class _Column(NamedTuple):
    values: Tensor
    candidate: bool


def _inputs(
    model: nn.Module, queries: pa.Table, catalogue: pa.Table
) -> tuple[str, dict[str, _Column]]:
    """Returns the name of forward's dict argument (empty if it takes columns by name), and the example's columns."""
    both = sorted(set(queries.column_names) & set(catalogue.column_names))
    if both:
        raise BundleError(
            f"columns {both}: are columns of queries and of the catalogue; rename them in one"
        )
    names: dict[str, tuple[pa.Table, bool]] = dict.fromkeys(
        queries.column_names, (queries, False)
    )
    names |= dict.fromkeys(catalogue.column_names, (catalogue, True))
    parameters = dict(inspect.signature(model.forward).parameters)
    # A forward that was replaced by a plain function has it.
    parameters.pop("self", None)
    required_names = []
    for name, parameter in parameters.items():
        is_variadic = parameter.kind in (
            parameter.VAR_POSITIONAL,
            parameter.VAR_KEYWORD,
        )
        if parameter.default is parameter.empty and not is_variadic:
            required_names.append(name)
    call = ""
    if len(required_names) == 1 and required_names[0] not in names:
        call = required_names[0]
        column_names = [
            name for name, (table, _) in names.items() if _is_numeric(table[name].type)
        ]
    else:
        column_names = [name for name in parameters if name in names]
        missing = [name for name in required_names if name not in names]
        if missing:
            raise BundleError(
                f"model: forward of {type(model).__name__} takes {listed(missing)}, which is no column; the columns "
                f"are {listed(names)}; name them as the arguments"
            )
    columns = {}
    for name in column_names:
        table, candidate = names[name]
        columns[name] = _Column(_tensor(name, table), candidate)
    return call, columns


def _tensor(name: str, table: pa.Table) -> Tensor:
    """Returns the example's rows of a column, (B,) or (B, W)."""
    column = table[name].take(pa.array(even_rows(len(table), _ROWS))).combine_chunks()
    if not _is_numeric(column.type):
        raise BundleError(
            f"column '{name}': {column.type}; an own module reads whole numbers, numbers or lists of them"
        )
    dtype = torch.int64 if "int64" in str(raw_type(column.type)) else torch.float32
    try:
        return torch.tensor(column.to_pylist(), dtype=dtype)
    except (ValueError, TypeError):
        raise BundleError(
            f"column '{name}': lists of different lengths, or rows without a value; pad lists as in training"
        ) from None


def _is_numeric(kind: pa.DataType) -> bool:
    return (raw_type(kind) or "").removeprefix("list<").removesuffix(">") in (
        "int64",
        "float32",
        "float64",
    )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Puts a model into evaluation mode inside the block."""
    # Noted one by one: model.train() would put the others into training too.
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        yield
    finally:
        for module in training:
            module.training = True


def _call_model(model: nn.Module, call: str, columns: Mapping[str, Tensor]) -> Any:
    with evaluating(model):
        if call:
            return model(dict(columns))
        return model(**columns)


def _trace(
    model: nn.Module, call: str, columns: Mapping[str, _Column]
) -> ExportedProgram:
    values = {name: column.values for name, column in columns.items()}
    # At least 2, because torch.export fixes axes of size 0 and 1.
    size = Dim("rows", min=2)
    arguments: dict[str, Any] = values
    dynamic_shapes: dict[str, Any] = {name: {0: size} for name in values}
    if call:
        arguments = {call: values}
        dynamic_shapes = {call: dynamic_shapes}
    try:
        with evaluating(model), warnings.catch_warnings():
            # Warnings about torch.export's own code and a GRU's flattened weights.
            warnings.simplefilter("ignore")
            program: ExportedProgram = torch.export.export(
                model, (), arguments, dynamic_shapes=dynamic_shapes, strict=False
            ).run_decompositions({})
    except Exception as error:  # torch.export raises forward's errors, and errors of many classes of its own
        if f"constant ({_ROWS})" in str(error):
            raise BundleError(
                f"model: forward of {type(model).__name__} fixes the number of rows to {_ROWS}; read sizes as "
                "x.shape[0] instead of len(x), and -1 instead of a number where tensors are viewed or expanded"
            ) from None
        raise BundleError(
            f"model: forward of {type(model).__name__} cannot be traced{_line_of(str(error))}: {type(error).__name__}: "
            f"{' '.join(str(error).split())[:300]}; `if` on values, .item() and boolean masks become torch.where or "
            "sums with weights of 0 and 1"
        ) from None
    return program


def _line_of(text: str | None) -> str:
    """Returns ", FILE:LINE" of the innermost stack line outside of torch, or an empty string."""
    lines = re.findall(r'File "([^"]+)", line (\d+)', text or "")
    for path, line in reversed(lines):
        if not path.startswith((*_LIBRARIES, "<")):
            return f", {path}:{line}"
    return ""


def _line(node: Node) -> str:
    return _line_of(node.meta.get("stack_trace"))


class _Split:
    """The graph of forward, with the columns behind each node."""

    def __init__(
        self,
        program: ExportedProgram,
        columns: Mapping[str, _Column],
        names: Sequence[str],
    ) -> None:
        self.names = names
        self.columns = columns
        signature = program.graph_signature
        state_paths = {**signature.inputs_to_parameters, **signature.inputs_to_buffers}
        constants = signature.inputs_to_lifted_tensor_constants
        state = {**program.state_dict, **program.constants}
        inputs = iter(columns)
        self.reads: dict[Node, frozenset[str]] = {}
        self.references: dict[Node, str] = {}  # reference of each column and weight
        self.weights: dict[str, Tensor] = {}
        for node in program.graph.nodes:
            if node.op == "placeholder":
                path = state_paths.get(node.name) or constants.get(node.name)
                if path is None:
                    self.references[node] = f"@{next(inputs)}"
                    self.reads[node] = frozenset({self.references[node][1:]})
                else:
                    reference = f"${path.replace('.', '/')}"
                    self.references[node] = reference
                    self.reads[node] = frozenset()
                    self.weights[reference] = state[path].detach()
            elif _is_batch(node):
                self.reads[node] = frozenset()
            elif node.op != "output":
                self.reads[node] = frozenset().union(
                    *(self.reads[each] for each in node.all_input_nodes)
                )
        result: Any = program.graph.output_node().args[0]
        self.result = result[0] if isinstance(result, list | tuple) else result
        self._check_result(result)
        self.pairwise = _reachable([self.result], lambda node: self.side(node) == 2)
        crossing: dict[Node, None] = {}
        for node in self.pairwise:
            crossing |= dict.fromkeys(node.all_input_nodes)
        # The values of one side that the pairwise nodes read, the query's first, each
        # side's in their order.
        self.frontier = [
            node for side in (0, 1) for node in crossing if self.side(node) == side
        ]
        for node in self.frontier:
            self._check_crossing(node)

    def side(self, node: Node) -> int | None:
        """Returns 0 for a node of queries alone, 1 for candidates alone, 2 for both, None for neither."""
        sides = {self.columns[name].candidate for name in self.reads[node]}
        if len(sides) > 1:
            return 2
        return int(sides.pop()) if sides else None

    def _check_result(self, result: Any) -> None:
        several = isinstance(result, list | tuple) and len(result) != 1
        shape: tuple[Any, ...] = ()
        if isinstance(self.result, Node) and isinstance(
            self.result.meta.get("val"), Tensor
        ):
            shape = tuple(self.result.meta["val"].shape)
        # In the trace the number of rows is symbolic, so a plain int is not one logit
        # for each row.
        one_for_each_row = (
            shape != () and not isinstance(shape[0], int) and shape[1:] in ((), (1,))
        )
        if several or not one_for_each_row:
            answer: Any = shape or "no tensor"
            if several:
                answer = "several values"
            raise BundleError(
                f"model: forward returns {answer}, must be logits (B,) or (B, 1), one for each row; wrap it in a "
                "module whose forward returns those"
            )
        side = self.side(self.result)
        if side != 2:
            table = "catalogue.features" if side == 0 else "queries"
            used = listed(sorted(self.reads[self.result]))
            raise BundleError(
                f"model: forward's logits depend on no column of {table}, but on {used} "
                "alone; there is nothing to rank by"
            )

    def _check_crossing(self, node: Node) -> None:
        value = node.meta["val"]
        tower = self.side(node) or 0
        line = next(filter(None, map(_line, (node, *node.users, *self.pairwise))), "")
        table = "queries"
        if tower:
            table = "catalogue"
        column_list = listed(f"'{name}'" for name in sorted(self.reads[node]))
        if (
            not isinstance(value, Tensor)
            or not value.dim()
            or isinstance(value.shape[0], int)
        ):
            raise BundleError(
                f"model: forward{line} combines {column_list} of the {table} over all rows of the batch, as an "
                "in-batch softmax does; return the logit of each row, and leave the rest to the loss"
            )
        if not all(isinstance(size, int) for size in value.shape[1:]):
            raise BundleError(
                f"model: forward{line}: a value of {column_list} has shape {tuple(value.shape)}, must be (B, ...)"
            )
        if not value.is_floating_point():
            raise BundleError(
                f"model: forward{line} combines ids or masks of {column_list} with the other tower's columns, so "
                f"'{self.names[tower]}' has no vector to store; look them up first, each by an nn.Embedding"
            )

    def check(self, paths: Mapping[str, Sequence[str]]) -> None:
        """Refuses modules unless they read columns of their own tower alone."""
        for tower, (name, modules) in enumerate(paths.items()):
            table = "queries"
            owner = "catalogue has"
            use = "computed once for a query"
            if tower:
                table = "catalogue.features"
                owner = "queries have"
                use = "stored for each candidate"
            for path in modules:
                # The module's first node of each side, for the line in a message.
                sides = {
                    self.side(node): node
                    for node in reversed(self.reads)
                    if _inside(node, path)
                }
                mixed = sides.get(2)
                if mixed is not None:
                    other = sorted(
                        name
                        for name in self.reads[mixed]
                        if self.columns[name].candidate != bool(tower)
                    )
                    raise BundleError(
                        f"towers: {name}={path!r} reads {listed(other)}{_line(mixed)}, which the {owner}, so its "
                        f"output cannot be {use}; name modules that read columns of {table} alone"
                    )
                if tower not in sides:
                    own = listed(
                        column
                        for column in self.columns
                        if self.columns[column].candidate == bool(tower)
                    )
                    raise BundleError(
                        f"towers: {name}={path!r} reads no column of {table} in forward, which are {own}; name its "
                        "module, the query tower's first, or put the columns into the other table"
                    )

    def towers(self) -> list[_ProgramWriter]:
        """Returns the programs of the query tower and of the candidate tower."""
        programs = []
        for tower in (0, 1):
            results = [node for node in self.frontier if self.side(node) == tower]
            tables = self._tables(results)
            program = _ProgramWriter(self, results, tables)
            names_read = frozenset().union(*(self.reads[node] for node in results))
            # No others: a request must give every column of a tower.
            for name, column in self.columns.items():
                if bool(tower) == column.candidate and name in names_read:
                    dtype = str(column.values.dtype).removeprefix("torch.")
                    program.columns[name] = [dtype, *column.values.shape[1:]]
            programs.append(program)
        return programs

    def _tables(self, results: Sequence[Node]) -> dict[str, list[str]]:
        """Returns the tables read by look-ups alone, each with its columns of ids."""
        look_ups: dict[Node, list[str]] = {}
        for node in _closure(results, self.references):
            for each in node.all_input_nodes:
                # A matrix becomes a table only if nothing but look-ups by columns reads
                # it.
                if self.references.get(each, "").startswith("$"):
                    column = ""  # any other use
                    if _name(node) == "embedding.default" and each is node.args[0]:
                        column = self._column_of(node.args[1])
                    look_ups.setdefault(each, []).append(column)
        tables = {}
        for table, columns in look_ups.items():
            # ProgramTower makes its tables as float32.
            if all(columns) and table.meta["val"].dtype == torch.float32:
                tables[self.references[table]] = list(dict.fromkeys(columns))
        return tables

    def _column_of(self, ids: Any) -> str:
        """Returns the column behind these ids, if they are its values in any shape, else an empty name."""
        while isinstance(ids, Node) and ids not in self.references:
            if _packet(ids) not in _SHAPES:
                return ""
            ids = ids.args[0]
        whole = isinstance(ids, Node) and ids.meta["val"].dtype == torch.int64
        if whole and self.references[ids].startswith("@"):
            return self.references[ids][1:]
        return ""


def _interaction_of(split: _Split) -> tuple[InteractionLayer, float]:
    """Returns the interaction, and the factor that the query tower's output needs for it."""
    widths = [0, 0]
    shapes = []
    for node in split.frontier:
        side = split.side(node) or 0
        widths[side] += _width(node)
        shapes.append([side, *node.meta["val"].shape[1:]])
    program = _ProgramWriter(split, [split.result], {}, inputs=split.frontier)
    top = ProgramTop(widths, shapes, program.sizes(), program.nodes, program.results[0])
    program.fill(top.kept)
    if (
        len(split.frontier) == 2
        and widths[0] == widths[1]
        and not top.arguments["weights"]
        and _MULTILINEAR.issuperset(map(_packet, split.pairwise))
    ):
        scale = _dot_scale(top, widths[0])
        if scale is not None:
            return DotProduct(widths), scale
    return _top_mlp(split, widths) or top, 1.0


def _dot_scale(top: ProgramTop, width: int) -> float | None:
    """Returns s if the interaction is s times the dot product, else None.

    With only products and sums, and without weights, the interaction is a polynomial. Two polynomials are equal if
    they agree on random points.
    """
    draw = torch.Generator().manual_seed(0)
    query = torch.randn(256, width, generator=draw, dtype=torch.float64)
    candidate = torch.randn(256, width, generator=draw, dtype=torch.float64)
    dots = (query * candidate).sum(1)
    logits = top([query, candidate])
    scale = float((logits @ dots) / (dots @ dots))
    # In float64, so rounding is near 1e-16 and leaves no doubt at 1e-9.
    allowed = 1e-9 * max(1.0, float(logits.abs().max()))
    # The random points determine the factor only within floating-point error, so
    # 0.1 would become 0.1000000000002.
    if scale > 0 and torch.allclose(logits, scale * dots, rtol=0, atol=allowed):
        return round(scale, 12)
    return None


def _top_mlp(split: _Split, widths: Sequence[int]) -> TopMLP | None:
    """Returns the interaction as a TopMLP with a splittable first layer, if it is one: cat, layers, one logit."""
    first, *layers = [
        node for node in split.pairwise if _packet(node) not in ("detach", "clone")
    ]
    concatenated: Any = []
    if _name(first) == "cat.default" and first.args[1:] in ((1,), (-1,)):
        concatenated = first.args[0]
    if sorted(map(str, concatenated)) != sorted(map(str, split.frontier)):
        return None
    if any(node.meta["val"].dim() != 2 for node in split.frontier):
        return None
    for node in layers:
        # Weights read no column: in a chain exactly one input of each layer does.
        if sum(bool(split.reads[each]) for each in node.all_input_nodes) != 1:
            return None
    # Shape operators at the end turn (B, 1) into (B,), as TopMLP does itself.
    while layers and _packet(layers[-1]) in _SHAPES:
        layers.pop()
    names = [_name(node) for node in layers]
    activation = next(
        (name for name in names if name != "linear.default"), "relu.default"
    )
    input_too = names[:1] != ["linear.default"]
    hidden = names.count("linear.default") - 1
    expected = (
        [activation] * input_too
        + ["linear.default", activation] * hidden
        + ["linear.default"]
    )
    if activation not in _ACTIVATIONS or names != expected:
        return None
    weights: list[list[Any]] = []
    for node in layers:
        arguments: Any = node.args[1:]
        if _name(node) == "linear.default":
            weights.append(
                [
                    split.weights.get(split.references.get(each, ""))
                    for each in arguments
                ]
            )
            # A computed matrix or bias is none of the model's weights.
            if any(each is None for each in weights[-1]):
                return None
        # Another slope of a leaky ReLU, or GELU by tanh, is no activation of a TopMLP.
        elif arguments or node.kwargs:
            return None
    matrices = [matrix for matrix, *_ in weights]
    if len(matrices[-1]) != 1:
        return None
    # forward may concatenate in any order, a TopMLP takes the query's values first.
    blocks = torch.split(matrices[0], list(map(_width, concatenated)), dim=1)
    columns = dict(zip(concatenated, blocks, strict=True))
    matrices[0] = torch.cat([columns[node] for node in split.frontier], dim=1)
    kind: Any = _ACTIVATIONS[activation]
    top = TopMLP(
        widths,
        [len(each) for each in matrices[:-1]],
        activation=kind,
        activate_input=input_too,
    )
    linears = [layer for layer in top.mlp if isinstance(layer, nn.Linear)]
    for layer, matrix, (_, *bias) in zip(linears, matrices, weights, strict=True):
        layer.weight.copy_(matrix)
        layer.bias.zero_()
        if bias:
            layer.bias.copy_(bias[0])
    return top


def _is_batch(node: Node) -> bool:
    """Whether a value is B, the number of rows."""
    value = node.meta.get("val")
    return isinstance(value, torch.SymInt) and bool(value.node.expr.is_symbol)


def _inside(node: Node, path: str) -> bool:
    """Whether a node is of a call within the module at ``path``."""
    if node.op != "call_function":
        return False
    for frame in node.meta.get("nn_module_stack", {}).values():
        module_path = str(frame[0]).removeprefix("L['self']").lstrip(".")
        if f"{module_path}.".startswith(f"{path}."):
            return True
    return False


def _name(node: Node) -> str:
    """Returns an operator's name in programs."""
    if node.target is operator.getitem:
        return "item"
    if node.target in _SIZES:
        return _SIZES[node.target]
    return str(node.target).removeprefix("aten.")


def _packet(node: Node) -> str:
    """Returns an operator's name in programs without its overload."""
    return _name(node).partition(".")[0]


def _width(node: Node) -> int:
    return int(torch.Size(node.meta["val"].shape[1:]).numel())


def _closure(results: Sequence[Node], leaves: Collection[Node]) -> list[Node]:
    """Returns the nodes that compute ``results`` from ``leaves``, in the order of the graph."""
    # The number of rows is an input of every program, and not computed.
    return _reachable(results, lambda node: node not in leaves and not _is_batch(node))


def _reachable(results: Sequence[Node], enters: Callable[[Node], bool]) -> list[Node]:
    """Returns the nodes behind ``results``, through nodes that ``enters`` admits, in the order of the graph."""
    if not results:
        return []
    queue = list(results)
    nodes = set()
    while queue:
        node = queue.pop()
        if node not in nodes and enters(node):
            nodes.add(node)
            queue.extend(node.all_input_nodes)
    return [node for node in results[0].graph.nodes if node in nodes]


class _ProgramWriter:
    """Writes a part of the graph as a program."""

    def __init__(
        self,
        split: _Split,
        results: Sequence[Node],
        tables: Mapping[str, list[str]],
        inputs: Sequence[Node] = (),
    ) -> None:
        self.columns: dict[str, list[Any]] = {}
        self.nodes: list[list[Any]] = []
        self._split = split
        self._tables = tables
        self._references = {
            **split.references,
            **{node: f"@{index}" for index, node in enumerate(inputs)},
        }
        self._weights: dict[str, Tensor] = {}
        self.width = sum(map(_width, results))
        for node in _closure(results, self._references):
            name = _name(node)
            if name not in OPERATORS:
                raise BundleError(
                    f"model: forward{_line(node)} uses {node.target}, which a bundle cannot hold; use another of "
                    "torch's operators for it, or rank with the model itself"
                )
            arguments = [self._encode(each) for each in node.args]
            options = {
                key: self._encode(value)
                for key, value in node.kwargs.items()
                if key not in PLACES
            }
            self.nodes.append([name, arguments, options])
            self._references[node] = f"#{len(self.nodes) - 1}"
        self.results = [str(self._encode(node)) for node in results]

    def scale(self, factor: float) -> None:
        """Multiplies the results by a factor."""
        for index, result in enumerate(self.results):
            self.nodes.append(["mul.Tensor", [result, factor], {}])
            self.results[index] = f"#{len(self.nodes) - 1}"

    def sizes(self) -> dict[str, list[Any]]:
        """Returns dtype and shape of each weight."""
        return {
            name: [str(value.dtype).removeprefix("torch."), *value.shape]
            for name, value in self._weights.items()
        }

    def fill(self, module: nn.Module) -> None:
        """Copies the weights into a module's buffers."""
        for name, value in self._weights.items():
            module.get_buffer(name).copy_(value)

    def tower(self, model: nn.Module) -> ProgramTower:
        """Returns the tower, with its weights."""
        tables = []
        for reference, columns in self._tables.items():
            rows, width = self._split.weights[reference].shape
            names = [name for name in columns if name in self.columns]
            tables.append(
                EmbeddingBagConfig(rows, width, name=reference[1:], feature_names=names)
            )
        # Without memory: the tables' weights are the model's own.
        with torch.device("meta"):
            tower = ProgramTower(
                tables, self.columns, self.sizes(), self.nodes, self.results, self.width
            )
        tower.kept.to_empty(device="cpu")
        self.fill(tower.kept)
        for table in tables:
            holder: Any = tower.embeddings.embedding_bags[table.name]  # type: ignore[union-attr]
            holder.weight = nn.Parameter(
                self._split.weights[f"${table.name}"], requires_grad=False
            )
        # A batch carries a column without a table as float32.
        longest = max(
            (len(value) for value in self._weights.values() if value.dim()), default=0
        )
        for name, (dtype, *_) in self.columns.items():
            looked_up = any(name in table.feature_names for table in tables)
            if dtype == "int64" and not looked_up and longest >= EXACT_IDS:
                raise BundleError(
                    f"column '{name}': ids computed from it look up a table of {EXACT_IDS:,} rows or more; look the "
                    "column up itself"
                )
        return tower

    def _encode(self, argument: Any) -> Any:
        if isinstance(argument, Node):
            if _is_batch(argument):
                return "rows"
            reference = self._references[argument]
            if reference in self._tables:
                return f"&{reference[1:]}"
            if reference.startswith("$"):
                self._weights[reference[1:]] = self._split.weights[reference]
            return reference
        if isinstance(argument, list | tuple):
            return [self._encode(each) for each in argument]
        if isinstance(argument, str):
            return f"={argument}"
        if isinstance(argument, torch.dtype):
            return f"dtype.{str(argument).removeprefix('torch.')}"
        if isinstance(argument, float) and not np.isfinite(argument):
            return str(argument)
        if argument is None or isinstance(argument, bool | int | float):
            return argument
        raise BundleError(
            f"model: forward gives an operator {argument!r}, which a bundle cannot hold"
        )
