"""adopt_tables(): the look-ups of a user's nn.Embedding and nn.EmbeddingBag in TorchRec's collections, to be sharded.

The user's forward is traced by torch.fx, and all look-ups of it become one call of a :class:`HoistedTables`, behind the
last computation of ids and before the first use of a row. So a step exchanges ids and rows once for all tables of a
kind, where a collection in place of each module would exchange them once for each. Everything else of the model stays:
its modules, under their paths.
"""

from __future__ import annotations

import inspect
import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torchrec_ext.needs_torch import and_torchrec  # noqa: F401

import torch
from torch import Tensor, fx, nn
from torchrec.modules.embedding_configs import (
    EmbeddingBagConfig,
    EmbeddingConfig,
    PoolingType,
)
from torchrec.modules.embedding_modules import (
    EmbeddingBagCollection,
    EmbeddingCollection,
)
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from torchrec_ext.adopt.errors import CannotAdopt
from torchrec_ext.distributed.tables import GivenRows
from torchrec_ext.observe.user_lines import raising_line, user_line

_LINE = "user_line"  # in the meta of a node
_TABLES = (nn.Embedding, nn.EmbeddingBag)
_IN_PLACE = {
    operator.setitem,
    operator.iadd,
    operator.isub,
    operator.imul,
    operator.itruediv,
}
_POOLING = {"sum": PoolingType.SUM, "mean": PoolingType.MEAN}


@dataclass(frozen=True, kw_only=True)
class _LookUp:
    """A look-up of the user's forward.

    Attributes:
        table: name of the table.
        feature: name of the ids.
        rows: rows of the table.
        collection: name of the collection that holds the table.
    """

    table: str
    feature: str
    rows: int
    collection: str


class HoistedTables(nn.Module):
    """Looks up all tables of a model at once; made by :func:`adopt_tables`.

    Tables of nn.Embedding with D columns are in the EmbeddingCollection ``rows_D``, those of nn.EmbeddingBag in the
    EmbeddingBagCollection ``bags``. They share the memory of the user's weights until :func:`hybrid_parallel` shards
    them, and each shard begins with these weights.

    Args:
        lookups: look-ups in the order of the arguments of forward.
        tables: weight and pooling by name of a table; the pooling of an nn.Embedding is "".
    """

    def __init__(
        self, lookups: Sequence[_LookUp], tables: Mapping[str, tuple[nn.Parameter, str]]
    ) -> None:
        super().__init__()
        self._lookups = list(lookups)
        features: dict[str, dict[str, list[str]]] = {}
        for each in lookups:
            features.setdefault(each.collection, {}).setdefault(each.table, []).append(
                each.feature
            )
        for collection, features_of_tables in features.items():
            self.add_module(collection, _collection(features_of_tables, tables))

    def forward(self, *ids: Tensor) -> tuple[Tensor, ...]:
        """Looks up ids, (B, ...) or for a bag (B, L) int each, and returns rows, (B, ..., D) or for a bag (B, D).

        Raises:
            ValueError: ids whose first dimension is not that of the others.
            IndexError: an id outside of its table.
        """
        results: dict[str, Any] = {}
        # All collections are asked before the first is waited for: a sharded one
        # answers when it is read.
        for name, collection in self.named_children():
            members = [
                pair
                for pair in zip(self._lookups, ids, strict=True)
                if pair[0].collection == name
            ]
            results[name] = collection(_jagged(members))
        if "bags" in results:
            results["bags"] = results["bags"].to_dict()
        rows = []
        for each, shaped_ids in zip(self._lookups, ids, strict=True):
            result = results[each.collection][each.feature]
            rows.append(
                result
                if each.collection == "bags"
                else result.values().view(*shaped_ids.shape, -1)
            )
        return tuple(rows)


def _collection(
    features: Mapping[str, list[str]], tables: Mapping[str, tuple[nn.Parameter, str]]
) -> nn.Module:
    """Returns a collection of tables whose memory is the user's."""
    configs: list[Any] = []
    for name, names in features.items():
        weight, pooling = tables[name]
        rows, columns = weight.shape
        config: dict[str, Any] = {
            "num_embeddings": rows,
            "embedding_dim": columns,
            "name": name,
        }
        # A weight that has no memory is drawn as nn.Embedding draws it.
        config["init_fn"] = nn.init.normal_ if weight.is_meta else GivenRows(weight)
        if pooling:
            config["pooling"] = _POOLING[pooling]
        kind = EmbeddingBagConfig if pooling else EmbeddingConfig
        configs.append(kind(**config, feature_names=names))
    # Without memory of its own: the user's weights take its place below.
    meta = torch.device("meta")
    collection: Any
    if isinstance(configs[0], EmbeddingBagConfig):
        collection = EmbeddingBagCollection(configs, device=meta)
        modules = collection.embedding_bags
    else:
        collection = EmbeddingCollection(configs, device=meta)
        modules = collection.embeddings
    for name, module in modules.items():
        module.weight = tables[name][0]
    return collection  # type: ignore[no-any-return]


