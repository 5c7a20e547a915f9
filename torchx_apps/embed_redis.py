"""Users' vectors into a Redis, by all ranks together, under the keys that `rec.serve.http --redis` reads."""

from __future__ import annotations

import torch
import torch.distributed as dist

from torchrec_ext.retrieval.ids import IdMap, Ids
from torchrec_ext.retrieval.redis_store import RedisStore
from torchrec_ext.retrieval.snapshots import StoreError
from torchx_apps.embedding import TowerRows
from torchx_apps.embedding_ids import of_kind

_TIMEOUT_S = 5.0  # a server that answers requests waits 50 ms; who writes them all can wait


def fill_redis(rows: TowerRows, url: str, expiry_s: float | None, deleted: Ids) -> str:
    """Writes each row's vector, pipelined, and takes ``deleted`` out; each rank writes its own share.

    Args:
        rows: of the query towers.
        url: of the Redis.
        expiry_s: after which a vector is forgotten, or None for never.
        deleted: ids.

    Returns:
        What was done, in words.

    Raises:
        ValueError: no address, an id twice or in both, a value that cannot be taken; or the Redis is not there, went away or
            refuses, with what was written.
    """
    store, runtime = RedisStore(url, tower=rows.digest, expiry_s=expiry_s, timeout_s=_TIMEOUT_S), rows.runtime
    written = gone = 0
    try:
        store.current_tower()  # is it there? the towers may run for long
        if runtime.is_main:
            _check_ids(rows, deleted)
        dist.barrier()
        for ids, block in rows.blocks():
            with torch.inference_mode():
                vectors = rows.vectors(block)
            store.put(ids.tolist(), vectors)
            written += len(ids)
        if runtime.is_main:
            gone = store.delete([str(one) for one in deleted])
        dist.barrier()
        if runtime.is_main and rows.catalogue:
            store.make_current()
    except StoreError as error:
        raise ValueError(f"{error} ({_written(rows, written)})") from None
    finally:
        store.close()
    shares = [0] * runtime.world_size
    dist.all_gather_object(shares, written)
    kept = "for ever" if expiry_s is None else f"for {expiry_s:,.12g} s"
    towers = f"tower{'s' if len(rows.names) > 1 else ''} {', '.join(rows.names)} ({rows.digest[:12]})"
    told = f"redis: {store.where} ({sum(shares):,} x {rows.side.width} of {towers} written, kept {kept}"
    return f"{told}; {gone:,} of {len(deleted):,} deleted)" if len(deleted) else f"{told})"


def _check_ids(rows: TowerRows, deleted: Ids) -> None:
    """A Redis takes an id twice without a word, and then the vector of either row."""
    if not rows.catalogue:
        return
    ids = IdMap.build(rows.ids())
    gone = of_kind(deleted, ids.kind)
    if (both := ids.positions(gone) >= 0).any():
        raise ValueError(f"--delete: {gone[both][0]!s} is also among the ids to write; leave it out")


def _written(rows: TowerRows, written: int) -> str:
    whose = f" of rank {rows.runtime.rank}" if rows.runtime.world_size > 1 else ""
    done = (
        f"{written:,} of {rows.rows:,} rows{whose} were written, or a few more"
        if written
        else f"no row{whose} is known to be written"
    )
    return f"{done}: run the same command again, which writes them all"
