"""`rec.plan`: plans for devices one does not have, in numbers that add up, or refusals that say what would fit."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torchrec_ext.components  # type: ignore[import-not-found]
from torchx.components.component_test_base import ComponentTestCase
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import get_components

from tests.contracts import run_ranks
from torchrec_ext.distributed.runtime import Runtime
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.jobs.setup import build_model, load_task, merge_lookups, plan_job
from torchx_apps.plan import main
from torchx_apps.recipes.by_name import load_recipe

BIG = "ad=300Mx64,item=12Mx64"


class TestValid(ComponentTestCase):
    def test_plan(self) -> None:
        self.validate(torchrec_ext.components, "plan")


@pytest.mark.unit
def test_the_component_is_listed_by_its_short_name_and_hands_on_what_was_asked() -> (
    None
):
    assert "rec.plan" in get_components()
    flags = [
        "--tables",
        BIG,
        "--world_size",
        "64",
        "--hbm",
        "40",
        "--out",
        "a b",
        "--",
        "--json",
    ]
    (role,) = materialize_appdef(torchrec_ext.components.plan, flags).roles
    assert role.entrypoint == "python3"
    assert role.args == [
        *(
            "-m",
            "torchx_apps.plan",
            "--world-size=64",
            "--device=cuda",
            "--hbm=40.0",
            "--ddr=1024.0",
            "--intra=600.0",
        ),
        *("--inter=12.5", f"--tables={BIG}", "--out=a b", "--json"),
    ]


def planned(capsys: pytest.CaptureFixture[str], *flags: str) -> dict[str, Any]:
    assert main([*flags, "--json"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    return document


def test_what_the_ranks_hold_adds_up_to_the_tables(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for devices in (8, 16):
        report = planned(
            capsys,
            "--tables",
            BIG,
            "--world-size",
            str(devices),
            "--sharding",
            "row_wise",
        )
        ranks = report["ranks"]
        assert len(ranks) == devices
        assert sum(rank["weights"] for rank in ranks) == 312_000_000 * 64 * 4
        # one number for a row
        assert sum(rank["state"] for rank in ranks) == pytest.approx(
            312_000_000 * 4, rel=1e-6
        )
        assert all(rank["total"] <= 0.85 * 80 * 2**30 for rank in ranks)
        assert {table["sharding"] for table in report["tables"]} == {"row_wise"}


def test_twice_the_bandwidth_halves_what_the_exchange_waits_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = (
        "--tables",
        "ad=3Mx64",
        "--world-size",
        "16",
        "--sharding",
        "row_wise",
        "--inter",
    )
    ten, twenty, forty = (
        planned(capsys, *flags, rate)["ranks"][0] for rate in ("10", "20", "40")
    )
    saved = (
        ten["exchange_ms"] - twenty["exchange_ms"],
        twenty["exchange_ms"] - forty["exchange_ms"],
    )
    assert saved[0] == pytest.approx(2 * saved[1]) != 0
    assert ten["lookup_ms"] == twenty["lookup_ms"]


def test_longer_bags_take_longer(capsys: pytest.CaptureFixture[str]) -> None:
    single, twenty = (
        planned(capsys, "--tables", tables, "--world-size", "2")
        for tables in ("a=1Mx64", "a=1Mx64x20")
    )
    assert max(rank["lookup_ms"] for rank in twenty["ranks"]) > 5 * max(
        rank["lookup_ms"] for rank in single["ranks"]
    )


def test_a_table_too_large_for_the_gpus_goes_to_the_hosts_where_they_may(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--tables", "ad=300Mx64", "--world-size", "8", "--hbm", "8")
    report = planned(capsys, *flags, "--ddr", "1024")
    assert {table["kernel"] for table in report["tables"]} <= {
        "fused_uvm",
        "fused_uvm_caching",
    }
    assert all(rank["host"] > 0 for rank in report["ranks"])
    assert main([*flags, "--ddr", "0"]) == 1
    err = capsys.readouterr().err
    assert (
        "no sharding plan fits: tables with optimizer state need 72.64 GiB over all ranks"
        in err
    )
    assert "8 rank(s) have 6.80 GiB each" in err
    assert (
        f"at least {math.ceil(300e6 * (64 * 4 + 4) / (6.8 * 2**30))} ranks of this size"
        in err
    )
    assert "sgd, fp16 tables" in err
    assert err.rstrip().endswith("--sharding and --optimizer what is asked of it")
    assert "Traceback" not in err
    assert (
        main(
            [
                *flags[:2],
                "--world-size",
                "16",
                "--hbm",
                "8",
                "--ddr",
                "0",
                "--sharding",
                "row_wise",
            ]
        )
        == 0
    )


def test_300_million_rows_beside_the_gpus_with_a_cache_on_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = (
        "--tables",
        "ad=300Mx64",
        "--world-size",
        "8",
        "--sharding",
        "row_wise",
        "--kernel",
        "fused_uvm_caching",
    )
    report = planned(capsys, *flags, "--cache-load-factor", "0.1")
    (ad,) = report["tables"]
    assert (ad["sharding"], ad["kernel"]) == ("row_wise", "fused_uvm_caching")
    # row_wise_adagrad: one number for a row, on the GPU
    weights, state = (300_000_000 * 64 * 4, 300_000_000 * 4)
    assert ad["ddr"] == sum(rank["host"] for rank in report["ranks"]) == weights
    # and FBGEMM's 4 bytes a row and 16 a cached one
    cache = weights // 10 + state + 300_000_000 * (4 + 0.1 * 16)
    assert cache < ad["hbm"] < cache + 2**25  # ids and embeddings on their way
    assert main([*flags, "--cache-load-factor", "0.1"]) == 0
    shown = capsys.readouterr().out
    assert "of these in host memory on rank 0: 9155.27 MiB" in shown
    assert "ad       fused_uvm_caching  10%" in shown


def test_a_table_that_fits_nowhere_is_refused_with_the_kernels_and_devices_that_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = ("--tables", "ad=300Mx64", "--hbm", "8", "--ddr", "64", "--world-size", "8")
    assert main([*flags, "--kernel", "fused_uvm_caching"]) == 1
    err = capsys.readouterr().err
    # 72.64 GiB of host memory at 6.80 each
    assert "at least 11 ranks of this size" in err
    rows = {
        line.split()[0]: line.split()[1:]
        for line in err.splitlines()
        if line.startswith(("fused", "key_value"))
    }
    assert (
        rows["fused"][0] == rows["fused_uvm"][0] == rows["fused_uvm_caching"][0] == "16"
    )
    assert rows["key_value"] == ["needs", "--ssd"]
    assert "Traceback" not in err
    for kernel in ("fused", "fused_uvm", "fused_uvm_caching"):
        assert main([*flags[:-1], "16", "--kernel", kernel]) == 0
    assert main([*flags, "--kernel", "key_value", "--ssd", "1024"]) == 0


def test_a_refusal_names_the_sharding_types_that_would_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert (
        main(["--tables", "ad=300Mx64", "--sharding", "data_parallel", "--ddr", "0"])
        == 1
    )
    err = capsys.readouterr().err
    assert (
        "shard the data_parallel tables, which no number of ranks makes smaller" in err
    )
    assert (
        "row_wise for every table is foreseen to be faster" in err
        or "column_wise for every table is foreseen" in err
    )


def test_the_folder_has_text_numbers_and_a_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip(
        "matplotlib", reason="needs matplotlib: pip install 'torchrec-ext[report]'"
    )
    assert (
        main(
            [
                "--tables",
                BIG,
                "--world-size",
                "16",
                "--sharding",
                "row_wise",
                "--out",
                str(tmp_path / "plan"),
            ]
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "weights on ranks 0-15: 4760.74 MiB" in shown  # 312 M rows of 256 bytes
    assert "row_wise (taken)" in shown
    assert (tmp_path / "plan/plan.txt").read_text() == shown
    assert len(json.loads((tmp_path / "plan/plan.json").read_text())["ranks"]) == 16
    assert (tmp_path / "plan/memory.png").stat().st_size > 10_000


def test_the_tables_of_a_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    flags = [
        "--recipe",
        "two_tower",
        "--set",
        "data.name=planted",
        "--set",
        "data.users=60",
        "--set",
        "data.items=50",
    ]
    report = planned(
        capsys, *flags, "--world-size", "2", "--device", "cpu", "--ddr", "4"
    )
    tables = {
        table["name"]: (table["rows"], table["dim"]) for table in report["tables"]
    }
    assert tables["user_id"] == (61, 32)
    assert all(
        rank["dense"] > 0 and rank["host"] == rank["total"] for rank in report["ranks"]
    )


def taken(runtime: Runtime, overrides: Sequence[str]) -> dict[str, str]:
    """The sharding type of each table in the plan that a training takes."""
    job = apply_overrides(load_recipe("two_tower"), list(overrides))
    model = build_model(job, load_task(job, runtime))
    merge_lookups(job, model, runtime.world_size)
    plan, _ = plan_job(job, model, None, runtime)
    tables = [pair for module in plan.plan.values() for pair in module.items()]  # type: ignore[attr-defined]
    return {name: sharding.sharding_type for name, sharding in tables}


@pytest.mark.parametrize(
    ("setting", "whole"),
    [
        ("sync.mode=every_step", True),
        ("sync.mode=semi_sync", False),
        ("plan.tables=item_id=row_wise", False),
    ],
)
def test_the_plan_is_the_one_that_training_takes(
    setting: str, whole: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    sets = ["data.name=planted", "data.users=60", "data.items=50", setting]
    trained = run_ranks(taken, 2, sets)[0]
    flags = [
        "--recipe",
        "two_tower",
        *(word for each in sets for word in ("--set", each)),
        "--world-size",
        "2",
    ]
    report = planned(capsys, *flags, "--device", "cpu", "--ddr", "4")
    assert set(trained) == {table["name"] for table in report["tables"]}
    by_rule = {table["sharding"] for table in report["tables"]} == {"data_parallel"}
    assert by_rule == ({*trained.values()} == {"data_parallel"}) == whole
    assert main([*flags, "--device", "cpu", "--ddr", "4"]) == 0
    assert ("so each rank has them whole" in capsys.readouterr().out) == whole
    if setting == "sync.mode=semi_sync":
        assert "data_parallel" not in trained.values()


def test_small_tables_are_whole_where_ranks_are_cpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = (
        "--tables",
        "a=2Kx64,b=2Kx64",
        "--world-size",
        "2",
        "--local-world-size",
        "2",
    )
    kinds = {
        device: {
            table["sharding"]
            for table in planned(capsys, *flags, "--device", device)["tables"]
        }
        for device in ("cpu", "cuda")
    }
    assert kinds["cpu"] == {"data_parallel"} != kinds["cuda"]
    assert main([*flags, "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "auto (taken)" in shown
    assert "foreseen to be faster" not in shown, (
        "the cost model counts bytes, and the rule stands against it"
    )


@pytest.mark.slow
@pytest.mark.launch
def test_as_a_user_runs_it(tmp_path: Path) -> None:
    torchx = str(Path(sys.executable).with_name("torchx"))
    command = [
        torchx,
        "run",
        "rec.plan",
        "--tables",
        "ad=3Mx64",
        "--world_size",
        "16",
        "--sharding",
        "row_wise",
        "--out",
        "plan",
    ]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=dict(os.environ),
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    assert len(json.loads((tmp_path / "plan/plan.json").read_text())["ranks"]) == 16


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            [],
            "give --tables NAME=ROWSxDIM,..., or --recipe NAME for the tables of a recipe, and not both",
        ),
        (["--tables", "a=1x4", "--recipe", "two_tower"], "and not both"),
        (
            ["--tables", "a=300M*64"],
            "--tables: 'a=300M*64': write NAME=ROWSxDIM, such as ad=300Mx64",
        ),
        (["--tables", "300Mx64"], "--tables: '300Mx64': write NAME=ROWSxDIM"),
        (
            ["--tables", "a=0x64"],
            "--tables: 'a=0x64': a table has at least one row and one column",
        ),
        (["--tables", "a=9x4,a=9x4"], "--tables names 'a' twice"),
        (["--tables", ","], "--tables ',' names no table"),
        (["--tables", "a=9x30"], "table 'a': embedding_dim=30 must be a multiple of 4"),
        (
            ["--tables", "a=9x4", "--inter", "-1"],
            "inter_gb_s=-1.0: must be a number greater than 0",
        ),
        (
            ["--tables", "a=9x4", "--intra", "nan"],
            "intra_gb_s=nan: must be a number greater than 0",
        ),
        (
            ["--tables", "a=9x4", "--hbm", "0"],
            "hbm_gb=0.0: must be a number greater than 0",
        ),
        (
            ["--tables", "a=9x4", "--device", "cpu", "--ddr", "0"],
            "ddr_gb=0.0: must be a number greater than 0",
        ),
        (
            ["--tables", "a=9x4", "--device", "tpu"],
            "device='tpu': must be one of cuda, cpu",
        ),
        (
            ["--tables", "a=9x4", "--world-size", "12"],
            "world_size=12 with local_world_size=8: every host has as many devices",
        ),
        (["--tables", "a=9x4", "--world-size", "0"], "world_size=0: must be 1 or more"),
        (
            ["--tables", "a=9x4", "--world-size", "10000000"],
            "world_size=10000000: must be 16,384 or less; the planner weighs",
        ),
        (
            ["--tables", "a=9x4", "--reserve", "1"],
            "reserve=1.0: must be at least 0 and below 1",
        ),
        (
            ["--tables", "a=9x4", "--batch-size", "-3"],
            "--batch-size -3: a device needs at least one row in a step",
        ),
        (
            ["--tables", "a=9x4", "--sharding", "rowwise"],
            "--sharding rowwise: must be one of auto, data_parallel",
        ),
        (
            ["--tables", "a=9x4", "--kernel", "uvm"],
            "--kernel uvm: must be one of auto, dense, fused, fused_uvm",
        ),
        (
            ["--tables", "a=9x4", "--kernel", "key_value"],
            "kernel=key_value, but the hosts have no SSD; give --ssd GIB",
        ),
        (
            ["--tables", "a=9x4", "--cache-load-factor", "2"],
            "cache_load_factor=2.0: must be a share of the rows",
        ),
        (
            ["--tables", "a=9x4", "--kernel", "fused_uvm", "--device", "cpu"],
            "table 'a': kernel=fused_uvm on a cpu: its rows would lie beside a GPU's memory",
        ),
        (
            ["--tables", "a=9x4", "--ssd", "-1"],
            "ssd_gb=-1.0: must be a number at least 0",
        ),
        (
            ["--tables", "a=9x4", "--optimizer", "adagard"],
            "tables='adagard': must be one of adagrad",
        ),
        (
            ["--tables", "a=9x4", "--set", "x=1"],
            "--set x=1: it changes a recipe; give one with --recipe",
        ),
        (
            ["--tables", "a=9x4", "--run-dir", "x"],
            "unrecognized arguments: --run-dir x",
        ),
        (
            ["--recipe", "two_towr"],
            "--recipe two_towr: there is no such recipe; did you mean 'two_tower'?",
        ),
        (
            ["--recipe", "two_tower", "--set", "plan.towers=user:0,item:1"],
            "plan.towers=user:0,item:1: plans for other devices",
        ),
        (["--tabels", "a=9x4"], "unrecognized arguments: --tabels a=9x4"),
    ],
)
def test_mistakes_are_told_in_one_line(
    flags: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 1
    err = capsys.readouterr().err
    assert message in err
    assert "Traceback" not in err
