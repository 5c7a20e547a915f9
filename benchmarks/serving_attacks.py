"""A server at 100 requests a second under attack: p99 and failures before, during and after each attack.

    python benchmarks/serving_attacks.py                 # 15 seconds of each
    cd OTHER && python .../serving_attacks.py            # of the code in OTHER, whose `torchx_apps` is found first

One worker serves the bundle and takes the requests of serving_http.py over connections that are kept; beside them
somebody new connects and asks five times a second. Meanwhile: a header of 100 MiB, again and again; 1,500 sockets that
say nothing, where the server begins with the usual limit of 1,024 files; and a bundle whose towers have other widths,
which `--stage dot` cannot serve. At the end a good bundle is pointed to. No attacker bears the token; all of them share
the machine with the server. The baseline of each row is the time before. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.metadata
import json
import os
import resource
import socket
import tempfile
import threading
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from serving_http import WIDTH, Load, ask, make_bundle, one_after_the_other, recommendations, row, service
from serving_rows import Options, Row

TOKEN = "the token of this benchmark"
HEADER_MIB, SOCKETS, FILES = 100, 1_500, 1_024
NEW_A_SECOND = 5
Attack = Callable[[int, threading.Event], None]


def long_header(port: int, ending: threading.Event) -> None:
    """One after the other, until told to end."""
    piece = b"a" * 2**20
    while not ending.is_set():
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=120) as attacker:
            attacker.sendall(b"GET / HTTP/1.1\r\nHost: localhost\r\nA: ")
            for _ in range(HEADER_MIB):
                attacker.sendall(piece)
            attacker.recv(2**16)
        ending.wait(0.1)


def silent_sockets(port: int, ending: threading.Event) -> None:
    """All at once, held until told to end."""
    with contextlib.ExitStack() as held:
        sockets = []
        for _ in range(SOCKETS):
            with contextlib.suppress(OSError):
                sockets.append(held.enter_context(socket.create_connection(("127.0.0.1", port), timeout=5)))
        ending.wait()
        print(f"of {len(sockets)} silent sockets {sum(map(is_open, sockets))} are open after all that time")


def is_open(one: socket.socket) -> bool:
    one.setblocking(False)
    try:
        return bool(one.recv(1))
    except BlockingIOError:
        return True
    except OSError:
        return False


def measured(port: int, seconds: float, rate: float, attack: Attack | None = None) -> tuple[Load, Load]:
    """The load over connections that are kept, and that of newcomers, of which each opens one of its own."""
    ending, newcomers = threading.Event(), Load()
    bearing = f"Authorization: Bearer {TOKEN}\r\nContent-Type".encode()
    requests = [request.replace(b"Content-Type", bearing) for request in recommendations(512)]
    start = time.perf_counter()
    due = [
        (start + place / NEW_A_SECOND, request) for place, request in enumerate(requests[: int(NEW_A_SECOND * seconds)])
    ]
    threads = [threading.Thread(target=lambda: [one_after_the_other(port, [each], newcomers) for each in due])]
    threads += [] if attack is None else [threading.Thread(target=attack, args=(port, ending))]
    for thread in threads:
        thread.start()
    load = ask(port, rate, seconds, requests)
    threads[0].join()
    ending.set()
    for thread in threads:
        thread.join()
    return load, newcomers


def point(pointer: Path, bundle: Path) -> None:
    fresh = pointer.with_name("fresh")
    fresh.symlink_to(bundle)
    os.replace(fresh, pointer)


def served(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=30) as page:
        return str(json.load(page)["bundle"])


def figures(options: argparse.Namespace) -> Iterator[Row]:
    torch.set_num_threads(1)
    os.environ["TORCHREC_EXT_TOKEN"] = TOKEN
    resource.setrlimit(resource.RLIMIT_NOFILE, (FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))  # for the server
    with tempfile.TemporaryDirectory() as temporary:
        folder = (options.folder or Path(temporary)).absolute()
        bundles = {"bundle-0": WIDTH, "bundle-1": WIDTH, "bundle-uneven": WIDTH // 2}
        for seed, (name, width) in enumerate(bundles.items()):
            if not (folder / name).exists():
                make_bundle(folder / name, seed, width)
        good, other, uneven = (folder / name for name in bundles)
        pointer, log = Path(temporary) / "live", Path(temporary) / "log"
        pointer.symlink_to(good)
        with service(pointer, 1, log) as port:
            resource.setrlimit(resource.RLIMIT_NOFILE, (SOCKETS + FILES, resource.getrlimit(resource.RLIMIT_NOFILE)[1]))
            first = served(port)

            def swap(port: int, ending: threading.Event) -> None:
                point(pointer, uneven)

            measured(port, 3, options.rate)  # warms up
            phases: dict[str, Attack | None] = {
                "before": None,
                f"header of {HEADER_MIB} MiB": long_header,
                f"{SOCKETS:,} silent sockets": silent_sockets,
                "bundle of other widths": swap,
                "after": None,
            }
            before = 0.0
            for name, attack in phases.items():
                load, newcomers = measured(port, options.seconds, options.rate, attack)
                before = before or load.percentile(99)
                yield row(f"{name}, p99", load.percentile(99), "ms", baseline=before)
                yield row(
                    f"{name}, failures of {int(options.rate * options.seconds)}",
                    len(load.failed),
                    "requests",
                    required=0,
                )
                yield row(
                    f"{name}, failures of {int(NEW_A_SECOND * options.seconds)} newcomers",
                    len(newcomers.failed),
                    "requests",
                )
                print(
                    name,
                    f"p99 {load.percentile(99)} ms, failed {sorted(load.failed)[:3]}, {sorted(newcomers.failed)[:3]}",
                )
            point(pointer, other)
            end = time.monotonic() + 30
            while served(port) == first and time.monotonic() < end:
                time.sleep(0.1)
            yield row("a good bundle is served afterwards", float(served(port) != first), "of 1", required=1)
        print(
            "refused: ",
            [json.loads(line)["why"] for line in log.read_text().splitlines() if '"bundle_refused"' in line],
        )
    print(f"{len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}")


def attacks(asked: Options) -> Iterator[Row]:
    """The rows as benchmarks/serving.py asks for them."""
    yield from figures(_parser().parse_args(["--seconds", "3"] if asked.quick else []))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each phase")
    parser.add_argument("--rate", type=float, default=100.0, help="requests a second")
    parser.add_argument("--folder", type=Path, help="keeps the bundles there, and takes them from there the next time")
    return parser


def main() -> None:
    rows = list(figures(_parser().parse_args()))
    versions = {
        name: importlib.metadata.version(name)
        for name in ("torch", "starlette", "uvicorn", "httptools", "torchrec-ext")
    }
    print(
        json.dumps(
            {"benchmark": "serving_attacks", "versions": versions, "cores": len(os.sched_getaffinity(0)), "rows": rows}
        )
    )


if __name__ == "__main__":
    main()
