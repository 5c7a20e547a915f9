"""Every model class of four recommender packages, and seven repositories' scripts, under adopt(), each as it trains.

    python benchmarks/zoo.py [--only recbole DeepFM ...] [--jobs 1] [--uncompiled] [--quick] [--results FILE]

One line per model: whether its step is captured; if not, adopt's reason; `wrong` if losses or weights after 12 steps
differ from the package's own loop by more than ten times what a change of the first weights by rounding does, and more
than half of Adam's eps does (tables moved row by row take eps as of one step); the gain and the seconds of the capture.
Both loops are timed in turn, the package's own in a process without adopt, which changes how freed memory is kept.
`failed`: the package's own loop raises here, without adopt.
`left out`: there is nothing to adopt, or a further package is needed. At the end reasons by number, and a JSON object.

The packages are installed with pip into a folder of their own, at the versions below, without what they depend on:
numpy and pandas there are of their time. RecBole's batches are its default, 2,048 rows; all others 256.
FuxiCTR's distribution has 10 of its models; the others are in its repository alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import multiprocessing
import os
import random
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

CACHE = (
    Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    / "torchrec_ext"
    / "zoo"
)
PACKAGES = (
    *(
        "torch-rechub==0.9.0",
        "deepctr-torch==0.3.0",
        "fuxictr==2.3.10",
        "recbole==1.2.1",
    ),
    *(
        "numpy==1.26.4",
        "scipy==1.11.4",
        "pandas==2.0.3",
        "pytz==2024.1",
        "tzdata==2024.1",
    ),
    *("scikit-learn==1.3.2", "joblib==1.4.2", "threadpoolctl==3.5.0"),
    *(
        "colorlog==4.7.2",
        "colorama==0.4.4",
        "texttable==1.7.0",
        "thop==0.1.1.post2209072238",
        "tabulate==0.9.0",
    ),
    *("faiss-cpu==1.8.0", "kmeans-pytorch==0.3"),
)
STEPS, SECONDS = 12, 4.0  # steps that are compared, and seconds of timing
GIB = 2**30
FORK = multiprocessing.get_context("fork")
Result = dict[str, Any]


def install(folder: Path) -> None:
    """Installs the packages into a folder, once."""
    done = folder / "installed.txt"
    if not (done.exists() and done.read_text() == "\n".join(PACKAGES)):
        command = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--upgrade",
        ]
        subprocess.run(
            [*command, "--target", str(folder), *PACKAGES],
            check=True,
            stdout=sys.stderr,
        )
        done.write_text("\n".join(PACKAGES))


def seed_all(seed: int) -> None:
    import numpy as np
    import torch

    random.seed(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)


def plain(case: Any, batch: tuple[Any, ...]) -> float:
    """Makes a step of the package's own loop, and returns its loss."""
    from torch.nn.utils import clip_grad_norm_

    for optimizer in case.optimizers:
        optimizer.zero_grad()
    loss = case.loss(*batch)
    loss.backward()
    if case.clip_norm:
        clip_grad_norm_(case.model.parameters(), case.clip_norm)
    for optimizer in case.optimizers:
        optimizer.step()
    return float(loss)


def trained(
    case: Any, step: Callable[[Any], float]
) -> tuple[list[float], dict[str, Any]]:
    """Makes the steps that are compared, and returns losses and weights."""
    seed_all(1)
    losses = [step(batch) for batch in case.batches[:STEPS]]
    return losses, {
        name: value.detach().clone() for name, value in case.model.named_parameters()
    }


def difference(one: tuple[Any, Any], other: tuple[Any, Any]) -> tuple[float, float]:
    """Returns the greatest relative difference of losses, and the greatest difference of weights."""
    losses = max(
        abs(a - b) / max(abs(a), 1e-3) for a, b in zip(one[0], other[0], strict=True)
    )
    pairs = (
        (value.double(), other[1][name].double())
        for name, value in one[1].items()
        if value.numel()
    )
    return losses, max((float((a - b).abs().max()) for a, b in pairs), default=0.0)


def rounded(case: Any) -> Any:
    """Changes the weights of a case by rounding."""
    import torch
    from torch import Tensor

    draw = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for weight in filter(Tensor.is_floating_point, case.model.parameters()):
            weight.mul_(
                1 + 2.0**-23 * torch.randint(-1, 2, weight.shape, generator=draw)
            )
    return case


def half_eps(case: Any) -> Any:
    """Halves Adam's eps, which counts where gradients are near it."""
    for optimizer in case.optimizers:
        for group in optimizer.param_groups:
            group["eps"] = group.get("eps", 0.0) / 2
    return case


def named(error: Exception) -> str:
    """Returns an error's kind and the first line of its text."""
    return f"{type(error).__name__}: {next(iter(str(error).splitlines()), '')}"


