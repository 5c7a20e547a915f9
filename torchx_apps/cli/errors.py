"""The errors of ranks: a user's mistake becomes one clean message, a bug keeps its traceback. Imports no torch."""

from __future__ import annotations

import json
import os
import sys
import sysconfig
import time
import traceback

_OURS = {"torchrec_ext", "torchx_apps"}
_STDLIB = sysconfig.get_path("stdlib")
_LOST_PEER = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Connection refused",
)
_PATIENCE_S = 3.0
# A full disk, a file that cannot be read, a folder that a dying process still holds, a
# store that does not answer.
_FAULTS = {"CheckpointError", "RunFolderError", "StoreError", "StoreUnreachable"}


def record_error(error: BaseException) -> None:
    """Writes this rank's error, in the words of `describe_error`, to torchrun's and TorchX's error file.

    Does nothing if no file is named.
    """
    if lost_a_peer(error):
        # Another rank failed first and this one only noticed. torchrun reports the
        # first rank to *exit*, and stops the rest: this pause lets the rank with the
        # cause exit first.
        time.sleep(_PATIENCE_S)
    write_reply(f"{type(error).__name__}: {error}", describe_error(error))


def end_process(message: str) -> None:
    """Ends this rank with ``message``, from any of its threads and whatever the other threads do."""
    if not write_reply(message, message):
        print(message, file=sys.stderr, flush=True)
    os._exit(1)


def write_reply(message: str, details: str) -> bool:
    """Writes the error file that torchrun or TorchX reads; returns False if none is named."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return False
    extra = {"py_callstack": details, "timestamp": str(int(time.time()))}
    # In one move: TorchX reads the file every second, and half a JSON document ends
    # TorchX with a traceback.
    with open(f"{path}.part", "w") as file:
        json.dump({"message": {"message": message, "extraInfo": extra}}, file)
    os.replace(file.name, path)
    return True


def describe_error(error: BaseException) -> str:
    """Returns the text of an error, with a traceback unless it is the user's mistake.

    Example:
        >>> print(describe_error(ValueError("loader.batch_size is 0; it must be at least 1")))
        loader.batch_size is 0; it must be at least 1
    """
    who = f"rank {os.environ['RANK']}: " if "RANK" in os.environ else ""
    if is_users_mistake(error) and os.environ.get("LOGLEVEL", "").upper() != "DEBUG":
        # An error without a message would print as an empty line.
        return f"{who}{str(error) or type(error).__name__}"
    trace = "".join(
        traceback.format_exception(type(error), error, error.__traceback__)
    ).rstrip()
    head, _, last = trace.rpartition("\n")
    return f"{head}\n{who}{last}" if head else f"{who}{last}"


def is_users_mistake(error: BaseException) -> bool:
    """Whether the user can correct the error: a ValueError or a missing file, raised by this package or by user code.

    A ValueError from deep inside a library is taken for a bug of this package, and keeps its traceback.
    """
    if not isinstance(error, (ValueError, FileNotFoundError)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    if not frames:
        return True
    module = str(frames[-1].f_globals.get("__name__", ""))
    file = frames[-1].f_code.co_filename
    library = (
        "site-packages" in file or "dist-packages" in file or file.startswith(_STDLIB)
    )
    return module.split(".")[0] in _OURS or not library


def would_come_again(error: BaseException) -> bool:
    """Whether another attempt with the same flags would meet the error again: a user's mistake, but none of files.

    Example:
        >>> would_come_again(ValueError("there is no key 'epoch'")), would_come_again(FileNotFoundError("a.parquet"))
        (True, False)
    """
    faults = isinstance(error, OSError) or any(
        base.__name__ in _FAULTS for base in type(error).__mro__
    )
    return is_users_mistake(error) and not faults


def lost_a_peer(error: BaseException) -> bool:
    """Whether this rank failed only because it lost the connection to another rank.

    Example:
        >>> lost_a_peer(RuntimeError("[gloo/transport/tcp/pair.cc:547] Connection closed by peer"))
        True
        >>> lost_a_peer(RuntimeError("mat1 and mat2 shapes cannot be multiplied"))
        False
    """
    # Without an import of torch.distributed nothing can have raised its error.
    distributed = sys.modules.get("torch.distributed")
    if distributed is not None and isinstance(error, distributed.DistError):
        return True
    return isinstance(error, RuntimeError) and any(
        words in str(error) for words in _LOST_PEER
    )