def _jagged(members: Sequence[tuple[_LookUp, Tensor]]) -> KeyedJaggedTensor:
    """Returns the ids of several look-ups by feature; every row of (B, ...) ids is a bag."""
    first, first_ids = members[0]
    size = first_ids.shape[0] if first_ids.dim() else 0
    lengths = []
    values = []
    for each, ids in members:
        if ids.dim() == 0 or ids.shape[0] != size:
            raise ValueError(
                f"ids of table '{each.table}' have the shape {tuple(ids.shape)}, beside "
                f"{tuple(first_ids.shape)} of '{first.table}': all ids must be (B, ...), with the batch "
                "first; reshape them to (B, -1) in forward"
            )
        # Refuse an id outside of its table, as nn.Embedding does; TorchRec's kernels
        # read row 0 in its place.
        if ids.is_cuda:
            torch._assert_async(((ids >= 0) & (ids < each.rows)).all())
        elif ids.numel():
            least, most = torch.aminmax(ids)
            if int(least) < 0 or int(most) >= each.rows:
                raise IndexError(
                    f"table '{each.table}': ids from {int(least)} to {int(most)}, must be 0 to {each.rows - 1}"
                )
        lengths.append(
            torch.full((size,), ids[:1].numel(), dtype=torch.int64, device=ids.device)
        )
        values.append(ids.reshape(-1))
    return KeyedJaggedTensor(
        [each.feature for each, _ in members],
        torch.cat(values),
        lengths=torch.cat(lengths),
    )


def adopt_tables(model: nn.Module) -> nn.Module:
    """Moves the look-ups of a user's model into TorchRec's collections, for tables that one machine cannot hold.

    :func:`hybrid_parallel` then shards the tables over the ranks, replicates everything else, and gives every shard the
    user's weights. Where they are on the meta device, tables are drawn as nn.Embedding draws them.

    Args:
        model: the user's model, with the same weights on all ranks, or on the meta device.

    Returns:
        A module with the model's forward, and its other modules under their paths; the tables are in ``tables``.

    Raises:
        CannotAdopt: a table does what no collection does, or torch.fx cannot follow forward; the message names the line
            and the remedy.

    Example:
        >>> model = nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(8, 1))
        >>> adopted = adopt_tables(model)
        >>> ids = torch.tensor([[1, 2], [3, 4]])
        >>> torch.equal(adopted(ids), model(ids)), [name for name, _ in adopted.tables.named_children()]
        (True, ['rows_4'])
    """
    modules = {
        path: module
        for path, module in model.named_modules()
        if isinstance(module, _TABLES)
    }
    if not modules:
        raise CannotAdopt(
            f"{type(model).__name__} has no nn.Embedding and no nn.EmbeddingBag: there is no table to move"
        )
    for path, table in modules.items():
        _refuse_table(path, table)
    graph = _trace(model)
    nodes = [
        node
        for node in graph.nodes
        if node.op == "call_module" and node.target in modules
    ]
    _refuse_unread(graph, modules, nodes)
    ids = [_ids_of(node, modules) for node in nodes]
    names = _names(modules)
    lookups: list[_LookUp] = []
    tables: dict[str, tuple[nn.Parameter, str]] = {}
    for node in nodes:
        weight: Any = modules[node.target].weight
        pooling = getattr(modules[node.target], "mode", "")
        name = names[id(weight)]
        # A collection pools all look-ups of a table alike.
        if tables.setdefault(name, (weight, pooling))[1] != pooling:
            raise CannotAdopt(
                f"{_line(node)}: '{node.target}' shares its weight with a table that is pooled otherwise: look both up "
                "by one nn.Embedding, and pool its rows in forward"
            )
        count = sum(each.table == name for each in lookups)
        collection = "bags" if pooling else f"rows_{weight.shape[1]}"
        lookups.append(
            _LookUp(
                table=name,
                feature=f"{name}_{count}",
                rows=len(weight),
                collection=collection,
            )
        )
    hoisted = _hoist(graph, nodes, ids)
    paths = {
        node.target for node in hoisted.nodes if node.op in ("call_module", "get_attr")
    }
    root: dict[str, Any] = {
        path: operator.attrgetter(path)(model) for path in sorted(paths - {"tables"})
    }
    root["tables"] = HoistedTables(lookups, tables)
    adopted = fx.GraphModule(root, hoisted, type(model).__name__)
    adopted.training = model.training
    return adopted


