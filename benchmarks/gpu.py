"""A GPU: an adopted step against others of its user. Only `adopted` has run on one, an H100, before steps were fused.

    python benchmarks/gpu.py [--only ROW ...] [--turns 3] [--quick] [--out FILE] [--budget SECONDS] [--limit SECONDS]

`adopted ...`: the network of plain_ncf.py (75 k and 12.45 M parameters) under dense Adam, on batches of the GPU, 1,280
and 16,384 rows. `as written` is Adam by default, `fused Adam` takes fused=True, `torch.compile` also compiles forward
and loss with mode="reduce-overhead", `by hand` is one CUDA graph of eager kernels with fused Adam, and `unfused` the
adopted step without Triton. `drawn ...`: the adopted step draws its
negatives and takes its rows itself, against torch.compile and the adopted step on batches that are `ready`; `epoch_s`,
of 18.24 M instances. `two towers`: two towers of two tables. `floor_us` is the greater of two microseconds a kernel and
the step's bytes over `copied_gb_s`, what a copy on this card moves; `host_us` what Python needs to begin our step.

`loader ...`: 26 tables of 100,000 x 64 under an MLP in fp32, tf32 and bf16, samples a second and the share of time in
which the card is busy, by NVML (nvidia-smi): a row-wise Dataset under torch's DataLoader (pinned; the best of 0, 2 and
8 workers) with fused Adam in fp32, against it in this precision, rows of files by ChunkLoader, and rows on the device
with an adopted step. `dynamic ids`: raw ids that become rows before an adopted step,
against static tables. `eight networks`: a Stack of eight small networks, against eight adopted ones in turn. `two
processes`: two that train the small network at the same time, against one, `mps`: under NVIDIA's MPS where it is
installed. All rows need torch alone, but for ChunkLoader. Without a GPU all runs on the CPU, which says nothing of a
GPU. With --out, each row has a process of its own, and a page of the file's rows is printed.
"""

from __future__ import annotations

import functools
import importlib.util
import itertools
import multiprocessing
import os
import queue
import shutil
import subprocess
import tempfile
import time
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path

import torch
from harness import LIMIT_S, command_line, digits, row
from plain_ncf import CONTEXT, NEGATIVES, SHAPES, PlainNCF, positives
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader, TensorDataset

from torchrec_ext.adopt import Rows, Uniform, adopt
from torchrec_ext.capture import policy
from torchrec_ext.capture.errors import CannotCaptureError
from torchrec_ext.capture.executors import fused_cuda_graph, inductor
from torchrec_ext.ids import Dynamic, DynamicIds

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0
DEVICE = "cuda" if GPUS else "cpu"
OF_A_GPU = ("torch.compile", "by hand", "unfused") if GPUS else ()
FORMS = ("as written", "fused Adam", *OF_A_GPU)
BEST = "torch.compile" if GPUS else "fused Adam"
SECONDS = 0.5  # of a turn


def batches(shape, rows):
    """Draws 20 batches onto the device."""
    generator = torch.Generator().manual_seed(0)
    made = []
    for _ in range(20):
        user = torch.randint(shape.users, (rows,), generator=generator)
        item = torch.randint(1, shape.items, (rows,), generator=generator)
        context = (torch.rand(rows, CONTEXT, generator=generator) < 0.3).float()
        label = torch.randint(2, (rows,), generator=generator).float()
        made.append(tuple(tensor.to(DEVICE) for tensor in (user, item, context, label)))
    return made


def step_of(form, model, *, autocast=nullcontext):
    """Returns a step of a network, whose last argument is the label, in one form."""
    criterion = nn.BCEWithLogitsLoss()
    fused = form in ("fused Adam", "torch.compile", "by hand")
    optimizer = torch.optim.Adam(
        model.parameters(), 1e-3, fused=fused, capturable=form == "by hand"
    )

    def loss(*batch):
        return criterion(model(*batch[:-1]), batch[-1])

    if form in ("adopted", "unfused"):
        step = adopt(model, optimizer, loss, autocast=autocast, compile="require")
        return unfused(step) if form == "unfused" else step
    forward = (
        torch.compile(loss, mode="reduce-overhead") if form == "torch.compile" else loss
    )

    def step(*batch):
        optimizer.zero_grad(set_to_none=form != "by hand")
        with autocast():
            value = forward(*batch)
        value.backward()
        optimizer.step()

    return by_hand(step) if form == "by hand" else step


