"""RedisStore: vectors by id in a Redis, for many readers and for users' vectors that are fresher than any file."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from torchrec_ext.retrieval.store.versions import StoreError

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ModuleNotFoundError as missing:  # told when a store is made
    redis, _MISSING = None, missing


class StoreUnreachable(StoreError, ConnectionError):  # noqa: N818 -- as the error that it is a case of
    """The Redis did not answer in time. The next call tries again by itself."""


class RedisStore:
    """The vectors that one tower made, by id; those of another tower are under other keys and never mixed in.

    Building one makes no connection; a connection that broke is made anew by the call after.

    Args:
        url: such as ``redis://localhost:6379/0``, ``rediss://`` for TLS, or ``unix://`` with a path.
        tower: digest of the tower; the version in every key.
        name: of what has the vectors; the beginning of every key.
        expiry_s: after which a vector is forgotten, or None for never.
        timeout_s: for a connection and for an answer.
        batch: ids in one command.
        width: D of the tower's vectors where it is known. A value that is no finite vector of that width is then found
            missing, and no more of it is read than such a vector has; else values of several widths are an error.

    Attributes:
        where: the address without its password, for messages.
        malformed: values that were none of the width, so far.

    Raises:
        ValueError: no digest, an address that is none, times or a batch that are not positive, or the package is
            missing.
    """

    def __init__(
        self,
        url: str,
        *,
        tower: str,
        name: str = "user",
        expiry_s: float | None = 86_400.0,
        timeout_s: float = 0.05,
        batch: int = 1_000,
        width: int | None = None,
    ) -> None:
        if redis is None:
            raise ValueError(f"a RedisStore needs the package {_MISSING.name}: pip install 'torchrec-ext[retrieval]'")
        if not tower:
            raise ValueError(
                "tower='': must be the digest of the tower that makes the vectors, or those of two are mixed"
            )
        for field, value in (("expiry_s", expiry_s), ("timeout_s", timeout_s), ("batch", batch)):
            if value is not None and not value > 0:
                raise ValueError(f"{field}={value}: must be greater than 0")
        self.where = _without_password(url)
        try:
            self._redis = redis.Redis.from_url(
                url, socket_timeout=timeout_s, socket_connect_timeout=timeout_s, retry=Retry(NoBackoff(), 1)
            )
        except ValueError:  # whose words may hold a part of the password
            raise ValueError(
                f"url={self.where!r}: is no address of a Redis; write redis://HOST:PORT/DB, rediss:// for TLS, or "
                "unix:// with a "
                "path, and of a password : / ? # @ as %3A %2F %3F %23 %40"
            ) from None
        self.tower = tower
        self._prefix, self._current = f"{name}:{tower}:", f"{name}:tower"
        self._expiry_ms = None if expiry_s is None else max(1, round(1000 * expiry_s))
        self._batch, self._width = batch, width
        self.malformed = 0

    def find(self, ids: Sequence[int] | Sequence[str]) -> tuple[Tensor, NDArray[np.bool_]]:
        """Vectors (B, D) float32, zeros where there is none, and (B,) whether each is there; one round trip.

        Raises:
            StoreUnreachable: no answer in time.
            StoreError: stored values of different widths, where this one's is not known.
        """
        if self._width is not None:
            return self._of_width(ids, self._width)
        values = [value for part in self._batched("mget", self._keys(ids)) for value in part]
        found = np.array([value is not None for value in values], dtype=np.bool_)
        sizes = {len(value) for value in values if value is not None}
        if len(sizes) > 1 or any(size % 4 for size in sizes):
            raise StoreError(
                f"{self.where}: vectors under '{self._prefix}*' have {sorted(sizes)} bytes; one tower has one width"
            )
        size = sizes.pop() if sizes else 0
        vectors = np.frombuffer(b"".join(value or bytes(size) for value in values), "<f4").reshape(
            len(values), size // 4
        )
        return torch.from_numpy(vectors.copy()), found

    def _of_width(self, ids: Sequence[int] | Sequence[str], width: int) -> tuple[Tensor, NDArray[np.bool_]]:
        keys, size = self._keys(ids), 4 * width
        # By the first bytes of each, since a value of gigabytes would take the time of all; a key of another type is an
        # error of its own in the answer.
        values = self._piped(lambda pipe: [pipe.getrange(key, 0, size) for key in keys], passed="WRONGTYPE")
        vectors, found = np.zeros((len(keys), width), "<f4"), np.zeros(len(keys), np.bool_)
        for row, value in enumerate(values):
            if isinstance(value, bytes) and len(value) == size:
                vectors[row] = np.frombuffer(value, "<f4")
                found[row] = np.isfinite(vectors[row]).all()
        vectors[~found] = 0.0
        self.malformed += sum(value != b"" for value in values) - int(found.sum())
        return torch.from_numpy(vectors), found

    def put(self, ids: Sequence[int] | Sequence[str], vectors: Tensor) -> None:
        """Writes vectors (B, D), whose expiry begins anew; batched and pipelined.

        Raises:
            StoreUnreachable: no answer in time; some may have been written.
            ValueError: not one finite vector for each id.
        """
        if vectors.dim() != 2 or len(vectors) != len(ids) or not bool(vectors.isfinite().all()):
            raise ValueError(
                f"vectors: shape {tuple(vectors.shape)} for {len(ids)} ids; must be ({len(ids)}, D) finite numbers"
            )
        keys, rows = self._keys(ids), vectors.detach().to("cpu", torch.float32).contiguous().numpy()

        def write(pipe: Any, places: range) -> None:
            for place in places:
                pipe.set(keys[place], rows[place].tobytes(), px=self._expiry_ms)

        for start in range(0, len(keys), self._batch):
            self._piped(lambda pipe, start=start: write(pipe, range(start, min(start + self._batch, len(keys)))))  # type: ignore[misc]

    def delete(self, ids: Sequence[int] | Sequence[str]) -> int:
        """Forgets vectors, and returns how many there were.

        Raises:
            StoreUnreachable: no answer in time.
        """
        return sum(self._batched("delete", self._keys(ids)))

    def make_current(self) -> None:
        """Tells readers that the vectors of this tower are complete, as :meth:`current_tower` then says.

        Raises:
            StoreUnreachable: no answer in time.
        """
        self._piped(lambda pipe: pipe.set(self._current, self.tower))

    def current_tower(self) -> str | None:
        """The tower whose vectors are complete; None where no writer said so.

        Raises:
            StoreUnreachable: no answer in time.
        """
        (found,) = self._piped(lambda pipe: pipe.get(self._current))
        return None if found is None else found.decode()

    def close(self) -> None:
        """Gives the connections back."""
        self._redis.close()

    def _keys(self, ids: Sequence[int] | Sequence[str]) -> list[str]:
        return [f"{self._prefix}{one}" for one in ids]

    def _batched(self, command: str, keys: list[str]) -> list[Any]:
        """The answers to ``command`` over batches of keys, in one round trip."""
        batches = [keys[start : start + self._batch] for start in range(0, len(keys), self._batch)]
        return self._piped(lambda pipe: [getattr(pipe, command)(*batch) for batch in batches]) if keys else []

    def _piped(self, fill: Callable[[Any], object], *, passed: str | None = None) -> list[Any]:
        """The answers to the commands that ``fill`` gives a pipeline, in one round trip; errors that begin with ``passed`` too."""
        try:
            with self._redis.pipeline(transaction=False) as pipe:
                fill(pipe)
                answers = list(pipe.execute(raise_on_error=passed is None))
            for answer in answers:
                if isinstance(answer, Exception) and not str(answer).startswith(passed or ""):
                    raise answer
            return answers
        except (
            redis.exceptions.AuthenticationError
        ) as error:  # a ConnectionError to its package, from a server that answers
            raise StoreError(f"{self.where} refuses: {error}") from None
        except (redis.exceptions.ConnectionError, redis.exceptions.TimeoutError, OSError) as error:
            raise StoreUnreachable(f"{self.where} does not answer ({error}); is redis-server running there?") from None
        except redis.exceptions.RedisError as error:
            raise StoreError(f"{self.where} refuses: {error}") from None


def _without_password(url: str) -> str:
    """The address without what stands before the host's @, and without the options, among which a password may be too."""
    scheme, mark, rest = url.partition("://")
    place, _, options = rest.partition("?")
    place = (
        "..." if "@" in options else place.rpartition("@")[2]
    )  # of either part: a password with a ? or an @ is in both
    return f"{scheme}{mark}{place}"
