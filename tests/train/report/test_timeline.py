"""What ran at the same time: known answers on made-up spans, and the traces of real ranks merged on one clock."""

import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.contracts import run_ranks
from tests.examples import META, batches, small_model
from tests.train.test_loop import Batches
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.observe.intervals import Interval, length, union
from torchrec_ext.train.loop import TrainConfig, train
from torchrec_ext.train.report import trace as tracing
from torchrec_ext.train.report.trace import (
    SKIP,
    RankSpans,
    RankTrace,
    StepTrace,
    Timeline,
    at_least,
    both,
    check_fits,
    clock_ahead,
    overlap,
    read_spans,
)
from torchrec_ext.train.step.pipeline import make_pipeline

MS = 1000.0
STEPS = 3


def rank(
    busy: list[Interval],
    exchange: Sequence[Interval] = (),
    **towers: tuple[list[Interval], list[Interval]],
) -> RankSpans:
    forward, backward = (
        {name: ways[way] for name, ways in towers.items()} for way in (0, 1)
    )
    return RankSpans(
        forward=forward, backward=backward, busy=busy, exchange=list(exchange)
    )


@pytest.mark.unit
def test_towers_on_ranks_of_their_own_overlap_as_far_as_their_spans_do() -> None:
    """User 0 to 6 on rank 0, item 4 to 8 on rank 1: together 2 of 8; rank 1 computes 1 of the 4 ms of its exchange."""
    ranks = [
        rank([(0, 10)], user=([(0, 4)], [(4, 6)])),
        rank([(0, 9)], [(8, 12)], item=([(4, 8)], [])),
    ]
    assert overlap(ranks) == {
        "ranks_in_towers": 2 / 8,
        "towers_at_once": 2 / 8,
        "exchange_hidden": 1 / 4,
    }


@pytest.mark.unit
def test_the_same_tower_on_two_ranks_is_two_ranks_but_one_tower() -> None:
    alike = rank([(0, 10)], user=([(0, 4)], []), item=([(4, 8)], []))
    assert overlap([alike, alike]) == {"ranks_in_towers": 1, "towers_at_once": 0}
    assert overlap([alike]) == {"ranks_in_towers": 0, "towers_at_once": 0}


@pytest.mark.unit
def test_a_rank_that_waits_in_a_tower_does_not_count() -> None:
    ranks = [
        rank([(0, 2)], user=([(0, 10)], [])),
        rank([(1, 10)], item=([(0, 10)], [])),
    ]
    assert overlap(ranks) == {"ranks_in_towers": 1 / 10, "towers_at_once": 1 / 10}
    assert overlap([rank([])]) == {}


sets_of = st.lists(
    st.tuples(st.integers(0, 30), st.integers(0, 6)).map(
        lambda pair: (pair[0], pair[0] + pair[1])
    ),
    max_size=8,
)


@pytest.mark.unit
@settings(deadline=None)
@given(st.lists(sets_of, min_size=1, max_size=4), st.integers(1, 3))
def test_time_shared_by_sets_is_what_counting_moments_gives(
    sets: list[list[Interval]], count: int
) -> None:
    apart = [union(own) for own in sets]
    moments = [
        sum(any(start <= at < stop for start, stop in own) for own in sets)
        for at in range(40)
    ]
    assert length(at_least(count, apart)) == sum(level >= count for level in moments)
    assert length(union(sets[0])) == length(both(apart[0], [(0, 40)]))


def op(
    name: str,
    ts: float,
    dur: float,
    number: int | None = None,
    thread: int = 0,
    cat: str = "cpu_op",
) -> dict[str, Any]:
    args = (
        {} if number is None else {"Sequence number": number, "Fwd thread id": thread}
    )
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "ts": ts,
        "dur": dur,
        "pid": 7,
        "tid": 7,
        "args": args,
    }


def node(name: str, ts: float, dur: float, number: int) -> dict[str, Any]:
    return op(f"autograd::engine::evaluate_function: {name}", ts, dur, number, thread=1)


