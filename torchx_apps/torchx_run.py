"""`torchx run` as our components need it; every other component runs as TorchX ships it.

TorchX lets a package replace a subcommand (entry point group `torchx.cli.cmds`), which alone can correct the following.
TorchX 0.7.0 refuses a repeated flag, so `--set a=1 --set b=2` never reaches a component. It prints all output of a
local job on stderr, figures too. It starts all ranks before one of them reads a flag. It keeps logs in a folder that it
deletes. It ends a failed job with a dump of its own status, after the failed rank's error, and answers a component's
ValueError, a missing package and Ctrl-C with a traceback. It looks for python3 on PATH alone, which fails for
`.venv/bin/torchx run` in a venv that is not activated. Where its `docker` package is installed it runs in Docker by
default, whether or not this machine has Docker.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import logging
import os
import re
import shlex
import subprocess
import sys
import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from torchx.cli.cmd_run import CmdRun
from torchx.runner import Runner, config
from torchx.schedulers import get_default_scheduler_name
from torchx.schedulers.api import Stream
from torchx.schedulers.local_scheduler import SignalException
from torchx.specs import NONE, AppDef, AppDryRunInfo, AppStatus, CfgVal, Role

from torchrec_ext.drawing.terminal import (
    ERASE,
    TERMINAL,
    is_moving,
    show_on_this_terminal,
)
from torchx_apps.cli.process import too_many
from torchx_apps.cli.sigterm import at_hangup_too
from torchx_apps.launch.checks import (
    WITHOUT_IMAGE,
    check_app,
    check_trackers,
    check_words,
)
from torchx_apps.launch.commands import missing_package, schedulers
from torchx_apps.launch.component_help import Component, asks_for_help

LOGS = Path("runs") / "logs"
_LOCAL = "local_cwd"


class Run(CmdRun):
    """The `run` subcommand."""

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        """Adds the flags of `torchx run`."""
        super().add_arguments(subparser)
        # For --set before the component, or without one where .torchxconfig names it;
        # after the component's name the flag is the component's.
        subparser.add_argument(
            "--set",
            action="append",
            default=[],
            metavar="KEY=VALUE",
            help="change one key of the recipe",
        )
        self._parser = subparser
        self._launched = False
        self._ours = False
        if config.get_config(prefix="cli", name="run", key="scheduler") is None:
            # None lets `run` see whether -s was given.
            subparser.set_defaults(scheduler=None)

    def run(self, args: argparse.Namespace) -> None:
        """Runs a component."""
        tokens = with_component(args.component_name_and_args)
        self._ours = is_ours(tokens)
        args.scheduler = args.scheduler or (
            _LOCAL if self._ours else get_default_scheduler_name()
        )
        if not self._ours:
            if args.set:
                self._parser.error(
                    f"--set {args.set[0]}: only the components of torchrec_ext take it; name one, or leave it out"
                )
            super().run(args)
            return
        if args.scheduler == _LOCAL and any(
            token.partition("=")[0] == "--manifest" for token in tokens
        ):
            # The files of a service are for Kubernetes.
            args.scheduler = "kubernetes"
        # In the order typed: of two changes to one key the later wins.
        name, *words = tokens
        tokens = gather_overrides(
            [name, *(f"--set={item}" for item in args.set), *words]
        )
        _put_this_python_on_path()
        try:
            check_words(tokens)
            component = Component.named(name)
            words = component.check_flags(tokens[1:])
        except ValueError as error:
            self._parser.error(str(error))
        if asks_for_help(words):
            sys.exit(show_help(component, words))
        args.component_name_and_args = [name, *words]
        if args.scheduler == _LOCAL:
            _quieten_torchx(args.log_level)
        try:
            super().run(args)
        except SignalException as stop:
            print(
                f"torchx run: stopped by {stop.sigval.name}; no rank is left",
                file=sys.stderr,
            )
            sys.exit(128 + stop.sigval)
        # Once the job has been launched, an error is no mistake in its flags.
        except ModuleNotFoundError as error:
            if self._launched or args.scheduler == _LOCAL:
                raise
            print(missing_package(args.scheduler, error), file=sys.stderr)
            sys.exit(1)
        except (ValueError, KeyError) as error:
            if self._launched:
                raise
            self._parser.error(str(error.args[0]))
        # By name, because docker need not be installed.
        except Exception as error:
            if self._launched or type(error).__module__ != "docker.errors":
                raise
            print(
                f"-s {args.scheduler} --workspace {args.workspace}: TorchX builds this folder into the image with "
                'Docker, which does not answer on this machine; write --workspace "" to run --image as it is',
                file=sys.stderr,
            )
            sys.exit(1)

    def _run(self, runner: Runner, args: argparse.Namespace) -> None:
        if not self._ours:
            super()._run(runner, args)
            return
        self._scheduler = args.scheduler
        self._out = sys.stdout
        with JobRunner(
            "torchx", schedulers(), config.load_sections(prefix="component")
        ) as jobs:
            jobs.only_shows = args.dryrun
            if args.scheduler != _LOCAL or args.dryrun:
                super()._run(jobs, args)
                return
            at_hangup_too()
            show_on_this_terminal()
            # TorchX prints the job's handle, which is of no use for a local job: that
            # ends with this process.
            with contextlib.redirect_stdout(io.StringIO()):
                super()._run(jobs, args)

    def _wait_and_exit(self, runner: Runner, app_handle: str, log: bool) -> None:
        self._launched = True
        if not self._ours:
            super()._wait_and_exit(runner, app_handle, log)
            return
        with _no_status_dump():
            try:
                super()._wait_and_exit(runner, app_handle, log)
            except SystemExit:
                print(last_words(runner.status(app_handle)), file=sys.stderr)
                raise

    def _start_log_thread(self, runner: Runner, app_handle: str) -> threading.Thread:
        if not self._ours or self._scheduler != _LOCAL:
            upstream: threading.Thread = super()._start_log_thread(runner, app_handle)
            return upstream
        thread = threading.Thread(
            target=print_output,
            args=(runner, app_handle, self._out, sys.stderr),
            daemon=True,
        )
        thread.start()
        return thread


class JobRunner(Runner):
    """A Runner with logs of local jobs, and a check of a job's settings before the ranks start."""

    # Whether to print the files of a service instead of writing them.
    only_shows = False

    def dryrun(
        self,
        app: AppDef,
        scheduler: str,
        cfg: Mapping[str, CfgVal] | None = None,
        workspace: str | None = None,
        parent_run_id: str | None = None,
    ) -> AppDryRunInfo[Any]:
        """Returns the job as it would run; logs of local jobs go to ``runs/logs``, or to ``log_dir`` of ``-cfg``."""
        for note in check_app(app, scheduler, workspace=workspace):
            print(note, file=sys.stderr)
        settings = {**(cfg or {})}
        if "manifest" in app.metadata:
            if scheduler != "kubernetes":
                raise ValueError(
                    f"--manifest: it writes files for Kubernetes, not for -s {scheduler}; leave -s out"
                )
            write_service(app, settings, only_shows=self.only_shows)
            sys.exit(0)
        # TorchX's own folder of logs is deleted when the job has ended.
        if scheduler == _LOCAL and not settings.get("log_dir") and _can_make(LOGS):
            settings["log_dir"] = str(LOGS.absolute())
        info = super().dryrun(
            app,
            scheduler,
            cfg=settings,
            workspace=workspace,
            parent_run_id=parent_run_id,
        )
        for role in app.roles:
            check_trackers(role)
        return info

    def schedule(self, dryrun_info: AppDryRunInfo[Any]) -> str:
        """Starts the job, unless its settings have a mistake; a job that only prints something runs here instead.

        Raises:
            SystemExit: with the exit code, when there is nothing to start.
        """
        role = dryrun_info._app.roles[0]
        local = dryrun_info._scheduler == _LOCAL
        launch = None
        # Other schedulers run an image, whose package and recipes may differ from those
        # here.
        if dryrun_info._scheduler in WITHOUT_IMAGE:
            launch = Launch.of(role)
        if launch is None:
            return str(super().schedule(dryrun_info))
        if launch.only_prints:
            sys.exit(launch.here(role.env).returncode)
        if local:
            refusal = too_many(launch.ranks)
            if refusal:
                print(refusal, file=sys.stderr)
                sys.exit(1)
            logs = os.path.relpath(dryrun_info.request.log_dir)
            print(
                f"torchx run: starting {launch}; logs: {logs}",
                file=sys.stderr,
                flush=True,
            )
        if launch.has_settings:
            mistake = launch.mistake(role.env, bugs=local)
            if mistake:
                print(mistake, file=sys.stderr)
                sys.exit(1)
        return str(super().schedule(dryrun_info))

    def status(self, app_handle: str) -> AppStatus | None:
        """Returns the job's state; None, and a printed note, if the cluster does not tell it after a submission.

        An error here would make a script that ends at errors submit the job once more.
        """
        try:
            return super().status(app_handle)
        except Exception as error:
            if app_handle.startswith(f"{_LOCAL}:"):
                raise
            print(
                f"note: {app_handle} is submitted, but its state cannot be read: {error}",
                file=sys.stderr,
            )
            return None


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The app of a role.

    Args:
        module: the app's module.
        flags: the app's flags.
        ranks: number of ranks that torchx_apps.agent starts, on all nodes; 0 for an app that is one process.
    """

    module: str
    flags: Sequence[str]
    ranks: int

    @classmethod
    def of(cls, role: Role) -> Launch | None:
        """Reads the launch from a role's command; returns None if the command starts none of our apps.

        Example:
            >>> command = "exec python3 -m torchx_apps.agent --nnodes 1:2 --nproc_per_node 4 -m torchx_apps.train"
            >>> args = ["-c", f"{command} --recipe ncf"]
            >>> print(Launch.of(Role(name="train", image="", entrypoint="bash", args=args)))
            8 ranks of ncf
            >>> args = ["-m", "torchx_apps.export", "runs/a"]
            >>> print(Launch.of(Role(name="export", image="", entrypoint="python3", args=args)))
            export
        """
        words = role.args
        if words and role.entrypoint == "bash":
            words = shlex.split(words[-1])
        apps = [
            index for index, word in enumerate(words) if word.startswith("torchx_apps.")
        ]
        if not apps:
            return None
        ranks = 0
        if words[apps[0]] == "torchx_apps.agent" and len(apps) > 1:
            agent_flags = " ".join(words[: apps[1]])
            # Of MIN:MAX nodes the most count.
            counts = dict(
                re.findall(r"--(nnodes|nproc_per_node)[= ](?:\d+:)?(\d+)", agent_flags)
            )
            ranks = int(counts.get("nnodes", 1)) * int(counts["nproc_per_node"])
            apps = apps[1:]
        return cls(module=words[apps[0]], flags=words[apps[0] + 1 :], ranks=ranks)

    @property
    def only_prints(self) -> bool:
        """Whether each rank would only print the same text and end."""
        return self.ranks > 0 and not _PRINTING.isdisjoint(self.flags)

    @property
    def has_settings(self) -> bool:
        """Whether ranks would read any settings from the user."""
        settings = [
            flag
            for flag in self.flags
            if not flag.startswith(("--run-dir=", "--resume="))
        ]
        return self.module in _TRAINING and settings != ["--recipe", "two_tower"]

    def here(
        self, env: Mapping[str, str], *flags: str, **options: Any
    ) -> subprocess.CompletedProcess[str]:
        """Runs the app in one process, with the Python and the environment of the ranks."""
        world = {
            **os.environ,
            **env,
            "PATH": os.environ["PATH"],
            "WORLD_SIZE": str(max(self.ranks, 1)),
        }
        return subprocess.run(
            ["python3", "-m", self.module, *self.flags, *flags],
            env=world,
            text=True,
            check=False,
            **options,
        )

    def mistake(self, env: Mapping[str, str], *, bugs: bool) -> str:
        """Returns the app's message about a wrong recipe, key or value; empty if there is none.

        Args:
            env: the role's environment.
            bugs: include errors with a traceback; false where the job runs on other machines, which may have what is
                missing here.
        """
        process = self.here(env, "--dry-run", capture_output=True)
        if not process.returncode or (not bugs and "Traceback" in process.stderr):
            return ""
        message: str = process.stderr.strip()
        return message

    def __str__(self) -> str:
        flags = dict(zip(self.flags, self.flags[1:], strict=False))
        name = flags.get("--recipe", self.module.rpartition(".")[2])
        if not self.ranks:
            return name
        noun = "ranks" if self.ranks > 1 else "rank"
        return f"{self.ranks} {noun} of {name}"


def show_help(component: Component, words: Sequence[str]) -> int:
    """Prints the help of a component, or of its app if ``--help`` stands behind ``--``; returns the exit code."""
    if "--" in words and not asks_for_help(words[: words.index("--")]):
        launch = Launch.of(component.app().roles[0])
        assert launch is not None, "each of our components starts one of our apps"
        return subprocess.run(
            ["python3", "-m", launch.module, "--help"], check=False
        ).returncode
    _copy([f"{component.help()}\n"], "", sys.stdout)
    return 0


def write_service(app: AppDef, cfg: Mapping[str, CfgVal], *, only_shows: bool) -> None:
    """Writes the files of a service on Kubernetes into its folder, and says how to start it; or only prints them."""
    import yaml

    from torchx_apps.launch.kubernetes import service_files

    files = {
        name: yaml.safe_dump(content, sort_keys=False)
        for name, content in service_files(app, cfg).items()
    }
    if only_shows:
        print("---\n".join(files.values()), end="")
        return
    folder = Path(app.metadata["manifest"])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (folder / name).write_text(text)
    except OSError as error:
        raise ValueError(
            f"--manifest {folder}: {error.strerror}; name a folder that can be written"
        ) from None
    print(f"wrote {', '.join(files)}; now: kubectl apply -f {shlex.quote(str(folder))}")


_PRINTING = {"-h", "--help", "--dry-run", "--list-recipes", "--list"}
_TRAINING = (
    "torchx_apps.train",
    "torchx_apps.train_networks",
    "torchx_apps.train_stream",
)


def with_component(tokens: Sequence[str]) -> list[str]:
    """Returns the component's name and its flags; .torchxconfig supplies a missing name if it has one."""
    words = [*tokens]
    if words[:1] == ["--"]:
        del words[0]
    if words and not words[0].startswith("-"):
        return words
    default = config.get_config(prefix="cli", name="run", key="component")
    return [default, *words] if default else words


