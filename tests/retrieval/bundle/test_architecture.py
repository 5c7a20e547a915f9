"""A module equals the one that its description rebuilds, for every class of the list; others cannot be named."""

import json
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, EmbeddingConfig, PoolingType
from torchrec.modules.embedding_configs import DataType

from torchrec_ext.models.ncf import NCFHead, NCFTower
from torchrec_ext.models.session import NextItemTower
from torchrec_ext.modules.compression import Compression
from torchrec_ext.modules.interaction import INTERACTIONS as RECIPE_INTERACTIONS
from torchrec_ext.modules.interaction import (
    Cosine,
    DeepCross,
    DeepFM,
    DotProduct,
    FactorizationMachine,
    GeneralizedMF,
    MultiTaskTop,
    Reordered,
    TopMLP,
)
from torchrec_ext.modules.layers import Recorded
from torchrec_ext.modules.session_encoder import SessionEncoder
from torchrec_ext.modules.session_tower import SessionSteps, SessionTop, SessionTower
from torchrec_ext.modules.tower import Tower
from torchrec_ext.retrieval.bundle.architecture import (
    INTERACTION_CLASSES,
    TOWERS,
    describe_module,
    rebuild,
)
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.bundle.program import ProgramTop, ProgramTower

pytestmark = pytest.mark.unit

ACTIVATION = st.sampled_from(["relu", "gelu", "silu", "tanh"])
NORMALIZATION = st.sampled_from(["none", "layer", "batch"])
DROPOUT = st.sampled_from([0.0, 0.25])
WIDTH = st.integers(1, 6)
HIDDEN = st.lists(WIDTH, max_size=3)
Draw = Callable[[st.SearchStrategy[Any]], Any]


def bags(draw: Draw, name: str, width: int) -> EmbeddingBagConfig:
    pooling = draw(st.sampled_from(list(PoolingType)[:2]))
    kind = draw(st.sampled_from([DataType.FP32, DataType.FP16]))
    return EmbeddingBagConfig(
        name=name,
        feature_names=[name],
        num_embeddings=draw(WIDTH),
        embedding_dim=width,
        pooling=pooling,
        data_type=kind,
    )


def lists(draw: Draw, *features: str) -> EmbeddingConfig:
    return EmbeddingConfig(
        name="listed",
        feature_names=list(features),
        num_embeddings=draw(WIDTH),
        embedding_dim=8,
    )


def layers(draw: Draw) -> dict[str, Any]:
    return {
        "activation": draw(ACTIVATION),
        "normalization": draw(NORMALIZATION),
        "dropout": draw(DROPOUT),
    }


def a_tower(draw: Draw) -> Tower:
    compress = draw(
        st.sampled_from(
            [
                None,
                Compression(kind="cross", dim=4, per_feature=1),
                Compression(dim=3, layers=2),
            ]
        )
    )
    tables = [
        bags(draw, "a", 4),
        bags(draw, "b", 4),
        *([lists(draw, "listed")] if draw(st.booleans()) and not compress else []),
    ]
    residual = draw(st.booleans())
    widths = [8, 8, 8] if residual else draw(HIDDEN)
    return Tower(
        tables,
        widths,
        dense=draw(st.sampled_from([(), ("x", "y")])),
        residual=residual,
        compress=compress,
        **layers(draw),
    )


def an_encoder(draw: Draw, *, causal: bool) -> SessionEncoder:
    return SessionEncoder(
        8,
        draw(WIDTH),
        layers=draw(st.integers(1, 3)),
        heads=draw(st.sampled_from([1, 2, 4])),
        hidden=draw(st.sampled_from([None, 5])),
        position=draw(st.sampled_from(["start", "end", "none"])),
        norm_first=draw(st.booleans()),
        causal=causal,
    )


def a_session_tower(draw: Draw) -> SessionTower:
    target = draw(st.sampled_from([(), ("item",)]))
    return SessionTower(
        [lists(draw, "history", *target)],
        session=["history"],
        target=target,
        mlp_widths=[4, 2],
        max_length=draw(WIDTH),
        heads=2,
        pooling=draw(st.sampled_from(["flatten", "last", "mean"])),
        activation=draw(ACTIVATION),
    )


def a_program(draw: Draw) -> ProgramTower:
    width = draw(WIDTH)
    return ProgramTower(
        [bags(draw, "item", 3)],
        {"item": ["int64"], "x": ["float32"], "list": ["float32", 2]},
        {"layer/weight": ["float32", width, 3], "shift": ["int64"]},
        [
            ["embedding.default", ["&item", "@item"], {}],
            ["to.dtype", ["#0", "dtype.float32"], {}],
            ["linear.default", ["#1", "$layer/weight"], {}],
        ],
        ["#2", "@x"],
        width + 1,
    )