@pytest.mark.unit
def test_a_backward_belongs_to_the_tower_whose_forward_made_it() -> None:
    events = [
        op("tower user", 0, 10, cat="user_annotation"),
        op("aten::linear", 1, 4, 5),
        op("aten::addmm", 2, 2, 5),  # inside linear: the one that makes node 5
        op("aten::relu", 6, 3, 6),
        # makes no node, but carries the number of the next that does
        op("aten::empty", 9.5, 0.1, 7),
        op("tower item", 10, 10, cat="user_annotation"),
        op("aten::addmm", 12, 6, 7),
        op("aten::mul", 21, 2, 8),
        op("All2All_Wait", 23, 30, 9),  # an autograd function that waits is not at work
        node("MulBackward0", 60, 2, 8),
        node("AddmmBackward0", 63, 4, 7),
        node("AccumulateGrad", 67, 1, 2**63),
        node("ReluBackward0", 70, 2, 6),
        node("AccumulateGrad", 72, 1, 2**63 + 1),
        node("AddmmBackward0", 74, 4, 5),
        op("gloo:all_to_all", 30, 20, cat="user_annotation"),
    ]
    spans = read_spans(events, shift=100)
    assert spans.forward == {"user": [(100, 110)], "item": [(110, 120)]}
    assert spans.backward == {"item": [(163, 167)], "user": [(170, 178)]}
    assert spans.exchange == [(130, 150)]
    assert spans.busy == [
        (101, 105),
        (106, 109),
        (109.5, 109.6),
        (112, 118),
        (121, 123),
    ]


@pytest.mark.unit
def test_on_a_gpu_the_kernels_count_by_where_they_were_launched() -> None:
    def kernel(
        name: str, launch: float, ts: float, dur: float, number: int
    ) -> list[dict[str, Any]]:
        return [
            {
                **op("cudaLaunchKernel", launch, 1, cat="cuda_runtime"),
                "args": {"correlation": number},
            },
            {**op(name, ts, dur, cat="kernel"), "args": {"correlation": number}},
        ]

    events = [
        op("tower user", 0, 10, cat="user_annotation"),
        op("tower item", 10, 10, cat="user_annotation"),
        *kernel("gemm", 2, 30, 10, 1),
        *kernel("gemm", 12, 35, 10, 2),
        *kernel("ncclDevKernel_AllReduce", 14, 50, 10, 3),
        *kernel("adam", 25, 58, 4, 4),
    ]
    spans = read_spans(events)
    assert spans.forward == {"user": [(30, 40)], "item": [(35, 45)]}
    assert (spans.busy, spans.exchange) == ([(30, 45), (58, 62)], [(50, 60)])
    assert overlap([spans]) == {
        "ranks_in_towers": 0,
        "towers_at_once": 5 / 15,
        "exchange_hidden": 2 / 10,
    }


@pytest.mark.unit
def test_ranks_whose_clocks_differ_are_put_on_one() -> None:
    """Rank 1 counts from a base 2 ms later, and its clock is 5 ms ahead."""

    def trace(base_ns: int, ts: float) -> dict[str, Any]:
        return {
            "baseTimeNanoseconds": base_ns,
            "traceEvents": [
                op("tower t", ts, MS, cat="user_annotation"),
                op("aten::mm", ts, MS, 1),
            ],
        }

    line = Timeline(
        [
            RankTrace(host="a", trace=trace(10**18, 50 * MS)),
            RankTrace(
                host="b",
                trace=trace(10**18 + 2_000_000, 53 * MS),
                ahead_us=5 * MS,
                error_us=20,
            ),
        ]
    )
    assert [spans.forward["t"] for spans in line.spans] == [[(0, MS)], [(0, MS)]]
    assert line.figures()["ranks_in_towers"] == 1
    assert line.merged()["clocks"][1] == {"rank": 1, "ahead_us": 5 * MS, "error_us": 20}


def traced(runtime: Runtime, folder: str) -> dict[str, Any]:
    """Steps of a small model; on rank 1 the clock goes wrong by a second."""
    parallel, optimizer = hybrid_parallel(small_model(META), runtime)
    pipeline = make_pipeline(parallel, optimizer, runtime.device)
    trace = StepTrace(
        parallel, runtime, STEPS, lambda timeline: timeline.write(Path(folder))
    )
    told = []
    own = batches(
        SKIP + STEPS + 2, size=256, rank=runtime.rank, world_size=runtime.world_size
    )
    for _ in range(SKIP + STEPS + 2):
        pipeline.progress(own)
        told.append(trace.step())
    alike = clock_ahead(runtime)
    ahead_ns = int(1e9) * runtime.rank
    real = time.time_ns
    tracing.time.time_ns = lambda: real() + ahead_ns  # type: ignore[assignment]
    wrong = clock_ahead(runtime)
    tracing.time.time_ns = real  # type: ignore[assignment]
    hooks = [len(tower._forward_hooks) for _, tower in tracing.towers(parallel)]
    pipeline.detach()
    seen: list[Timeline] = []
    config = TrainConfig(epochs=2, trace_steps=2)
    history = train(
        parallel, optimizer, Batches(runtime, 4), runtime, config, timeline=seen.append
    )
    records = [record for record in history if record["kind"] == "timeline"]
    return {
        "told": told,
        "alike": alike,
        "wrong": wrong,
        "hooks": hooks,
        "records": records,
        "seen": len(seen),
    }


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    """What two ranks told, and where rank 0 wrote."""
    folder = tmp_path_factory.mktemp("timeline")
    return run_ranks(traced, 2, str(folder)), folder