def study(library: str, name: str, args: argparse.Namespace) -> Result:
    """Trains one model both ways."""
    import torch
    from zoo_models import CannotBuildError, Size

    from torchrec_ext.adopt import CannotAdopt, adopt
    from torchrec_ext.capture import executors

    torch.set_num_threads(1)
    if args.uncompiled:
        executors.compile_graph = lambda graph, examples: graph
    size = Size(rows=64, length=10) if args.quick else Size()
    try:
        seed_all(0)
        make = _libraries()[library].build(name, size, STEPS)

        def fresh() -> Any:
            seed_all(0)
            return make()

        own = fresh()
        expected = trained(own, lambda batch: plain(own, batch))
        drawn = torch.get_rng_state()
        if not all(map(math.isfinite, expected[0])):
            return {
                "verdict": "failed",
                "why": "the package's own losses are not finite",
            }
    except CannotBuildError as error:
        return {"verdict": "left out", "why": str(error)}
    except Exception as error:
        traceback.print_exc()
        return {
            "verdict": "failed",
            "why": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        }
    seed_all(1)
    result: Result = {"random": not torch.equal(drawn, torch.get_rng_state())}
    case = fresh()
    orders, served = FORK.Pipe()
    if not args.uncompiled:
        FORK.Process(
            target=serve_times, args=(own, served, orders), daemon=True
        ).start()
    try:
        step = adopt(
            case.model,
            case.optimizers,
            case.loss,
            compile="require",
            clip_norm=case.clip_norm,
        )
        actual = trained(case, lambda batch: float(step(*batch)[0]))
    except CannotAdopt as error:
        why = str(error).removeprefix("compile='require': ")
        return result | {
            "verdict": "differs" if "differs from the eager one" in why else "eager",
            "why": why,
        }
    except Exception as error:
        traceback.print_exc()
        return result | {
            "verdict": "raised",
            "why": f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}",
        }
    controls = []
    for change in (rounded, half_eps):
        control = change(fresh())
        controls.append(
            difference(
                expected,
                trained(control, lambda batch, control=control: plain(control, batch)),
            )
        )
    far = difference(expected, actual)
    noise = [10 * a + b for a, b in zip(*controls, strict=True)]
    # a compiled step draws other numbers
    drops = result["random"] and not args.uncompiled
    wrong = far[0] > 1e-4 + noise[0] or far[1] > 1e-5 + noise[1]
    result |= {
        "losses": far,
        "control": noise,
        "way": step.describe(),
        "capture_s": step.figures()["capture_s"],
    }
    result["verdict"] = "wrong" if wrong and not drops else "captured"
    if not args.uncompiled:
        result |= timed(orders, own.batches, step)
    return result


def milliseconds(step: Callable[[Any], Any], batches: list[Any]) -> list[float]:
    """Returns the time of each step."""
    taken = []
    for batch in batches:
        start = time.perf_counter()
        step(batch)
        taken.append(1e3 * (time.perf_counter() - start))
    return taken


def serve_times(own: Any, orders: Connection, parent_end: Connection) -> None:
    """Times steps of the package's own loop whenever it is asked to, in a process of its own."""
    parent_end.close()  # else the end of the parent would not end the wait
    with suppress(EOFError):
        while orders.recv():
            orders.send(milliseconds(lambda batch: plain(own, batch), own.batches[:4]))


def timed(orders: Connection, batches: list[Any], step: Any) -> Result:
    """Times both loops in turn."""
    taken: dict[str, list[float]] = {"eager_ms": [], "captured_ms": []}
    until = time.perf_counter() + SECONDS
    while time.perf_counter() < until or len(taken["eager_ms"]) < 8:
        orders.send(True)
        taken["eager_ms"] += orders.recv()
        taken["captured_ms"] += milliseconds(lambda batch: step(*batch), batches[:4])
    medians = {side: statistics.median(times) for side, times in taken.items()}
    return medians | {"gain": medians["eager_ms"] / medians["captured_ms"]}


def child(library: str, name: str, args: argparse.Namespace) -> None:
    """Studies one model in this process, and prints the result as the last line."""
    resource.setrlimit(resource.RLIMIT_AS, (args.memory * GIB, args.memory * GIB))
    with tempfile.TemporaryDirectory() as folder:
        tempfile.tempdir = os.environ["TORCHINDUCTOR_CACHE_DIR"] = folder
        os.chdir(folder)  # packages write logs into it
        result = study(library, name, args)
        os.chdir("/")
    print(json.dumps(result))


def run(library: str, name: str, args: argparse.Namespace) -> Result:
    """Studies one model in a process of its own, and prints its line."""
    command = [
        sys.executable,
        __file__,
        "--child",
        library,
        name,
        "--memory",
        str(args.memory),
    ]
    command += [f"--{flag}" for flag in ("uncompiled", "quick") if getattr(args, flag)]
    paths = [
        str(Path(__file__).parents[1]),
        str(args.packages),
        os.environ.get("PYTHONPATH", ""),
    ]
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "OMP_NUM_THREADS": "1",
    }
    start = time.perf_counter()
    try:
        done = subprocess.run(
            command,
            env=environment,
            timeout=args.seconds,
            capture_output=True,
            text=True,
        )
        lines = done.stdout.splitlines() or [""]
        result = (
            json.loads(lines[-1])
            if lines[-1].startswith("{")
            else {"verdict": "died", "why": _end(done)}
        )
    except subprocess.TimeoutExpired:
        result = {"verdict": "died", "why": f"took more than {args.seconds:.0f} s"}
    result = {
        "library": library,
        "name": name,
        **result,
        "seconds": round(time.perf_counter() - start, 1),
    }
    print(line(result), file=sys.stderr, flush=True)
    return result


