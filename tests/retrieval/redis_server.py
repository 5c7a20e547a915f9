"""A real redis-server on a free port of this machine, for tests."""

import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.contracts import free_ports


class RedisServer:
    """Started, stopped and started again on one port, without a disk."""

    def __init__(self, folder: Path) -> None:
        pytest.importorskip("redis", reason="the package redis is not installed")
        if shutil.which("redis-server") is None:
            pytest.skip("redis-server is not installed")
        self.folder = folder
        (self.port,) = free_ports(1)
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def start(self) -> None:
        options = [
            "--port",
            str(self.port),
            "--bind",
            "127.0.0.1",
            "--save",
            "",
            "--appendonly",
            "no",
            "--dir",
            str(self.folder),
        ]
        with (self.folder / "redis.log").open("ab") as log:
            self.process = subprocess.Popen(
                ["redis-server", *options], stdout=log, stderr=log
            )
        end = time.monotonic() + 30
        while time.monotonic() < end:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return
            time.sleep(0.02)
        raise RuntimeError(
            f"redis-server did not start: {(self.folder / 'redis.log').read_text()[-500:]}"
        )

    def stop(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            self.process = None