def is_ours(tokens: Sequence[str]) -> bool:
    """Whether the component is one of this package.

    Args:
        tokens: component name and its flags.

    Example:
        >>> is_ours(["rec.train.hybrid", "-j", "1x2"]), is_ours(["components/train.py:hybrid"]), is_ours(["dist.ddp"])
        (True, True, False)
    """
    name = tokens[0] if tokens else ""
    return (
        name.startswith("rec.")
        or Path(name.partition(":")[0]).parent.name == "components"
    )


_REPEATED = ("--set", "--vary", "--member")


def gather_overrides(tokens: Sequence[str]) -> list[str]:
    """Moves every `--set`, `--vary` and `--member` behind `--`; TorchX passes them on unchanged from there.

    Args:
        tokens: component name and its flags; the name is required, since TorchX drops a `--` that comes first.

    Example:
        >>> gather_overrides(["rec.train.hybrid", "--set", "a=1", "-j", "1x2", "--set=b=2"])
        ['rec.train.hybrid', '-j', '1x2', '--', '--set=a=1', '--set=b=2']
        >>> gather_overrides(["rec.train.hybrid", "--", "--set", "a=1", "--dry-run"])
        ['rec.train.hybrid', '--', '--dry-run', '--set=a=1']
    """
    rest = list(tokens)
    others: list[str] = []
    overrides: dict[str, None] = {}
    while rest:
        token = rest.pop(0)
        if token in _REPEATED and rest:
            token = f"{token}={rest.pop(0)}"
        if token.partition("=")[0] in _REPEATED and "=" in token:
            # Of two equal overrides the later stays, since it may undo another one in
            # between; TorchX refuses both.
            overrides.pop(token, None)
            overrides[token] = None
        else:
            others.append(token)
    if overrides and "--" not in others:
        others.append("--")
    return [*others, *overrides]