def unfused(step):
    """Returns an adopted step that is captured without Triton."""

    def without_triton(*batch):
        before, policy.HAS_TRITON = policy.HAS_TRITON, False
        try:
            return step(*batch)
        finally:
            policy.HAS_TRITON = before

    return without_triton


def by_hand(step):
    """Returns a step as one CUDA graph, captured with its first batch."""
    held = []

    def replay(*batch):
        if not held:
            held.extend(each.clone() for each in batch)
            stream = torch.cuda.Stream()
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(3):
                    step(*held)
            torch.cuda.current_stream().wait_stream(stream)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step(*held)
            held.append(graph)
        for buffer, each in zip(held, batch, strict=False):
            buffer.copy_(each)
        held[-1].replay()

    return replay


def ncf(shape):
    """Returns the network of plain_ncf.py."""
    torch.manual_seed(0)
    return PlainNCF(shape.users, shape.items).to(DEVICE)


def microseconds(step, given, seconds):
    """Returns the time of a step, in microseconds, the device's work included."""
    count = 0
    _wait()
    start = time.perf_counter()
    while time.perf_counter() - start < seconds:
        for batch in given:
            step(*batch)
        _wait()
        count += len(given)
    return 1e6 * (time.perf_counter() - start) / count


def host_microseconds(step, given):
    """Returns the time in which the host begins a step, in microseconds, whether or not the device has made it."""
    _wait()
    start = time.perf_counter()
    for batch in given:
        step(*batch)
    seconds = time.perf_counter() - start
    _wait()
    return 1e6 * seconds / len(given)


def _wait():
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def kernels(step, batch):
    """Returns the number of kernels of a step on a GPU, by torch.profiler; None on a CPU."""
    if not GPUS:
        return None
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        step(*batch)
        _wait()
    # Calls of the driver are among its events too.
    cuda = torch.autograd.DeviceType.CUDA
    return sum(each.device_type == cuda for each in profiler.events())


