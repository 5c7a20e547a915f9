"""`torchx run rec.train.hybrid` over real processes: exit codes, last lines, nothing left behind."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from tests.launch.jobs import gone
from tests.small_sets import write_ml_100k
from torchx_apps.cli.process import MISTAKE, MISTAKE_FILE
from torchx_apps.recipes import RECIPES

pytestmark = [
    pytest.mark.launch,
    pytest.mark.skipif(
        not any(point.name == "run" for point in entry_points(group="torchx.cli.cmds")),
        reason="`torchx run` of this package is not registered: pip install -e . again",
    ),
]

CLONE = Path(__file__).parents[2]
TORCHX = [str(Path(sys.executable).with_name("torchx")), "run"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder that is not the clone: no .torchxconfig, the package found because it is installed."""
    shutil.copy(Path(__file__).with_name("my_recipe.py"), tmp_path)
    return tmp_path


@pytest.fixture(scope="module")
def trained(
    tmp_path_factory: pytest.TempPathFactory,
) -> tuple[subprocess.CompletedProcess[str], Path]:
    """A tiny run of the recipe two_tower that succeeds, on three ranks and at most two cores, and its run folder."""
    folder = tmp_path_factory.mktemp("trained")
    overrides = [
        "data.name=planted",
        "data.users=60",
        "data.items=60",
        "train.epochs=2",
        "train.eval_every=1",
    ]
    flags = [
        *(f"--set={override}" for override in overrides),
        "--set",
        "model.tower_widths=16,8",
        "--run_dir",
        "out",
    ]
    return torchx_run(
        folder, "rec.train.hybrid", "-j", "1x3", *flags, cores=2
    ), folder / "out"


@pytest.fixture
def endless(folder: Path) -> Iterator[tuple[subprocess.Popen[str], list[int]]]:
    command = [*TORCHX, "rec.train.hybrid", "--recipe", "my_recipe.py:endless"]
    process = subprocess.Popen(
        command, cwd=folder, env=environment(), stderr=subprocess.PIPE, text=True
    )
    files = [folder / "pid0", folder / "pid1"]
    wait_until(lambda: all(file.exists() and file.read_text() for file in files))
    yield process, [int(file.read_text()) for file in files]
    process.kill()


def environment(**changes: str) -> dict[str, str]:
    """Returns the environment of a user who did not activate the venv."""
    bin_folder = str(Path(sys.executable).parent)
    folders = [f for f in os.environ["PATH"].split(os.pathsep) if f != bin_folder]
    return {**os.environ, "PATH": os.pathsep.join(folders), **changes}


def torchx_run(
    folder: Path, *flags: str, cores: int | None = None, **changes: str
) -> subprocess.CompletedProcess[str]:
    """Runs `torchx run` in ``folder`` with changes to the environment, on at most ``cores`` cores."""
    allowed = sorted(os.sched_getaffinity(0))[:cores]
    return subprocess.run(
        [*TORCHX, *flags],
        cwd=folder,
        env=environment(**changes),
        capture_output=True,
        text=True,
        timeout=240,
        preexec_fn=lambda: os.sched_setaffinity(0, allowed),
    )


def failed(folder: Path, *flags: str, message: str, **changes: str) -> str:
    """Runs a job that fails by a user's mistake, with ``message`` once and no traceback; returns its stderr."""
    done = torchx_run(folder, "rec.train.hybrid", *flags, **changes)
    assert done.returncode == 1
    assert (done.stdout + done.stderr).count(message) == 1, done.stderr
    assert "Traceback" not in done.stderr
    return done.stderr


def wait_until(condition: Callable[[], bool], seconds: float = 120) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, f"still waiting after {seconds} s"
        time.sleep(0.1)