def test_the_traces_of_real_ranks_become_one_file_with_a_lane_for_each(
    real: tuple[list[Any], Path],
) -> None:
    ranks, folder = real
    told = [rank["told"] for rank in ranks]
    assert told[0] == told[1], "the same on every rank"
    assert [place for place, found in enumerate(told[0]) if found is not None] == [
        SKIP + STEPS - 1
    ]
    figures = told[0][SKIP + STEPS - 1]
    assert set(figures) == {"ranks_in_towers", "towers_at_once", "exchange_hidden"}
    assert all(0 <= share <= 1 for share in figures.values())
    assert [rank["hooks"] for rank in ranks] == [[0, 0], [0, 0]]

    merged = json.loads((folder / "timeline.json").read_text())
    events = merged["traceEvents"]
    lanes = {
        event["pid"]: event["args"]["name"]
        for event in events
        if event["name"] == "process_name"
    }
    assert list(lanes) == [0, 1]
    assert all(name.startswith(f"rank {number} on ") for number, name in lanes.items())
    assert {event["pid"] for event in events} == {0, 1}
    for number in (0, 1):
        spans = [
            event["name"]
            for event in events
            if event["pid"] == number and event.get("cat") == "tower"
        ]
        assert sorted(spans) == sorted(
            [
                f"{tower} {way}"
                for tower in ("user", "item")
                for way in ("forward", "backward")
            ]
            * STEPS
        )
        assert any(
            event["name"].startswith("gloo:")
            for event in events
            if event["pid"] == number
        )
    starts = [event["ts"] for event in events if event["ph"] == "X"]
    assert min(starts) == pytest.approx(0, abs=1)
    assert max(starts) < 60e6, "of one clock: within the run"
    assert merged["overlap"] == figures
    assert (folder / "timeline.png").read_bytes().startswith(b"\x89PNG")


def test_training_records_its_timeline_once_and_hands_it_to_rank_0(
    real: tuple[list[Any], Path],
) -> None:
    first, second = real[0]
    (record,) = first["records"]
    assert second["records"] == [record]
    assert (record["epoch"], record["step"]) == (2, SKIP + 2)
    assert record.keys() > {"ranks_in_towers", "towers_at_once", "exchange_hidden"}
    assert (first["seen"], second["seen"]) == (1, 0)


def test_a_clock_that_is_ahead_is_found_within_the_error(
    real: tuple[list[Any], Path],
) -> None:
    first, second = real[0]
    assert first["alike"] == first["wrong"] == (0, 0)
    assert second["alike"][0] == 0, "one host, one clock"
    ahead, error = second["wrong"]
    assert abs(ahead - 1e6) <= error + 1
    assert 0 < error < 1e6


@pytest.mark.unit
@pytest.mark.parametrize(
    ("traced", "steps", "why"),
    [
        (
            6,
            10,
            "trace_steps=6: the run has 10 steps, of which the first 5 are not traced; trace 5 or fewer",
        ),
        (1, 4, "train for longer"),
        (101, 1000, "trace_steps=101: must be 100 or fewer"),
    ],
)
def test_more_steps_than_the_run_has_are_refused(
    traced: int, steps: int, why: str
) -> None:
    with pytest.raises(ValueError, match=why):
        check_fits(traced, steps)
    check_fits(5, 10)
    check_fits(0, 1)


@pytest.mark.unit
def test_a_model_without_towers_shows_its_children() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.ReLU())
    assert [name for name, _ in tracing.towers(model)] == ["0", "1"]
    assert [name for name, _ in tracing.towers(small_model())] == ["user", "item"]
