"""No program reads memory that is not its own, takes more than it may, or fails without naming its node."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

from torchrec_ext.retrieval.bundle.architecture import rebuild
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.bundle.operators import _ATEN, run_operator
from torchrec_ext.retrieval.bundle.program import (
    _DTYPES,
    MOST_BYTES,
    Program,
    ProgramTower,
)

DRAW = torch.Generator().manual_seed(0)


def real(*size: int) -> Tensor:
    return torch.randn(*size, generator=DRAW)


def whole(*size: int) -> Tensor:
    return torch.randint(0, 3, size, generator=DRAW)


def yes(*size: int) -> Tensor:
    return torch.rand(*size, generator=DRAW) > 0.5


def cells(gates: int, inputs: int = 3, width: int = 4) -> list[Tensor]:
    """Weights of one recurrent layer with ``gates`` gates."""
    rows = gates * width
    return [real(rows, inputs), real(rows, width), real(rows), real(rows)]


# of a recurrent operator: biased, one layer, batch first
LAYER = [True, 1, 0.0, False, False, True]
X, Y = real(3, 4), real(4)
ONE = """abs exp expm1 cos sin tan tanh floor round reciprocal relu relu6 rsqrt sigmoid sign silu sqrt square log
log1p neg log_sigmoid mish selu gelu hardsigmoid hardswish hardtanh elu softplus leaky_relu clone contiguous detach t
lift_fresh_copy logical_not max mean sum squeeze ones_like zeros_like diagonal tril triu"""
TWO = """add.Tensor sub.Tensor mul.Tensor div.Tensor eq.Tensor ne.Tensor lt.Tensor le.Tensor gt.Tensor ge.Tensor
remainder.Tensor pow.Tensor_Tensor maximum.default minimum.default floor_divide.default logical_and.default
logical_or.default"""
SCALAR = """add.Scalar sub.Scalar mul.Scalar div.Scalar eq.Scalar ne.Scalar lt.Scalar le.Scalar gt.Scalar ge.Scalar
remainder.Scalar pow.Tensor_Scalar rsub.Scalar clamp.default clamp_min.default clamp_max.default full_like.default
flatten.using_ints all.dim any.dim argmax.default cumsum.default max.dim min.dim prod.dim_int softmax.int
log_softmax.int squeeze.dim glu.default unbind.int unsqueeze.default"""
OVER = """amax.default amin.default mean.dim logsumexp.default std.dim var.dim std.correction var.correction
sum.dim_IntList flip.default"""
EXAMPLES: dict[str, list[Any]] = {
    **{f"{name}.default": [X] for name in ONE.split()},
    **{name: [X, Y] for name in TWO.split()},
    **{name: [X, 1] for name in SCALAR.split()},
    **{name: [X, [1]] for name in OVER.split()},
    "_native_batch_norm_legit_no_training.default": [
        X,
        Y,
        real(4),
        real(4),
        real(4).abs(),
        0.1,
        1e-5,
    ],
    "_to_copy.default": [X],
    "addmm.default": [real(5), X, real(4, 5)],
    "arange.default": [5],
    "arange.start": [1, 5],
    "arange.start_step": [1, 9, 2],
    "baddbmm.default": [real(2, 3, 5), real(2, 3, 4), real(2, 4, 5)],
    "bitwise_and.Tensor": [yes(3, 4), yes(4)],
    "bitwise_not.default": [yes(3, 4)],
    "bitwise_or.Tensor": [yes(3, 4), yes(4)],
    "bmm.default": [real(2, 3, 4), real(2, 4, 5)],
    "cat.default": [[X, real(3, 2)], 1],
    "chunk.default": [X, 2, 1],
    "clamp.Tensor": [X, Y, real(4)],
    "concat.default": [[X, real(3, 2)], 1],
    "constant_pad_nd.default": [X, [1, 2], 0.5],
    "conv1d.default": [real(2, 4, 6), real(5, 4, 3), real(5)],
    "conv2d.default": [real(2, 4, 6, 6), real(5, 4, 3, 3), real(5)],
    "cosine_similarity.default": [X, real(3, 4)],
    "div.Tensor_mode": [X, Y],
    "einsum.default": ["bij,bjk->bik", [real(2, 3, 4), real(2, 4, 5)]],
    "embedding.default": [real(5, 4), whole(3, 2)],
    "embedding_bag.default": [real(5, 4), whole(6), torch.tensor([0, 2, 4])],
    "embedding_bag.padding_idx": [
        real(5, 4),
        whole(6),
        torch.tensor([0, 2, 4]),
        False,
        0,
        False,
        None,
        False,
        0,
    ],
    "expand.default": [real(3, 1), [3, 4]],
    "expand_as.default": [real(3, 1), X],
    "full.default": [[3, 4], 2.0],
    "gather.default": [X, 1, whole(3, 2)],
    "group_norm.default": [real(3, 4, 2), 2, Y, real(4)],
    "gru.input": [real(2, 5, 3), real(1, 2, 4), cells(3), *LAYER],
    "index.Tensor": [X, [None, whole(2)]],
    "index_select.default": [X, 1, whole(2)],
    "layer_norm.default": [X, [4], Y, real(4)],
    "linalg_vector_norm.default": [X, 2, [1]],
    "linear.default": [X, real(5, 4), real(5)],
    "lstm.input": [real(2, 5, 3), [real(1, 2, 4), real(1, 2, 4)], cells(4), *LAYER],
    "masked_fill.Scalar": [X, yes(3, 4), 0.5],
    "masked_fill.Tensor": [X, yes(3, 4), torch.tensor(0.5)],
    "matmul.default": [X, real(4, 5)],
    "max_pool1d.default": [real(2, 4, 6), [2]],
    "mm.default": [X, real(4, 5)],
    "movedim.int": [real(2, 3, 4), 0, 2],
    "mv.default": [X, Y],
    "new_full.default": [X, [3, 4], 2.0],
    "new_ones.default": [X, [3, 4]],
    "new_zeros.default": [X, [3, 4]],
    "one_hot.default": [whole(3), 4],
    "ones.default": [[3, 4]],
    "pad.default": [X, [1, 2]],
    "permute.default": [real(2, 3, 4), [2, 0, 1]],
    "pow.Scalar": [2.0, X],
    "prelu.default": [X, Y],
    "repeat.default": [X, [2, 1]],
    "repeat_interleave.self_int": [X, 2, 0],
    "reshape.default": [X, [4, 3]],
    "rms_norm.default": [X, [4], Y],
    "rnn_relu.input": [real(2, 5, 3), real(1, 2, 4), cells(1), *LAYER],
    "rnn_tanh.input": [real(2, 5, 3), real(1, 2, 4), cells(1), *LAYER],
    "scaled_dot_product_attention.default": [
        *(real(2, 2, 5, 4) for _ in range(3)),
        real(2, 1, 5, 5),
    ],
    "select.int": [X, 1, 2],
    "slice.Tensor": [X, 1, 1, 3],
    "split.Tensor": [X, 2, 1],
    "split_with_sizes.default": [X, [1, 3], 1],
    "squeeze.dims": [real(3, 1, 4), [1]],
    "stack.default": [[X, real(3, 4)], 1],
    "tile.default": [X, [2, 1]],
    "to.dtype": [X, torch.float64],
    "topk.default": [X, 2],
    "transpose.int": [X, 0, 1],
    "type_as.default": [X, whole(2)],
    "unflatten.int": [X, 1, [2, 2]],
    "view.default": [X, [4, 3]],
    "where.ScalarOther": [yes(3, 4), X, 0.0],
    "where.ScalarSelf": [yes(3, 4), 0.0, X],
    "where.self": [yes(3, 4), X, Y],
    "zeros.default": [[3, 4]],
}
OPTIONS: dict[str, dict[str, Any]] = {
    "div.Tensor_mode": {"rounding_mode": "floor"},
    "_to_copy.default": {"dtype": torch.float64},
}
GUARD = 4096  # numbers before and after each tensor


def variants(value: Any) -> Iterator[Any]:
    """Yields an argument cut, extended, transposed, with other dimensions, of another dtype, or another number."""
    if type(value) is bool:
        yield not value
    elif type(value) is int:
        yield from (value - 1, value + 1, 3 * value, 0, -5, 2**40)
    elif isinstance(value, Tensor):
        for dim, size in enumerate(value.shape):
            yield from (
                value.narrow(dim, 0, kept)
                for kept in {0, 1, size // 2, size - 1}
                if 0 <= kept < size
            )
            yield torch.cat([value, value.narrow(dim, 0, 1)], dim)
            yield torch.cat([value, value, value], dim)
        yield from (
            value.flatten(),
            value[None],
            value[..., None],
            value.mT if value.dim() > 1 else value,
        )
        if value.dim():
            yield value[0]
        yield from (
            value.to(dtype) for dtype in _DTYPES.values() if dtype != value.dtype
        )
        if value.dtype == torch.int64:
            yield from (
                value.flip(0) if value.dim() else value,
                value - 1,
                value + 2**20,
            )


def surrounded(value: Any, by: float) -> Any:
    """A tensor in the middle of others' memory, which holds ``by``."""
    if not isinstance(value, Tensor):
        return value
    memory = torch.full(
        (value.numel() + 2 * GUARD,),
        by if value.is_floating_point() else by > 0,
        dtype=value.dtype,
    )
    inner = memory[GUARD : GUARD + value.numel()].view(value.shape)
    return inner.copy_(value)


