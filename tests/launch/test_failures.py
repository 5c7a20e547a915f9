"""Which failure is the cause, and in which words it is told."""

import contextlib
import json
import pickle
import socket
import sys
from datetime import datetime, timedelta, timezone
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous
from torchx.specs import AppState, AppStatus

from tests.launch.jobs import Launched
from torchx_apps import agent, export, serve
from torchx_apps.agent import describe_failure, first_failure
from torchx_apps.cli import process
from torchx_apps.cli.errors import describe_error, is_users_mistake
from torchx_apps.cli.overrides import convert
from torchx_apps.cli.process import MISTAKE, exit_code, hand_over
from torchx_apps.cli.rank_errors import RankErrorHandler
from torchx_apps.torchx_run import last_words

pytestmark = pytest.mark.unit


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def failure(
    exitcode: int, error_file: Path | None = None, pid: int = 1
) -> ProcessFailure:
    return ProcessFailure(
        local_rank=0, pid=pid, exitcode=exitcode, error_file=str(error_file or "")
    )


def library_error() -> Exception:
    try:
        json.loads("{")
    except ValueError as error:
        return error
    raise AssertionError


def our_error() -> Exception:
    try:
        convert("many", int)
    except ValueError as error:
        return error
    raise AssertionError


def test_a_users_mistake_is_one_line_with_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "3")
    assert (
        describe_error(our_error())
        == "rank 3: 'many' is not an int; write for example 4096, 4_096 or 4e3"
    )
    assert describe_error(raised(ValueError("mine"))) == "rank 3: mine"
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    assert describe_error(our_error()).startswith("Traceback")


def test_a_bug_keeps_its_traceback_and_ends_with_the_rank(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("RANK", "1")
    text = describe_error(raised(KeyError("tower")))
    assert text.startswith("Traceback")
    assert text.splitlines()[-1] == "rank 1: KeyError: 'tower'"
    assert not is_users_mistake(library_error())


def test_the_cause_is_the_rank_that_left_an_error_not_one_stopped_for_it(
    tmp_path: Path,
) -> None:
    reply = tmp_path / "error.json"
    handler = RankErrorHandler()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))
        patch.setenv("RANK", "1")
        handler.record_exception(our_error())
    stopped, cause = failure(-15), failure(1, reply)
    assert first_failure({0: stopped, 1: cause}) == (1, cause)
    assert describe_failure(1, cause).startswith("rank 1: 'many' is not an int")
    killed = failure(-9)
    assert first_failure({0: stopped, 1: killed}) == (1, killed)
    assert describe_failure(1, killed) == (
        "rank 1: killed by SIGKILL without an error of its own; the machine may be out of memory"
    )
    assert "ended with exit code 7" in describe_failure(0, failure(7))


def test_torchx_ends_with_what_the_agent_handed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reply = tmp_path / "reply.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))
    hand_over("Traceback\n  line\nrank 1: KeyError: 'tower'")
    status = AppStatus(AppState.FAILED, structured_error_msg=reply.read_text())
    assert last_words(status) == "Traceback\n  line\nrank 1: KeyError: 'tower'"
    assert (
        last_words(AppStatus(AppState.FAILED))
        == "the job ended as FAILED; its own output above says why"
    )


@pytest.mark.parametrize(
    ("app", "flags"),
    [(export, ["nowhere"]), (serve, ["bundle", "--workers=0"])],
)
def test_an_app_that_torchx_starts_without_an_agent_hands_its_error_over_itself(
    app: ModuleType,
    flags: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    reply = tmp_path / "reply.json"
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    assert app.main(flags) == 1
    printed = capsys.readouterr().err.strip()
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))
    assert app.main(flags) == 1
    assert printed
    assert "Traceback" not in printed
    assert (
        last_words(AppStatus(AppState.FAILED, structured_error_msg=reply.read_text()))
        == printed
    )
    assert capsys.readouterr().err == ""


