"""`torchx status`, `log`, `cancel` and `list` over our schedulers, for the jobs of any component; `torchx tracker`.

TorchX's own commands ask its own Slurm scheduler, which needs accounting, and answer a user's mistake with a traceback.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from torchx.cli.cmd_cancel import CmdCancel
from torchx.cli.cmd_list import HANDLE_HEADER, STATUS_HEADER, CmdList
from torchx.cli.cmd_log import CmdLog, get_logs
from torchx.cli.cmd_status import CmdStatus
from torchx.cli.cmd_tracker import CmdTracker
from torchx.runner import Runner
from torchx.schedulers import get_scheduler_factories
from torchx.specs.api import MalformedAppHandleException, UnknownAppException
from torchx.util.entrypoints import load_group

_SESSION = "torchx"
_OURS = {"slurm": "SlurmScheduler", "kubernetes": "KubernetesScheduler"}


def schedulers() -> dict[str, Callable[..., Any]]:
    """Returns TorchX's schedulers by name, with ours in the place of two; another package's stay as they are."""
    factories = dict(get_scheduler_factories())
    # TorchX 0.7.0 answers None for no group, its nightlies an empty one.
    if not load_group("torchx.schedulers"):
        factories |= {name: _deferred(name) for name in _OURS}
    return factories


def _deferred(name: str) -> Callable[..., Any]:
    def create(session_name: str, **_: Any) -> Any:
        return getattr(
            importlib.import_module(f"torchx_apps.launch.{name}"), _OURS[name]
        )(session_name)

    return create


def missing_package(scheduler: str, error: ModuleNotFoundError) -> str:
    """Names a scheduler's missing package, and how to install it.

    Example:
        >>> missing_package("kubernetes", ModuleNotFoundError("", name="kubernetes.client"))[:81]
        "-s kubernetes needs the extra kubernetes: pip install 'torchrec-ext[kubernetes]',"
    """
    package = (error.name or str(error)).partition(".")[0]
    if package != "kubernetes":
        return f"-s {scheduler} needs the package {package}: pip install it, or TorchX's extra for this scheduler"
    install = (
        "pip install 'torchrec-ext[kubernetes]', or in the clone -e '.[kubernetes]'"
    )
    return f"-s {scheduler} needs the extra kubernetes: {install}"


@contextlib.contextmanager
def _runner(address: str) -> Iterator[Runner]:
    """A runner; a user's mistake ends the command with one line.

    Args:
        address: the job's address, or the scheduler's name.
    """
    by_name = schedulers()
    scheduler, mark, _ = address.partition("://")
    try:
        if mark and scheduler not in by_name:
            raise ValueError(
                f"{address}: there is no scheduler {scheduler}; known are {', '.join(by_name)}"
            )
        with Runner(_SESSION, by_name) as runner:
            yield runner
        return
    except UnknownAppException:
        message = "the scheduler knows no such job, or no longer"
    except MalformedAppHandleException:
        message = f"{address}: a job's address is the line that torchx run has printed, such as slurm://torchx/7"
    except ModuleNotFoundError as error:
        message = missing_package(scheduler, error)
    except ValueError as error:
        message = str(error)
    print(message, file=sys.stderr)
    sys.exit(1)


class StatusCommand(CmdStatus):
    """The `status` subcommand."""

    def run(self, args: argparse.Namespace) -> None:
        """Prints a job's state, and why it waits."""
        with _runner(args.app_handle) as runner:
            status = runner.status(args.app_handle)
            if status is None:
                raise UnknownAppException(args.app_handle)
        print(status.format([role for role in args.roles.split(",") if role] or None))


class LogCommand(CmdLog):
    """The `log` subcommand."""

    def run(self, args: argparse.Namespace) -> None:
        """Prints a job's log."""
        # TorchX raises a thread's error here again, so do not print it twice.
        threading.excepthook = lambda _: None
        # `| head` causes a BrokenPipeError.
        with _runner(args.identifier) as runner, contextlib.suppress(BrokenPipeError):
            get_logs(
                sys.stdout,
                args.identifier,
                args.regex,
                args.tail,
                runner=runner,
                streams=args.streams,
            )


class CancelCommand(CmdCancel):
    """The `cancel` subcommand."""

    def run(self, args: argparse.Namespace) -> None:
        """Stops a job."""
        with _runner(args.app_handle) as runner:
            runner.cancel(args.app_handle)


class ListCommand(CmdList):
    """The `list` subcommand."""

    def run(self, args: argparse.Namespace) -> None:
        """Prints the scheduler's jobs and their states."""
        from tabulate import tabulate

        with _runner(args.scheduler) as runner:
            jobs = [
                [job.app_handle, str(job.state)] for job in runner.list(args.scheduler)
            ]
        print(tabulate(jobs, headers=[HANDLE_HEADER, STATUS_HEADER]))


@contextlib.contextmanager
def _readable_tracker() -> Iterator[None]:
    try:
        yield
    except Exception as error:
        # A tracker's client may raise anything.
        print(f"torchx tracker: {error}", file=sys.stderr)
        sys.exit(1)


class TrackerCommand(CmdTracker):
    """The `tracker` subcommand."""

    def list_jobs_command(self, args: argparse.Namespace) -> None:
        """Prints the runs of the first tracker of .torchxconfig."""
        with _readable_tracker():
            super().list_jobs_command(args)

    def list_metadata_command(self, args: argparse.Namespace) -> None:
        """Prints a run's settings and figures."""
        with _readable_tracker():
            super().list_metadata_command(args)

    def list_artifacts_command(self, args: argparse.Namespace) -> None:
        """Prints the paths of a run's artifacts."""
        with _readable_tracker():
            super().list_artifacts_command(args)
