"""`rec.diagnose.why_slow`: from the component to the page, for a recipe's own loader, step and evaluation."""

import contextlib
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torchrec_ext.components import diagnose  # type: ignore[import-not-found]
from torchx.components.component_test_base import ComponentTestCase
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import get_components

from tests.contracts import run_ranks
from torchrec_ext.diagnose import Diagnosis, Facts, Finding, Remedy
from torchrec_ext.diagnose.experiments import loop, measure, rounds
from torchrec_ext.diagnose.facts import Gain
from torchrec_ext.diagnose.findings import Change
from torchrec_ext.distributed.runtime import Runtime
from torchx_apps.cli.overrides import apply_overrides
from torchx_apps.diagnose import main
from torchx_apps.jobs import diagnosing, setup
from torchx_apps.jobs.diagnosing import run_diagnosis
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.tasks.job import Job


class TestValid(ComponentTestCase):
    def test_why_slow(self) -> None:
        self.validate(diagnose, "why_slow")


def test_it_is_listed_and_its_flags_reach_the_app() -> None:
    assert "rec.diagnose.why_slow" in get_components()
    given = [
        "--recipe",
        "ncf",
        "--set",
        "loader.batch_size=8",
        "--budget",
        "5",
        "--out",
        "here",
        "--threads",
        "2",
    ]
    (role,) = materialize_appdef(diagnose.why_slow, given).roles
    assert role.args == [
        *(
            "-m",
            "torchx_apps.diagnose",
            "--recipe",
            "ncf",
            "--budget=5.0",
            "--set=loader.batch_size=8",
            "--out=here",
        )
    ]
    assert role.env == {"OMP_NUM_THREADS": "2", "PYTHONUNBUFFERED": "1"}
    (role,) = materialize_appdef(
        diagnose.why_slow, ["--html", "a.html", "--trace", "b.json", "--apply", "True"]
    ).roles
    assert role.args[-3:] == ["--html=a.html", "--trace=b.json", "--apply"]
    with pytest.raises(
        ValueError, match="--threads 0: a rank needs at least one thread"
    ):
        materialize_appdef(diagnose.why_slow, ["--threads", "0"])


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--budget", "0"], "--budget 0: must be a number of seconds above 0"),
        (["--run-dir", "x"], "unrecognized arguments: --run-dir x"),
        (["--resume", "auto"], "unrecognized arguments: --resume auto"),
        (["--recipe", "two_towr"], "did you mean 'two_tower'"),
        (["--set", "loader.batch=1"], "there is no key"),
    ],
)
def test_wrong_flags_are_refused(
    flags: list[str], message: str, capfd: pytest.CaptureFixture[str]
) -> None:
    assert main(flags) == 1
    assert message in capfd.readouterr().err


def test_several_ranks_are_launched_by_torchrun() -> None:
    (role,) = materialize_appdef(
        diagnose.why_slow, ["--recipe", "ncf", "-j", "1x2", "--budget", "5"]
    ).roles
    assert "--nproc_per_node 2" in role.args[-1]
    check, _, started = role.args[-1].partition("; exec ")
    assert check.startswith('python3 -c "import torchx_apps" ')
    assert started.startswith("python3 -m torchx_apps.agent --max_restarts 0 ")
    assert role.args[-1].endswith("-m torchx_apps.diagnose --recipe ncf --budget=5.0")
    assert role.resource.cpu == 2
    with pytest.raises(
        ValueError, match="-j two: write NODESxPROCS in whole numbers from 1"
    ):
        materialize_appdef(diagnose.why_slow, ["-j", "two"])
    with pytest.raises(
        ValueError, match="-j 1:2x1: write NODESxPROCS in whole numbers from 1"
    ):
        materialize_appdef(diagnose.why_slow, ["-j", "1:2x1"])
    with pytest.raises(
        ValueError,
        match="-j 1x2 with --gpu 4: each of a node's 2 ranks needs a GPU of its own",
    ):
        materialize_appdef(diagnose.why_slow, ["-j", "1x2", "--gpu", "4"])


def small_job(*settings: str) -> Job:
    settings = ("data.name=planted", "loader.batch_size=256", "device=cpu", *settings)
    job: Job = apply_overrides(load_recipe("n_tower"), settings)
    return job


