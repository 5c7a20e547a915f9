"""`torchx run` as our components need it; every other component runs as TorchX ships it.

TorchX lets a package replace a subcommand (entry point group `torchx.cli.cmds`). Five things are only reachable from there:
TorchX 0.7.0 refuses a repeated flag, so `--set a=1 --set b=2` never reaches a component; it ends a failed job with a dump of its
own status, after the failed rank's error; it answers a component's ValueError and Ctrl-C with a traceback; it finds
python3 on PATH alone, which fails for `.venv/bin/torchx run` in a venv that is not activated; and where its own `docker` package
is installed it runs in Docker unless told otherwise, whether or not this machine has Docker.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torchx.cli.cmd_run import CmdRun
from torchx.runner import Runner, config
from torchx.schedulers import get_default_scheduler_name
from torchx.schedulers.local_scheduler import SignalException
from torchx.specs import NONE, AppStatus


class Run(CmdRun):
    """The `run` subcommand."""

    def add_arguments(self, subparser: argparse.ArgumentParser) -> None:
        """Takes the flags of `torchx run`."""
        super().add_arguments(subparser)
        # Before the component, or without one where .torchxconfig names it; behind it the flag is one of the component's own.
        subparser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="change one key of the recipe")
        self._parser = subparser
        self._launched = False
        self._ours = False
        if config.get_config(prefix="cli", name="run", key="scheduler") is None:
            subparser.set_defaults(scheduler=None)  # to know in `run` whether -s was given

    def run(self, args: argparse.Namespace) -> None:
        """Runs a component."""
        self._ours = is_ours(args.component_name_and_args)
        args.scheduler = args.scheduler or ("local_cwd" if self._ours else get_default_scheduler_name())
        if not self._ours:
            if args.set:
                self._parser.error(f"--set {args.set[0]}: only the components of torchrec_ext take it; name one, or leave it out")
            super().run(args)
            return
        overrides = [f"--set={override}" for override in args.set]
        args.component_name_and_args = gather_overrides([*args.component_name_and_args, *overrides])
        _put_this_python_on_path()
        try:
            super().run(args)
        except SignalException as stop:
            print(f"torchx run: stopped by {stop.sigval.name}; no rank is left", file=sys.stderr)
            sys.exit(128 + stop.sigval)
        except (ValueError, KeyError) as error:
            if self._launched:
                raise
            self._parser.error(str(error.args[0]))

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


def is_ours(tokens: Sequence[str]) -> bool:
    """Whether the component is one of this package.

    Args:
        tokens: component name and its flags; without a name the one in .torchxconfig counts.

    Example:
        >>> is_ours(["rec.train.hybrid", "-j", "1x2"]), is_ours(["components/train.py:hybrid"]), is_ours(["dist.ddp"])
        (True, True, False)
    """
    first = next(iter(token for token in tokens if token != "--"), "-")
    name = (config.get_config(prefix="cli", name="run", key="component") or "") if first.startswith("-") else first
    return name.startswith("rec.") or Path(name.partition(":")[0]).parent.name == "components"


_REPEATED = ("--set", "--vary", "--member")


def gather_overrides(tokens: Sequence[str]) -> list[str]:
    """Moves every `--set`, `--vary` and `--member` behind `--`, where TorchX hands it on as it stands.

    Example:
        >>> gather_overrides(["rec.train.hybrid", "--set", "a=1", "-j", "1x2", "--set=b=2"])
        ['rec.train.hybrid', '-j', '1x2', '--', '--set=a=1', '--set=b=2']
        >>> gather_overrides(["rec.train.hybrid", "--", "--set", "a=1", "--dry-run"])
        ['rec.train.hybrid', '--', '--dry-run', '--set=a=1']
    """
    rest = list(tokens[1:] if tokens[:1] == ["--"] else tokens)
    kept: list[str] = []
    found: dict[str, None] = {}
    while rest:
        token = rest.pop(0)
        if token in _REPEATED and rest:
            token = f"{token}={rest.pop(0)}"
        if token.partition("=")[0] in _REPEATED and "=" in token:
            # Told twice word for word, the later stands: it may undo another one in between. TorchX refuses the repetition.
            found.pop(token, None)
            found[token] = None
        else:
            kept.append(token)
    if not found:
        return kept
    return [*kept, *([] if "--" in kept else ["--"]), *found]


def last_words(status: AppStatus | None) -> str:
    """The failed rank's error, or the job's state when none was left, as by a flag that there is not."""
    if status is None or status.structured_error_msg == NONE:
        return f"the job ended as {'UNKNOWN' if status is None else status.state.name}; its own output above says why"
    message = json.loads(status.structured_error_msg).get("message")
    if not isinstance(message, dict):
        return str(message)
    return str(message.get("extraInfo", {}).get("py_callstack") or message.get("message")).rstrip()


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


def _put_this_python_on_path() -> None:
    folder = os.path.dirname(sys.executable)
    if folder not in os.environ.get("PATH", "").split(os.pathsep):
        os.environ["PATH"] = os.pathsep.join([folder, os.environ.get("PATH", os.defpath)])
