"""What the page shows of a bundle: example features, known values of columns, titles."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.catalogue import CATEGORIES
from torchrec_ext.retrieval.server.settings import ServerConfig

_MOST_NAMED = 1_000  # most values of a column to list
_FEW = 100  # most values of a column of a user, unless its values are items: others may be ids of people
_SAMPLE = 200  # number of user ids offered by the page
_NEUTRAL: Mapping[str, Any] = {
    "int64": 0,
    "float32": 0.0,
    "float64": 0.0,
    "bool": False,
    "string": "",
}
_A_DAY = "2024-01-01"  # of a column of times


def bundle_page(bundle: Bundle, settings: ServerConfig) -> dict[str, Any]:
    """Describes a bundle for people and the page. Includes user ids only if the server is private."""
    private = settings.is_private
    users: dict[str, Any] = {
        "user_key": None,
        "user_kind": None,
        "users": 0,
        "sample_users": [],
    }
    if bundle.users is not None:
        ids = bundle.users.ids
        users.update(user_key=bundle.users.key, user_kind=ids.kind, users=len(ids))
        if private:
            users["sample_users"] = ids.ids(range(min(_SAMPLE, len(ids))))
    column_values = known_values(bundle, private=private)
    titles = {}
    for name, values in column_values.items():
        texts = _item_titles(bundle, values)
        if texts:
            titles[name] = texts
    categories: list[Any] = []
    if CATEGORIES in bundle.items.attributes:
        names = bundle.items.attributes[CATEGORIES].values
        categories = names.ids(range(len(names)))
    return {
        "digest": bundle.digest,
        "manifest": bundle.manifest.as_json(),
        "items": len(bundle.items),
        **users,
        "columns": dict(bundle.query.columns.raw),
        "example_user": example_user(bundle, private=private),
        "known_values": column_values,
        "known_titles": titles,
        "categories": categories,
        "limits": vars(settings.limits),
    }


def known_values(bundle: Bundle, *, private: bool) -> dict[str, list[Any]]:
    """Returns the known values of a user's raw columns of ids, by column, where they are few or are items.

    Other values are accepted as well, and count as unknown.

    Args:
        bundle: live bundle.
        private: whether no stranger reads them. Without a table of users any column may hold ids of people.
    """
    columns = {}
    for name, kind in bundle.query.columns.raw.items():
        if _holds_users(bundle, name):
            continue
        values = bundle.query.columns.known_values(name, _MOST_NAMED)
        are_few = 0 < len(values) <= _FEW and (private or bundle.users is not None)
        # Only lists of them: a single number may be the id of a person, although an
        # item has it too.
        are_items = kind.startswith("list<") and bool(_item_titles(bundle, values))
        if are_few or are_items:
            columns[name] = values
    return columns


def _holds_users(bundle: Bundle, name: str) -> bool:
    """Returns whether a raw column holds ids of the bundle's users."""
    if bundle.users is None:
        return False
    key = bundle.users.key
    return name == key or bundle.query.columns.share_ids(name, key)


def _item_titles(bundle: Bundle, values: Sequence[Any]) -> list[str]:
    """Returns the titles of a column's known values, if these are ids of the catalogue; else an empty list."""
    kind = str if bundle.items.ids.kind == "str" else int
    # Other columns have whole numbers too, such as a code of two values: those are no
    # items.
    is_whole = 2 * len(values) > min(len(bundle.items), _MOST_NAMED)
    if not is_whole or set(map(type, values)) != {kind}:
        return []
    positions = bundle.items.ids.positions(values)
    if positions.min() < 0:
        return []
    return bundle.items.titles_of(positions)


def example_user(bundle: Bundle, *, private: bool) -> dict[str, Any]:
    """Returns raw features of a person whom the model has never seen, as a request gives them without an id.

    Args:
        bundle: live bundle.
        private: see :func:`known_values`.
    """
    columns = bundle.query.columns
    features: dict[str, Any] = {}
    if bundle.users is not None:
        unknown = bundle.users.features(-1)
        features = {name: values[0] for name, values in unknown.items()}
    example = {}
    for name, kind in columns.raw.items():
        if bundle.users is not None and name == bundle.users.key:
            continue
        value = features.get(name)
        if value is None:
            value = _NEUTRAL.get(kind, _A_DAY)
            if kind.startswith("list<"):
                # A bag may be empty, other lists have one length.
                value = [0] * bundle.query.list_widths().get(name, 0)
            is_shown = not _holds_users(bundle, name) and (
                private or bundle.users is not None
            )
            if is_shown and kind in ("int64", "string"):
                value = next(iter(columns.known_values(name, 1)), value)
        example[name] = value
    return example
