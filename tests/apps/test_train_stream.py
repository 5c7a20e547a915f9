"""rec.train.stream: each event once, whoever is killed; what is published is what was trained, and never a mixture."""

import contextlib
import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from tests.contracts import _CONTEXT, free_ports
from tests.files import records
from tests.settings import as_words
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.scorer import RecommendRequest, Scorer
from torchrec_ext.train.checkpoint.folder import CheckpointFolder, read_checkpoint
from torchx_apps import train_stream

SLOW = pytest.mark.slow
KILLS, SERVER_KILLS, EVENTS = 32, 8, 16_000
# Small tables, from which ids are evicted all the time.
SETS = [
    "loader.batch_size=100",
    "loader.negatives=2",
    "train.compile=off",
    "train.log_every=20",
    "model.top_widths=8",
]
SETS += ["model.tower_widths=8", "model.embedding_dim=8", "checkpoint.steps=4"]
for name in ("user_id", "item_id"):
    SETS += [f"ids.features.{name}.capacity=60", f"ids.features.{name}.half_life=1"]


def flags(log: Path, run: Path, *more: str) -> list[str]:
    return [
        f"--data.folder={log}",
        f"--run_dir={run}",
        *as_words(SETS),
        *more,
    ]


def ids(number: int) -> dict[str, int]:
    """The user and the item of an event; both drift through 64-bit numbers."""
    chance = random.Random(number)
    drift = number // 50
    user, item = (int(chance.random() ** 2 * 80) + drift for _ in range(2))
    return {"user_id": hash((user, 1.5)), "item_id": hash((item, 2.5))}


def write_log(
    folder: Path, *, events: int, seconds: float, killed: threading.Event
) -> None:
    """Writes events into files of three formats, of any number of events, and renames each when it is whole.

    The last file comes after ``killed``: until then no trainer can be done.
    """
    chance = random.Random(1)
    begin = time.monotonic()
    number = file = 0
    while number < events:
        count = min(chance.randrange(1, 400), events - number)
        if number + count == events:
            killed.wait()
        rows = [ids(number + offset) for offset in range(count)]
        hidden = folder / "_part.jsonl"
        hidden.write_text("".join(json.dumps(row) + "\n" for row in rows))
        hidden.rename(folder / f"part-{file}.jsonl")
        number += count
        file += 1
        time.sleep(max(0.0, begin + seconds * number / events - time.monotonic()))


def quiet(arguments: list[str]) -> None:
    torch.set_num_threads(1)
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    sys.exit(train_stream.main(arguments))


def noted(arguments: list[str], stderr: Path) -> None:
    """Trains, and writes stderr to a file: a process of the fork server has the server's own stderr."""
    os.dup2(os.open(stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC), 2)
    quiet(arguments)


def state_of(run: Path) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """The position and all tensors of the last checkpoint: weights, optimizer, ids and random states."""
    folder = CheckpointFolder(str(run / "checkpoints"))
    path = folder.path(max(folder.steps()))
    metadata = read_checkpoint(path).index.state_dict_metadata
    tensors = {
        name: torch.empty(value.size, dtype=value.properties.dtype)
        for name, value in metadata.items()
    }
    dcp.load(tensors, checkpoint_id=path, no_dist=True)
    content = json.loads((Path(path) / "manifest.json").read_text())["content"]
    return content["loader"], tensors


class Client(threading.Thread):
    """Asks a server for recommendations until it is ended, and keeps what came."""

    def __init__(self, port: int) -> None:
        super().__init__(daemon=True)
        self.answers: list[tuple[int, dict[str, Any]]] = []
        self.failed = 0
        self.ending = False
        self._port = port

    def run(self) -> None:
        number = 0
        while not self.ending:
            number += 37
            user = ids(number % EVENTS)["user_id"]
            body = json.dumps({"user": {"user_id": user}, "k": 3}).encode()
            request = urllib.request.Request(
                f"http://127.0.0.1:{self._port}/v1/recommend", body
            )
            request.add_header("content-type", "application/json")
            try:
                with urllib.request.urlopen(request, timeout=5) as answer:
                    self.answers.append((user, json.loads(answer.read())))
            except OSError:
                self.failed += 1
            time.sleep(0.01)


