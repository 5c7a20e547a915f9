"""rec.pipeline.all makes what three commands make, from wherever it stopped, and tells mistakes before it begins."""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from torchrec_ext.components import pipeline as component  # type: ignore[import-not-found]
from torchx.components.component_test_base import ComponentTestCase
from torchx.specs import finder, macros
from torchx.specs.builders import materialize_appdef
from torchx.specs.finder import get_components

from tests.contracts import leave_group, run_ranks
from tests.launch.jobs import Launched, gone
from tests.small_sets import write_ml_100k
from torchrec_ext.distributed.runtime import Runtime
from torchx_apps import export, pipeline, preprocess, train
from torchx_apps.jobs import pipeline as stages
from torchx_apps.recipes.by_name import load_job
from torchx_apps.torchx_run import gather_overrides

KEYS = (
    *(
        "preprocess.pictures=false",
        "preprocess.config.test_share=0.2",
        "train.epochs=8",
        "train.compile=off",
    ),
    *(
        "loader.batch_size=64",
        "model.embedding_dim=4",
        "model.tower_widths=8",
        "model.top_widths=8",
    ),
    *("checkpoint.steps=4", "checkpoint.epochs=0"),
)


def need_duckdb() -> None:
    pytest.importorskip(
        "ibis", reason="needs ibis-framework[duckdb]: pip install 'torchrec-ext[data]'"
    )
    pytest.importorskip(
        "duckdb",
        reason="needs ibis-framework[duckdb]: pip install 'torchrec-ext[data]'",
    )


class TestValid(ComponentTestCase):
    def test_all(self) -> None:
        # TorchX executes the file among its own globals, where `all` would be the
        # component from then on.
        self.addCleanup(vars(finder).pop, "all", None)
        self.validate(component, "all")


@pytest.mark.unit
def test_the_component_starts_the_app_on_all_ranks() -> None:
    assert "rec.pipeline.all" in get_components()
    assert not [
        name
        for name in get_components()
        if name.startswith("rec.pipeline.") and name != "rec.pipeline.all"
    ]
    typed = [
        "--out",
        "films",
        "--set",
        "preprocess.config.min_count=2",
        "--index",
        "HNSW32",
        "-j",
        "2x4",
        "--set",
        "a=1",
    ]
    app = materialize_appdef(
        component.all, gather_overrides(["rec.pipeline.all", *typed])[1:]
    )
    assert app.roles[0].num_replicas == 2
    assert str(app.roles[0].args[-1]).endswith(
        "--nproc_per_node 4 --tee 2 --role '' -m torchx_apps.pipeline --recipe stream --preprocess=ml_100k --out=films "
        "--index=HNSW32 --set=preprocess.config.min_count=2 --set=a=1"
    )


def setting(*keys: str) -> list[str]:
    return [f"--set={key}" for key in keys]


def digest_of(folder: Path) -> dict[str, bytes]:
    """The bytes of a bundle's files by name; of the manifest all but the paths and times of the run."""
    files = {
        str(path.relative_to(folder)): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file()
    }
    manifest = json.loads(files["manifest.json"])
    return {
        **files,
        "manifest.json": json.dumps(without_run(manifest), sort_keys=True).encode(),
    }


def without_run(value: Any) -> Any:
    if isinstance(value, dict):
        of_run = {"run", "checkpoint", "data", "created", "id", "seal"}
        return {
            key: without_run(inner) for key, inner in value.items() if key not in of_run
        }
    return value


class Attempt(NamedTuple):
    code: int
    output: str


def attempt(runtime: Runtime, out: Path, keys: Sequence[str], stopped: bool) -> Attempt:
    """Runs the pipeline in this process, with a SIGTERM after the training's first checkpoint where ``stopped``."""
    leave_group(runtime)
    output = io.StringIO()

    def stop() -> None:
        while not list((out / "run" / "checkpoints").glob("step-*[0-9]")):
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGTERM)

    def become(path: str, command: Sequence[str], environment: object) -> None:
        assert command[1:3] == ["-m", "torchx_apps.export"]
        for name in stages._RANK:
            os.environ.pop(name)
        raise SystemExit(export.main(command[3:]))

    os.execve = become  # type: ignore[assignment]
    if stopped:
        threading.Thread(target=stop, daemon=True).start()
    with contextlib.redirect_stdout(output):
        try:
            code = pipeline.main(["--out", str(out), *setting(*keys), "--store=fp16"])
        except SystemExit as end:
            code = int(str(end.code))
    return Attempt(code, output.getvalue())