@functools.cache
def copied_gb_s():
    """Returns the GB a second that a copy on the card reads and writes."""
    source = torch.empty(2**28, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    us = microseconds(target.copy_, [(source,)] * 20, 0.2)
    return digits(2 * source.numel() / us / 1e3)


def step_bytes(model, columns):
    """Returns what a step with Adam must move: seven floats a weight that it reads, of tables the rows in a batch.

    Args:
        model: the network.
        columns: ids of a batch by the end of their tables' names.
    """
    weights = 0
    for name, weight in model.named_parameters():
        ids = next((ids for end, ids in columns.items() if end in name), None)
        weights += (
            weight.numel() if ids is None else len(ids.unique()) * weight.shape[1]
        )
    return 7 * 4 * weights


def compared(what, steps, given, options, **more):
    """Times steps on the same batches in turn, and yields the first against each other."""
    times = {form: [] for form in steps}
    for step in steps.values():
        for batch in given:
            step(*batch)
    seconds = 0.05 if options.quick else SECONDS
    for _ in range(options.turns):
        for form, step in steps.items():
            times[form].append(microseconds(step, given, seconds))
    ours, *others = steps
    more["kernels"] = count = kernels(steps[ours], given[0])
    if count:
        begun = [host_microseconds(steps[ours], given) for _ in range(5)]
        more["host_us"] = digits(min(begun))
    if count and "step_bytes" in more:
        moved_us = more["step_bytes"] / 1e3 / copied_gb_s()
        more |= {"copied_gb_s": copied_gb_s(), "floor_us": max(2 * count, moved_us)}
    for form in others:
        name = f"{what}, against {form} ({DEVICE})"
        if count:
            more["baseline_kernels"] = kernels(steps[form], given[0])
        yield row(name, times[ours], "us/step", baseline=times[form], **more)


def adopted(name, rows, options):
    """Times the adopted step and each other form, in turn."""
    shape = SHAPES[name]
    given = batches(shape, 64 if options.quick else rows)
    steps = {form: step_of(form, ncf(shape)) for form in ("adopted", *FORMS)}
    moved = step_bytes(ncf(shape), {"_user": given[0][0], "_item": given[0][1]})
    what = f"adopted {name}, {rows:,} rows"
    yield from compared(what, steps, given, options, step_bytes=moved)


def drawn(name, rows, options):
    """Times adopted steps that draw their negatives, against steps that are given batches."""
    shape = SHAPES[name]
    user, item, context = positives(shape)
    negatives = Uniform(
        range(1, shape.items + 1), draws=NEGATIVES, exclude=("user", "item")
    )
    columns = {"user": user, "item": item, "context": context}
    size = 64 if options.quick else rows // (1 + NEGATIVES)
    held = Rows(columns, size, negatives=negatives, drop_last=True)
    step = step_of("adopted", ncf(shape))
    epochs = itertools.chain.from_iterable(step.epoch(held) for _ in itertools.count())
    steps = {
        "drawn": lambda *_: next(epochs),
        BEST: step_of(BEST, ncf(shape)),
        "ready": step_of("adopted", ncf(shape)),
    }
    what = f"drawn {name}, {rows:,} rows"
    for made in compared(what, steps, batches(shape, size * (1 + NEGATIVES)), options):
        yield made | {"epoch_s": digits(made["ours"] * 18.24 / rows)}


class Towers(nn.Module):
    """Two towers, each of two tables and two layers."""

    def __init__(self, ids):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(ids, 64) for _ in range(4))
        self.towers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 64))
            for _ in range(2)
        )

    def forward(self, *columns):
        """Returns (B,) logits of four columns of ids, (B,) each."""
        a, b, c, d = (
            table(each) for table, each in zip(self.tables, columns, strict=True)
        )
        user = self.towers[0](torch.cat([a, b], 1))
        item = self.towers[1](torch.cat([c, d], 1))
        return (user * item).sum(1)


def towers(options):
    """Times the adopted step of two towers and each other form, in turn."""
    ids, rows = (100, 64) if options.quick else (100_000, 4_096)
    generator = torch.Generator().manual_seed(0)
    given = [
        (
            *torch.randint(ids, (4, rows), generator=generator).to(DEVICE),
            torch.rand(rows, generator=generator).round().to(DEVICE),
        )
        for _ in range(20)
    ]
    steps = {}
    for form in ("adopted", *FORMS):
        torch.manual_seed(0)
        steps[form] = step_of(form, Towers(ids).to(DEVICE))
    yield from compared(f"two towers, {rows:,} rows", steps, given, options)


