"""Stored vectors of users: a snapshot beside the bundle, or a Redis that others refresh and that may go away."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.scorer.requests import Id, Source, UnavailableError
from torchrec_ext.retrieval.store.versions import StoreError, current

if TYPE_CHECKING:
    from torchrec_ext.retrieval.store.store import EmbeddingStore

Found = tuple[Tensor, NDArray[np.bool_]]
RETRY_S = 1.0


class UserVectors(Protocol):
    """Stored outputs of the query tower by user id."""

    source: Source

    malformed: int  # values that were no vectors of the width asked for, so far

    @property
    def available(self) -> bool:
        """Whether it could be reached when it was last asked."""
        ...

    def find(self, ids: Sequence[Id], *, tower: str, width: int | None = None) -> tuple[Tensor, NDArray[np.bool_]]:
        """(B, Dq) vectors and whether each is there, of those that the tower with digest ``tower`` made, Dq ``width`` where given.

        Raises:
            UnavailableError: the store cannot be reached.
        """
        ...


class StoredVectors:
    """The vectors of an :class:`~torchrec_ext.retrieval.store.store.EmbeddingStore` of users, of this tower alone."""

    source: Source = "store"
    available = True
    malformed = 0

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store

    def find(self, ids: Sequence[Id], *, tower: str, width: int | None = None) -> Found:
        """(B, Dq) vectors, and whether each is there."""
        store = self._store
        if store.tower != tower or width not in (None, store.width):
            return torch.empty(len(ids), 0), np.zeros(len(ids), dtype=bool)
        try:
            positions = np.asarray(store.ids.positions(cast(Sequence[int], ids)))
        except ValueError:  # of another type, so of nobody here
            return torch.empty(len(ids), 0), np.zeros(len(ids), dtype=bool)
        there = (positions >= 0) & np.asarray(store.live)[positions]
        vectors = torch.zeros(len(ids), store.width)
        vectors[torch.from_numpy(there)] = store.rows(torch.from_numpy(positions[there]))
        return vectors, there


class FolderVectors:
    """The current version of the store in a folder, of which a newer one is taken within a second.

    Args:
        folder: that ``rec.embed --tower query`` wrote.
        retry_s: seconds between two looks for a newer version.

    Raises:
        StoreError: there is no store.
    """

    source: Source = "store"
    malformed = 0

    def __init__(self, folder: Path, *, retry_s: float = RETRY_S) -> None:
        from torchrec_ext.retrieval.store.store import EmbeddingStore

        self._open: Callable[[], EmbeddingStore] = lambda: EmbeddingStore.open(folder)
        self._folder, self._retry_s = folder, retry_s
        self._next = time.monotonic() + retry_s
        self._store = self._open()
        self.available = True

    @property
    def tower(self) -> str:
        """Digest of the tower that made the vectors."""
        return self._store.tower

    def find(self, ids: Sequence[Id], *, tower: str, width: int | None = None) -> Found:
        """(B, Dq) vectors, and whether each is there."""
        if time.monotonic() >= self._next:
            self._look()
        return StoredVectors(self._store).find(ids, tower=tower, width=width)

    def _look(self) -> None:
        """A version that is damaged or half removed leaves the one that is open."""
        self._next = time.monotonic() + self._retry_s
        try:
            if current(self._folder) != self._store.version:
                self._store = self._open()
            self.available = True
        except StoreError:
            self.available = False


class Remote(Protocol):
    """A store of one tower's vectors by id, elsewhere; ``malformed`` counts values that were no such vectors."""

    malformed: int

    def find(self, ids: Sequence[int] | Sequence[str]) -> Found:
        """(B, Dq) vectors, and whether each is there."""
        ...


class RemoteVectors:
    """A remote store behind a fuse: after a failure it is left alone for a while, so that requests do not wait for it one by one.

    Args:
        connect: from a tower's digest and the width of its vectors, where known, to the store of them; makes no
            connection.
        failures: the errors by which the store says that it is out of reach.
        source: its name in answers.
        retry_s: for how long it is left alone.
    """

    def __init__(
        self,
        connect: Callable[[str, int | None], Remote],
        failures: tuple[type[Exception], ...],
        *,
        source: Source = "redis",
        retry_s: float = RETRY_S,
    ) -> None:
        self._connect, self._failures, self._retry_s = connect, failures, retry_s
        self.source = source
        self._stores: dict[tuple[str, int | None], Remote] = {}
        self._until = 0.0
        self.malformed = 0

    @property
    def available(self) -> bool:
        """Whether the last look found it."""
        return self._until == 0.0

    def find(self, ids: Sequence[Id], *, tower: str, width: int | None = None) -> Found:
        """See :class:`~torchrec_ext.retrieval.scorer.users.UserVectors`.

        Raises:
            UnavailableError: it is out of reach, or was a moment ago.
        """
        if time.monotonic() < self._until:
            raise UnavailableError(
                f"the {self.source} of users' vectors is out of reach; it is tried again within {self._retry_s:g} s"
            )
        if (tower, width) not in self._stores:
            self._stores = {(tower, width): self._connect(tower, width)}
        store = self._stores[tower, width]
        before = store.malformed
        try:
            found = store.find(cast(Sequence[int], ids))
        except self._failures as error:
            self._until = time.monotonic() + self._retry_s
            raise UnavailableError(
                f"the {self.source} of users' vectors is out of reach ({type(error).__name__})"
            ) from None
        self._until = 0.0
        self.malformed += store.malformed - before
        return found


def user_vectors(folder: Path | None, redis: str | None, tower: str) -> list[UserVectors]:
    """Where a server looks for users' vectors, in order: a Redis, which may be fresher, and a store in a folder.

    Args:
        folder: of the store, or None.
        redis: its address, or None.
        tower: digest of the query towers of the bundle that is served first.

    Raises:
        ValueError: there is no store, it is of another tower, or the Redis has no address.
    """
    found: list[UserVectors] = [*redis_vectors(redis)]
    if folder is not None:
        stored = FolderVectors(folder)
        if stored.tower != tower:
            raise ValueError(
                f"--vectors {folder}: made by tower {stored.tower[:12] or '(none)'}, this bundle's query is by "
                f"{tower[:12]}; embed "
                f"the users with it: python -m torchx_apps.embed BUNDLE --tower query --out {folder} ..."
            )
        found.append(stored)
    return found


def redis_vectors(url: str | None) -> list[RemoteVectors]:
    """The vectors of users in the Redis at ``url``, or none where there is no address.

    Raises:
        ValueError: the package redis is missing, or the address is none.
    """
    if url is None:
        return []
    try:
        import redis as _  # noqa: F401  (a clear word here, and not at the first request)
    except ModuleNotFoundError as error:
        raise ValueError(f"--redis needs the package {error.name}: pip install 'torchrec-ext[retrieval]'") from None
    from torchrec_ext.retrieval.store.redis import RedisStore

    RedisStore(url, tower="any").close()  # a wrong address is told now
    return [RemoteVectors(lambda tower, width: RedisStore(url, tower=tower, width=width), (StoreError,))]
