"""The address of a Redis, to which the password comes from a file or the environment and never from a flag."""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

PASSWORD = "REDIS_PASSWORD"


def add_password_file(parser: argparse.ArgumentParser) -> None:
    """Adds the flag ``--redis-password-file``."""
    help_text = f"file with the password of --redis, as one line; where not given the variable {PASSWORD}, if set"
    parser.add_argument(
        "--redis-password-file", type=Path, metavar="FILE", help=help_text
    )


def with_password(
    url: str | None, file: Path | None, environ: Mapping[str, str] = os.environ
) -> str | None:
    """Returns the address with its password.

    Args:
        url: address of a Redis without a password, with or without a user, or None.
        file: file with the password, or None for the variable REDIS_PASSWORD.
        environ: environment.

    Raises:
        ValueError: the address holds a password, which every user of the machine could read, or the file cannot be
            read.

    Example:
        >>> with_password("redis://host:6379/0", None, {"REDIS_PASSWORD": "a/b"})
        'redis://:a%2Fb@host:6379/0'
        >>> with_password("rediss://ann@host", None, {"REDIS_PASSWORD": "c"}), with_password("redis://host", None, {})
        ('rediss://ann:c@host', 'redis://host')
        >>> with_password("redis://:secret@host:6379/0", None, {})  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: --redis: the address holds a password, which `ps` shows to all users; leave it out, ...
    """
    if url is None:
        if file is not None:
            raise ValueError(
                f"--redis-password-file {file}: is for --redis; name the address too"
            )
        return None
    scheme, mark, rest = url.partition("://")
    user, at_sign, host = rest.partition("@")
    if not at_sign:
        user = ""
        host = rest
    if ":" in user or re.search(r"[?&]password=", url):
        raise ValueError(
            "--redis: the address holds a password, which `ps` shows to all users; leave it out, and "
            f"give --redis-password-file FILE or the variable {PASSWORD}"
        )
    password = environ.get(PASSWORD, "") if file is None else _read(file)
    if not password:
        return url
    return f"{scheme}{mark}{user}:{quote(password, safe='')}@{host}"


def _read(file: Path) -> str:
    try:
        password = file.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(
            f"--redis-password-file {file}: it cannot be read ({error})"
        ) from None
    if not password:
        raise ValueError(
            f"--redis-password-file {file}: it is empty; write the password into it, as one line"
        )
    return password
