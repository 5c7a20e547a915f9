"""Row `two-hosts` of hybrid.py: towers that compress what leaves their host, against flat table-wise sharding.

Two network namespaces are the hosts, a veth pair between them is limited to 1 Gbit/s each way by `tc`, one rank runs in
each. The network has 26 features, 128 wide, in two towers; a tower makes D (c F + p) = 16 x (13 + 2) = 240 numbers of
its 1,664, and a top NN reads both. All sides train by `train()`, in turn:

    flat      that network with every table on one rank, all of them looked up in one exchange, layers on both ranks
    fp16      flat with TorchRec's own communication in 16 bits (QCommsConfig), forward and backward
    plain     the network without compression, flat
    towers    each tower on the host of its tables: the same numbers as flat from the same start

`two-hosts` has flat as its baseline, `two-hosts-fp16` fp16, `two-hosts-plain` plain. Bytes are those of the interfaces'
counters, headers and acknowledgements included, beside the formula of benchmarks/traffic.py, which counts float32.
Needs root, `ip` and `tc`.
"""

import contextlib
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from harness import LIMIT_S, Options, Repeated, Row, Trainings, row
from hybrid_training import Side, Stop
from torchrec import EmbeddingBagConfig
from traffic import HostLayout, Traffic, flat_traffic, tower_traffic

from torchrec_ext.batch import TowerBatch
from torchrec_ext.distributed.optim.config import OptimizerConfig
from torchrec_ext.distributed.parallel import dense_layers, hybrid_parallel
from torchrec_ext.distributed.placement import TowerPlacement
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.distributed.sharders import codecs_of
from torchrec_ext.distributed.tables import collections
from torchrec_ext.models.tower_model import TowerModel
from torchrec_ext.modules.compression import Compression
from torchrec_ext.modules.interaction import interaction_layer
from torchrec_ext.modules.tower import Tower
from torchrec_ext.schema import Jagged
from torchrec_ext.train.loop import TrainConfig, train

# TorchRec's own compression: pooled vectors and their gradients travel as float16.
_IN_16_BITS = PlanConfig(
    sharding="table_wise", forward_precision="fp16", backward_precision="fp16"
)
FEATURES, WIDTH, TOP = 13, 128, (128, 64)
COMPRESS = Compression(dim=16, per_feature=1, flat=2)
GBIT, LINK = 1, "host_link"
PLACEMENT = "left:0,right:1"
NAMES = {
    side: [f"{side}_{place}" for place in range(FEATURES)] for side in ("left", "right")
}


def two_hosts(options: Options) -> Iterator[Row]:
    """The rows, or none and a line that says why."""
    missing = [tool for tool in ("ip", "tc") if shutil.which(tool) is None] or (
        ["root"] if os.geteuid() else []
    )
    if missing:
        print(f"two-hosts: not measured: needs {', '.join(missing)}", file=sys.stderr)
        return
    sizes = {
        "table_rows": 10_000 if options.quick else 50_000,
        "batch": 256 if options.quick else 1024,
    }
    try:
        result = _on_two_hosts(
            {**sizes, "turns": options.turns, "steps": 3 if options.quick else 10}
        )
    except subprocess.CalledProcessError as error:
        print(
            f"two-hosts: not measured: `{' '.join(error.cmd)}` ended with {error.returncode}",
            file=sys.stderr,
        )
        return
    seconds, measured, formula = result["seconds"], result["bytes"], result["formula"]
    for side, traffic in formula.items():
        share = measured[side] / traffic["total"]
        print(
            f"two-hosts, {side}: {measured[side] / 1e6:.3f} MB a step measured, {traffic['text']}: {share:.3f} of it",
            file=sys.stderr,
        )
    towers = [1e3 * turn for turn in seconds["towers"]]
    for name, baseline, required in (
        ("two-hosts", "flat", 1.5),
        ("two-hosts-fp16", "fp16", None),
        ("two-hosts-plain", "plain", None),
    ):
        yield row(
            name,
            towers,
            "ms/step",
            baseline=[1e3 * turn for turn in seconds[baseline]],
            required=required,
            machine="cores",
            link_gbit_per_s=round(result["gbit"], 3),
            megabytes={
                side: round(measured[side] / 1e6, 3) for side in (baseline, "towers")
            },
            megabytes_by_formula={
                side: round(formula[side]["total"] / 1e6, 3)
                for side in (baseline, "towers")
                if side in formula
            },
            bytes_ratio=round(measured[baseline] / measured["towers"], 2),
            greatest_difference_of_logits=result["differences"].get(baseline),
        )