def test_a_recipe_is_diagnosed_with_its_own_flags_as_remedies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MOST_ROUNDS", rounds.FEWEST_ROUNDS)
    monkeypatch.setattr(loop, "TURN_S", 0.0)
    monkeypatch.setattr(measure, "roofline", lambda: (5e10, 1e10))
    html, trace = tmp_path / "page.html", tmp_path / "trace.json"
    assert (
        run_diagnosis(
            small_job(), budget_s=5, out=tmp_path / "page", html=html, trace=trace
        )
        == 0
    )
    assert html.read_text() == (tmp_path / "page" / "diagnosis.html").read_text()
    assert {
        event["name"] for event in json.loads(trace.read_text())["traceEvents"]
    } >= {"data", "forward", "backward"}
    page = capsys.readouterr().out
    assert page.startswith("why is my training slow? ")
    assert "torchrec_ext.adopt" not in page
    made = json.loads((tmp_path / "page" / "diagnosis.json").read_text())
    assert (tmp_path / "page" / "diagnosis.txt").read_text().strip() == page.strip()
    facts = made["facts"]
    assert facts["recipe"] is True
    assert "step" not in facts["not_measured"]
    assert {"data", "step", "op"} <= set(facts["rounds"][0])
    assert facts["ops"] > 20
    assert [each["name"] for each in facts["between"]] == ["the evaluation"]
    assert facts["parameters"] > 1_000
    assert {each["name"]: each["why"] for each in made["answers"]}[
        "torch.compile"
    ].startswith("--set train.compile=require: predicted, not tried")


def test_settings_are_applied_in_turn_beside_the_job_as_it_was(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A job whose batches take 100 ms by the clock, and a remedy with which they take 10: by its training's steps."""
    clock = [0.0]
    given, loader_of = small_job("loader.prefetch=0"), setup.loader_of
    monkeypatch.setattr(diagnosing, "_PROOF_S", 0.0)
    monkeypatch.setattr(
        diagnosing, "ThreadClock", lambda: contextlib.nullcontext(lambda: clock[0])
    )
    monkeypatch.setattr(
        setup,
        "loader_of",
        lambda job, *rest: Waiting(
            loader_of(job, *rest), clock, 0.01 if job.loader.prefetch else 0.1
        ),
    )
    seconds = Facts(rounds=[{"data": 0.2, "step": 0.01}] * 9).gain(
        lambda each: each["step"]
    )
    lines = ("--set loader.prefetch=8  # or more", "--threads 1  # with torchx run")
    remedies = [
        Remedy(
            name="ahead",
            lines=lines,
            gain=seconds,
            changes=Change.EXACT,
            basis="made up",
        )
    ]
    remedies.append(
        dataclasses.replace(
            remedies[0],
            name="bf16",
            lines=("--set train.amp=bf16",),
            changes=Change.BF16_PRODUCTS,
        )
    )
    remedies.append(
        dataclasses.replace(
            remedies[0],
            name="less",
            lines=("--set train.eval_every=...  # four times",),
        )
    )
    diagnosis = Diagnosis(Facts(rounds=[]))
    finding = Finding(
        cause="x",
        title="x",
        evidence=(),
        remedies=tuple(remedies),
        cost=0.9,
        size="large",
    )
    diagnosis.findings = (finding,)
    again: list[Job] = []
    monkeypatch.setattr(
        diagnosing, "diagnose_job", lambda job, *_: again.append(job) or diagnosis
    )
    threads = torch.get_num_threads()
    with Runtime.start("cpu", threads=1) as runtime:
        diagnosing.apply_remedies(given, diagnosis, runtime, 1.0)
    torch.set_num_threads(threads)
    assert [each.remedy for each in diagnosis.proof] == ["ahead"], (
        "no bf16, which rounds, and no value that is not given"
    )
    assert diagnosis.proof[0].ratio > 2, "20 ms of sleep for each batch are gone"
    assert [text for text, _ in diagnosis.kept] == [
        "--set loader.prefetch=8 --set threads=1"
    ]
    assert [(job.loader.prefetch, job.threads) for job in again] == [(8, 1)]
    assert "loader.prefetch" not in capsys.readouterr().out


class Waiting:
    """A loader whose batches take so many seconds by a clock."""

    def __init__(self, loader: Any, clock: list[float], seconds: float) -> None:
        self._loader, self._clock, self._seconds = loader, clock, seconds

    def __iter__(self) -> Any:
        for batch in self._loader:
            self._clock[0] += self._seconds
            yield batch

    def __len__(self) -> int:
        return len(self._loader)

    def set_epoch(self, epoch: int) -> None:
        self._loader.set_epoch(epoch)


@pytest.mark.slow
def test_a_captured_step_is_applied_and_its_gain_is_printed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "MOST_ROUNDS", rounds.FEWEST_ROUNDS)
    monkeypatch.setattr(loop, "TURN_S", 0.0)
    assert run_diagnosis(small_job("loader.batch_size=64"), budget_s=5, apply=True) == 0
    page = " ".join(capsys.readouterr().out.split())
    (applied,) = re.findall("what was applied, and what it gained (.*) together", page)
    # beside fewer threads, where others keep the cores busy
    assert "the step captured: predicted " in applied
    assert "--set train.compile=require" in page.split("together")[1]