@contextlib.contextmanager
def served(bundle: Path, port: int) -> Iterator[subprocess.Popen[str]]:
    # The worker of a server that was killed drains before it lets the port go.
    while True:
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            break
        time.sleep(0.1)
    command = [
        sys.executable,
        "-m",
        "torchx_apps.serve",
        str(bundle),
        f"--port={port}",
        "--watch=0.1",
        "--log=events",
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )
    try:
        assert process.stdout is not None
        assert f"serving {bundle} at" in process.stdout.readline()
        yield process
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow(minutes=4)
@pytest.mark.launch
def test_whoever_is_killed_no_event_is_lost_or_counted_twice_and_no_answer_is_of_two_bundles(
    tmp_path: Path,
) -> None:
    log, run = tmp_path / "log", tmp_path / "run"
    log.mkdir()
    killed = threading.Event()
    writer = threading.Thread(
        target=write_log,
        args=(log,),
        kwargs={"events": EVENTS, "seconds": 60.0, "killed": killed},
        daemon=True,
    )
    writer.start()
    chance = random.Random(5)
    more = [f"--data.events={EVENTS}", "--publish-s=0.3", "--keep=10000"]
    arguments = flags(log, run, *more)
    kills = 0
    current = run / "bundles" / "current"
    # On a busy machine a trainer needs longer to come to its first step.
    scale = 1.0
    answers: list[tuple[int, dict[str, Any]]] = []
    (port,) = free_ports(1)
    with contextlib.ExitStack() as stack:
        client: Client | None = None
        server: subprocess.Popen[str] | None = None
        while kills < KILLS + SERVER_KILLS:
            trainer = _CONTEXT.Process(target=quiet, args=(arguments,), daemon=True)
            trainer.start()
            if server is None:
                begin = time.monotonic()
                wait_for(current.exists)
                scale = max(1.0, (time.monotonic() - begin) / 3)
            trainer.join(chance.uniform(0.5, 3.0) * scale)
            assert trainer.exitcode is None
            os.kill(trainer.pid or 0, signal.SIGKILL)
            kills += 1
            trainer.join()
            if server is None:
                server = stack.enter_context(served(current, port))
                client = Client(port)
                client.start()
            elif kills % 5 == 0 and server is not None:
                server.send_signal(signal.SIGKILL)
                kills += 1
                server = stack.enter_context(served(current, port))
        killed.set()
        writer.join()
        trainer = _CONTEXT.Process(target=quiet, args=(arguments,), daemon=True)
        trainer.start()
        trainer.join(120)
        assert trainer.exitcode == 0
        assert client is not None
        client.ending = True
        client.join()
        answers = client.answers
    whole = tmp_path / "whole"
    reference = _CONTEXT.Process(
        target=quiet,
        args=(flags(log, whole, f"--data.events={EVENTS}", "--publish-s=0"),),
        daemon=True,
    )
    reference.start()
    reference.join(120)
    assert reference.exitcode == 0
    position, tensors = state_of(run)
    expected_position, expected = state_of(whole)
    assert position == expected_position
    assert position["loader"]["events"] == EVENTS
    assert list(tensors) == list(expected)
    different = [
        name
        for name, value in expected.items()
        if not torch.equal(tensors[name], value)
    ]
    assert different == []
    last, only = (Bundle.load(current_bundle(each)) for each in (run, whole))
    assert last.manifest.digest == only.manifest.digest
    assert len(answers) > 500
    check_answers(answers, run / "bundles")