def result(
    name: str, leaves: list[Any], spec: Any, by: float
) -> list[Tensor] | Exception:
    arguments, options = tree_unflatten([surrounded(leaf, by) for leaf in leaves], spec)
    try:
        found = tree_flatten(run_operator(name, arguments, options))[0]
    except Exception as error:
        return error
    return [value.clone() for value in found if isinstance(value, Tensor)]


def program(
    name: str, leaves: list[Any], spec: Any
) -> tuple[Program, dict[str, Tensor]]:
    """A program of one operator on constants, and their values."""
    values = {
        f"${index}": leaf
        for index, leaf in enumerate(leaves)
        if isinstance(leaf, Tensor)
    }
    names = {dtype: reference for reference, dtype in _DTYPES.items()}
    written = [
        f"${index}"
        if isinstance(leaf, Tensor)
        else f"={leaf}"
        if isinstance(leaf, str)
        else names.get(leaf, leaf)
        for index, leaf in enumerate(leaves)
    ]
    arguments, options = tree_unflatten(written, spec)
    constants = {
        reference: (value.dtype, tuple(value.shape))
        for reference, value in values.items()
    }
    made = Program(
        [[name, arguments, options]], {"@x": (torch.float32, ())}, constants, ["@x"]
    )
    return made, {**values, "@x": torch.zeros(2), "rows": 2}


