"""RedisStore: vectors by id in a Redis, if users' vectors must be fresher than any file."""

from __future__ import annotations

import functools
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
except ModuleNotFoundError as missing:  # reported when a store is made
    redis, _MISSING = None, missing


class StoreUnreachable(StoreError, ConnectionError):  # noqa: N818  named after the state
    """The Redis did not answer in time. The next call tries again by itself."""


class RedisStore:
    """Vectors of one tower by id. Keys contain the tower's digest, so vectors of two towers never mix.

    The first call connects. If a call loses the connection, the next call reconnects.

    Args:
        url: address such as ``redis://localhost:6379/0``, ``rediss://`` for TLS, or ``unix://`` with a path.
        tower: digest of the tower; the version in every key.
        name: first word of every key, such as ``user``.
        expiry_s: seconds after which a vector is forgotten, or None for never.
        timeout_s: seconds for a connection and for an answer.
        batch: ids in one command.
        width: D of the tower's vectors, if known. Any value other than a finite vector of that width then counts as
            missing, and no more bytes than a vector's are read. Without it, values of several widths are an error.

    Attributes:
        where: address without its password, for error messages.
        malformed: number of values so far other than finite vectors of the width.

    Raises:
        ValueError: an empty digest, a wrong address, times or a batch that are not positive, or the package is
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
            raise ValueError(
                f"a RedisStore needs the package {_MISSING.name}: pip install 'torchrec-ext[retrieval]'"
            )
        if not tower:
            raise ValueError(
                "tower='': must be the digest of the tower that makes the vectors, or those of two are mixed"
            )
        for field, value in (
            ("expiry_s", expiry_s),
            ("timeout_s", timeout_s),
            ("batch", batch),
        ):
            if value is not None and not value > 0:
                raise ValueError(f"{field}={value}: must be greater than 0")
        # The address without the user and password before the host's @, and without the
        # options.
        scheme, mark, rest = url.partition("://")
        host, _, options = rest.partition("?")
        # If a password contains both ? and @, the begin of the host is ambiguous: hide
        # everything.
        address = "..." if "@" in options else host.rpartition("@")[2]
        self.where = f"{scheme}{mark}{address}"
        try:
            # One immediate retry: a connection that the server closed while idle fails
            # once, without delay.
            self._redis = redis.Redis.from_url(
                url,
                socket_timeout=timeout_s,
                socket_connect_timeout=timeout_s,
                retry=Retry(NoBackoff(), 1),
            )
        except ValueError:  # its message may contain a part of the password
            raise ValueError(
                f"url={self.where!r}: is not the address of a Redis; write redis://HOST:PORT/DB, rediss:// for TLS, or "
                "unix:// with a path, and : / ? # @ in a password as %3A %2F %3F %23 %40"
            ) from None
        self.tower = tower
        self._prefix = f"{name}:{tower}:"
        self._expiry_ms: int | None = None
        if expiry_s is not None:
            # Redis refuses an expiry of 0 ms.
            self._expiry_ms = max(1, round(1000 * expiry_s))
        self._batch = batch
        self._width = width
        self.malformed = 0

    def find(
        self, ids: Sequence[int] | Sequence[str]
    ) -> tuple[Tensor, NDArray[np.bool_]]:
        """Finds vectors (B, D) float32, zeros if missing, and (B,) whether each exists, in one round trip.

        Raises:
            StoreUnreachable: no answer in time.
            StoreError: stored values have different widths, and ``width`` is not known.
        """
        if self._width is not None:
            return self._find_vectors(ids, self._width)
        values: list[Any] = []
        for batch in self._send_batches("mget", self._keys(ids)):
            values += batch
        exists = np.array([value is not None for value in values], dtype=np.bool_)
        contents = [value for value in values if value is not None]
        sizes = sorted(set(map(len, contents)))
        if len(sizes) > 1 or sum(sizes) % 4:
            raise StoreError(
                f"{self.where}: vectors under '{self._prefix}*' have {sizes} bytes; one tower has one width"
            )
        width = sum(sizes) // 4
        # Missing vectors are zeros.
        vectors = np.zeros((len(values), width), "<f4")
        vectors[exists] = np.frombuffer(b"".join(contents), "<f4").reshape(
            len(contents), width
        )
        return torch.from_numpy(vectors), exists

    def _find_vectors(
        self, ids: Sequence[int] | Sequence[str], width: int
    ) -> tuple[Tensor, NDArray[np.bool_]]:
        keys = self._keys(ids)
        size = 4 * width
        # Only the first bytes, since a value of gigabytes would delay all; a key of
        # another type gives an error of its own in the answer.
        values = self._send_pipeline(
            lambda pipe: [pipe.getrange(key, 0, size) for key in keys],
            allowed_error="WRONGTYPE",
        )
        vectors = np.zeros((len(keys), width), "<f4")
        exists = np.zeros(len(keys), np.bool_)
        for row, value in enumerate(values):
            if isinstance(value, bytes) and len(value) == size:
                vectors[row] = np.frombuffer(value, "<f4")
                exists[row] = np.isfinite(vectors[row]).all()
        vectors[~exists] = 0.0
        # An empty answer means that the key is missing; everything else without a
        # vector is malformed.
        self.malformed += sum(value != b"" for value in values) - int(exists.sum())
        return torch.from_numpy(vectors), exists

    def put(self, ids: Sequence[int] | Sequence[str], vectors: Tensor) -> None:
        """Writes vectors (B, D) and starts their expiry again; batched and pipelined.

        Raises:
            StoreUnreachable: no answer in time; some may have been written.
            ValueError: not one finite vector for each id.
        """
        if (
            vectors.dim() != 2
            or len(vectors) != len(ids)
            or not bool(vectors.isfinite().all())
        ):
            raise ValueError(
                f"vectors: shape {tuple(vectors.shape)} for {len(ids)} ids; must be ({len(ids)}, D) finite numbers"
            )
        keys = self._keys(ids)
        rows = vectors.detach().to("cpu", torch.float32).contiguous().numpy()

        def write(pipe: Any, block: range) -> None:
            for row in block:
                pipe.set(keys[row], rows[row].tobytes(), px=self._expiry_ms)

        # A round trip for each batch, unlike look-ups: a pipeline holds all its
        # commands in memory.
        for start in range(0, len(keys), self._batch):
            block = range(start, min(start + self._batch, len(keys)))
            self._send_pipeline(functools.partial(write, block=block))

    def delete(self, ids: Sequence[int] | Sequence[str]) -> int:
        """Deletes vectors and returns their number.

        Raises:
            StoreUnreachable: no answer in time.
        """
        return sum(self._send_batches("delete", self._keys(ids)))

    def check(self) -> None:
        """Checks at once whether the Redis answers.

        Raises:
            StoreUnreachable: no answer in time.
        """
        self._send_pipeline(lambda pipe: pipe.ping())

    def close(self) -> None:
        """Closes the connections."""
        self._redis.close()

    def _keys(self, ids: Sequence[int] | Sequence[str]) -> list[str]:
        return [f"{self._prefix}{each}" for each in ids]

    def _send_batches(self, command: str, keys: list[str]) -> list[Any]:
        """Runs a command over batches of keys and returns the answers, in one round trip."""
        batches = [
            keys[start : start + self._batch]
            for start in range(0, len(keys), self._batch)
        ]
        if keys:
            return self._send_pipeline(
                lambda pipe: [getattr(pipe, command)(*batch) for batch in batches]
            )
        return []

    def _send_pipeline(
        self, fill: Callable[[Any], object], *, allowed_error: str | None = None
    ) -> list[Any]:
        """Fills a pipeline with commands and returns their answers, in one round trip.

        Args:
            fill: adds commands.
            allowed_error: first word of errors to return among the answers instead of raising.
        """
        try:
            # No transaction: each vector stands for itself, so other clients' commands
            # may come between.
            with self._redis.pipeline(transaction=False) as pipe:
                fill(pipe)
                answers = list(pipe.execute(raise_on_error=allowed_error is None))
            for answer in answers:
                if isinstance(answer, Exception) and not str(answer).startswith(
                    allowed_error or ""
                ):
                    raise answer
            return answers
        # A subclass of ConnectionError, although the server does answer, so it comes
        # first.
        except redis.exceptions.AuthenticationError as error:
            raise StoreError(f"{self.where} refuses: {error}") from None
        except (
            redis.exceptions.ConnectionError,
            redis.exceptions.TimeoutError,
            OSError,
        ) as error:
            raise StoreUnreachable(
                f"{self.where} does not answer ({error}); is redis-server running there?"
            ) from None
        except redis.exceptions.RedisError as error:
            raise StoreError(f"{self.where} refuses: {error}") from None