def test_repeated_overrides_reach_the_job(
    trained: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, out = trained
    assert done.returncode == 0, done.stderr
    config = json.loads((out / "config.json").read_text())
    assert (
        config["data"]["users"],
        config["train"]["epochs"],
        config["model"]["tower_widths"],
    ) == (60, 2, [16, 8])


def test_more_ranks_than_cores_work_and_one_line_says_so(
    trained: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = trained
    cores = min(2, len(os.sched_getaffinity(0)))
    assert re.search(
        r"ranks: 3 on cpu over gloo( and shared memory)?, 1 thread\(s\) each",
        done.stdout,
    )
    message = f"note: 3 processes share {cores} cores on this host, so they oversubscribe it: "
    message += "each step takes longer than with "
    assert (
        done.stdout.count(message)
        == (done.stdout + done.stderr).count("oversubscribe")
        == 1
    )


def test_a_run_prints_plan_figures_and_recommendations_once(
    trained: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    done, _ = trained
    printed = done.stdout
    assert printed.count("data: planted, ") == 1
    for table, rows in (
        ("user_id", 61),
        ("gender", 3),
        ("history", 61),
        ("item_id", 61),
        ("genres", 19),
    ):
        assert re.search(
            rf"^{table} +{rows} x 32 +\d+\.\d+ +\w+ +\w+", printed, re.MULTILINE
        ), table
    for figure in (
        r"auc +0\.\d{4}",
        r"hr@10( +\d\.\d{4}){2} +\d+\.\d\dx +\d\.\d{4}",
        r"ndcg@10( +\d\.\d{4}){2} +\d+\.\d\dx",
    ):
        assert len(re.findall(rf"^{figure}", printed, re.MULTILINE)) == 1, figure
    assert re.search(
        r"^trained in \d+\.\d s, .* [\d,]+ samples/s", printed, re.MULTILINE
    )
    assert printed.count("user 1 liked before: item ") == 1
    assert (
        len(
            re.findall(
                r"^ *\d+\. item \d+, kind \d+  \(-?\d+\.\d\d\)", printed, re.MULTILINE
            )
        )
        == 10
    )
    assert "run folder: out (" in printed
    (message,) = done.stderr.splitlines()  # and so ranks 1 and 2 say nothing
    assert re.fullmatch(
        r"torchx run: starting 3 ranks of two_tower; logs: runs/logs/torchx/train-\w+",
        message,
    )


def test_a_run_leaves_its_folder(
    trained: tuple[subprocess.CompletedProcess[str], Path],
) -> None:
    _, out = trained
    assert {
        "config.json",
        "metrics.jsonl",
        "plan.txt",
        "summary.json",
        "training.png",
        "tensorboard",
    } <= set(os.listdir(out))
    records = [
        json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()
    ]
    assert [record["kind"] for record in records if record["kind"] != "steps"] == [
        "train",
        "eval",
        "train",
        "eval",
    ]
    (steps,) = (record for record in records if record["kind"] == "steps")
    assert steps["message"].startswith("eager: ")
    assert {"auc", "hr@10", "ndcg@10"} <= set(
        [record for record in records if record["kind"] == "eval"][-1]
    )
    summary = json.loads((out / "summary.json").read_text())
    assert summary["test"].keys() == {"auc", "hr@10", "ndcg@10"}
    assert summary["popularity"].keys() == {"hr@10", "ndcg@10"}
    assert summary["samples_per_s"] > 0
    assert (out / "plan.txt").read_text().startswith("table ")
    assert (out / "training.png").read_bytes()[:4] == b"\x89PNG"
    assert (out / "training.png").stat().st_size > 10_000
    assert any(file.stat().st_size for file in (out / "tensorboard").iterdir())


@pytest.mark.slow
def test_a_bare_torchx_run_in_the_clone_trains_on_two_ranks(tmp_path: Path) -> None:
    # In a folder of its own, so that the clone's runs/ stays as it is, and on a set
    # that is trained in seconds.
    shutil.copy(CLONE / ".torchxconfig", tmp_path)
    (tmp_path / "components").symlink_to(CLONE / "components")
    done = torchx_run(tmp_path, TORCHREC_EXT_DATA=str(write_ml_100k(tmp_path / "data")))
    assert done.returncode == 0, done.stderr
    assert (
        "data: ml-100k, 600 training rows, 60 users with a held-out item, 40 items"
        in done.stdout
    )
    assert "licence: MovieLens 100K (c) GroupLens" in done.stdout
    assert "ranks: 2 on cpu over gloo" in done.stdout
    (run,) = (tmp_path / "runs").glob("two_tower-*")
    assert json.loads((run / "config.json").read_text())["name"] == "two_tower"


@pytest.mark.slow
def test_an_id_out_of_range_on_one_rank_is_the_last_line_once(folder: Path) -> None:
    flags = [
        "--recipe",
        "my_recipe.py:id_out_of_range",
        "--set",
        "loader.batch_size=32",
    ]
    last = failed(
        folder, *flags, message="feature 'user_id': id 60 in row "
    ).splitlines()[-1]
    assert re.match(
        r"rank [01]: feature 'user_id': id 60 in row \d+ is outside table 'user_id' \(valid ids: 0 to 59; ",
        last,
    )
    assert last.endswith(
        "enlarge num_embeddings, fix the data, or set out_of_range='oov' to use row 0 for them"
    )


@pytest.mark.slow
def test_a_table_that_does_not_fit_is_refused_once_and_in_numbers(folder: Path) -> None:
    flags = ["--set", "data.name=planted", "--set", "plan.memory_gb=0.0001"]
    text = failed(
        folder,
        *flags,
        message="no sharding plan fits: tables with optimizer state need ",
    )
    (message,) = [line for line in text.splitlines() if "no sharding plan fits" in line]
    assert re.match(
        r"rank [01]: no sharding plan fits: tables with optimizer state need 920.00 KiB over all ranks ",
        message,
    )
    assert message.endswith("the largest table, 'user_id', needs 500.25 KiB")
    assert re.search(
        r"^what would make it fit: at least 11 ranks of this size", text, re.MULTILINE
    )


@pytest.mark.slow
def test_a_truncated_file_is_named_in_the_last_line_once(folder: Path) -> None:
    file = write_ml_100k(folder) / "ml-100k" / "inter.parquet"
    file.write_bytes(file.read_bytes()[:-100])
    last = failed(
        folder,
        message="its footer is missing or damaged",
        TORCHREC_EXT_DATA=str(folder),
    ).splitlines()[-1]
    assert last.startswith(f"rank 0: {file}: starts as parquet, but ")


@pytest.mark.slow
def test_a_bug_on_one_rank_ends_with_its_traceback_once(folder: Path) -> None:
    done = torchx_run(folder, "rec.train.hybrid", "--recipe", "my_recipe.py:bugged")
    lines = done.stderr.splitlines()
    assert done.returncode == 1
    assert lines[-1] == "rank 1: KeyError: 'tower'"
    assert lines[-2].strip() == 'raise KeyError("tower")'
    assert done.stderr.count("Traceback") == 1


@pytest.mark.slow
def test_a_mistake_on_another_node_is_the_last_line_once(folder: Path) -> None:
    done = torchx_run(
        folder, "rec.train.hybrid", "-j", "2x1", "--recipe", "my_recipe.py:mistaken"
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "rank 1: the user tower has 3 tables"
    )
    assert done.stderr.count("the user tower has") == 1


@pytest.mark.slow
def test_a_mistake_in_a_setting_is_told_before_any_rank_starts(folder: Path) -> None:
    flags = ["--set", "loader.batchsize=3", "--set", "data.name=planted"]
    starting, message = failed(folder, *flags, message="there is no key").splitlines()
    assert starting.startswith("torchx run: starting 2 ranks of two_tower; logs: ")
    assert message.startswith(
        "--set loader.batchsize=3: there is no key 'batchsize'; did you mean loader.batch_size?"
    )
    assert not (folder / "runs" / "logs").exists(), "a rank was started"


@pytest.mark.slow
def test_an_unknown_recipe_is_told_with_the_nearest(folder: Path) -> None:
    last = failed(
        folder, "-j", "1x1", "--recipe", "two_towr", message="there is no such recipe"
    ).splitlines()[-1]
    names = ", ".join(sorted(RECIPES))
    assert (
        last
        == f"--recipe two_towr: there is no such recipe; did you mean 'two_tower'? Built in: {names}"
    )


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["rec.train.hybrid", "--recipe", "ncf", "--", "--dry-run"],
            "loader.batch_size ",
        ),
        (["rec.train.hybrid", "--", "--list-recipes"], "two_tower "),
        (
            ["rec.train.networks", "--vary", "train.seed=0,1", "--", "--list"],
            "seed=1 .* 1$",
        ),
        (["rec.embed", "--bundle", "b", "--", "--help"], "usage: "),
    ],
)
def test_what_only_prints_is_printed_once_and_without_ranks(
    folder: Path, flags: list[str], line: str
) -> None:
    done = torchx_run(folder, *flags)
    assert (done.returncode, done.stderr) == (0, "")
    assert len(re.findall(f"^{line}", done.stdout, re.MULTILINE)) == 1
    assert os.listdir(folder) == ["my_recipe.py"]


