"""A user's own step on a GPU, adopted, against the same step in the forms that its user could write.

    python benchmarks/gpu_adopt.py [--only ROW ...] [--turns 3] [--quick]

The network is that of small_model_baseline.py (75 k and 12.45 M parameters) under dense Adam, on batches of the GPU.
 `as written` is Adam by default, `fused Adam` takes fused=True, `torch.compile` also compiles forward and loss with
mode="reduce-overhead". Without a GPU it runs on the CPU, which says nothing of a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch
from harness import Options, Row, command_line, row
from small_model_baseline import CONTEXT, SHAPES, PlainNCF, Shape
from torch import Tensor, nn

from torchrec_ext.adopt import adopt

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZES = {"1,280 rows": 1_280, "16,384 rows": 16_384}
SECONDS = 1.0  # of a turn
Batch = tuple[Tensor, ...]
Step = Callable[..., object]


def batches(shape: Shape, rows: int) -> list[Batch]:
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


def step_of(form: str, shape: Shape) -> Step:
    """Returns a step of the network in one form."""
    torch.manual_seed(0)
    model = PlainNCF(shape.users, shape.items).to(DEVICE)
    criterion = nn.BCEWithLogitsLoss()
    optimizer = torch.optim.Adam(
        model.parameters(), 1e-3, fused=form in ("fused Adam", "torch.compile")
    )

    def loss(user: Tensor, item: Tensor, context: Tensor, label: Tensor) -> Tensor:
        return criterion(model(user, item, context), label)  # type: ignore[no-any-return]

    if form == "adopted":
        return adopt(model, optimizer, loss, compile="require")
    forward = (
        torch.compile(loss, mode="reduce-overhead") if form == "torch.compile" else loss
    )

    def step(*batch: Tensor) -> None:
        optimizer.zero_grad()
        forward(*batch).backward()
        optimizer.step()

    return step


def microseconds(step: Step, given: list[Batch], seconds: float) -> float:
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


def _wait() -> None:
    if DEVICE == "cuda":
        torch.cuda.synchronize()


def compared(name: str, size: str, options: Options) -> Iterator[Row]:
    """Times the adopted step and each other form, in turn."""
    shape = SHAPES[name]
    given = batches(shape, SIZES[size])
    forms = [
        "adopted",
        "as written",
        "fused Adam",
        *(["torch.compile"] if DEVICE == "cuda" else []),
    ]
    steps = {form: step_of(form, shape) for form in forms}
    times: dict[str, list[float]] = {form: [] for form in forms}
    for step in steps.values():
        for batch in given:
            step(*batch)
    for _ in range(options.turns):
        for form, step in steps.items():
            times[form].append(
                microseconds(step, given, 0.05 if options.quick else SECONDS)
            )
    for form in forms[1:]:
        what = f"adopted {name}, {size}, against {form} ({DEVICE})"
        yield row(what, times["adopted"], "us/step", baseline=times[form])


def main() -> None:
    rows = {}
    for name in SHAPES:
        for size in SIZES:
            rows[f"{name}, {size}"] = lambda options, name=name, size=size: compared(
                name, size, options
            )
    command_line(__doc__, rows, turns=3)


if __name__ == "__main__":
    main()
