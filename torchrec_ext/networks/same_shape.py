"""Whether networks have one shape, and where they differ first: what a stack asks before it lays their weights together."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn
from torchrec.modules.embedding_configs import BaseEmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

# How a module was made (Recorded) is in what it became, but for dropout, of which a member may have a rate of its own.
_OF_EVERY_MODULE = frozenset({*vars(nn.Module()), "arguments", "made_of"})
_OF_A_TABLE = ("name", "num_embeddings", "embedding_dim", "feature_names", "pooling", "data_type")


class Layer(NamedTuple):
    """A module of a network: where it is, and all that its computation depends on but its weights."""

    path: str
    facts: dict[str, Any]


def layers(network: nn.Module) -> Iterator[Layer]:
    """The modules of ``network`` in order, without dropout: its rate is a member's own business, 0 where it has none."""
    inside: tuple[str, ...] = ()
    for path, module in network.named_modules():
        if isinstance(module, nn.Dropout) or path.startswith(inside or ("\0",)):
            continue
        if isinstance(module, EmbeddingBagCollection):
            inside += (f"{path}.",)
            tables = {table.name: _fact(table) for table in module.embedding_bag_configs()}
            yield Layer(path, {"tables": tuple(tables), **tables, "is_weighted": module.is_weighted()})
            continue
        shapes = {name: tuple(weight.shape) for name, weight in module.named_parameters(recurse=False)}
        own = {name: _fact(value) for name, value in vars(module).items() if name not in _OF_EVERY_MODULE}
        yield Layer(path, {"layer": type(module).__qualname__, **own, **shapes})


def difference(networks: Mapping[str, nn.Module]) -> str | None:
    """The first field in which one of the networks differs from the first of them; None where all have one shape.

    Example:
        >>> difference({"a": nn.Linear(4, 2), "b": nn.Linear(4, 3)})
        "out_features is 2 in 'a' and 3 in 'b'"
        >>> difference({"a": nn.Linear(4, 2), "b": nn.Linear(4, 2)})
    """
    (first, reference), *others = ((name, list(layers(network))) for name, network in networks.items())
    for name, found in others:
        for one, other in zip(reference, found, strict=False):
            for field in [*one.facts, *other.facts]:
                mine, theirs = one.facts.get(field, "absent"), other.facts.get(field, "absent")
                if mine != theirs:
                    where = f"{one.path}: {field}" if one.path else field
                    return f"{where} is {mine} in '{first}' and {theirs} in '{name}'"
        if len(reference) != len(found):
            return f"'{first}' has {len(reference)} layers and '{name}' {len(found)}"
    return None


def _fact(value: Any) -> Any:
    """``value`` so that two of one content are equal; None for what is compared elsewhere, as modules and tensors are."""
    if isinstance(value, BaseEmbeddingConfig):
        return tuple(f"{name}={_shown(getattr(value, name))}" for name in _OF_A_TABLE if hasattr(value, name))
    if isinstance(value, functools.partial):
        return (_fact(value.func), _fact(value.args), _fact(value.keywords))
    if callable(value) and hasattr(value, "__qualname__"):
        closed = tuple(_fact(cell.cell_contents) for cell in getattr(value, "__closure__", None) or ())
        return (value.__module__, value.__qualname__, *closed)
    if isinstance(value, Mapping):
        return tuple((key, _fact(entry)) for key, entry in value.items())
    if isinstance(value, set | frozenset):
        return tuple(sorted(map(str, value)))
    if isinstance(value, list | tuple):
        return tuple(_fact(entry) for entry in value)
    return value if isinstance(value, int | float | str | bytes) else repr(value) if isinstance(value, slice) else None


def _shown(value: object) -> str:
    return str(getattr(value, "name", value))