MAKES: dict[type[nn.Module], Callable[[Draw], nn.Module]] = {
    Tower: a_tower,
    NCFTower: lambda draw: NCFTower(
        [bags(draw, "g", 2), bags(draw, "m", 3)],
        2,
        draw(WIDTH),
        bias=draw(st.booleans()),
        dense=["x"],
    ),
    SessionTower: a_session_tower,
    SessionSteps: lambda draw: SessionSteps(
        [lists(draw, "history", "gap")],
        session=["history", "gap"],
        max_length=draw(WIDTH),
        dense=["hour"],
        combine=draw(st.sampled_from(["sum", "concat"])),
    ),
    SessionTop: lambda draw: SessionTop(
        [3 * 9 + 1, 5, 19],
        **draw(
            st.sampled_from(
                [
                    {"width": 8, "targets": 2},
                    {"width": 4, "targets": 1, "features": 2, "slots": [1]},
                ]  # type: ignore[list-item]
            )
        ),
        max_length=3,
        mlp_widths=draw(HIDDEN),
        top_widths=draw(HIDDEN),
        heads=2,
        position=draw(st.sampled_from(["start", "end", "none"])),
        pooling=draw(st.sampled_from(["flatten", "last", "mean"])),
        activation=draw(ACTIVATION),
    ),
    NextItemTower: lambda draw: NextItemTower(
        [lists(draw, "session")], an_encoder(draw, causal=True)
    ),
    DotProduct: lambda draw: DotProduct([draw(WIDTH)] * 2),
    Cosine: lambda draw: Cosine([draw(WIDTH)] * 2, temperature=0.3),
    GeneralizedMF: lambda draw: GeneralizedMF([draw(WIDTH)] * 2),
    TopMLP: lambda draw: TopMLP(
        [draw(WIDTH), draw(WIDTH)],
        draw(HIDDEN),
        activate_input=draw(st.booleans()),
        **layers(draw),
    ),
    MultiTaskTop: lambda draw: MultiTaskTop(
        [draw(WIDTH)] * 3, draw(st.integers(2, 4)), draw(HIDDEN), **layers(draw)
    ),
    DeepCross: lambda draw: DeepCross(
        [3, 4],
        draw(HIDDEN),
        layers=2,
        low_rank=draw(st.sampled_from([None, 2])),
        **layers(draw),
    ),
    FactorizationMachine: lambda draw: FactorizationMachine([draw(WIDTH)] * 3),
    DeepFM: lambda draw: DeepFM([draw(WIDTH)] * 2, draw(HIDDEN), **layers(draw)),
    NCFHead: lambda draw: NCFHead(
        draw(WIDTH),
        draw(st.lists(WIDTH, min_size=1, max_size=3)),
        activation=draw(ACTIVATION),
    ),
    Reordered: lambda draw: Reordered(TopMLP([3, 4, 5]), [2, 0, 1], [4, 5, 3]),
    ProgramTower: a_program,
    ProgramTop: lambda draw: ProgramTop(
        [draw(WIDTH), 2],
        [[0, 1], [1, 2]],
        {},
        [["sum.dim_IntList", ["@1", [1]], {"dtype": "dtype.float32"}]],
        "#0",
    ),
}


# An interaction of the registry without a line of its own is tried over two towers of
# equal width.
MAKES = {
    kind: lambda draw, kind=kind: kind([draw(WIDTH)] * 2)
    for kind in RECIPE_INTERACTIONS.values()
} | MAKES


def test_every_class_that_a_bundle_can_name_is_tried() -> None:
    assert set(MAKES) == {*TOWERS, *INTERACTION_CLASSES}


@pytest.mark.parametrize("kind", MAKES, ids=lambda kind: kind.__name__)
def test_there_and_back(kind: type[nn.Module]) -> None:
    @given(st.data())
    @settings(max_examples=6, deadline=None)
    def there_and_back(data: st.DataObject) -> None:
        module = MAKES[kind](data.draw)
        described = json.loads(json.dumps(describe_module(module)))
        again = rebuild(described)
        assert type(again) is type(module)
        assert describe_module(again) == described
        shapes = {
            name: (value.shape, value.dtype)
            for name, value in module.state_dict().items()
        }
        assert {
            name: (value.shape, value.dtype)
            for name, value in again.state_dict().items()
        } == shapes
        assert all(value.is_meta for value in again.state_dict().values())
        # Without what has weights, the layers are the same ones with the same settings.
        assert str(again) == str(module)

    there_and_back()


