"""keras-rs's own tables for ranking metrics and in-batch corrections, read from the folder that KERAS_RS_SOURCE names.

Nothing of it is in this repository; `git clone https://github.com/keras-team/keras-rs` brings it. Its tests are read
and not run: the arguments of their ``named_parameters`` and the expected values are literals. What differs in
definition:

- a query without a relevant item is 0 there; here there is no such query;
- gains there are 2 ** label - 1; here an item is relevant or not;
- rows and items may have weights there; here means are over queries, and a weight of 0 is a candidate that is left out;
- precision there divides by the number of candidates where that is less than k; here always by k;
- probabilities there are cut at 1e-6; here log q is taken as it is;
- a hit there gets smallest_normal / 100 = 1.2e-40 added (812d35b), which leaves its logit where it was, although it is
  said to become extremely small; here it is excluded, as in TensorFlow Recommenders, which adds finfo.min / 100;
- mean average precision and DCG are there alone;
- of equal logits it keeps exactly k hard negatives, ``hardest=k`` here all that equal the k-th.
"""

from __future__ import annotations

import ast
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from torchrec_ext.modules.losses import softmax_losses
from torchrec_ext.modules.softmax import in_batch_negatives
from torchrec_ext.train.metrics import Hits, ranking_metrics
from torchrec_ext.train.metrics.hits import best_grades, first_gains

SOURCE = Path(os.environ.get("KERAS_RS_SOURCE") or "/nonexistent") / "keras_rs/src"
pytestmark = pytest.mark.skipif(
    not SOURCE.is_dir(), reason="needs keras-rs's source in the folder $KERAS_RS_SOURCE"
)
FILES = {
    "mrr": "mean_reciprocal_rank",
    "ndcg": "ndcg",
    "precision": "precision_at_k",
    "recall": "recall_at_k",
}


class _Ops:
    """For ``ops.array(values, dtype=...)`` among the arguments."""

    @staticmethod
    def array(values: Any, dtype: str = "") -> Any:
        del dtype
        return values


def _dcg(labels: list[int], ranks: list[int]) -> float:
    return sum(
        (2**label - 1) / math.log2(rank + 1)
        for label, rank in zip(labels, ranks, strict=True)
    )


def value(node: ast.expr) -> Any:
    """Of a literal, a quotient or a DCG."""
    names = {"__builtins__": {}, "ops": _Ops, "_compute_dcg": _dcg}
    return eval(compile(ast.Expression(node), "keras-rs", "eval"), names)