FAILED = {
    "everywhere": "ahead could not be applied: ValueError: no loader",
    "rank 1": "no further remedy was applied: rank 1: OSError: no such shard",
}


def _applied(
    runtime: Runtime, cause: str
) -> tuple[list[tuple[str, float]], list[str], list[str]]:
    """What two ranks applied of two remedies, what they kept, and their notes; ``cause``: where the second fails."""
    lines = {
        "whole": "--set plan.sharding=data_parallel",
        "ahead": "--set loader.prefetch=7",
    }
    gain = Gain(1.2, 1.5)
    remedies = [
        Remedy(
            name=name, lines=(line,), gain=gain, changes=Change.EXACT, basis="made up"
        )
        for name, line in lines.items()
    ]
    finding = Finding(
        cause="x",
        title="x",
        evidence=(),
        remedies=tuple(remedies),
        cost=0.9,
        size="large",
    )
    diagnosis = Diagnosis(Facts(rounds=[]), rank=runtime.rank)
    loader_of = setup.loader_of
    diagnosis.findings = (finding,)
    diagnosing._PROOF_S = 0.0
    diagnosing.diagnose_job = lambda *_: diagnosis  # type: ignore[assignment]

    def loader(job: Job, *rest: Any) -> Any:
        if job.loader.prefetch == 7 and cause == "everywhere":
            raise ValueError("no loader")
        made = loader_of(job, *rest)
        return (
            Broken(made, 3)
            if cause == "rank 1" and job.loader.prefetch == 7 and runtime.rank == 1
            else made
        )

    setup.loader_of = loader
    diagnosing.apply_remedies(
        small_job("plan.sharding=row_wise"), diagnosis, runtime, 1.0
    )
    proof = [(each.remedy, each.ratio) for each in diagnosis.proof]
    return proof, [text for text, _ in diagnosis.kept], list(diagnosis.facts.notes)


class Broken(Waiting):
    """A loader that raises after so many batches."""

    def __init__(self, loader: Any, count: int) -> None:
        super().__init__(loader, [0.0], 0.0)
        self.count = count

    def __iter__(self) -> Any:
        for number, batch in enumerate(super().__iter__()):
            if number == self.count:
                raise OSError("no such shard")
            yield batch


@pytest.mark.slow
@pytest.mark.launch
@pytest.mark.parametrize("cause", ["", "everywhere", "rank 1"])
def test_ranks_apply_the_same_remedies_and_none_hangs_where_one_fails(
    cause: str,
) -> None:
    """They agree on every ratio and on what is kept; a remedy that fails on one rank ends the measuring on all."""
    by_rank = run_ranks(_applied, 2, cause)
    assert by_rank[0] == by_rank[1]
    proof, kept, notes = by_rank[0]
    assert [name for name, _ in proof] == (["whole"] if cause else ["whole", "ahead"])
    if cause:
        assert all("loader.prefetch" not in text for text in kept)
        assert notes[-1].startswith(FAILED[cause])