def three_commands(runtime: Runtime, out: Path, keys: Sequence[str]) -> list[int]:
    leave_group(runtime)
    with contextlib.redirect_stdout(io.StringIO()):
        given = [
            key.removeprefix("preprocess.")
            for key in keys
            if key.startswith("preprocess.")
        ]
        codes = [
            preprocess.main(
                ["--recipe=ml_100k", f"--out={out / 'data'}", *setting(*given)]
            )
        ]
        given = [key for key in keys if not key.startswith("preprocess.")]
        flags = [
            "--recipe=stream",
            f"--run-dir={out / 'run'}",
            *setting(*given, f"data.name={out / 'data'}"),
        ]
        codes.append(train.main(flags))
        for name in stages._RANK:
            os.environ.pop(name)
        codes.append(
            export.main([str(out / "run"), f"--out={out / 'bundle'}", "--store=fp16"])
        )
    return codes


@pytest.fixture(scope="module")
def small_set(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_ml_100k(tmp_path_factory.mktemp("set"))


@pytest.mark.slow
def test_a_stopped_pipeline_goes_on_where_it_was_and_its_bundle_is_that_of_three_commands(
    small_set: Path, tmp_path: Path
) -> None:
    need_duckdb()
    keys = (f"preprocess.config.folder={small_set / 'ml-100k'}", *KEYS)
    (codes,) = run_ranks(three_commands, 1, tmp_path / "three", keys)
    assert codes == [0, 0, 0]
    out = tmp_path / "all"
    (first,) = run_ranks(attempt, 1, out, keys, True)
    assert first.code == 128 + signal.SIGTERM, first.output
    assert not (out / "bundle").exists()
    preprocessed = {path: path.stat().st_mtime_ns for path in (out / "data").rglob("*")}
    (second,) = run_ranks(attempt, 1, out, keys, False)
    assert second.code == 0, second.output
    assert (
        f"preprocess: {out / 'data'} is whole, of the same settings; it is not made again"
        in second.output
    )
    assert f"resuming from {out / 'run'}/checkpoints/step-" in second.output
    assert {
        path: path.stat().st_mtime_ns for path in (out / "data").rglob("*")
    } == preprocessed
    assert digest_of(out / "bundle") == digest_of(tmp_path / "three" / "bundle")
    (third,) = run_ranks(attempt, 1, out, keys, False)
    assert third.code == 0
    assert third.output.count("it is not made again") == 3
    for changed, stage, key in (
        (
            "preprocess.config.min_count=2",
            "data",
            r"config.min_count=2: \S+/data was made with 1",
        ),
        ("train.epochs=9", "run", r"train.epochs=9: \S+/run was made with 8"),
    ):
        with pytest.raises(
            ValueError,
            match=f"^{key}; go on with that, give another --out, or remove .*bundle$",
        ):
            checked(out, *setting(*keys, changed))
        assert stage
    with pytest.raises(
        ValueError, match=r"^flags=--recall=0.5: \S+/bundle was made with --store=fp16"
    ):
        checked(out, *setting(*keys), "--recall=0.5")
    (out / "run" / "summary.json").write_text("{}")
    with pytest.raises(
        ValueError,
        match=r"^SHA-256 of \S+/run/summary.json=\w+: \S+/bundle was made with \w+; go on",
    ):
        checked(out, *setting(*keys), "--store=fp16")
    (out / "pipeline.json").unlink()
    with pytest.raises(
        ValueError,
        match=r"/data: there is something that no pipeline has recorded in \S+json; give",
    ):
        checked(out, *setting(*keys), "--store=fp16")


@pytest.mark.unit
def test_a_log_that_has_changed_is_refused_and_one_that_was_touched_or_is_gone_is_not(
    tmp_path: Path,
) -> None:
    log, out = tmp_path / "log", tmp_path / "out"
    log.mkdir()
    file, more = log / "part-0.parquet", log / "part-1.parquet"
    file.write_bytes(bytes(range(256)) * 20_000)
    flags = ("--preprocess=clicks", f"--set=preprocess.config.folder={log}")
    options = pipeline._parser().parse_args(["--out", str(out), *flags])
    stages.begin(stages.stages_of(options)["preprocess"], out / "pipeline.json")
    (out / "data").mkdir()
    (out / "data" / "summary.json").write_text("{}")
    checked(out, *flags)
    whole = file.read_bytes()
    file.unlink()
    file.write_bytes(whole)  # other times, and another inode
    os.utime(file, (1, 1))
    checked(out, *flags)
    message = (
        r"^log \S+/log=.* files, [\d,]+ bytes, \w+: \S+/data was made with 1 files, "
        r"5,120,000 bytes, \w+; go on with"
    )
    for change in (whole + whole, whole[:-1] + b"x", b"x" + whole[1:], whole[:-1]):
        file.write_bytes(change)
        with pytest.raises(ValueError, match=message):
            checked(out, *flags)
    file.write_bytes(whole)
    more.write_bytes(b"")
    with pytest.raises(ValueError, match=message):
        checked(out, *flags)
    for path in (file, more):
        path.unlink()
    log.rmdir()
    checked(out, *flags)


def checked(out: Path, *flags: str) -> None:
    """Checks the flags as the app does before its first stage."""
    pipeline._pipeline(["--out", str(out), *flags, "--dry-run"])


@pytest.mark.unit
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--preprocess ml_100",
            "--preprocess ml_100: there is no such recipe; did you mean 'ml_100k'?",
        ),
        (
            "--set preprocess.config.min_counts=2",
            "--set preprocess.config.min_counts=2: there is no key 'min_counts'",
        ),
        (
            "--set preprocess.out=elsewhere",
            "--set preprocess.out=elsewhere: it is the folder data of --out",
        ),
        (
            "--recipe strem",
            "--recipe strem: there is no such recipe; did you mean 'stream'?",
        ),
        (
            "--recipe session",
            "--recipe session: it reads the log itself, and no preprocessed rows; take bst",
        ),
        (
            "--set train.epoch=2",
            "--set train.epoch=2: there is no key 'epoch'; did you mean train.epochs?",
        ),
        (
            "--set loader.batch_size=0",
            "--set loader.batch_size=0: loader.batch_size=0: must be 1 or more",
        ),
        (
            "--set config.folder=log",
            "--set config.folder=log: there is no key 'config'",
        ),
        (
            "--set data.name=films",
            "--set data.name=films: it is the folder data of --out; leave it out",
        ),
        (
            "--set export=require",
            "--set export=require: the last stage exports; leave it out",
        ),
        (
            "--set checkpoint.epochs=0",
            "checkpoint.epochs=0 with checkpoint.steps=0: the bundle is made of a checkpoint",
        ),
        ("--store int8", "argument --store: invalid choice: 'int8'"),
        (
            "--index HNSW32 --set model.interaction=dot",
            "an index of FAISS needs its package: pip install",
        ),
        (
            "--index HNSW32",
            "--index HNSW32: FAISS searches products, and logits of model.interaction=dcn are none; take",
        ),
        ("--run-dir runs/a", "unrecognized arguments: --run-dir runs/a"),
        ("--resume runs/a", "unrecognized arguments: --resume runs/a"),
    ],
)
def test_a_mistake_in_any_stages_flags_is_told_before_the_first_stage(
    flags: str,
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "faiss", None)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    out = tmp_path / "films"
    assert (
        pipeline.main(["--out", str(out), *flags.replace("OUT", str(out)).split()]) == 1
    )
    (line,) = capsys.readouterr().err.splitlines()
    assert re.match(message.replace("(", r"\("), line), line
    assert not out.exists()


