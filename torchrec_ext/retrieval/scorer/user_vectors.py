"""Stored vectors of users: a store in a folder, or a Redis refreshed by others and possibly out of reach."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.scorer.requests import Id, UnavailableError, UserSource
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.retrieval.store.versions import StoreError, current

VectorsAndMask = tuple[Tensor, NDArray[np.bool_]]
RETRY_S = 1.0


class UserVectors(Protocol):
    """Stored outputs of the query tower by user id."""

    source: UserSource

    malformed: int  # number of values so far other than vectors of the width

    @property
    def available(self) -> bool:
        """Whether the store answered the last attempt."""
        ...

    def find(
        self, ids: Sequence[Id], *, tower: str, width: int | None = None
    ) -> tuple[Tensor, NDArray[np.bool_]]:
        """Returns (B, Dq) vectors of users and (B,) whether each exists.

        Args:
            ids: (B,) ids of users.
            tower: required digest of the vectors' tower.
            width: Dq, if known.

        Raises:
            UnavailableError: the store cannot be reached.
        """
        ...


class FolderVectors:
    """Users' vectors in the current version of a store; picks up a newer version within a second.

    Args:
        folder: folder written by ``rec.embed --tower query``.
        retry_s: seconds between two looks for a newer version.

    Raises:
        StoreError: there is no store.
    """

    source: UserSource = "store"
    malformed = 0

    def __init__(self, folder: Path, *, retry_s: float = RETRY_S) -> None:
        self._folder = folder
        self._retry_s = retry_s
        self._next = time.monotonic() + retry_s
        self._store = EmbeddingStore.open(folder)
        self.available = True

    @property
    def tower(self) -> str:
        """Digest of the vectors' tower."""
        return self._store.tower

    def find(
        self, ids: Sequence[Id], *, tower: str, width: int | None = None
    ) -> VectorsAndMask:
        """See :meth:`UserVectors.find`."""
        if time.monotonic() >= self._next:
            self._look()
        # Read once, because another thread may open a newer version.
        store = self._store
        nothing = torch.empty(len(ids), 0), np.zeros(len(ids), dtype=bool)
        if store.tower != tower or width not in (None, store.width):
            return nothing
        try:
            positions = np.asarray(store.ids.positions(cast(Sequence[int], ids)))
            exists = (positions >= 0) & np.asarray(store.live)[positions]
            vectors = torch.zeros(len(ids), store.width)
            vectors[torch.from_numpy(exists)] = store.rows(
                torch.from_numpy(positions[exists])
            )
            return vectors, exists
        except StoreError:
            raise UnavailableError(
                f"the files of users' vectors in '{self._folder.name}' were changed in place; embed the users again"
            ) from None
        except ValueError:  # no user here has ids of another type
            return nothing

    def _look(self) -> None:
        """Opens a newer version; keeps the open one if the newer is damaged or half removed."""
        self._next = time.monotonic() + self._retry_s
        try:
            if current(self._folder) != self._store.version:
                self._store = EmbeddingStore.open(self._folder)
            self.available = True
        except StoreError:
            self.available = False


class Remote(Protocol):
    """A remote store of one tower's vectors by id; ``malformed`` counts values other than such vectors."""

    malformed: int

    def find(self, ids: Sequence[int] | Sequence[str]) -> VectorsAndMask:
        """See :meth:`UserVectors.find`."""
        ...


class RemoteVectors:
    """Users' vectors in a remote store behind a circuit breaker: after a failure, requests do not wait one by one.

    Args:
        connect: function from a tower's digest and the width of its vectors, if known, to their store. It must not
            connect yet.
        failures: exception types of a store out of reach.
        source: name of the store in answers.
        retry_s: seconds without requests to the store after a failure.
    """

    def __init__(
        self,
        connect: Callable[[str, int | None], Remote],
        failures: tuple[type[Exception], ...],
        *,
        source: UserSource = "redis",
        retry_s: float = RETRY_S,
    ) -> None:
        self._connect = connect
        self._failures = failures
        self._retry_s = retry_s
        self.source = source
        self._stores: dict[tuple[str, int | None], Remote] = {}
        self._until = 0.0
        self.malformed = 0

    @property
    def available(self) -> bool:
        """Whether the store answered the last request."""
        return self._until == 0.0

    def find(
        self, ids: Sequence[Id], *, tower: str, width: int | None = None
    ) -> VectorsAndMask:
        """See :class:`~torchrec_ext.retrieval.scorer.user_vectors.UserVectors`.

        Raises:
            UnavailableError: the store is out of reach, or was a moment ago.
        """
        if time.monotonic() < self._until:
            raise UnavailableError(
                f"the {self.source} of users' vectors is out of reach; it is tried again within {self._retry_s:g} s"
            )
        if (tower, width) not in self._stores:
            # Only the latest tower's store: after a swap of the bundle nobody asks for
            # the former one.
            self._stores = {(tower, width): self._connect(tower, width)}
        store = self._stores[tower, width]
        # The store counts from its own beginning; here the count goes on over all
        # stores.
        before = store.malformed
        try:
            result = store.find(cast(Sequence[int], ids))
        except self._failures as error:
            self._until = time.monotonic() + self._retry_s
            raise UnavailableError(
                f"the {self.source} of users' vectors is out of reach ({type(error).__name__})"
            ) from None
        self._until = 0.0
        self.malformed += store.malformed - before
        return result


def user_vectors(
    folder: Path | None, redis: str | None, tower: str, *, key: str | None
) -> list[UserVectors]:
    """Returns the stores of users' vectors in the server's order: a Redis, then a folder.

    Args:
        folder: folder of a store, or None.
        redis: address of a Redis, or None.
        tower: digest of the query towers of the server's first bundle.
        key: request column with the user's id in that bundle; None if it has no users.

    Raises:
        ValueError: there is no store, it has vectors of another tower, the Redis address is wrong, or the bundle has no
            users, so that no request can name one by id alone.
    """
    if key is None and (folder or redis):
        raise ValueError(
            f"--{'redis' if folder is None else 'vectors'}: the bundle has no users, so a request cannot name one by "
            "id alone; export it with users=NamedUsers(...)"
        )
    stores: list[UserVectors] = [*redis_vectors(redis)]
    if folder is not None:
        stored = FolderVectors(folder)
        if stored.tower != tower:
            raise ValueError(
                f"--vectors {folder}: made by tower {stored.tower[:12] or '(none)'}, this bundle's query is by "
                f"{tower[:12]}; embed the users with it: python -m torchx_apps.embed BUNDLE --tower query --out "
                f"{folder} ..."
            )
        stores.append(stored)
    return stores


def redis_vectors(url: str | None) -> list[RemoteVectors]:
    """Returns the store of users' vectors in the Redis at ``url``, or an empty list for None.

    Raises:
        ValueError: the package redis is missing, or the address is wrong.
    """
    if url is None:
        return []
    try:
        import redis as _  # noqa: F401  (a clear message here, and not at the first request)
    except ModuleNotFoundError as error:
        raise ValueError(
            f"--redis needs the package {error.name}: pip install 'torchrec-ext[retrieval]'"
        ) from None
    from torchrec_ext.retrieval.store.redis import RedisStore

    # Refuse a wrong address at the start instead of at the first request.
    RedisStore(url, tower="any").close()
    return [
        RemoteVectors(
            lambda tower, width: RedisStore(url, tower=tower, width=width),
            (StoreError,),
        )
    ]