def test_without_a_scheduler_to_tell_the_agent_prints(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    hand_over("rank 1: mine")
    assert capsys.readouterr().err == "rank 1: mine\n"


def test_a_node_starts_no_more_ranks_than_it_has_memory_for(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("TORCHELASTIC_ERROR_FILE", raising=False)
    monkeypatch.setattr(agent, "_stop_when_orphaned", lambda: None)  # of this process
    assert (
        agent._run(
            ["--standalone", "--nproc_per_node=99999", "-m", "torchx_apps.train"]
        )
        == 1
    )
    assert capsys.readouterr().err.startswith(
        "99999 ranks on one machine: they need 25,000 GiB before they read any"
    )


def test_a_port_is_taken_where_a_program_of_this_node_listens_on_it() -> None:
    with socket.create_server(("127.0.0.2", 0)) as program:
        port = program.getsockname()[1]
        assert agent.port_is_taken(f"127.0.0.2:{port}")
        assert not agent.port_is_taken(f"192.0.2.1:{port}"), "another node's"
    assert not agent.port_is_taken(f"127.0.0.2:{port}")


class Shelf:
    """Keeps the state of a rendezvous in memory, where every node finds it."""

    name = "shelf"

    def __init__(self) -> None:
        self.bits: bytes | None = None
        self.writes = 0

    def get_state(self) -> tuple[bytes, int] | None:
        return None if self.bits is None else (self.bits, self.writes)

    def set_state(
        self, state: bytes, token: int | None = None
    ) -> tuple[bytes, int, bool]:
        self.bits, self.writes = state, self.writes + 1
        return state, self.writes, True


def test_a_node_is_dead_when_it_is_silent_and_not_when_its_clock_is_wrong(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stock = rendezvous._BackendRendezvousStateHolder
    # to be undone
    monkeypatch.setattr(rendezvous, "_BackendRendezvousStateHolder", stock)
    agent._judge_by_own_clock()
    now_s = [0.0]
    monkeypatch.setattr(agent, "time", SimpleNamespace(monotonic=lambda: now_s[0]))
    settings = rendezvous.RendezvousSettings(
        "7",
        1,
        3,
        rendezvous.RendezvousTimeout(),
        timedelta(seconds=5),
        keep_alive_max_attempt=3,
    )
    shelf, other = Shelf(), rendezvous._NodeDesc("host1", 1, 0)
    ours, torchruns, theirs = (
        made(shelf, settings, 0)
        for made in (rendezvous._BackendRendezvousStateHolder, stock, stock)
    )

    def beat(hours: int) -> None:
        """The other node writes that it is alive and when the last call ends, by its clock."""
        clock = datetime.now(timezone.utc) + timedelta(hours=hours)
        theirs._state.last_heartbeats[other] = clock
        theirs._state.participants[other] = 0
        theirs._state.deadline = clock + settings.timeout.last_call
        shelf.set_state(pickle.dumps(theirs._state))

    for hours in (-1, 1, 0):
        beat(hours)
        ours.sync()
        assert other in ours.state.participants, hours
        now_s[0] += 14
    written = theirs._state.deadline
    assert (
        ours.state.deadline - datetime.now(timezone.utc) <= settings.timeout.last_call
    )
    ours.mark_dirty()
    ours.sync()
    assert pickle.loads(shelf.bits or b"").deadline == written, (
        "each node reads what the first one wrote"
    )
    now_s[0] += 2
    ours.sync()
    assert not ours.state.participants, "16 s without a heartbeat"
    beat(-1)
    torchruns.sync()
    assert not torchruns.state.participants, "torchrun compares the two clocks"


@pytest.mark.slow
@pytest.mark.launch
def test_nodes_whose_clocks_are_an_hour_apart_meet(tmp_path: Path) -> None:
    script = tmp_path / "app.py"
    script.write_text(
        "import os, time, torch.distributed as dist\n"
        "dist.init_process_group('gloo')\n"
        "for _ in range(10):\n"
        "    time.sleep(0.5)\n"
        "    dist.barrier()\n"
        "print('a world of', dist.get_world_size())\n"
    )
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    where = [
        "--rdzv_backend=c10d",
        f"--rdzv_endpoint=localhost:{port}",
        f"--rdzv_id={port}",
        "--local_addr=localhost",
    ]
    # Heartbeats come every second, and three that are missing make a node a dead one.
    conf = "--rdzv_conf=timeout=120,keep_alive_interval=1"
    with contextlib.ExitStack() as stack:
        nodes = [
            stack.enter_context(
                Launched(
                    [
                        sys.executable,
                        "-m",
                        "tests.launch.shifted_clock",
                        shift,
                        *where,
                        conf,
                        "--nnodes=2",
                        str(script),
                    ],
                    {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
                )
            )
            for shift in ("0", "-3600")
        ]
        assert [node.end(120) for node in nodes] == [0, 0], [
            node.output for node in nodes
        ]
        assert ["a world of 2" in node.output for node in nodes] == [True, True]


class CheckpointError(ValueError):
    """Goes by the name of the error of a full disk."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("there is no key 'epoch'"), MISTAKE),
        (FileNotFoundError("items.parquet"), 1),
        (CheckpointError("no space left"), 1),
        (KeyError("tower"), 1),
    ],
)
def test_only_what_another_attempt_would_meet_too_is_a_mistake(
    error: Exception, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def app(_: object) -> int:
        raise error

    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    assert exit_code(app, []) == 1, "without ranks"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setattr(process, "die_with_parent", lambda: None)
    assert exit_code(app, []) == code
