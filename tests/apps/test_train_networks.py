"""Several networks in one job: members, ranks, the table with the best; a stacked member equals one trained alone."""

import contextlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contracts import leave_group, run_ranks
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.networks.compiled import CompiledStep
from torchrec_ext.train.checkpoint import folder as shared_folder
from torchx_apps import publish, train_networks
from torchx_apps.config import with_settings
from torchx_apps.networks import stacks as stacked_members
from torchx_apps.networks.members import (
    MemberJob,
    RankGroup,
    World,
    differing,
    members_of,
    place,
    setting,
)
from torchx_apps.networks.report import Result, best_of, draw_networks, table
from torchx_apps.networks.run import run_networks
from torchx_apps.networks.stacks import NetworksConfig, why_alone
from torchx_apps.recipes.by_name import load_recipe

TINY = [
    "data.name=planted",
    "data.users=60",
    "data.items=50",
    "data.history_length=5",
    "train.epochs=2",
    "train.eval_every=1",
]
SETS = [
    f"--set={item}"
    for item in [
        *TINY,
        "loader.batch_size=256",
        "model.tower_widths=8",
        "model.top_widths=8",
    ]
]
# A step of Adam or Adagrad turns on the last bit of a gradient that is nearly 0; SGD
# does not.
SGD = [
    f"--set=optimizer.{item}"
    for item in ("tables=sgd", "dense=sgd", "tables_lr=0.1", "dense_lr=0.05")
]


def members(
    *vary: str, listed: tuple[str, ...] = (), own_rows: bool = False
) -> list[MemberJob]:
    return members_of(load_recipe("two_tower"), vary, listed, own_rows=own_rows)


@pytest.mark.unit
def test_a_grid_is_all_combinations_and_a_list_adds_to_it() -> None:
    found = members(
        "optimizer.dense_lr=1e-3,3e-3",
        "model.tower_widths=64|128,64",
        listed=("big:train.seed=3,model.tower_widths=256,64",),
    )
    assert [member.name for member in found] == [
        "dense_lr=1e-3_tower_widths=64",
        "dense_lr=1e-3_tower_widths=128-64",
        "dense_lr=3e-3_tower_widths=64",
        "dense_lr=3e-3_tower_widths=128-64",
        "big",
    ]
    assert [member.job.model.tower_widths for member in found] == [
        (64,),
        (128, 64),
        (64,),
        (128, 64),
        (256, 64),
    ]
    assert differing(found) == [
        "optimizer.dense_lr",
        "model.tower_widths",
        "train.seed",
    ]
    assert [setting(found[-1], key) for key in differing(found)] == [
        "0.002",
        "256,64",
        "3",
    ]


@pytest.mark.unit
def test_keys_that_end_alike_are_named_in_full() -> None:
    (first, *_) = members("train.seed=0,1", "loader.seed=5,6")
    assert first.name == "train.seed=0_loader.seed=5"