def _refuse_table(path: str, table: nn.Embedding | nn.EmbeddingBag) -> None:
    own_forward = type(table).forward not in (
        nn.Embedding.forward,
        nn.EmbeddingBag.forward,
    )
    refused = [
        (
            table.padding_idx is not None,
            f"padding_idx={table.padding_idx}",
            "mask its rows in forward",
        ),
        (
            table.max_norm is not None,
            f"max_norm={table.max_norm}",
            "normalise the rows in forward",
        ),
        (table.scale_grad_by_freq, "scale_grad_by_freq=True", "leave it out"),
        (
            getattr(table, "mode", "") == "max",
            "mode='max'",
            "take nn.Embedding and amax in forward",
        ),
        (
            not table.weight.requires_grad,
            "a frozen weight",
            "make it a buffer of a module of your own",
        ),
        (
            table.weight.dtype != torch.float32,
            f"a {table.weight.dtype} weight",
            "call float() first",
        ),
        (
            own_forward,
            "a forward of its own",
            "put what it does beside the look-up into another module",
        ),
        (
            table._forward_hooks or table._forward_pre_hooks,
            "hooks",
            "put them on another module",
        ),
    ]
    for is_refused, what, remedy in refused:
        if is_refused:
            raise CannotAdopt(
                f"table '{path}' has {what}, which TorchRec's collections do not have: {remedy}"
            )


class _Tracer(fx.Tracer):
    """Follows a forward down to the modules of torch.nn, and to the tables in them."""

    def create_node(self, *args: Any, **kwargs: Any) -> fx.Node:
        """Makes a node that knows the user's line."""
        node = super().create_node(*args, **kwargs)
        node.meta[_LINE] = user_line()
        return node

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        # torch.nn's own modules are leaves, but an nn.Sequential may hold a table.
        if any(isinstance(child, _TABLES) for child in m.modules()):
            return isinstance(m, _TABLES)
        return super().is_leaf_module(m, module_qualified_name)


def _trace(model: nn.Module) -> fx.Graph:
    """Traces forward in both modes; refuses what a trace would fix."""
    for name, parameter in inspect.signature(type(model).forward).parameters.items():
        if parameter.default is not inspect.Parameter.empty:
            raise CannotAdopt(
                f"forward's argument '{name}' has the default {parameter.default!r}, and torch.fx would follow only "
                "what forward does with it, or without: make it an argument without a default"
            )
    before = _python_attributes(model)
    modes = [(m, m.training) for m in model.modules()]
    graphs = []
    # A graph has no branches: both modes must make the same one.
    try:
        for training in (True, False):
            model.train(training)
            graphs.append(_Tracer().trace(model))
    except Exception as error:
        raise CannotAdopt(
            f"{raising_line(error)}: torch.fx cannot follow forward here: {error}; forward must not decide by "
            "the values of tensors (torch.where in place of if), nor call what reads them"
        ) from None
    finally:
        # Not by train(): modules of one model may be in different modes.
        for module, training in modes:
            module.training = training
    changed = _changed_attribute(before, _python_attributes(model))
    if changed is not None:
        raise CannotAdopt(
            f"forward sets the attribute '{changed}', which torch.fx would fix: make it a buffer"
        )
    for first, second in zip(graphs[0].nodes, graphs[1].nodes, strict=False):
        if first.format_node() != second.format_node():
            raise CannotAdopt(
                f"{_line(first)}: forward does something else in train and in eval mode (F.dropout with "
                "training=?); take modules, as nn.Dropout"
            )
    if len(graphs[0].nodes) != len(graphs[1].nodes):
        raise CannotAdopt(
            "forward has other operations in train and in eval mode, of which torch.fx would fix one"
        )
    return graphs[0]


def _line(node: fx.Node) -> str:
    return str(node.meta[_LINE])


def _refuse_unread(
    graph: fx.Graph, modules: Mapping[str, nn.Module], nodes: Sequence[fx.Node]
) -> None:
    """Refuses weights that forward reads as a matrix, and tables without a look-up."""
    called = {id(modules[str(node.target)].weight) for node in nodes}
    weights = {f"{path}.weight": path for path in modules}
    for node in graph.nodes:
        if node.op == "get_attr" and str(node.target) in weights:
            raise CannotAdopt(
                f"{_line(node)}: the weight of table '{weights[str(node.target)]}' is read as a matrix, but a sharded "
                "table is whole on no rank: look its rows up"
            )
    for path, table in modules.items():
        if id(table.weight) not in called:
            raise CannotAdopt(
                f"table '{path}' is not looked up by forward: remove it, or look it up"
            )