def methods(path: str) -> dict[str, ast.FunctionDef]:
    """By name those of the test class in a file."""
    tree = ast.parse((SOURCE / path).read_text())
    (case,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    return {node.name: node for node in case.body if isinstance(node, ast.FunctionDef)}


def table(method: ast.FunctionDef) -> list[Any]:
    """The arguments of its named_parameters."""
    (decorator,) = method.decorator_list
    assert isinstance(decorator, ast.Call)
    (first, *_) = rows = [value(argument) for argument in decorator.args]
    return first if isinstance(first, list) else rows


def k_of(method: ast.FunctionDef) -> int | None:
    """The k of the metric that it makes; None: all candidates."""
    calls = [
        node
        for node in ast.walk(method)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    return next(
        (
            value(keyword.value)
            for call in calls
            for keyword in call.keywords
            if keyword.arg == "k"
        ),
        None,
    )


def batched(path: str) -> tuple[Any, Any]:
    """``y_true_batched`` and ``y_pred_batched`` of setUp."""
    values = {}
    for node in methods(path)["setUp"].body:
        target = node.targets[0] if isinstance(node, ast.Assign) else None
        if isinstance(target, ast.Attribute) and target.attr in (
            "y_true_batched",
            "y_pred_batched",
        ):
            values[target.attr] = value(node.value)  # type: ignore[attr-defined]
    return values["y_true_batched"], values["y_pred_batched"]


def figure(
    name: str,
    labels: list[list[float]],
    scores: list[list[float]],
    k: int | None,
    kept: Any = None,
) -> float:
    """Ours, and 0 for each query without a relevant item, which is theirs."""
    sums = []
    for row, (own, given) in enumerate(
        zip(torch.tensor(labels), torch.tensor(scores), strict=True)
    ):
        there = (
            torch.ones(len(own), dtype=torch.bool)
            if kept is None
            else torch.tensor(kept[row], dtype=torch.bool)
        )
        own, given = own[there], given[there]
        is_relevant = own > 0
        count = int(is_relevant.sum())
        if not count:
            sums.append(0.0)
            continue
        size = k or len(own)
        hits = Hits(
            first_gains(given[None], is_relevant[None].float(), size),
            best_grades(torch.zeros(count).long(), torch.ones(count), 1, size),
            torch.tensor([count]),
        )
        sums.append(ranking_metrics(hits, [(name, size)])[f"{name}@{size}"])  # type: ignore[list-item]
    return sum(sums) / len(sums)


def cases(name: str) -> Iterator[tuple[str, tuple[Any, ...], float]]:
    """(what it is called there, arguments of :func:`figure`, the expected value), of what both define alike."""
    path = f"metrics/{FILES[name]}_test.py"
    tests, graded = methods(path), {2, 3}
    k = k_of(tests["test_unbatched_inputs"])
    for label, true, scores, weight, expected in table(tests["test_unbatched_inputs"]):
        if not isinstance(weight, list) and not (name == "ndcg" and graded & set(true)):
            yield label, (name, [true], [scores], k), expected
    k = k_of(tests["test_masking"])
    for label, true, scores, weight, expected in table(tests["test_masking"]):
        if weight is None and not (
            name == "precision" and sum(map(sum, true["mask"])) < 3
        ):
            yield (
                f"masking {label}",
                (name, true["labels"], scores, k, true["mask"]),
                expected,
            )
    labels, scores = batched(path)
    if name != "ndcg":
        for label, size, expected in table(tests["test_k"]):
            yield f"k {label}", (name, labels, scores, size), expected


@pytest.mark.parametrize("name", FILES)
def test_ranking_metrics(name: str) -> None:
    listed = list(cases(name))
    assert len(listed) >= 5
    for label, arguments, expected in listed:
        assert figure(*arguments) == pytest.approx(expected, rel=1e-5, abs=1e-6), label


def ranks_of(path: str, names: tuple[str, str]) -> list[tuple[int, int]]:
    """The ranks of logits and of what corrects them that their layer is tested with."""
    return [
        tuple(case[name] for name in names)
        for case in table(methods(path)["test_call"])
    ]  # type: ignore[misc]


def logits_of(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(42))


def test_a_correction_for_the_sampling_probability() -> None:
    """Ours take a matrix of logits and a probability for each candidate or pair; theirs also a vector or a stack."""
    ranks = ranks_of(
        "layers/retrieval/sampling_probability_correction_test.py",
        ("logits_rank", "probs_rank"),
    )
    ours = [pair for pair in ranks if pair[0] == 2]
    assert ours == [(2, 1), (2, 2)]
    logits, targets = logits_of(20, 10), torch.arange(20) % 10
    for _, rank in ours:
        probabilities = logits_of(*(20, 10)[-rank:]).clamp(min=1e-6)
        theirs = logits - probabilities.clamp(1e-6, 1.0).log()
        assert (theirs > logits).all()
        expected = cross_entropy(theirs, targets, reduction="none")
        torch.testing.assert_close(
            softmax_losses(logits, targets, log_q=probabilities.log()), expected
        )


def test_accidental_hits_are_removed() -> None:
    """All rows share our candidates, theirs may differ by row. Row i's own candidate is the i-th: its logit stays.

    What is compared is what their docstring says, by the constant that TensorFlow Recommenders has.
    """
    ranks = ranks_of(
        "layers/retrieval/remove_accidental_hits_test.py",
        ("logits_rank", "candidate_ids_rank"),
    )
    assert (2, 1) in ranks
    logits = logits_of(10, 10)
    ids = torch.randint(10, (10,), generator=torch.Generator().manual_seed(42))
    smallest = torch.finfo(torch.float32).min / 100
    duplicates = (ids == ids[:, None]).float() - torch.eye(10)
    assert duplicates.any()
    ours = in_batch_negatives(
        torch.eye(10), ids, present=torch.ones(10, dtype=torch.bool)
    )
    assert torch.equal(ours.excluded, duplicates.bool())
    expected = cross_entropy(
        logits + duplicates * smallest, torch.arange(10), reduction="none"
    )
    torch.testing.assert_close(
        softmax_losses(logits, ours.targets, excluded=ours.excluded), expected
    )