@pytest.mark.unit
def test_members_read_the_rows_of_the_recipes_seed_unless_they_ask_for_their_own() -> (
    None
):
    def stream(found: list[MemberJob]) -> list[int]:
        return [member.job.train.seed + member.job.loader.seed for member in found]

    assert stream(members("train.seed=0,1,2")) == [0, 0, 0]
    assert stream(members("train.seed=0,1,2", own_rows=True)) == [0, 1, 2]
    assert stream(members("loader.seed=4,7")) == [4, 7]
    assert stream(members("train.seed=1,2", "loader.seed=4,7")) == [5, 8, 6, 9]


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flags", "told"),
    [
        ([], "no member: give --vary KEY=VALUE,VALUE"),
        (
            ["--vary=optimizer.dense_l=1,2"],
            "--vary optimizer.dense_l=1: Unrecognized options: --optimizer.dense_l, 1; did you mean",
        ),
        (
            ["--vary=optimizer.dense_lr=fast,1"],
            "--vary optimizer.dense_lr=fast: --optimizer.dense_lr: ",
        ),
        (
            ["--vary=optimizer.dense_lr"],
            "--vary optimizer.dense_lr: write KEY=VALUE,VALUE",
        ),
        (["--vary=train.seed=1,1"], "--vary train.seed=1,1: 1 stands there twice"),
        (
            ["--vary=train.seed=1", "--vary=train.seed=2"],
            "--vary train.seed is given twice",
        ),
        (
            ["--vary=loader.batch_size=0,1"],
            "--vary loader.batch_size=0: loader: loader.batch_size=0: must be 1 or more",
        ),
        (["--member=wide"], "--member wide: write NAME:KEY=VALUE"),
        (["--member=a/b:train.seed=1"], "the name 'a/b' must be letters, digits"),
        (
            ["--member=a:train.seed=1", "--member=a:train.seed=2"],
            "two members have the name 'a'",
        ),
        (
            ["--member=a:train.seed=1", "--member=b:train.seed=1"],
            "members 'a' and 'b' are one network",
        ),
        (
            ["--member=a:train.sed=1"],
            "--member train.sed=1: Unrecognized options: --train.sed, 1; did you mean",
        ),
        (
            ["--vary=train.seed=1,2", "--groups=seed=3:0"],
            "--groups seed=3:0: there is no member 'seed=3'; did you mean 'seed=",
        ),
        (
            ["--vary=train.seed=1,2", "--groups=seed=1:0"],
            "--groups: member seed=2 is in no group; give it ranks",
        ),
        (
            ["--vary=train.seed=1,2", "--groups=seed=1:0,seed=2:1"],
            "there is no rank 1; the job has ranks 0 to 0",
        ),
        (
            ["--vary=train.seed=1,2", "--ranks=2", "--groups=seed=1:0-1,seed=2:1"],
            "rank 1 is in two groups",
        ),
        (
            ["--vary=train.seed=1,2", "--ranks=2", "--groups=*:0"],
            "rank 1 is in no group; give it a member",
        ),
        (
            ["--vary=train.seed=1,2", "--groups=*:0,seed=1:0"],
            "member seed=1 is in two groups",
        ),
        (["--vary=train.seed=1,2", "--groups=*"], "--groups *: write MEMBER:RANKS"),
        (
            ["--vary=train.seed=1,2", "--stack=maybe"],
            "--stack maybe: must be auto, require or never",
        ),
        (
            ["--vary=train.seed=1,2", "--codistill=wait=1", "--dry-run"],
            "--codistill wait=1: Unrecognized options: --wait, 1",
        ),
        (
            ["--vary=train.seed=1,2", "--codistill=weight=1", "--stack=never"],
            "--codistill with --stack never",
        ),
        (
            ["--vary=train.seed=1,2", "--ranks=2"],
            "--ranks 2: it is of --list and --dry_run",
        ),
        (
            ["--vary=train.seed=1,2", "--resume=runs/a"],
            "--resume runs/a: several networks go on in their own folder; give --run_dir",
        ),
    ],
)
def test_a_mistake_is_told_with_its_flag_and_no_traceback(
    flags: list[str], told: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train_networks.main(flags) == 1
    error = capsys.readouterr().err
    assert told in error
    assert "Traceback" not in error


@pytest.mark.unit
def test_the_list_says_what_differs_and_which_ranks_train_it(
    capsys: pytest.CaptureFixture[str],
) -> None:
    flags = [
        "--vary=train.seed=0,1",
        "--member=wide:model.tower_widths=128,64",
        "--ranks=3",
        "--groups=seed=*:0,wide:1-2",
    ]
    assert train_networks.main([*flags, "--list"]) == 0
    header, _, *rows = [
        re.split(r"\s{2,}", line) for line in capsys.readouterr().out.splitlines()
    ]
    assert header == ["member", "train.seed", "model.tower_widths", "ranks"]
    assert rows == [
        ["seed=0", "0", "64", "0"],
        ["seed=1", "1", "64", "0"],
        ["wide", "0", "128,64", "1, 2"],
    ]
    assert train_networks.main([*flags, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "optimizer.dense_lr" in shown
    assert "wide" in shown


@pytest.mark.unit
@pytest.mark.parametrize(
    ("names", "ranks", "groups", "expected"),
    [
        ("abcde", 2, "", [("abc", (0,)), ("de", (1,))]),
        ("ab", 5, "", [("a", (0, 1, 2)), ("b", (3, 4))]),
        ("abc", 4, "a:0+2-3,*c+b:1", [("a", (0, 2, 3)), ("cb", (1,))]),
        ("abc", 1, "", [("abc", (0,))]),
    ],
)
def test_members_are_dealt_to_ranks_or_placed_as_asked(
    names: str, ranks: int, groups: str, expected: Any
) -> None:
    assert place(list(names), ranks, groups) == [
        RankGroup(tuple(own), on) for own, on in expected
    ]


def result(
    name: str, auc: float, *, ended: str = "all epochs", test: float | None = None
) -> Result:
    validation = [
        {"kind": "eval", "epoch": 1, "step": 3, "auc": auc - 0.1},
        {"kind": "eval", "epoch": 2, "step": 6, "auc": auc},
    ]
    loss = [{"epoch": 1, "step": 3, "loss": 0.6}, {"epoch": 2, "step": 6, "loss": 0.5}]
    figures = {} if ended == "diverged" else {"auc": auc if test is None else test}
    return Result(
        name=name,
        ended=ended,
        epochs=2,
        validation=validation,
        test=figures,
        loss=loss,
        seconds=1.5,
    )


@pytest.mark.unit
def test_the_best_is_chosen_on_validation_and_never_one_that_diverged() -> None:
    found = members("train.seed=0,1,2")
    results = [
        result("seed=0", 0.7, test=0.9),
        result("seed=1", 0.8, test=0.6),
        result("seed=2", 0.95, ended="diverged"),
    ]
    best = best_of(found, results)
    assert best is not None
    assert best.name == "seed=1"
    lines = table(found, results).splitlines()
    assert re.split(r"\s{2,}", lines[0]) == [
        "member",
        "train.seed",
        "validation auc",
        "test auc",
        "epochs",
        "ended",
        "seconds",
    ]
    assert re.split(r"\s{2,}", lines[3]) == [
        "seed=1 *",
        "1",
        "0.8000",
        "0.6000",
        "2",
        "all epochs",
        "1.5",
    ]
    assert "diverged" in lines[4]
    # A member that diverged does not count: 0.75 is the mean of 0.7 and 0.8.
    assert re.split(r"\s{2,}", lines[5].strip()) == [
        "mean ± std",
        "0.7500 ± 0.0707",
        "0.7500 ± 0.2121",
    ]
    assert "±" not in table(
        members("train.seed=0,1", "optimizer.dense_lr=1,2")[:3], results
    )


@pytest.mark.unit
def test_a_figure_that_should_fall_is_best_where_it_is_least() -> None:
    falling = with_settings(
        load_recipe("two_tower"),
        ["train.early_stop.metric=log_loss", "train.early_stop.mode=min"],
    )
    values = {"seed=0": 0.4, "seed=1": 0.3}
    results = [
        Result(name=name, validation=[{"log_loss": value}], test={"log_loss": value})
        for name, value in values.items()
    ]
    best = best_of(members_of(falling, ["train.seed=0,1"], []), results)
    assert best is not None
    assert best.name == "seed=1"


@pytest.mark.unit
def test_the_picture_has_a_line_for_each_member(tmp_path: Path) -> None:
    results = [result("a", 0.7), result("b", 0.8)]
    draw_networks(tmp_path / "networks.png", results, results[1])
    assert (tmp_path / "networks.png").read_bytes()[:4] == b"\x89PNG"


@pytest.mark.unit
def test_the_picture_has_bars_for_members_of_one_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    drawn: list[Any] = []
    monkeypatch.setattr(
        "torchx_apps.networks.report.save_figure",
        lambda figure, path: drawn.append(figure),
    )
    loss = [{"epoch": 1, "step": step, "loss": 1 / step} for step in (1, 2)]
    results = [
        Result(name=name, epochs=1, validation=[{"epoch": 1, "auc": auc}], loss=loss)
        for name, auc in (("a", 0.7), ("b", 0.8))
    ]
    draw_networks(tmp_path / "networks.png", results, results[1])
    lines, bars = drawn[0].axes
    assert [len(line.get_xdata()) for line in lines.lines] == [2, 2]
    assert [bar.get_height() for bar in bars.patches] == [0.7, 0.8]
    assert not bars.lines


@pytest.mark.unit
def test_a_process_without_torchrun_is_a_world_of_one() -> None:
    environ: dict[str, str] = {}
    world = World(environ)
    world.narrow(RankGroup(("a",), (0,)), "0/0")
    world.send("results/0", "[]")
    assert (world.rank, world.size, environ, world.receive("results/0")) == (
        0,
        1,
        {},
        "[]",
    )


def on_a_host_of_its_own(runtime: Runtime, folder: str) -> str:
    """What a job of two networks ends with where each rank stands in another folder."""
    leave_group(runtime)
    shared_folder._LATE_S = 0.5
    home = Path(folder, f"host{runtime.rank}")
    home.mkdir()
    os.chdir(home)
    world, message = World(), "trained"
    groups = [RankGroup((f"seed={rank}",), (rank,)) for rank in range(2)]
    try:
        run_networks(
            members("train.seed=0,1"), groups, world, NetworksConfig(), Path("runs/a")
        )
    except ValueError as error:
        message = str(error)
    if runtime.is_main:
        world.receive("read")  # it holds the store from which the other one reads
    else:
        world.send("read", "")
    return message


def test_a_folder_of_each_host_is_refused_before_any_member_is_trained(
    tmp_path: Path,
) -> None:
    for message in run_ranks(on_a_host_of_its_own, 2, str(tmp_path)):
        assert "folder 'runs/a': rank 1 on " in message
        assert "give a folder that all hosts share: --run_dir" in message
    assert list(tmp_path.rglob("runs/a/*")) == [], "no member has begun"


@pytest.mark.unit
def test_settings_of_the_job_are_checked() -> None:
    with pytest.raises(
        ValueError, match="--stack none: must be auto, require or never"
    ):
        NetworksConfig(stack="none")


@pytest.mark.unit
@pytest.mark.parametrize(
    ("change", "told"),
    [
        ("train.amp=bf16", "train.amp=bf16 is of networks that are trained alone"),
        ("sync.mode=local_sgd", "sync.mode=local_sgd is of networks"),
        ("start.path=runs/a", "start.path=runs/a is of networks"),
        (
            "export=auto",
            "export=auto makes a bundle where a network is trained alone; run rec.serve.export afterwards",
        ),
        (
            "pretrained=item_id=v.npy",
            "pretrained=item_id=v.npy is of networks that are trained alone",
        ),
    ],
)
def test_settings_that_no_stack_has_are_told_and_their_network_is_trained_alone(
    change: str, told: str
) -> None:
    assert why_alone(load_recipe("two_tower")) is None
    assert told in str(why_alone(with_settings(load_recipe("two_tower"), [change])))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """The records of how the training went; which way its steps went is told by the loop of one network alone."""
    records = [
        json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()
    ]
    return [record for record in records if record["kind"] != "steps"]


@pytest.mark.slow
def test_a_stacked_member_has_the_losses_and_figures_that_it_has_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    vary = ["--vary=train.seed=0,1", "--vary=model.dropout=0,0.3"]
    for stack in ("require", "never"):
        assert (
            train_networks.main(
                [
                    *SETS,
                    *SGD,
                    *vary,
                    f"--stack={stack}",
                    f"--run_dir={tmp_path / stack}",
                    "--weights",
                ]
            )
            == 0
        )
    said = capsys.readouterr().out
    assert "one loader read once for all: seed=0_dropout=0, seed=0_dropout=0.3" in said
    for name in ("seed=0_dropout=0", "seed=0_dropout=0.3", "seed=1_dropout=0.3"):
        stacked, alone = (
            metrics(tmp_path / stack / name) for stack in ("require", "never")
        )
        assert [(record["kind"], record["step"]) for record in stacked] == [
            (record["kind"], record["step"]) for record in alone
        ]
        for one, other in zip(stacked, alone, strict=True):
            for figure in one.keys() & {"loss", "auc", "hr@10", "ndcg@10", "rows"}:
                assert one[figure] == pytest.approx(other[figure], abs=1e-5), (
                    name,
                    figure,
                )
        assert (tmp_path / "require" / name / "weights.pt").stat().st_size > 1000
    results = json.loads((tmp_path / "require" / "results.json").read_text())
    assert results["chosen_by"] == "validation auc"
    assert results["best"] in said
    assert (tmp_path / "require" / "networks.png").exists()


ONE_ID = [
    "--set=data.history_length=0",
    "--set=model.features=user_id,item_id",
    "--set=loader.batch_size=64",
]


@pytest.fixture
def compiled_calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of members in each compiled step."""
    calls: list[int] = []
    run = CompiledStep.run

    def counted(step: CompiledStep, shape: Any, batches: Any, *arguments: Any) -> Any:
        calls.append(len(batches))
        return run(step, shape, batches, *arguments)

    monkeypatch.setattr(CompiledStep, "run", counted)
    return calls


@pytest.mark.slow
def test_a_compiled_stack_trains_its_members_as_alone_and_goes_on_after_a_stop(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    compiled_calls: list[int],
) -> None:
    vary = ["--vary=train.seed=0,1", "--vary=model.dropout=0,0.3"]
    flags = [*SETS, *SGD, *ONE_ID, *vary, "--set=checkpoint.steps=5"]
    compiled = [*flags, "--stack=require", "--set=train.compile=require"]
    assert (
        train_networks.main(
            [*flags, "--stack=never", f"--run_dir={tmp_path / 'alone'}"]
        )
        == 0
    )
    assert compiled_calls == []
    assert train_networks.main([*compiled, f"--run_dir={tmp_path / 'whole'}"]) == 0
    steps = metrics(tmp_path / "whole" / "seed=0_dropout=0")[-1]["step"]
    assert compiled_calls == [4] * (steps - 1)
    assert "stack: compiled since step 2: " in capsys.readouterr().out
    asked = iter(range(1, 10_000))

    @contextlib.contextmanager
    def stopping() -> Iterator[Callable[[], bool]]:
        yield lambda: next(asked) == steps - 3

    with monkeypatch.context() as patched:
        patched.setattr(stacked_members, "asked_to_stop", stopping)
        assert train_networks.main([*compiled, f"--run_dir={tmp_path / 'cut'}"]) == 143
    assert train_networks.main([*compiled, f"--run_dir={tmp_path / 'cut'}"]) == 0
    for name in ("seed=0_dropout=0", "seed=0_dropout=0.3", "seed=1_dropout=0.3"):
        alone = metrics(tmp_path / "alone" / name)
        for folder in ("whole", "cut"):
            records = metrics(tmp_path / folder / name)
            assert [(record["kind"], record["step"]) for record in records] == [
                (record["kind"], record["step"]) for record in alone
            ]
            for first, second in zip(records, alone, strict=True):
                for figure in first.keys() & {"loss", "rows"}:
                    assert first[figure] == pytest.approx(second[figure], abs=1e-5), (
                        folder,
                        name,
                        figure,
                    )
                for figure in first.keys() & {
                    "auc",
                    "hr@10",
                    "ndcg@10",
                }:  # two scores may change places by rounding
                    assert first[figure] == pytest.approx(second[figure], abs=1e-3), (
                        folder,
                        name,
                        figure,
                    )


@pytest.mark.slow
def test_a_compiled_stack_of_lists_is_refused_by_name_and_its_members_are_trained_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], compiled_calls: list[int]
) -> None:
    flags = [*SETS, *SGD, "--vary=train.seed=0,1", "--set=train.compile=require"]
    assert (
        train_networks.main(
            [*flags, "--stack=require", f"--run_dir={tmp_path / 'refused'}"]
        )
        == 1
    )
    assert (
        "cannot be stacked: train.compile=require: the step of the stack cannot be compiled: one of the feat"
        in (capsys.readouterr().err)
    )
    assert train_networks.main([*flags, f"--run_dir={tmp_path / 'alone'}"]) == 0
    shown = capsys.readouterr().out
    assert (
        "note: seed=0, seed=1: not stacked: train.compile=require: the step of the stack cannot"
        in shown
    )
    assert "best: " in shown
    assert compiled_calls == []


@pytest.mark.slow
def test_a_job_that_was_stopped_goes_on_and_each_member_is_published_as_a_network_of_its_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two members in a stack, of which one ends earlier, and one of another shape, trained after them."""
    flags = [
        "--member=a:train.seed=1,train.epochs=1",
        "--member=b:train.seed=2",
        "--member=wide:model.tower_widths=16",
    ]
    whole, cut = tmp_path / "whole", tmp_path / "cut"
    assert train_networks.main([*SETS, *SGD, *flags, f"--run_dir={whole}"]) == 0
    steps = metrics(whole / "b")[-1]["step"]
    asked = iter(range(1, 10_000))

    @contextlib.contextmanager
    def stopping() -> Iterator[Callable[[], bool]]:
        yield lambda: next(asked) == steps - 1

    with monkeypatch.context() as patched:
        patched.setattr(stacked_members, "asked_to_stop", stopping)
        assert train_networks.main([*SETS, *SGD, *flags, f"--run_dir={cut}"]) == 143
    assert f"stopped by a signal after step {steps - 1}" in capsys.readouterr().out
    assert train_networks.main([*SETS, *SGD, *flags, f"--run_dir={cut}"]) == 0
    said = capsys.readouterr().out
    assert f"{cut / 'b' / 'checkpoints'}/step-{steps - 1:010d}" in said
    for name in ("a", "b", "wide"):
        one, other = (without_speed(metrics(folder / name)) for folder in (whole, cut))
        assert one == other, name
        assert (
            publish.main(
                [str(cut / name), "--out", str(tmp_path / f"{name}.safetensors")]
            )
            == 0
        )
        assert (
            publish.main(
                [
                    str(whole / name),
                    "--out",
                    str(tmp_path / f"{name}-whole.safetensors"),
                ]
            )
            == 0
        )
        found, expected = (
            load_file(tmp_path / f"{name}{part}.safetensors") for part in ("", "-whole")
        )
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[key], value) for key, value in expected.items())
    one, other = (
        json.loads((folder / "results.json").read_text())["members"]
        for folder in (whole, cut)
    )
    assert [(own["name"], own["ended"], own["test"]) for own in one] == [
        (own["name"], own["ended"], own["test"]) for own in other
    ]
    capsys.readouterr()
    assert train_networks.main([*SETS, *SGD, *flags, f"--run_dir={cut}"]) == 0
    assert "stack of" not in capsys.readouterr().out, (
        "all have ended: only the table is made again"
    )


def without_speed(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {
            key: value
            for key, value in record.items()
            if key not in ("rows_per_s", "data_wait")
        }
        for record in records
    ]


@pytest.mark.launch
@pytest.mark.slow
def test_networks_of_different_shapes_train_at_the_same_time_on_groups_of_ranks(
    tmp_path: Path,
) -> None:
    flags = [
        "--member=a:train.seed=1",
        "--member=b:train.seed=2",
        "--member=wide:model.tower_widths=16",
        "--groups=a+b:0,wide:1-2",
    ]
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--nproc_per_node=3",
        "-m",
        "torchx_apps.train_networks",
    ]
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [*command, *SETS, *flags, "--run_dir=out"],
        cwd=tmp_path,
        env=environ,
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [
        (result["name"], result["ranks"], result["ended"])
        for result in results["members"]
    ] == [
        ("a", [0], "all epochs"),
        ("b", [0], "all epochs"),
        ("wide", [1, 2], "all epochs"),
    ]
    assert (
        "stack of 2 on cpu, 1 thread(s), one loader read once for all: a, b"
        in done.stdout
    )
    assert "wide: on rank(s) 1, 2" in done.stdout
    assert (
        "so each rank has them whole"
        in (tmp_path / "out" / "wide" / "plan.txt").read_text()
    )
    assert done.stdout.count("best: ") == 1
    assert {"a", "b", "wide", "networks.png", "results.txt"} <= set(
        os.listdir(tmp_path / "out")
    )