def check_answers(answers: list[tuple[int, dict[str, Any]]], folder: Path) -> None:
    """Each answer is wholly of the bundle that it names."""
    scorers = {}
    for path in folder.glob("step-*"):
        bundle = Bundle.load(path, verify=False)
        scorers[bundle.manifest.digest] = Scorer(bundle)
    named = {answer["bundle"] for _, answer in answers}
    assert len(named) > 5
    for user, answer in answers:
        ours = scorers[answer["bundle"]].recommend(
            RecommendRequest(user={"user_id": user}, k=3)
        )
        assert answer["items"] == ours.items
        np.testing.assert_allclose(answer["scores"], ours.scores, atol=1e-5)


def write_small_log(folder: Path, count: int, **more: Any) -> Path:
    folder.mkdir()
    lines = [json.dumps({**ids(number), **more}) for number in range(count)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    return folder


@SLOW
@pytest.mark.parametrize(
    ("more", "figure"),
    [
        (["data.label=clicked", "loader.negatives=0"], "log_loss"),
        (
            ["model.loss=in_batch", "model.interaction=dot", "loader.negatives=0"],
            "loss",
        ),
        (["model.loss=sampled_softmax", "train.compile=auto"], "hit_rate"),
    ],
)
def test_a_log_is_trained_to_its_end_and_published(
    tmp_path: Path, more: list[str], figure: str
) -> None:
    log, run = write_small_log(tmp_path / "log", 450, clicked=1), tmp_path / "run"
    often = ("--data.until_idle_s=0.1", "--publish-s=0.02")
    arguments = flags(log, run, *often, *(f"--{text}" for text in more))
    assert train_stream.main(arguments) == 0
    (*_, last) = records(run, "train")
    assert last["events"] == 450
    assert figure in last
    # Two full tables, without the row of unknown ids.
    bundle = Bundle.load(current_bundle(run))
    assert bundle.manifest.content["items"]["rows"] <= 59


def test_a_log_without_an_event_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "log").mkdir()
    (tmp_path / "log" / "day.parquet").write_bytes(b"PAR1")
    arguments = flags(tmp_path / "log", tmp_path / "run", "--data.until_idle_s=0.1")
    assert train_stream.main(arguments) == 1
    assert "had no event to train on" in capsys.readouterr().err


def of_whole(log: Path, run: Path) -> list[str]:
    """The words of the run of :func:`whole`."""
    arguments = flags(log, run, "--data.until_idle_s=0.1", "--publish-s=0")
    return [
        *arguments,
        "--checkpoint.keep=100",
        "--train.log_every=10",
    ]


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A log of 1,700 events, and a run that trained all of it."""
    root = tmp_path_factory.mktemp("whole")
    log = write_small_log(root / "log", 1_700)
    assert train_stream.main(of_whole(log, root / "run")) == 0
    return root


def test_a_resumed_record_is_that_of_an_uninterrupted_run(
    whole: Path, tmp_path: Path
) -> None:
    """The run goes on from the middle of its second record, of steps 11 to 17."""
    expected = records(whole / "run", "train")
    assert [record["step"] for record in expected] == [10, 17]
    assert expected[-1]["events"] == 1_700
    bundle = Bundle.load(current_bundle(whole / "run"))
    assert bundle.manifest.content["items"]["rows"] <= 59, "without that of unknown ids"
    run = shutil.copytree(whole / "run", tmp_path / "run")
    folder = CheckpointFolder(str(run / "checkpoints"))
    for step in folder.steps():
        if step > 12:
            shutil.rmtree(folder.path(step))
    assert train_stream.main(of_whole(whole / "log", run)) == 0
    again = records(run, "train")
    assert again == expected
    assert {"log_loss", "hit_rate", "ids_unknown"} <= again[-1].keys()
    again_bundle = Bundle.load(current_bundle(run))
    assert again_bundle.manifest.digest == bundle.manifest.digest


def current_bundle(run: Path) -> Path:
    current = run / "bundles" / "current"
    return current.parent / current.read_text().strip()


def test_a_run_whose_log_model_or_checkpoints_changed_is_told_so(
    whole: Path, tmp_path: Path
) -> None:
    log, run = whole / "log", shutil.copytree(whole / "run", tmp_path / "run")
    stderr = tmp_path / "stderr"
    arguments = of_whole(log, run)

    def told(words: list[str], code: int) -> str:
        """Trains in a process of its own, with which its folders' locks go; returns what it wrote to stderr."""
        process = _CONTEXT.Process(target=noted, args=(words, stderr), daemon=True)
        process.start()
        process.join(60)
        assert process.exitcode == code
        return stderr.read_text()

    (log / "A.jsonl").write_text(json.dumps(ids(9)) + "\n")
    late = f"{log}/A.jsonl: came after a.jsonl was read, and precedes it; give new "
    assert late in told(arguments, 1)
    (log / "A.jsonl").unlink()
    larger = ["--ids.features.item_id.capacity=90"]
    remedy = "--start.path RUN --start.partial true in a new --run_dir, or load("
    assert remedy in told([*arguments, *larger], 1)
    start = [f"--start.path={run}", "--start.partial=true"]
    new = [*of_whole(log, tmp_path / "new"), *larger, *start]
    assert "begins anew" not in told(new, 0)
    _, tensors = state_of(tmp_path / "new")
    assert len(tensors["tables.item_id.weight"]) == 90
    shutil.rmtree(run / "checkpoints")
    # Starts that were refused have left the records as they were.
    assert (
        f"warning: {run} has 3 records, and {run}/checkpoints no checkpoint: the run "
        "begins anew" in told(arguments, 0)
    )


