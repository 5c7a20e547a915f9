"""embed: a store in the order of the ids, the same from any number of ranks and however they share the catalogue."""

import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.retrieval.store.writer import embed

pytestmark = pytest.mark.unit
ITEMS = 101


def catalogue(strings: bool) -> list[tuple[Any, torch.Tensor]]:
    """Blocks of ids in no order, with their rows."""
    order = np.random.default_rng(0).permutation(ITEMS)
    ids = np.array([f"i{one:03d}" for one in order]) if strings else order
    rows = torch.randn(ITEMS, 4, generator=torch.Generator().manual_seed(1))[
        torch.from_numpy(order)
    ]
    return [(ids[at : at + 13], rows[at : at + 13]) for at in range(0, ITEMS, 13)]


def tower(rows: torch.Tensor) -> torch.Tensor:
    return rows @ torch.ones(4, 3).cumsum(0) + 1


def over_ranks(
    folder: Path, blocks: list[Any], world_size: int, **options: Any
) -> EmbeddingStore:
    barrier, failures = threading.Barrier(world_size, timeout=30), []

    def run(rank: int) -> None:
        try:
            embed(
                tower,
                blocks[rank::world_size],
                folder,
                rank=rank,
                world_size=world_size,
                barrier=barrier.wait,
                **options,
            )
        except BaseException as error:
            failures.append(error)
            barrier.abort()

    ranks = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    for failure in failures:
        if not isinstance(failure, threading.BrokenBarrierError):
            raise failure
    return EmbeddingStore.open(folder, verify=True)


@pytest.mark.parametrize("strings", [False, True])
@pytest.mark.parametrize("dtype", ["fp32", "int8"])
def test_the_same_store_from_any_number_of_ranks(
    strings: bool, dtype: str, tmp_path: Path
) -> None:
    blocks = catalogue(strings)
    stores = [
        over_ranks(tmp_path / f"r{ranks}", blocks, ranks, dtype=dtype, digest="t")
        for ranks in (1, 2, 4)
    ]
    assert len({store.digest for store in stores}) == 1
    named = stores[0].ids.ids().tolist()
    assert named == sorted(named)
    assert len(named) == ITEMS
    expected = torch.cat([tower(rows) for _, rows in blocks])
    places = torch.from_numpy(
        stores[0].ids.positions(np.concatenate([ids for ids, _ in blocks]))
    )
    assert torch.allclose(
        stores[0].rows(places), expected, atol=1e-6 if dtype == "fp32" else 0.1
    )
    assert [path.name for path in tmp_path.iterdir() if "share" in path.name] == []


def test_an_id_in_two_shares_is_refused(tmp_path: Path) -> None:
    blocks = [
        (np.array([1, 2]), torch.ones(2, 4)),
        (np.array([3, 2]), torch.ones(2, 4)),
    ]
    with pytest.raises(ValueError, match="ids: 2 stands at rows"):
        over_ranks(tmp_path / "store", blocks, 2)
    with pytest.raises(ValueError, match="several ranks need a barrier"):
        embed(tower, blocks, tmp_path, world_size=2)