def _end(done: subprocess.CompletedProcess[str]) -> str:
    return f"status {done.returncode}: {(done.stderr.strip().splitlines() or [''])[-1]}"


def line(result: Result) -> str:
    parts = [f"{result['library']} {result['name']}: {result['verdict']}"]
    if "gain" in result:
        both = f"{result['eager_ms']:.3g} ms, captured {result['captured_ms']:.3g} ms"
        parts.append(
            f"{result['gain']:.3g}x ({both}; capture {result['capture_s']:.0f} s)"
        )
    if "losses" in result:
        figures = [
            f"{figure:.1e}" for figure in (*result["losses"], *result["control"])
        ]
        parts.append(
            "losses and weights differ by {}, {} (allowed {}, {})".format(*figures)
        )
    return "; ".join([*parts, *([result["why"]] if "why" in result else [])])


def cause(why: str) -> str:
    """Returns a reason without what is of one model: files, lines, code, names and numbers."""
    text = re.sub(r"\S+:\d+ \(.*?\)+(?= )", "LINE", why)
    text = re.sub(r"\(\S+\.py:\d+\)", "", text)
    return re.sub(r"'[^']*'", "NAME", re.sub(r"\b\d[\d.,e+-]*", "N", text))[:150]


def summary(results: list[Result]) -> Result:
    """Returns verdicts by package, reasons by number, and the median gain."""
    counts = {
        library: Counter(r["verdict"] for r in results if r["library"] == library)
        for library in _libraries()
    }
    reasons: dict[str, list[str]] = {}
    for result in results:
        if result["verdict"] in ("eager", "differs", "raised"):
            reasons.setdefault(cause(result["why"]), []).append(
                f"{result['library']} {result['name']}"
            )
    ranked = dict(sorted(reasons.items(), key=lambda pair: -len(pair[1])))
    gains = [result["gain"] for result in results if "gain" in result]
    return {
        "counts": counts,
        "reasons": ranked,
        "gain": statistics.median(gains) if gains else None,
    }


def _libraries() -> dict[str, Any]:
    from zoo_models import LIBRARIES
    from zoo_scripts import SCRIPTS

    return {**LIBRARIES, "scripts": SCRIPTS}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--only",
        nargs="+",
        default=[],
        metavar="NAME",
        help="packages, or models of any of them",
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=1,
        help="models at a time; more than 1 spoils the timings",
    )
    parser.add_argument(
        "--uncompiled",
        action="store_true",
        help="run traced steps op by op: verdicts alone",
    )
    parser.add_argument(
        "--quick", action="store_true", help="batches of 64 rows, lists of 10 ids"
    )
    parser.add_argument("--seconds", type=float, default=900, help="limit of one model")
    parser.add_argument(
        "--memory", type=int, default=16, help="limit of one model, in GiB"
    )
    parser.add_argument(
        "--packages",
        type=Path,
        default=CACHE,
        help=f"folder of the packages, default {CACHE}",
    )
    parser.add_argument(
        "--results", type=Path, help="file to write the JSON object to as well"
    )
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        return child(*args.child, args)
    install(args.packages)
    sys.path.append(str(args.packages))
    models = [
        (library, name)
        for library, each in _libraries().items()
        for name in each.names(args.packages)
    ]
    chosen = [pair for pair in models if not args.only or set(pair) & set(args.only)]
    if unknown := set(args.only) - {word for pair in models for word in pair}:
        parser.error(
            f"--only: {', '.join(sorted(unknown))}: neither a package nor a model; packages: {list(_libraries())}"
        )
    with ThreadPoolExecutor(args.jobs) as pool:
        results = list(pool.map(lambda pair: run(*pair, args), chosen))
    made = summary(results)
    for library, counts in made["counts"].items():
        print(
            f"{library}: {', '.join(f'{count} {verdict}' for verdict, count in counts.items())}",
            file=sys.stderr,
        )
    for reason, names in made["reasons"].items():
        print(f"{len(names)}: {reason} ({', '.join(names[:3])})", file=sys.stderr)
    versions = {
        name: importlib.metadata.version(name) for name in ("torch", "torchrec")
    }
    report = {
        "benchmark": "zoo",
        "versions": versions,
        "packages": PACKAGES,
        "rows": results,
        "summary": made,
    }
    if args.results:
        args.results.write_text(json.dumps(report, indent=1))
    print(json.dumps(report))
    return None


if __name__ == "__main__":
    main()
