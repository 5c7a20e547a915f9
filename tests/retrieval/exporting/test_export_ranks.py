"""One bundle, whatever ranks and plan its model was trained on; over real gloo processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from torchrec import EmbeddingConfig

from tests.contracts import run_ranks
from tests.examples import ITEMS, META, small_model
from tests.retrieval.bundles import contents
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.session import NextItemModel
from torchrec_ext.modules.session_encoder import SessionEncoder
from torchrec_ext.retrieval.bundle.bundle import Bundle
from torchrec_ext.retrieval.exporting.content import Catalogue, ExportTables, NamedUsers
from torchrec_ext.retrieval.exporting.export import export
from torchrec_ext.schema import DataError

SHARDINGS = (
    *(
        "table_wise",
        "row_wise",
        "column_wise",
        "table_column_wise",
        "table_row_wise",
        "grid_shard",
        "data_parallel",
    ),
)


def plans(world_size: int) -> dict[str, PlanConfig]:
    """By name; on several ranks also towers on ranks of their own."""
    configs = {kind: PlanConfig(sharding=kind) for kind in SHARDINGS}  # type: ignore[arg-type]
    return (
        configs
        if world_size == 1
        else {**configs, "towers apart": PlanConfig(towers="user:0,item:1")}
    )


def exported(runtime: Runtime, folder: Path) -> dict[str, str]:
    """The digest of a bundle of one model, by plan."""
    digests = {}
    for name, config in plans(runtime.world_size).items():
        model = small_model(META)
        if name == "row_wise":
            model.merge_lookups()
        plan = plan_sharding(model, runtime, config)
        sharded, _ = hybrid_parallel(model, runtime, plan=plan, seed=7)
        sharded.train()
        out = folder / f"{name}-{runtime.world_size}"
        digests[name] = export(
            sharded,
            out,
            details={"ranks": runtime.world_size, "plan": name},
            **contents(),
        ).digest
        assert sharded.training
    return digests


def next_items(runtime: Runtime, folder: Path, tables: ExportTables = "trained") -> str:
    torch.manual_seed(0)
    encoder = SessionEncoder(8, 5, heads=2, causal=True)
    table = EmbeddingConfig(name="item_id", num_embeddings=ITEMS, embedding_dim=8)
    sharded, _ = hybrid_parallel(
        NextItemModel(table, encoder, device=META), runtime, seed=7
    )
    items, users = np.arange(1, ITEMS), np.arange(3)
    session = pa.array([[1, 2, 3], [4], [5, 6]], type=pa.list_(pa.int64()))
    none = pa.array([[], [], []], type=pa.list_(pa.int64()))
    known = NamedUsers(
        key="user_id",
        ids=users,
        features=pa.table({"session": session}),
        unknown={"session": []},
        seen=none,
        liked=none,
    )
    catalogue = Catalogue(ids=items, features=pa.table({"candidates": items}))
    return export(
        sharded,
        folder / f"session-{runtime.world_size}",
        catalogue=catalogue,
        users=known,
        tables=tables,
    ).digest


def refused(runtime: Runtime, folder: Path) -> str:
    """What every rank is told where rank 0 cannot write."""
    sharded, _ = hybrid_parallel(small_model(META), runtime, seed=7)
    try:
        export(sharded, folder / f"table_wise-{runtime.world_size}", **contents())
    except DataError as error:
        return str(error)
    return "nothing"


def everything(runtime: Runtime, folder: Path) -> dict[str, Any]:
    return {
        "digests": exported(runtime, folder),
        "session": next_items(runtime, folder),
        "refused": refused(runtime, folder),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bundles")
    return {
        "folder": folder,
        **{str(ranks): run_ranks(everything, ranks, folder) for ranks in (1, 2, 4)},
    }


def test_the_digest_is_one_on_any_ranks_and_under_any_plan(
    found: dict[str, Any],
) -> None:
    digests = {
        (name, ranks): digest
        for ranks in ("1", "2", "4")
        for by_plan in found[ranks]
        for name, digest in by_plan["digests"].items()
    }
    assert len(digests) == 7 + 8 + 8
    assert len(set(digests.values())) == 1, digests


def test_and_it_is_that_of_the_plain_model(
    found: dict[str, Any], tmp_path: Path
) -> None:
    from torchrec_ext.distributed.tables import initialise_tables

    model = small_model()
    initialise_tables(model, seed=7)
    assert (
        export(model, tmp_path / "bundle", **contents()).digest
        == found["2"][0]["digests"]["table_wise"]
    )


@pytest.mark.parametrize(
    "name", ["row_wise-4", "column_wise-2", "towers apart-4", "session-2"]
)
def test_each_loads_and_was_proven_on_its_own_ranks(
    name: str, found: dict[str, Any]
) -> None:
    bundle = Bundle.load(found["folder"] / name)
    assert (
        bundle.manifest.parity["greatest_difference"]
        <= bundle.manifest.parity["allowed"]
    )
    if not name.startswith("session"):
        assert bundle.manifest.certificate["plan"] == name.rpartition("-")[0]


def test_sessions_too(found: dict[str, Any]) -> None:
    digests = {
        by_rank["session"] for ranks in ("1", "2", "4") for by_rank in found[ranks]
    }
    assert len(digests) == 1
    bundle = Bundle.load(found["folder"] / "session-1")
    assert (bundle.query, bundle.candidate, bundle.metric) == (
        ["session"],
        "item",
        "dot",
    )
    scores, positions = bundle.index.search(
        bundle.embed_query({"session": [[3, 4]]}), 5
    )
    products = (
        bundle.embed_query({"session": [[3, 4]]})
        @ bundle.store.rows(torch.arange(ITEMS - 1)).T
    )
    assert torch.equal(positions, products.topk(5).indices)
    torch.testing.assert_close(scores, products.topk(5).values)


def test_int8_tables_of_sessions_too(tmp_path: Path) -> None:
    run_ranks(next_items, 1, tmp_path, "int8")
    bundle = Bundle.load(tmp_path / "session-1")
    assert bundle.manifest.content["tables"]["dtype"] == "int8"
    assert bundle.manifest.content["tables"]["overlap"] >= 0.9


def test_every_rank_is_told_why_rank_0_could_not_write(found: dict[str, Any]) -> None:
    for ranks in ("1", "2", "4"):
        for by_rank in found[ranks]:
            assert "there is something already" in by_rank["refused"]
