"""torchrun, but a failed job ends with one error, a mistake is not tried again, no process or lost node is left.

`python -m torchx_apps.agent` takes torchrun's flags. The component starts it; plain torchrun runs the same ranks.
"""

from __future__ import annotations

import argparse
import errno
import logging
import os
import signal
import socket
import sys
import threading
import time
import zlib
from collections.abc import Mapping, Sequence
from datetime import datetime, timezone
from typing import TYPE_CHECKING, Any

from torchx_apps.cli.process import MISTAKE, MISTAKE_FILE, hand_over, too_many
from torchx_apps.cli.sigterm import (
    at_hangup_too,
    end_where_no_child_runs,
    ending_the_block,
    once,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

# 2 is argparse's code for an unknown flag.
_MISTAKES = (MISTAKE, 2)
# Below the ports that Linux gives to connections and Kubernetes to services.
_FIRST_PORT = 20_000
_PORTS = 10_000


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the ranks to their end.

    Args:
        argv: torchrun's flags, the module or script, and its flags; the command line when None.

    Returns:
        0, or 1 when a rank failed or the other nodes went away, 200 when it failed by its user's mistake, or 128 + the
        signal that stopped the job.
    """
    with ending_the_block():
        at_hangup_too()
        end_where_no_child_runs()
        return _run(list(sys.argv[1:] if argv is None else argv))


def _run(argv: Sequence[str]) -> int:
    _stop_when_orphaned()
    # Imported late: torch takes seconds, and the launcher may die in them.
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous.api import RendezvousError

    _silence_torchruns_error_log()
    options = run.parse_args(argv)  # type: ignore[no-untyped-call]
    refusal = (
        too_many(int(options.nproc_per_node))
        if options.nproc_per_node.isdecimal()
        else ""
    )
    if refusal:
        hand_over(refusal)
        return 1
    options.rdzv_endpoint = meeting_point(
        options.rdzv_endpoint, options.rdzv_id, several=_on_several_nodes(options)
    )
    if _on_several_nodes(options) and port_is_taken(options.rdzv_endpoint):
        hand_over(
            f"{options.rdzv_endpoint}, where the nodes would meet: another program listens on this port; give the job "
            "another one, --rdzv_port 1 to 65535"
        )
        return 1
    _end_when_lost(options)
    _restart_no_mistake()
    _judge_by_own_clock()

    def stop() -> None:
        raise SignalException("the job was stopped by SIGTERM", signal.SIGTERM)

    # Replaces torch's handlers: at a second SIGTERM it no longer waits for ranks that
    # save, and it hands SIGHUP on to ranks, which then do not save.
    signals = map(str.strip, options.signals_to_handle.split(","))
    options.signals_to_handle = ",".join(
        name for name in signals if name not in ("SIGTERM", "SIGHUP")
    )
    signal.signal(signal.SIGTERM, once(stop, stop))
    try:
        # Not run.main, whose wrapper writes the scheduler's reply file too, and not in
        # one move.
        run.run(options)  # type: ignore[no-untyped-call]
    except ChildFailedError as failed:
        rank, failure = first_failure(failed.failures)
        hand_over(describe_failure(rank, failure))
        if failure.exitcode not in _MISTAKES:
            return 1
        if os.environ.get(MISTAKE_FILE):
            open(os.environ[MISTAKE_FILE], "w").close()
        return MISTAKE
    except RendezvousError as lost:
        hand_over(
            f"this node lost the other nodes, whose own output has the cause: {lost}"
        )
        return 1
    except SignalException as stopped:
        print(f"the ranks were stopped by {stopped.sigval.name}", file=sys.stderr)
        return 128 + stopped.sigval
    return 0


def meeting_point(endpoint: str, job: str, *, several: bool) -> str:
    """Replaces port 0 of an endpoint by a port derived from the job's id, to separate jobs with one first node.

    At one port the second job's agents would join the first job's store, and end when that job does.

    Args:
        endpoint: HOST:PORT.
        job: id of the job, which all of its nodes know; of ids that count up, as Slurm's do, 10,000 in a row get
            different ports.
        several: whether the job runs on several nodes; on one node torchrun itself takes port 0 for any that is free.

    Example:
        >>> meeting_point("node1:0", "4711", several=True), meeting_point("node1:0", "4712", several=True)
        ('node1:24711', 'node1:24712')
        >>> meeting_point("node1:0", "train-f4gt5gf2", several=True), meeting_point("node1:29500", "4711", several=True)
        ('node1:22524', 'node1:29500')
    """
    host, _, port = endpoint.rpartition(":")
    if not several or port != "0":
        return endpoint
    number = int(job) if job.isdecimal() else zlib.crc32(job.encode())
    return f"{host}:{_FIRST_PORT + number % _PORTS}"


def port_is_taken(endpoint: str) -> bool:
    """Whether a program of this node listens on the port of an endpoint on this node.

    torchrun would take that program for the job's store, and wait for its answer.

    Args:
        endpoint: HOST:PORT. A loopback host is left out: there the agents of several nodes share one machine, and the
            program may be one of them.

    Example:
        >>> port_is_taken("localhost:29500"), port_is_taken("a-host-that-is-not-there:29500"), port_is_taken("")
        (False, False, False)
    """
    host, _, port = endpoint.rpartition(":")
    if not port.isdecimal() or host in ("", "localhost", "127.0.0.1", "::1"):
        return False
    # Bound and never listening: another node that connects in this moment is refused,
    # and tries again.
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, int(port)))
        except OSError as error:
            # Most often the address is another node's.
            return error.errno == errno.EADDRINUSE
    return False


def first_failure(failures: Mapping[int, ProcessFailure]) -> tuple[int, ProcessFailure]:
    """Returns the rank and failure behind the others: one with an error, else one not stopped by SIGTERM.

    torchrun itself chooses by time in whole seconds alone, and a rank that is stopped for another's error falls into
    the same second.
    """

    def order(rank: int) -> tuple[bool, bool, int]:
        failure = failures[rank]
        return (
            not isinstance(failure.message, dict),
            failure.exitcode == -signal.SIGTERM,
            failure.timestamp,
        )

    rank = min(failures, key=order)
    return rank, failures[rank]


def describe_failure(rank: int, failure: ProcessFailure) -> str:
    """Returns the failed rank's error, or a description of its end without one."""
    message = failure.message
    if isinstance(message, dict):
        return str(
            message.get("extraInfo", {}).get("py_callstack") or message.get("message")
        )
    if failure.exitcode < 0:
        hint = (
            "; the machine may be out of memory"
            if -failure.exitcode == signal.SIGKILL
            else ""
        )
        return f"rank {rank}: killed by {failure.signal_name()} without an error of its own{hint}"
    return f"rank {rank}: ended with exit code {failure.exitcode} without an error of its own; see its output above"


def _silence_torchruns_error_log() -> None:
    """Silences torchrun's log of a failed rank, since `hand_over` prints its error; LOGLEVEL=INFO shows it."""
    if os.environ.get("LOGLEVEL", "WARNING").upper() not in ("INFO", "DEBUG"):
        logging.getLogger("torch.distributed.elastic.multiprocessing.api").setLevel(
            logging.CRITICAL
        )


def _restart_no_mistake() -> None:
    """Makes torchrun's agent end, instead of starting all ranks again, after the exit code of a mistake."""
    from torch.distributed.elastic.agent.server import local_elastic_agent
    from torch.distributed.launcher import api

    class MistakeEnds(local_elastic_agent.LocalElasticAgent):
        def _monitor_workers(self, worker_group: Any) -> Any:
            result = super()._monitor_workers(worker_group)
            if any(
                failure.exitcode in _MISTAKES for failure in result.failures.values()
            ):
                self._remaining_restarts = 0
            return result

    api.LocalElasticAgent = MistakeEnds  # type: ignore[misc]


def _judge_by_own_clock() -> None:
    """Makes torchrun measure the age of other nodes' messages from their arrival, by this node's clock alone.

    torchrun compares a node's heartbeat, in that node's wall clock, with its own wall clock: of two nodes whose clocks
    are 15 s apart one takes the other for dead, and trains without it.
    """
    from torch.distributed.elastic.rendezvous import dynamic_rendezvous as rendezvous

    class OwnClock(rendezvous._BackendRendezvousStateHolder):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            # A node's heartbeat, and the time of its arrival here.
            self._came: dict[Any, tuple[datetime, float]] = {}
            # Deadline of the last call as written, and by this clock.
            self._deadline: tuple[datetime, datetime] | None = None

        def sync(self) -> bool | None:
            if self._deadline is not None and self._state.deadline == self._deadline[1]:
                # The others read the state too, so restore the deadline as written.
                self._state.deadline = self._deadline[0]
            changed = super().sync()
            deadline = self._state.deadline
            if deadline is None:
                self._deadline = None
            elif self._deadline is None or self._deadline[0] != deadline:
                end = (
                    rendezvous.datetime.now(timezone.utc)
                    + self._settings.timeout.last_call
                )
                self._deadline = (deadline, end)
            if self._deadline is not None:
                self._state.deadline = self._deadline[1]
            return changed

        def _sanitize(self) -> None:
            """Removes dead nodes as torchrun does, but compares heartbeats of only two ages."""
            now = time.monotonic()
            beats = self._state.last_heartbeats
            silent_s = (
                self._settings.keep_alive_interval
                * self._settings.keep_alive_max_attempt
            ).total_seconds()
            arrivals = self._came
            self._came = {}
            compared = {}
            for node, beat in beats.items():
                earlier = arrivals.get(node)
                if earlier is None or earlier[0] != beat:
                    earlier = (beat, now)
                self._came[node] = earlier
                is_silent = now - earlier[1] > silent_s
                compared[node] = (datetime.min if is_silent else datetime.max).replace(
                    tzinfo=timezone.utc
                )
            self._state.last_heartbeats = compared
            super()._sanitize()
            # The others compare what stands in the state, so restore the beats as they
            # came.
            self._state.last_heartbeats = {
                node: beats[node] for node in self._state.last_heartbeats
            }

    rendezvous._BackendRendezvousStateHolder = OwnClock  # type: ignore[misc]


def _end_when_lost(options: argparse.Namespace) -> None:
    """Ends this node when it has lost the others, if there are any; see :mod:`torchx_apps.cli.link_watch`."""
    from torchx_apps.cli.link_watch import end_when_lost

    def end(message: str) -> None:
        hand_over(message)
        # The agent's own thread may wait for ever, so do not wait for it.
        os._exit(1)

    if (
        _on_several_nodes(options)
        and options.rdzv_backend != "static"
        and ":" in options.rdzv_endpoint
    ):
        end_when_lost(options.rdzv_endpoint, end)


def _on_several_nodes(options: argparse.Namespace) -> bool:
    return options.nnodes.rpartition(":")[2] != "1" and not options.standalone


def _stop_when_orphaned() -> None:
    """Stops the job when the launcher is gone.

    Linux's parent-death signal would not do: it also comes when only the launcher's *thread* ends, as in a notebook.
    """
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, daemon=True, name="launcher-watch").start()


if __name__ == "__main__":
    sys.exit(main())