def accepted(
    name: str, leaves: list[Any], spec: Any
) -> tuple[Program, dict[str, Tensor]] | None:
    """The program, or None where it is refused when it is made."""
    refused = f"({re.escape(f'node #0 ({name})')}|the program takes)"
    try:
        return program(name, leaves, spec)
    except ValueError as error:
        if not re.match(refused, str(error)):
            raise
        return None


def test_every_operator_has_an_example() -> None:
    assert set(EXAMPLES) == set(_ATEN.split())


@pytest.mark.parametrize("name", EXAMPLES)
@pytest.mark.filterwarnings("ignore")
@torch.no_grad()
def test_an_operator_reads_its_own_memory_alone(name: str) -> None:
    """Whatever is wrong with one argument: an error, or the same result among other memory."""
    leaves, spec = tree_flatten((EXAMPLES[name], OPTIONS.get(name, {})))
    right, values = program(name, leaves, spec)
    assert right(values)[0].equal(values["@x"])
    for index, leaf in enumerate(leaves):
        for variant in variants(leaf):
            wrong = [*leaves[:index], variant, *leaves[index + 1 :]]
            made = accepted(name, wrong, spec)
            if type(variant) is int and variant == 2**40:
                continue  # refused there, and asking torch for so much memory is no test
            first, second = (result(name, wrong, spec, by) for by in (7.25, -3.5))
            if isinstance(first, Exception):
                assert type(first) is type(second)
                if made is not None:
                    # what depends on values, and kernels that lack a dtype
                    with pytest.raises(
                        ValueError, match=re.escape(f"node #0 ({name})")
                    ):
                        made[0](made[1])
                continue
            assert not isinstance(second, Exception)
            for one, other in zip(first, second, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def described(
    nodes: list[Any], columns: Any = None, weights: Any = None, out: int = 1
) -> dict[str, Any]:
    arguments = {
        "tables": [],
        "columns": {"mapping": columns or {"x": ["float32", 4]}},
        "weights": {"mapping": weights or {}},
        "nodes": [
            [name, given, {"mapping": options}] for name, given, options in nodes
        ],
        "outputs": [f"#{len(nodes) - 1}"],
        "out_features": out,
    }
    return {"class": "ProgramTower", "arguments": arguments}


SUM = ["sum.dim_IntList", ["#0", [1]], {}]
BOMBS: dict[str, tuple[dict[str, Any], str]] = {
    "a wide column": (
        described([], {"x": ["float32", 10**12]}),
        r"column 'x': width 1,000,000,000,000; a row may",
    ),
    "wide columns": (
        described([], {f"x{n}": ["float32", 2**17] for n in range(3)}),
        r"column 'x2': width 131,072",
    ),
    "zeros": (
        described([["zeros.default", [[200_000, 200_000]], {}]]),
        r"takes more than 2,147,483,648 bytes",
    ),
    "full": (
        described([["full.default", [["rows", 10**10], 1.0], {}]]),
        "takes more than",
    ),
    "one hot": (
        described([["one_hot.default", ["@x", 2**40], {}]], {"x": ["int64", 4]}),
        "takes more than",
    ),
    "repeated": (
        described([["repeat_interleave.self_int", ["@x", 2**36, 1], {}]]),
        "takes more than",
    ),
    "arange": (described([["arange.default", [2**45], {}]]), "takes more than"),
    "expanded": (
        described(
            [
                ["expand.default", ["@x", [2**40, "rows", 4]], {}],
                ["sum.default", ["#0"], {}],
            ]
        ),
        "takes",
    ),
    "products": (
        described(
            [
                ["ones.default", [[8192, 8192]], {}],
                *(["mm.default", [f"#{number}", "#0"], {}] for number in range(40)),
            ]
        ),
        "takes more than",
    ),
    "a list times a number": (
        described([["size_mul", [[0], 10**10], {}]]),
        "list .* is not a size",
    ),
    "sizes of sizes": (
        described(
            [
                ["size_mul", [2**30, 2**30], {}],
                *(["size_mul", [f"#{n}", f"#{n}"], {}] for n in range(9)),
            ]
        ),
        "is not a size",
    ),
    "pieces": (
        described([["zeros.default", [[10**7]], {}], ["unbind.int", ["#0"], {}]]),
        "10,000,000 pieces",
    ),
    "another device": (
        described([["zeros.default", [[4]], {"device": "=cuda"}]]),
        "says where its values are",
    ),
    "fewer rows": (
        described([["slice.Tensor", ["@x", 0, 1], {}]], out=4),
        r"result #0 of \d rows is .*as many rows",
    ),
    "another width": (
        described([["relu.default", ["@x"], {}]], out=5),
        r"out_features=5: the outputs are 4 wide",
    ),
}


@pytest.mark.parametrize("name", BOMBS)
def test_a_program_that_takes_too_much_is_refused_before_it_runs(name: str) -> None:
    description, message = BOMBS[name]
    with pytest.raises(BundleError, match=message):
        rebuild(description)


def test_a_weight_of_one_number_for_many_channels_is_refused() -> None:
    nodes = [
        [
            "_native_batch_norm_legit_no_training.default",
            ["@x", "$w", "$w", "$w", "$w", 0.1, 1e-5],
            {},
        ],
        ["item", ["#0", 0], {}],
    ]
    assert rebuild(described(nodes, weights={"w": ["float32", 4]}, out=4))
    with pytest.raises(
        BundleError,
        match=r"node #0 \(_native.*\): weight is \(1,\) torch.float32, must be \(4,\)",
    ):
        rebuild(described(nodes, weights={"w": ["float32", 1]}, out=4))


def test_rows_that_do_not_fit_together_run_in_blocks(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    nodes = [
        ["repeat.default", ["@x", [1, 1000]], {}],
        SUM,
        ["unsqueeze.default", ["#1", 1], {}],
    ]
    tower = ProgramTower([], {"x": ["float32", 4]}, {}, nodes, ["#2"], 1)
    dense = torch.randn(70, 4)
    whole_batch = tower(None, dense)  # type: ignore[arg-type]
    assert tower._program.blocks(70) == [70]
    monkeypatch.setattr(
        "torchrec_ext.retrieval.bundle.program.MOST_BYTES", MOST_BYTES // 2**12
    )
    tower = ProgramTower([], {"x": ["float32", 4]}, {}, nodes, ["#2"], 1)
    assert tower._program.blocks(70) == [17, 18, 17, 18]
    torch.testing.assert_close(tower(None, dense), whole_batch)  # type: ignore[arg-type]