@pytest.mark.unit
def test_a_recipe_file_that_changed_is_another_setting(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.py"
    recipe.write_text("from torchx_apps.recipes.preprocess import ml_100k as job\n")
    job = load_job(f"{recipe}:job")
    before = stages._settings(job, f"{recipe}:job")
    recipe.write_text(recipe.read_text() + "# other steps\n")
    after = stages._settings(job, f"{recipe}:job")
    assert {key for key in before if before[key] != after[key]} == {
        f"SHA-256 of {recipe}"
    }


@pytest.mark.slow
@pytest.mark.launch
def test_killed_on_two_ranks_in_each_stage_it_ends_as_if_it_never_was(
    small_set: Path, tmp_path: Path
) -> None:
    need_duckdb()
    keys = (f"preprocess.config.folder={small_set / 'ml-100k'}", *KEYS)
    out, whole = tmp_path / "films", tmp_path / "whole"
    moments = (
        lambda: list(out.glob(".data.partial-*")),
        lambda: list((out / "run" / "checkpoints").glob("step-*[0-9]")),
        lambda: (out / "run" / "summary.json").exists(),
    )
    for moment in moments:
        with launched(out, keys) as job:
            job.until(moment)
            left = job.descendants()
            job.process.kill()
            assert gone(left, 30), job.output
    with launched(out, keys) as job:
        assert job.end() == 0, job.output
        assert job.output.count("it is not made again") == 2, job.output
    with launched(whole, keys) as job:
        assert job.end() == 0, job.output
    assert digest_of(out / "bundle") == digest_of(whole / "bundle")


def launched(out: Path, keys: Sequence[str]) -> Launched:
    """The component's job of two ranks on this machine."""
    words = [
        "--out",
        str(out),
        "--store=fp16",
        *[word for key in keys for word in ("--set", key)],
    ]
    role = materialize_appdef(
        component.all, gather_overrides(["rec.pipeline.all", *words])[1:]
    ).roles[0]
    values = macros.Values(
        img_root="", app_id="films", replica_id="0", rank0_env="TORCHX_RANK0_HOST"
    )
    role = values.apply(role)
    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    return Launched(
        [role.entrypoint, *role.args],
        {**role.env, "PATH": path, "TORCHX_RANK0_HOST": "localhost"},
    )