def print_output(runner: Runner, app_handle: str, out: TextIO, err: TextIO) -> None:
    """Copies a local job's output as it comes, stdout to ``out`` and stderr to ``err``, until the job has ended.

    Lines of a job on several nodes begin with the role and the node.
    """
    replicas = [
        (role.name, node)
        for role in runner.describe(app_handle).roles
        for node in range(role.num_replicas)
    ]
    threads = []
    for role, node in replicas:
        prefix = f"{role}/{node} " if len(replicas) > 1 else ""
        # Apart, so that figures go to stdout and errors to stderr.
        for stream, file in ((Stream.STDOUT, out), (Stream.STDERR, err)):
            lines = runner.log_lines(
                app_handle, role, node, should_tail=True, streams=stream
            )
            threads.append(
                threading.Thread(target=_copy, args=(lines, prefix, file), daemon=True)
            )
            threads[-1].start()
    for thread in threads:
        thread.join()


def _copy(lines: Iterable[str], prefix: str, file: TextIO) -> None:
    at_line_start = True
    erase = ""
    if TERMINAL in os.environ:
        lines = _beside_a_moving_line(lines)
        erase = ERASE
    try:
        # A text may be several lines, or a piece of one.
        for text in lines:
            file.write(f"{erase}{prefix}{text}" if at_line_start else text)
            file.flush()
            at_line_start = text.endswith("\n")
    except BrokenPipeError:
        # `| head` causes this; the job continues, and its logs are kept. Python would
        # raise again when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), file.fileno())