def dynamic(options):
    """Times adopted steps on raw ids, 1 % of them new and admitted every 64 steps, against static tables."""
    capacity, rows = (400, 64) if options.quick else (200_000, 4_096)
    names = ("user", "place", "item", "brand")
    generator = torch.Generator().manual_seed(0)

    def random_ids(*shape):
        return torch.randint(-(2**62), 2**62, shape, generator=generator)

    catalogue = random_ids(4, 3 * capacity // 4)
    policy_ = Dynamic(capacity=capacity, admit_after=2)
    ids = DynamicIds(dict.fromkeys(names, policy_), every=64, device=DEVICE)

    def compiled(*look_ups):
        with suppress(CannotCaptureError):  # without a C++ compiler
            return (fused_cuda_graph if GPUS else inductor)(*look_ups)

    for _ in range(128):
        ids.step(dict(zip(names, catalogue.to(DEVICE), strict=True)))
    ids.compile_look_ups(compiled)
    given = []
    for _ in range(20):
        places = torch.rand(4, rows, generator=generator) ** 4 * catalogue.shape[1]
        known = catalogue.gather(1, places.long())
        is_new = torch.rand(4, rows, generator=generator) < 0.01
        raw = torch.where(is_new, random_ids(4, rows), known)
        label = torch.rand(rows, generator=generator).round()
        given.append([each.to(DEVICE) for each in (raw, is_new, label)])

    def trained():
        torch.manual_seed(0)
        model = Towers(capacity).to(DEVICE)
        optimizer = torch.optim.Adagrad(model.parameters(), 0.05)
        criterion = nn.BCEWithLogitsLoss()
        loss = lambda *batch: criterion(model(*batch[:-1]), batch[-1])  # noqa: E731
        return model, optimizer, adopt(model, optimizer, loss, compile="require")

    def began(note, model, optimizer):
        weight = model.tables[names.index(note.table)].weight
        values = torch.randn(len(note.rows), 64, device=DEVICE)
        with torch.no_grad():
            weight.index_copy_(0, note.rows, values)
            optimizer.state[weight]["sum"].index_fill_(0, note.rows, 0.0)

    model, optimizer, of_ids = trained()

    def dynamic_step(raw, is_new, label):
        # New ids come in two batches, and are others from then on.
        raw += is_new * (ids.now // 20 % 2)
        found, notes = ids.step(dict(zip(names, raw, strict=True)))
        for note in notes:
            began(note, model, optimizer)
        of_ids(*found.values(), label)

    _, _, of_rows = trained()

    def static_step(raw, _, label):
        of_rows(*(raw.abs() % capacity), label)

    for batch in given[:3]:
        dynamic_step(*batch)  # which compiles the look-ups
    steps = {"dynamic ids": dynamic_step, "static tables": static_step}
    what = f"dynamic ids, {capacity:,} rows"
    yield from compared(what, steps, given, options)


class Wide(nn.Module):
    """26 tables and an MLP."""

    def __init__(self, ids):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(ids, 64) for _ in range(26))
        layers = []
        for before, after in itertools.pairwise((26 * 64, 1024, 512, 256)):
            layers += [nn.Linear(before, after), nn.ReLU()]
        self.mlp = nn.Sequential(*layers, nn.Linear(256, 1))

    def forward(self, ids):
        """Returns (B,) logits of (B, 26) ids."""
        columns = ids.split(1, 1)
        vectors = [
            table(each) for table, each in zip(self.tables, columns, strict=True)
        ]
        return self.mlp(torch.cat(vectors, 1)).squeeze(1)


def multiply_in(precision):
    """Sets torch's switch for products of float32 in tf32."""
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")


class Busy:
    """The share of time in which the card was busy, asked of nvidia-smi ten times a second; None without it.

    Attributes:
        percent: mean, once the block is left.
    """

    def __enter__(self):
        self.percent, self._asked = None, None
        ask = ["nvidia-smi", "--query-gpu=utilization.gpu", "-i", "0", "-lms", "100"]
        if GPUS and shutil.which(ask[0]):
            self._asked = subprocess.Popen(
                [*ask, "--format=csv,noheader,nounits"],
                stdout=subprocess.PIPE,
                text=True,
            )
        return self

    def __exit__(self, *_):
        if self._asked:
            self._asked.terminate()
            words = self._asked.communicate()[0].split()
            # "[N/A]" of a part of a card
            told = [float(word) for word in words if word.isdigit()]
            self.percent = digits(sum(told) / len(told)) if told else None


def row_wise(data, size, step, seconds, *, best):
    """Returns samples a second and the card's busy share, with the best of 0, 2 and 8 workers.

    Args:
        data: the rows.
        size: rows of a batch.
        step: step on a batch.
        seconds: of the measurement.
        best: a list, which gets the number of workers that was best in the first call.
    """

    def batches_of(workers):
        loader = DataLoader(
            data, size, True, num_workers=workers, pin_memory=bool(GPUS), drop_last=True
        )
        for ids, label in itertools.chain.from_iterable(itertools.repeat(loader)):
            yield ids.to(DEVICE, non_blocking=True), label.to(DEVICE, non_blocking=True)

    cores = len(os.sched_getaffinity(0))
    asked = best or [workers for workers in (0, 2, 8) if workers <= cores]
    made = {workers: fed(batches_of(workers), step, size, seconds) for workers in asked}
    best[:] = [max(made, key=made.get)]
    return made[best[0]]


def in_chunks(data, size, step, seconds, folder):
    """Returns samples a second and the card's busy share of batches by ChunkLoader, from parquet files."""
    import pyarrow as pa
    import pyarrow.parquet as pq
    from torchrec.modules.embedding_configs import EmbeddingBagConfig

    from torchrec_ext.data.files.sources import ParquetSource
    from torchrec_ext.data.loader.loader import ChunkLoader, LoaderConfig
    from torchrec_ext.schema import BatchSchema

    names = [f"c{column}" for column in range(26)]
    ids, label = data.tensors
    columns = dict(zip(names, ids.t().numpy(), strict=True))
    columns["label"] = label.numpy()
    file = Path(folder, "rows.parquet")
    if not file.exists():
        pq.write_table(pa.table(columns), file, row_group_size=65_536)
    tables = [
        EmbeddingBagConfig(
            name="ids", embedding_dim=4, feature_names=names, num_embeddings=1 << 20
        )
    ]
    config = LoaderConfig(batch_size=size, negatives=0, label="label", drop_last=True)
    loader = ChunkLoader(
        ParquetSource(file), BatchSchema.from_tables(tables), config=config
    )

    def given():
        for epoch in itertools.count():
            loader.set_epoch(epoch)
            for batch in loader:
                batch = batch.to(torch.device(DEVICE), non_blocking=True)
                yield batch.sparse.values().view(26, -1).t(), batch.labels

    return fed(given(), step, size, seconds)


def on_device(data, size, step, seconds):
    """Returns samples a second and the card's busy share of an adopted step that takes its rows itself."""
    ids, label = data.tensors
    held = Rows({"ids": ids, "label": label}, size, drop_last=True)
    epochs = itertools.chain.from_iterable(step.epoch(held) for _ in itertools.count())
    return fed(((each,) for each in epochs), lambda loss: loss, size, seconds)


def fed(given, step, size, seconds):
    """Returns samples a second and the card's busy share of steps on batches, after eight that do not count."""
    for batch in itertools.islice(given, 8):
        step(*batch)
    _wait()
    steps, start = 0, time.perf_counter()
    with Busy() as busy:
        for batch in given:
            step(*batch)
            steps += 1
            if steps % 8 == 0:
                _wait()
            if time.perf_counter() - start > seconds:
                break
        _wait()
    return steps * size / (time.perf_counter() - start), busy.percent


def loaders(precision, options):
    """Times a row-wise DataLoader in fp32 and in this precision, ChunkLoader and rows on the device, in turn."""
    ids, rows, size = (100, 4_096, 256) if options.quick else (100_000, 2**21, 16_384)
    data = TensorDataset(torch.randint(ids, (rows, 26)), torch.rand(rows))
    seconds = 0.2 if options.quick else 4 * SECONDS

    base = "row-wise in fp32"

    def step(form, of=precision):
        multiply_in(of)
        autocast = functools.partial(
            torch.autocast, DEVICE, torch.bfloat16, enabled=of == "bf16"
        )
        torch.manual_seed(0)
        return step_of(form, Wide(ids).to(DEVICE), autocast=autocast)

    with tempfile.TemporaryDirectory() as folder:
        by_row = functools.partial(row_wise, data, size)
        sides = {base: functools.partial(by_row, step("fused Adam", "fp32"), best=[])}
        if precision != "fp32":
            sides["row-wise"] = functools.partial(by_row, step("fused Adam"), best=[])
        if importlib.util.find_spec("torchrec"):
            chunks = functools.partial(in_chunks, folder=folder)
            sides["chunks"] = functools.partial(chunks, data, size, step("adopted"))
        sides["rows on the device"] = functools.partial(
            on_device, data, size, step("adopted")
        )
        speeds = {side: [] for side in sides}
        percent = {}
        for _ in range(options.turns):
            for side, run in sides.items():
                multiply_in("fp32" if side == base else precision)
                speed, percent[side] = run(seconds)
                speeds[side].append(speed)
    baseline = speeds.pop(base)
    for side, ours in speeds.items():
        busy = {
            "busy_percent": percent[side],
            "baseline_busy_percent": percent[base],
        }
        name = f"loader, {precision}: {side}, against {base} ({DEVICE})"
        yield row(name, ours, "samples/s", baseline=baseline, better="more", **busy)


def eight(rows, options):
    """Times a Stack of eight networks, and eight adopted ones in turn."""
    from torchrec_ext.networks import Stack

    shape, members = SHAPES["small"], 2 if options.quick else 8
    rates = [1e-3 * (1 + number) for number in range(members)]

    def loss(network, *batch):
        logits = network(*batch[:-1])
        return nn.functional.binary_cross_entropy_with_logits(logits, batch[-1])

    stacked = Stack([ncf(shape) for _ in rates], loss, rates)
    alone = [step_of("adopted", ncf(shape)) for _ in rates]

    def in_turn(*batch):
        for step in alone:
            step(*batch)

    steps = {"stacked": stacked.step, "one after another": in_turn}
    given = batches(shape, 64 if options.quick else rows)
    yield from compared(f"{members} networks, {rows:,} rows", steps, given, options)


def trains(begin, told, rows, seconds):
    """Times the steps of one of several processes, from the moment when all are ready."""
    shape = SHAPES["small"]
    step = step_of("adopted", ncf(shape))
    given = batches(shape, rows)
    for batch in given:
        step(*batch)
    _wait()
    begin.wait(LIMIT_S)
    told.put(microseconds(step, given, seconds))


def answer(told, processes):
    """Returns the next value of a queue that processes put into; raises if one of them died."""
    while True:
        with suppress(queue.Empty):
            return told.get(timeout=1)
        if any(process.exitcode for process in processes):
            raise RuntimeError("one of the processes died, see above")


def processes(rows, options):
    """Times two processes that train at the same time, without MPS and with it, against one."""
    context = multiprocessing.get_context("spawn")
    seconds = 0.2 if options.quick else 3 * SECONDS

    def together(count):
        begin, told = context.Barrier(count), context.Queue()
        arguments = (begin, told, 64 if options.quick else rows, seconds)
        both = [
            context.Process(target=trains, args=arguments, daemon=True)
            for _ in range(count)
        ]
        for process in both:
            process.start()
        return sum(1e6 / answer(told, both) for _ in both)

    def of_two(name):
        both = [together(2) for _ in range(options.turns)]
        return row(
            f"{name}, {rows:,} rows ({DEVICE})",
            both,
            "steps/s",
            baseline=one,
            better="more",
        )

    one = [together(1) for _ in range(options.turns)]
    yield of_two("two processes")
    if GPUS and shutil.which("nvidia-cuda-mps-control"):
        with under_mps():
            yield of_two("two processes, mps")


@contextmanager
def under_mps():
    """Runs NVIDIA's Multi-Process Service for the processes that are started within the block."""
    control, nowhere = "nvidia-cuda-mps-control", subprocess.DEVNULL
    names = [f"CUDA_MPS_{each}_DIRECTORY" for each in ("PIPE", "LOG")]
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= dict.fromkeys(names, folder)
        try:
            # It stays behind, and would keep a pipe to it open.
            subprocess.run([control, "-d"], check=True, stdout=nowhere, stderr=nowhere)
            yield
        finally:
            subprocess.run(
                [control], input="quit\n", text=True, stdout=nowhere, timeout=60
            )
            for name in names:
                del os.environ[name]


PRECISIONS = ("fp32", "tf32", "bf16")
STEPS = [(name, rows) for name in SHAPES for rows in (1_280, 16_384)]
# in the order that GPU users ask, so that a budget ends with the last ones
ROWS = {
    f"{form.__name__} {name}, {rows:,} rows": functools.partial(form, name, rows)
    for form in (adopted, drawn)
    for name, rows in STEPS
}
ROWS |= {"two towers": towers}
ROWS |= {f"loader, {each}": functools.partial(loaders, each) for each in PRECISIONS}
ROWS |= {
    f"{name}, {rows:,} rows": functools.partial(form, rows)
    for name, form in (("eight networks", eight), ("two processes", processes))
    for rows in (1_280, 16_384)
}
ROWS |= {"dynamic ids": dynamic}


if __name__ == "__main__":
    command_line(__doc__, ROWS)