def _ids_of(node: fx.Node, modules: Mapping[str, nn.Module]) -> fx.Node:
    """Returns the ids of a look-up."""
    names = ("input", "offsets", "per_sample_weights")
    arguments = {**dict(zip(names, node.args, strict=False)), **node.kwargs}
    for name in names[1:]:
        if arguments.get(name) is not None:
            more = (
                ", and weigh the rows of an nn.Embedding in forward"
                if name == "per_sample_weights"
                else ""
            )
            raise CannotAdopt(
                f"{_line(node)}: table '{node.target}' is looked up with {name}: give ids as (B, L){more}"
            )
    if not isinstance(arguments["input"], fx.Node):
        raise CannotAdopt(
            f"{_line(node)}: table '{node.target}' is looked up with ids that are not computed in forward"
        )
    return arguments["input"]


def _names(modules: Mapping[str, Any]) -> dict[int, str]:
    """Returns a name for each weight, by its id: the path of its first module, which TorchRec's ModuleDict can hold."""
    names: dict[int, str] = {}
    for path, module in modules.items():
        name = path.replace(".", "_") or "table"
        # "a.b" and "a_b" would be one name, and some are methods of ModuleDict.
        while name in names.values() or hasattr(nn.ModuleDict, name):
            name += "_table"
        names.setdefault(id(module.weight), name)
    return names


def _hoist(
    graph: fx.Graph, nodes: Sequence[fx.Node], ids: Sequence[fx.Node]
) -> fx.Graph:
    """Returns the graph with one call in place of all look-ups, behind the last of their ids."""
    # All look-ups stand behind the last of their ids: whatever needs a row comes later.
    order = {node: index for index, node in enumerate(graph.nodes)}
    last = max(order[each] for each in ids)
    end = max(order[node] for node in nodes)
    later: set[fx.Node] = set(nodes)  # what needs rows
    for node in graph.nodes:
        if not later.isdisjoint(node.all_input_nodes):
            later.add(node)
        in_place = node.op == "call_method" and re.fullmatch(
            r"[a-z]\w*[a-z0-9]_", str(node.target)
        )
        if order[node] <= end and (
            in_place or node.target in _IN_PLACE or "out" in node.kwargs
        ):
            raise CannotAdopt(
                f"{_line(node)}: forward changes a tensor in place before its last look-up, which is then another "
                "order: write the result to a new name"
            )
    for node, each in zip(nodes, ids, strict=True):
        if each in later:
            raise CannotAdopt(
                f"{_line(node)}: the ids of table '{node.target}' are decided by rows of another table, so that both "
                "cannot be looked up at once: decide them in the loader"
            )
    hoisted = fx.Graph()
    copies = dict[fx.Node, fx.Node]()

    def copy(node: fx.Node) -> None:
        copies[node] = hoisted.node_copy(node, copies.__getitem__)

    for node in graph.nodes:
        if order[node] <= last and node not in later:
            copy(node)
    rows = hoisted.call_module("tables", tuple(copies[each] for each in ids))
    for index, node in enumerate(nodes):
        copies[node] = hoisted.call_function(operator.getitem, (rows, index))
    for node in graph.nodes:
        if node not in copies:
            copy(node)
    return hoisted


def _python_attributes(model: nn.Module) -> dict[str, Any]:
    """Returns the attributes of a model's modules that are neither parameters nor buffers, by path.

    :func:`_changed_attribute` compares them to refuse a forward by name. StateCopy puts attributes back without names.
    """
    module_attributes = {*vars(nn.Module()), "forward"}
    attributes: dict[str, Any] = {}
    for path, module in model.named_modules():
        for name, value in vars(module).items():
            if name in module_attributes:
                continue
            # A container that grows is seen by its length: its entries are not copied.
            is_container = isinstance(value, list | dict | set)
            attributes[f"{path}.{name}".lstrip(".")] = (
                (value, len(value)) if is_container else value
            )
    return attributes


def _changed_attribute(
    before: Mapping[str, Any], after: Mapping[str, Any]
) -> str | None:
    """Returns the path of a changed attribute, such as ``user.calls``; None if there is none."""
    for name in {**before, **after}:
        if not _same(before.get(name), after.get(name)):
            return name
    return None


def _same(before: Any, after: Any) -> bool:
    if (
        isinstance(before, tuple)
        and isinstance(after, tuple)
        and len(before) == len(after)
    ):
        return all(_same(*pair) for pair in zip(before, after, strict=True))
    if isinstance(before, int | float | str | bytes) and type(before) is type(after):
        return bool(before == after)
    return before is after
