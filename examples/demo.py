"""`make demo`: captures a loop, trains two towers on two ranks, stores their vectors, answers a request from them.

python examples/demo.py [--KEY VALUE ...]
"""

import http.client
import json
import shutil
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch import nn

from torchrec_ext import adopt

BIN = Path(sys.executable).parent
USERS, ITEMS, ROWS = 250_000, 60_000, 1_280


class NCF(nn.Module):
    """GMF and MLP as in the paper; its 12.4 million weights are nearly all in tables that a batch hardly touches."""

    def __init__(self):
        super().__init__()
        self.gmf_user, self.gmf_item = nn.Embedding(USERS, 8), nn.Embedding(ITEMS, 8)
        self.mlp_user, self.mlp_item = nn.Embedding(USERS, 32), nn.Embedding(ITEMS, 32)
        self.mlp = nn.Sequential(
            nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 8), nn.ReLU()
        )
        self.head = nn.Linear(16, 1)

    def forward(self, user, item):
        gmf = self.gmf_user(user) * self.gmf_item(item)
        mlp = self.mlp(torch.cat([self.mlp_user(user), self.mlp_item(item)], 1))
        return self.head(torch.cat([gmf, mlp], 1)).squeeze(1)


def batches(count):
    draws = torch.Generator().manual_seed(0)
    for _ in range(count):
        yield (
            torch.randint(USERS, (ROWS,), generator=draws),
            torch.randint(ITEMS, (ROWS,), generator=draws),
            torch.randint(2, (ROWS,), generator=draws).float(),
        )


def captured_loop():
    """Trains for some steps with a plain loop, then for more with the same loop adopted."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss_fn = NCF(), nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(model.parameters(), 1e-3)

    def plain_step(user, item, label):
        optimizer.zero_grad()
        loss = loss_fn(model(user, item), label)
        loss.backward()
        optimizer.step()
        return loss

    def loss_of(user, item, label):
        return loss_fn(model(user, item), label)

    print(f"your loop: {milliseconds(plain_step, 12):.1f} ms a step", flush=True)
    step = adopt(model, optimizer, loss_of, compile="require")
    print(f"adopted: {milliseconds(step, 400):.2f} ms a step, median of 400")


def milliseconds(step, count):
    """Returns the median time of a step, without that of making its batch."""
    times = []
    for batch in batches(count):
        start = time.perf_counter()
        step(*batch)
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def answer(bundle, vectors):
    """Serves the bundle, asks for a user's recommendations as anyone would, and says how long an answer takes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [BIN / "python", "-m", "torchx_apps.serve", bundle, "--vectors", vectors]
    server = subprocess.Popen(
        [*command, "--port", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        start = time.perf_counter()
        while request(port, "GET", "/readyz")[0] != 200:
            if server.poll() is not None or time.perf_counter() - start > 60:
                sys.exit(f"the server did not start: {' '.join(map(str, command))}")
            time.sleep(0.02)
        asked = {"user": {"user_id": 1}, "k": 3}
        times = []
        for _ in range(200):
            start = time.perf_counter()
            status, body = request(port, "POST", "/v1/recommend", asked)
            times.append(time.perf_counter() - start)
            assert status == 200, body
        print(f"$ curl -s localhost:8000/v1/recommend -d '{json.dumps(asked)}'")
        print(body)
        middle = 1e3 * statistics.median(times)
        print(
            f"answered from stored vectors in {middle:.2f} ms over HTTP, median of {len(times)}"
        )
    finally:
        server.terminate()
        server.wait()


def request(port, method, path, body=None):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    try:
        headers = {"content-type": "application/json"}
        connection.request(method, path, body and json.dumps(body), headers)
        response = connection.getresponse()
        return response.status, response.read().decode()
    except OSError:
        return 0, ""
    finally:
        connection.close()


def run(*command):
    code = subprocess.run([str(word) for word in command]).returncode
    if code:
        sys.exit(code)


def title(text):
    print(f"\n== {text}", flush=True)


def main(*settings):
    started = time.time()
    title(f"1. an NCF of 12.4 M weights in plain PyTorch, {ROWS:,} rows a step")
    if shutil.which("c++"):
        captured_loop()
    else:
        print("left out: capturing a step needs a C++ compiler (apt install g++)")
    title("2. two towers and a top network, on two ranks: torchx run")
    words = ["--", "--export", "auto"]
    # Generated data is learnt after a fifth of the epochs.
    words += ["--train.early_stop.metric", "hr@10", "--train.early_stop.patience", "1"]
    run(BIN / "torchx", "run", "-s", "local_cwd", "rec.train.hybrid", *words, *settings)
    made = [
        path for path in Path("runs").glob("*/bundle") if path.stat().st_mtime > started
    ]
    if not made:
        print("no bundle was exported, so nothing is served")
        return
    bundle = made[-1]
    vectors = bundle.with_name("vectors")
    title(
        "3. the users' vectors stored, and a request answered by the top network alone"
    )
    embed = ["-m", "torchx_apps.embed", bundle, "--tower", "query", "--out", vectors]
    run(BIN / "python", *embed)
    print(f"serve them: python -m torchx_apps.serve {bundle} --vectors {vectors}")
    answer(bundle, vectors)


if __name__ == "__main__":
    main(*sys.argv[1:])