def _beside_a_moving_line(texts: Iterable[str]) -> Iterator[str]:
    """Yields whole lines, without those that the moving line of rank 0 shows."""
    rest = ""
    for text in texts:
        *lines, rest = (rest + text).split("\n")
        for line in lines:
            if not is_moving(line):
                yield f"{line}\n"
    if rest:
        yield rest


def last_words(status: AppStatus | None) -> str:
    """Returns the failed rank's error, or the job's state if no rank reported one, e.g. after an unknown flag."""
    if status is None or status.structured_error_msg == NONE:
        state = "UNKNOWN" if status is None else status.state.name
        return f"the job ended as {state}; its own output above says why"
    message = json.loads(status.structured_error_msg).get("message")
    if not isinstance(message, dict):
        return str(message)
    return str(
        message.get("extraInfo", {}).get("py_callstack") or message.get("message")
    ).rstrip()


@contextmanager
def _no_status_dump() -> Iterator[None]:
    def keep(record: logging.LogRecord) -> bool:
        return not isinstance(record.msg, AppStatus)

    logger = logging.getLogger("torchx.cli.cmd_run")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _quieten_torchx(log_level: str) -> None:
    """Silences TorchX's log of its own steps, unless LOGLEVEL asks for it; its warnings stay."""
    if log_level == "INFO" and "LOGLEVEL" not in os.environ:
        logging.getLogger("torchx").setLevel(logging.WARNING)


def _can_make(folder: Path) -> bool:
    nearest = next(
        path
        for path in (folder.absolute(), *folder.absolute().parents)
        if path.exists()
    )
    return nearest.is_dir() and os.access(nearest, os.W_OK)


def _put_this_python_on_path() -> None:
    folder = os.path.dirname(sys.executable)
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join(
            [folder, os.environ.get("PATH", os.defpath)]
        )