def test_a_silent_log_is_published_and_sigterm_saves_what_was_trained(
    tmp_path: Path,
) -> None:
    log = write_small_log(tmp_path / "log", 250)
    current = tmp_path / "run" / "bundles" / "current"
    run = _CONTEXT.Process(
        target=quiet,
        args=(flags(log, tmp_path / "run", "--publish-s=0.05"),),
        daemon=True,
    )
    run.start()
    try:
        wait_for(
            lambda: current.exists() and current.read_text() == "step-0000000002\n"
        )
        (log / "_b").write_text(
            "".join(json.dumps(ids(number)) + "\n" for number in range(200))
        )
        (log / "_b").rename(log / "b.jsonl")
        wait_for(lambda: current.read_text() == "step-0000000004\n")
        os.kill(run.pid or 0, signal.SIGTERM)
        run.join(60)
    finally:
        run.kill()
    assert run.exitcode == 143
    position, _ = state_of(tmp_path / "run")
    # The last 50 events fill no batch yet, and are left to the next run.
    assert position["loader"]["events"] == 400


def wait_for(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--data.folder=nosuch"], "data.folder=nosuch: no such folder"),
        (["--publish-s=-1"], "--publish_s -1.0: must be 0 or more seconds"),
        (["--keep=0"], "--keep=0: must be 1 or more"),
        (
            ["--bundles=/dev/null/b"],
            "/dev/null/b: cannot be written (Not a directory); choose another",
        ),
        (
            ["--data.label=clicked"],
            "data.label=clicked: events have labels of their own; set loader.neg",
        ),
        (
            ["--checkpoint.steps=0"],
            "checkpoint.steps=0: a log has no epochs; set 1 or more",
        ),
        (
            ["--train.epochs=2"],
            "train.epochs=2: each event is trained once; leave it out",
        ),
        (
            ["--ids.features.place.capacity=9"],
            "ids of user_id, item_id, place: give ids.features.user_id and .item_id",
        ),
    ],
)
def test_a_mistake_is_one_line(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    log = write_small_log(tmp_path / "log", 9)
    assert train_stream.main([*flags(log, tmp_path / "run"), *more]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert line.startswith(message)
    assert len(line) < 200