def test_a_log_reaches_its_job_behind_torchruns_own_flags(folder: Path) -> None:
    """Of which `--log` would be an abbreviation."""
    done = torchx_run(
        folder, "rec.train.stream", "--log", "nosuch", "--until_idle", "1"
    )
    assert done.returncode == 1
    assert "--log nosuch: no such folder" in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_a_killed_rank_is_started_again(folder: Path) -> None:
    flags = [
        "--recipe",
        "my_recipe.py:killed_once",
        "--max_retries",
        "1",
        "--run_dir",
        "out",
    ]
    done = torchx_run(folder, "rec.train.hybrid", *flags)
    assert done.returncode == 0, done.stderr
    assert (folder / "out" / "summary.json").exists(), (
        "the second attempt writes into the folder of the first"
    )


@pytest.mark.parametrize(("code", "starts"), [(1, 2), (MISTAKE, 1)])
def test_a_fault_of_a_rank_is_tried_again_and_a_mistake_is_not(
    code: int, starts: int, tmp_path: Path
) -> None:
    """With an exit code of its own, by which a scheduler sees that another start is of no use."""
    (tmp_path / "rank.py").write_text(
        f"print('started', flush=True)\nraise SystemExit({code})\n"
    )
    words = [
        "-m",
        "torchx_apps.agent",
        "--standalone",
        "--nproc-per-node=1",
        "--max-restarts=1",
        "rank.py",
    ]
    variables = {**os.environ, MISTAKE_FILE: str(tmp_path / "mistake")}
    done = subprocess.run(
        [sys.executable, *words],
        cwd=tmp_path,
        env=variables,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == code, done.stderr
    assert done.stdout.count("started") == starts
    assert (tmp_path / "mistake").exists() == (code == MISTAKE)


def test_a_bad_j_shows_usage_and_what_was_given(folder: Path) -> None:
    done = torchx_run(folder, "rec.train.hybrid", "-j", "1y2")
    assert done.returncode == 2
    assert "usage: torchx run" in done.stderr
    assert done.stderr.splitlines()[-1].endswith("such as -j 1x2 or -j 2:4x8")
    assert "-j 1y2:" in done.stderr
    assert "Traceback" not in done.stderr


def test_ctrl_c_stops_every_rank(
    endless: tuple[subprocess.Popen[str], list[int]],
) -> None:
    process, ranks = endless
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert stderr.splitlines()[-1] == "torchx run: stopped by SIGINT; no rank is left"
    # a rank that is killed takes a moment to give its memory back
    assert gone(ranks, seconds=30)
    assert "Traceback" not in stderr


@pytest.mark.slow
def test_a_killed_torchx_leaves_no_rank_behind(
    endless: tuple[subprocess.Popen[str], list[int]],
) -> None:
    process, ranks = endless
    process.kill()
    assert gone(ranks, seconds=30)