@contextlib.contextmanager
def _namespaces() -> Iterator[list[str]]:
    """Two hosts: names of network namespaces, each with an interface LINK of 10.213.0.1 and .2."""
    names = [f"rec{os.getpid()}h{host}" for host in (0, 1)]
    try:
        for name in names:
            _run("ip", "netns", "add", name)
        _run(
            "ip",
            "link",
            "add",
            LINK,
            "netns",
            names[0],
            "type",
            "veth",
            "peer",
            "name",
            LINK,
            "netns",
            names[1],
        )
        for host, name in enumerate(names):
            _run(
                "ip", "-n", name, "addr", "add", f"10.213.0.{host + 1}/24", "dev", LINK
            )
            _run("ip", "-n", name, "link", "set", LINK, "up")
            _run("ip", "-n", name, "link", "set", "lo", "up")
            limit = ["tbf", "rate", f"{GBIT}gbit", "burst", "128kb", "latency", "50ms"]
            _run("tc", "-n", name, "qdisc", "add", "dev", LINK, "root", *limit)
        yield names
    finally:
        for name in names:
            subprocess.run(
                ["ip", "netns", "del", name], check=False, capture_output=True
            )


def _run(*command: str) -> None:
    subprocess.run(command, check=True)


def _on_two_hosts(sizes: dict[str, int]) -> dict[str, Any]:
    """What rank 0 of :func:`_rank` returns, one rank on each host."""
    with _namespaces() as names, tempfile.TemporaryDirectory() as folder:
        answer = Path(folder) / "answer.json"
        processes: list[subprocess.Popen[bytes]] = []
        # so that the hosts go, and the ranks with them
        signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
        for rank, name in enumerate(names):
            place = {
                "RANK": str(rank),
                "LOCAL_RANK": "0",
                "WORLD_SIZE": "2",
                "LOCAL_WORLD_SIZE": "1",
            }
            net = {
                "MASTER_ADDR": "10.213.0.1",
                "MASTER_PORT": "29513",
                "GLOO_SOCKET_IFNAME": LINK,
                "OMP_NUM_THREADS": "1",
            }
            command = [
                "ip",
                "netns",
                "exec",
                name,
                sys.executable,
                __file__,
                json.dumps(sizes),
                str(answer),
            ]
            processes.append(
                subprocess.Popen(command, env={**os.environ, **place, **net})
            )
        try:
            codes = [process.wait(timeout=LIMIT_S) for process in processes]
        finally:
            for process in processes:
                process.kill()
        if any(codes):
            raise RuntimeError(
                f"two-hosts: the ranks ended with exit codes {codes}; what they said stands above"
            )
        return json.loads(answer.read_text())  # type: ignore[no-any-return]


def _towers(table_rows: int) -> dict[str, Tower]:
    return {side: _tower(names, table_rows, COMPRESS) for side, names in NAMES.items()}


def _tower(names: list[str], table_rows: int, compress: Compression | None) -> Tower:
    torch.manual_seed(len(names[0]))  # both sides begin alike
    tables = [
        EmbeddingBagConfig(
            name=n, feature_names=[n], num_embeddings=table_rows, embedding_dim=WIDTH
        )
        for n in names
    ]
    return Tower(tables, [], compress=compress, device=torch.device("meta"))


def _model(towers: dict[str, Tower]) -> TowerModel:
    torch.manual_seed(0)
    return TowerModel(
        towers,
        interaction_layer(
            "top_nn", [tower.out_features for tower in towers.values()], TOP
        ),
    )


def _batches(model: TowerModel, sizes: dict[str, int], rank: int) -> list[TowerBatch]:
    generator = torch.Generator().manual_seed(rank)
    schema = model.schema()

    def ids() -> Jagged:
        return Jagged(
            torch.randint(sizes["table_rows"], (sizes["batch"],), generator=generator)
        )

    columns = [
        {name: ids() for names in NAMES.values() for name in names} for _ in range(8)
    ]
    labels = torch.randint(2, (8, sizes["batch"]), generator=generator).float()
    return [
        schema.assemble(own, labels=label)
        for own, label in zip(columns, labels, strict=True)
    ]


