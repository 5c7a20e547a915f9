"""Which failure is the cause, and in which words it is told."""

import json
import socket
from pathlib import Path
from types import ModuleType

import pytest
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torchx.specs import AppState, AppStatus

from torchx_apps import agent, export, plan, serve
from torchx_apps.agent import describe_failure, first_failure, hand_over
from torchx_apps.cli.errors import describe_error, is_users_mistake
from torchx_apps.cli.overrides import convert
from torchx_apps.cli.rank_errors import RankErrorHandler
from torchx_apps.torchx_run import last_words

pytestmark = pytest.mark.unit


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:
        return caught


def failure(exitcode: int, error_file: Path | None = None, pid: int = 1) -> ProcessFailure:
    return ProcessFailure(local_rank=0, pid=pid, exitcode=exitcode, error_file=str(error_file or ""))


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


def test_a_users_mistake_is_one_line_with_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "3")
    assert describe_error(our_error()) == "rank 3: 'many' is not an int; write for example 4096, 4_096 or 4e3"
    assert describe_error(raised(ValueError("mine"))) == "rank 3: mine"
    monkeypatch.setenv("LOGLEVEL", "DEBUG")
    assert describe_error(our_error()).startswith("Traceback")


def test_a_bug_keeps_its_traceback_and_ends_with_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "1")
    text = describe_error(raised(KeyError("tower")))
    assert text.startswith("Traceback")
    assert text.splitlines()[-1] == "rank 1: KeyError: 'tower'"
    assert not is_users_mistake(library_error())


def test_the_cause_is_the_rank_that_left_an_error_not_one_stopped_for_it(tmp_path: Path) -> None:
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


def test_torchx_ends_with_what_the_agent_handed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reply = tmp_path / "reply.json"
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(reply))
    hand_over("Traceback\n  line\nrank 1: KeyError: 'tower'")
    status = AppStatus(AppState.FAILED, structured_error_msg=reply.read_text())
    assert last_words(status) == "Traceback\n  line\nrank 1: KeyError: 'tower'"
    assert last_words(AppStatus(AppState.FAILED)) == "the job ended as FAILED; its own output above says why"


@pytest.mark.parametrize(("app", "flags"), [(export, ["nowhere"]), (plan, []), (serve, ["bundle", "--workers=0"])])
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
    assert last_words(AppStatus(AppState.FAILED, structured_error_msg=reply.read_text())) == printed
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
    assert agent._run(["--standalone", "--nproc_per_node=99999", "-m", "torchx_apps.train"]) == 1
    assert capsys.readouterr().err.startswith("99999 ranks on one machine: they need 25,000 GiB before they read any")


def test_a_port_is_taken_where_a_program_of_this_node_listens_on_it() -> None:
    with socket.create_server(("127.0.0.2", 0)) as program:
        port = program.getsockname()[1]
        assert agent.port_is_taken(f"127.0.0.2:{port}")
        assert not agent.port_is_taken(f"192.0.2.1:{port}"), "another node's"
    assert not agent.port_is_taken(f"127.0.0.2:{port}")


class CheckpointError(ValueError):
    """Goes by the name of the error of a full disk."""


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ValueError("there is no key 'epoch'"), agent.MISTAKE),
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
    assert agent.exit_code(app, []) == 1, "without ranks"
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "7")
    monkeypatch.setattr(agent, "die_with_parent", lambda: None)
    assert agent.exit_code(app, []) == code