class Halved(Recorded, nn.Module):
    def __init__(self, widths: list[int]) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(widths[0]))

    def forward(self, outputs: list[Tensor]) -> Tensor:
        return (outputs[0] * outputs[1] * self.weight).sum(1) / 2


class Forgetful(nn.Module):
    pass


def test_a_class_of_ones_own_is_named_by_who_exports_and_by_who_loads() -> None:
    described = describe_module(Halved([4, 4]), also=[Halved])
    assert type(rebuild(described, also=[Halved])) is Halved
    with pytest.raises(
        BundleError, match=r"class 'Halved' is not one that a bundle may name .*also="
    ):
        rebuild(described)
    with pytest.raises(
        BundleError, match=r"Halved: not one of the classes.*also=\[Halved\]"
    ):
        describe_module(Halved([4, 4]))
    with pytest.raises(BundleError, match="Forgetful must be Recorded"):
        describe_module(Forgetful(), also=[Forgetful])


def test_a_class_of_ones_own_cannot_take_the_name_of_ours() -> None:
    taken = type("Tower", (Halved,), {})
    with pytest.raises(BundleError, match="a name of its own"):
        rebuild(describe_module(DotProduct([4, 4])), also=[taken])


@pytest.mark.parametrize(
    ("description", "message"),
    [
        (
            {"class": "os.system", "arguments": {"command": "true"}},
            "class 'os.system' is not one",
        ),
        (
            {"class": "DotProduct", "arguments": {"widths": [4, 4], "hook": "x"}},
            "DotProduct cannot be made of",
        ),
        ({"class": "DotProduct", "arguments": {"widths": [4, 5]}}, "equal width"),
        ({"class": "DotProduct"}, "neither a class with arguments nor a mapping"),
        ({"class": ["DotProduct"], "arguments": {}}, "neither a class with arguments"),
        ({"class": "Compression", "arguments": {}}, "describes no module"),
        ([1, 2], "describes no module"),
        ("DotProduct", "describes no module"),
        (
            {"class": "TopMLP", "arguments": {"widths": [4, 4], "hidden": [2**40]}},
            r"hidden=1,099,511,627,776 is beyond",
        ),
        (
            {"class": "TopMLP", "arguments": {"widths": [4, 4], "hidden": [1] * 5000}},
            "a list of 5,000 entries",
        ),
        (
            {"class": "DeepCross", "arguments": {"widths": [4, 4], "layers": 10**6}},
            "layers=1,000,000 is beyond the 256",
        ),
        (
            {"class": "MultiTaskTop", "arguments": {"widths": [4, 4], "tasks": 10**9}},
            "tasks=1,000,000,000 is beyond",
        ),
        (
            {"class": "Cosine", "arguments": {"widths": [4, 4], "temperature": "0"}},
            "Cosine cannot be made",
        ),
        (
            {"class": "TopMLP", "arguments": {"widths": [4, 4], "activation": "exec"}},
            "activation='exec'",
        ),
    ],
)
def test_what_is_no_description_is_refused(description: Any, message: str) -> None:
    with pytest.raises(BundleError, match=message):
        rebuild(description)


def test_deep_nesting_is_refused() -> None:
    described: Any = describe_module(DotProduct([4, 4]))
    for _ in range(100):
        described = {
            "class": "Reordered",
            "arguments": {"interaction": described, "order": [0, 1], "widths": [4, 4]},
        }
    with pytest.raises(BundleError, match="nested deeper than"):
        rebuild(described)


def test_a_huge_table_takes_no_memory() -> None:
    table = {
        "name": "t",
        "feature_names": ["t"],
        "num_embeddings": 10**13,
        "embedding_dim": 64,
        "data_type": "FP32",
        "pooling": "SUM",
    }
    tables = [{"class": "EmbeddingBagConfig", "arguments": table}]
    tower = rebuild(
        {"class": "Tower", "arguments": {"tables": tables, "mlp_widths": [2**20]}}
    )
    assert all(value.is_meta for value in tower.state_dict().values())


def test_a_setting_of_a_table_that_no_bundle_holds_is_named() -> None:
    table = EmbeddingBagConfig(
        name="t", feature_names=["t"], num_embeddings=4, embedding_dim=4, need_pos=True
    )
    with pytest.raises(BundleError, match="table 't' has need_pos=True"):
        describe_module(Tower([table], [2]))


def test_an_argument_that_is_no_value_is_named() -> None:
    with pytest.raises(
        BundleError, match=r"Halved\(widths=.*a object cannot be written down"
    ):
        describe_module(Halved([4, object()]), also=[Halved])  # type: ignore[list-item]