def _rank(runtime: Runtime, sizes: dict[str, int]) -> dict[str, Any]:
    """Seconds of a step of each side by turn, its bytes, also by formula, and how fast the link is."""
    sides: dict[str, Side] = {}
    formula: dict[str, Traffic] = {}
    sent: dict[str, list[int]] = {}
    first: dict[str, torch.Tensor] = {}
    everything = [*NAMES["left"], *NAMES["right"]]
    kinds = {
        "flat": (_towers(sizes["table_rows"]), PlanConfig(sharding="table_wise")),
        "fp16": (_towers(sizes["table_rows"]), _IN_16_BITS),
        "plain": (
            {"all": _tower(everything, sizes["table_rows"], None)},
            PlanConfig(sharding="table_wise"),
        ),
        "towers": (
            _towers(sizes["table_rows"]),
            PlanConfig(sharding="table_wise", towers=PLACEMENT),
        ),
    }
    optimizer = OptimizerConfig(tables="row_wise_adagrad", dense="adam")
    for side, (towers, config) in kinds.items():
        model = _model(towers)
        if side in ("flat", "fp16"):
            model.merge_lookups()
        plan = plan_sharding(
            model, runtime, config, optimizer=optimizer, batch_size=sizes["batch"]
        )
        if side != "fp16":
            formula[side] = _formula(model, towers, plan, config.towers, sizes["batch"])
        batches = _batches(model, sizes, runtime.rank)
        sharded, own = hybrid_parallel(
            model, runtime, plan=plan, optimizer=optimizer, codecs=codecs_of(config)
        )
        with torch.no_grad():
            first[side] = sharded(batches[0])[1].logits
        sent[side] = []
        sides[side] = _counting(_training(sharded, own, batches, runtime), sent[side])
    gbit = _link_speed()
    trainings = Trainings(sides, before=dist.barrier)
    seconds = trainings.seconds_per_step(sizes["steps"], sizes["turns"], warm_up=4)
    trainings.close()
    totals = torch.tensor(
        [statistics.median(sent[side]) for side in sides], dtype=torch.float64
    )
    dist.all_reduce(totals)  # what each of the two sent
    return {
        "seconds": seconds,
        "bytes": dict(zip(sides, totals.tolist(), strict=True)),
        "formula": {
            side: {"total": traffic.total, "text": str(traffic)}
            for side, traffic in formula.items()
        },
        "gbit": gbit,
        "differences": {
            side: float((first[side] - first["towers"]).abs().max())
            for side in ("flat", "fp16")
        },
    }


def _training(
    model: Any, optimizer: Any, batches: list[TowerBatch], runtime: Runtime
) -> Side:
    return lambda stop: train(
        model, optimizer, Repeated(batches), runtime, TrainConfig(epochs=1), stop=stop
    )


def _counting(side: Side, sent: list[int]) -> Side:
    """Returns ``side``, which puts the bytes that each of its steps sends into ``sent``."""

    def counted(stop: Stop) -> object:
        before = _sent()

        def after_step() -> bool:
            nonlocal before
            sent.append(_sent() - before)
            ends = stop()  # may wait for the other sides' turns
            before = _sent()
            return ends

        return side(after_step)

    return counted


def _sent() -> int:
    """Bytes that this host's interface has sent so far."""
    return int(Path(f"/sys/class/net/{LINK}/statistics/tx_bytes").read_text())


def _link_speed() -> float:
    """Gbit/s of 32 MB each way at once."""
    data = torch.zeros(2, 8_000_000)
    out = torch.empty_like(data)
    dist.all_to_all_single(out, data)
    start = time.perf_counter()
    dist.all_to_all_single(out, data)
    return 8 * data[0].numel() * 4 / (time.perf_counter() - start) / 1e9


def _formula(
    model: TowerModel, towers: dict[str, Tower], plan: Any, placement: str, rows: int
) -> Traffic:
    layout = HostLayout(world_size=2, local_world_size=1, rows=rows)
    ids = {name: 1.0 for names in NAMES.values() for name in names}
    layers = dict(model.named_parameters())
    dense = {name: layers[name].numel() for name in dense_layers(model)}
    if placement == "data_parallel":
        plans = [plan.get_plan_for_module(path) or {} for path, _ in collections(model)]
        owner = {table: own.ranks[0] for found in plans for table, own in found.items()}
        return flat_traffic(
            list(towers.values()), layout, owner, ids, sum(dense.values())
        )
    top = sum(count for name, count in dense.items() if not name.startswith("towers."))
    return tower_traffic(
        towers, layout, TowerPlacement.parse(placement, list(towers), 2), ids, top
    )


def main() -> None:
    """One rank."""
    sizes, answer = json.loads(sys.argv[1]), Path(sys.argv[2])
    sys.stdout = Path(os.devnull).open("w")  # noqa: SIM115
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank = dist.get_rank()
    result = _rank(Runtime(rank=rank, world_size=2, local_world_size=1), sizes)
    if rank == 0:
        answer.write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
