"""Scoring given positions: compiled or not, of whatever dtype and count, as the whole network scores."""

import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from torchrec_ext.models.ncf import NCFHead
from torchrec_ext.modules.interaction import Cosine, DeepCross, DotProduct, TopMLP
from torchrec_ext.retrieval.index.projection import projection
from torchrec_ext.retrieval.scorer.candidates import CandidateScorer
from torchrec_ext.retrieval.store.store import EmbeddingStore
from torchrec_ext.retrieval.store.versions import StoreError
from torchrec_ext.retrieval.store.writer import write_store

ITEMS = 400
INTERACTIONS = {
    "top": lambda: TopMLP([24, 8, 16], (16, 8), normalization="layer"),
    "wide": lambda: TopMLP([32, 16], (32,)),
    "ncf": lambda: NCFHead(6, (10, 5)),
    "dot": lambda: DotProduct([16, 16]),
    "cosine": lambda: Cosine([16, 16]),
    "cross": lambda: DeepCross([16, 16], (8,)),
}
QUERIES = {"top": 32, "wide": 32}


def case(
    name: str, folder: Path, dtype: str = "fp32"
) -> tuple[nn.Module, torch.Tensor, torch.Tensor, EmbeddingStore]:
    torch.manual_seed(3)
    interaction = INTERACTIONS[name]().eval()
    candidates, query = torch.randn(ITEMS, 16), torch.randn(QUERIES.get(name, 16))
    store = write_store(
        folder,
        [(np.arange(ITEMS), projection(interaction, 16).candidates(candidates))],
        dtype=dtype,
    )
    return interaction, query, candidates, store


@pytest.mark.parametrize("name", INTERACTIONS)
def test_as_the_whole_network(name: str, tmp_path: Path) -> None:
    interaction, query, candidates, store = case(name, tmp_path)
    made = projection(interaction, 16)
    expected = interaction.score_all(query[None], candidates)[0].detach()
    scorer = CandidateScorer(made, store, compile="off")
    for count in (0, 1, 2, 300, 7):
        positions = torch.randint(ITEMS, (count,))
        assert torch.allclose(scorer(query, positions), expected[positions], atol=1e-5)


@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "dtype"), [("top", "fp32"), ("ncf", "int8"), ("dot", "fp16")]
)
def test_compiled_as_not_compiled(
    name: str, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For every count; a result is not overwritten by the next; another time it is loaded, not compiled."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    interaction, query, _, store = case(name, tmp_path, dtype)
    made = projection(interaction, 16)
    plain, compiled = (
        CandidateScorer(made, store, compile=mode) for mode in ("off", "auto")
    )
    assert compiled.compiled
    kept = []
    for count in (1, 2, 15, 16, 17, 300, 2_000):
        positions = torch.randint(ITEMS, (count,))
        kept.append((compiled(query, positions), plain(query, positions)))
    assert all(torch.allclose(ours, theirs, atol=1e-5) for ours, theirs in kept)
    for wrong in (ITEMS, -1, 2**62, -(2**63)):
        with pytest.raises(
            ValueError,
            match=f"positions: {wrong} is not a row of this store, which has 400",
        ):
            compiled(query, torch.tensor([0, wrong]))
    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", None)
    assert CandidateScorer(made, store).compiled
    if name != "dot":  # which has no weights: of others there is no code
        with pytest.warns(UserWarning, match="uncompiled"):
            CandidateScorer(projection(INTERACTIONS[name]().eval(), 16), store)


def test_without_a_compiler_it_says_so_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interaction, query, candidates, store = case("wide", tmp_path)
    made = projection(interaction, 16)

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler\nlong story")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.warns(
        UserWarning, match="the top NN runs uncompiled: RuntimeError: no compiler$"
    ):
        scorer = CandidateScorer(made, store)
    assert not scorer.compiled
    expected = interaction.score_all(query[None], candidates)[0].detach()
    assert torch.allclose(scorer(query, torch.arange(ITEMS)), expected, atol=1e-5)


@pytest.mark.unit
@pytest.mark.parametrize("planted", ["owner", "mode", "link", "parent"])
def test_compiled_code_is_loaded_from_a_folder_of_this_user_alone(
    planted: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(cache))
    monkeypatch.setattr(
        torch._inductor,
        "aoti_compile_and_package",
        lambda *_, **__: pytest.fail("it compiles all the same"),
    )
    interaction, _, _, store = case("top", tmp_path / "store")
    named = cache if planted == "parent" else cache / "torchrec_ext"
    named.mkdir(parents=True)
    if planted == "link":
        named.rmdir()
        (tmp_path / "elsewhere").mkdir()
        named.symlink_to(tmp_path / "elsewhere")
    elif planted == "owner" and os.geteuid() == 0:
        os.chown(named, 12_345, -1)
    elif planted == "owner":
        monkeypatch.setattr(os, "geteuid", lambda: 12_345)
    else:
        named.chmod(0o777)
    with pytest.warns(
        UserWarning,
        match=f"compiled code is not loaded from '{named}', user .* remove it, or name another",
    ):
        scorer = CandidateScorer(projection(interaction, 16), store, compile="auto")
    assert not scorer.compiled


def test_refused(tmp_path: Path) -> None:
    interaction, query, _, store = case("wide", tmp_path)
    made = projection(interaction, 16)
    scorer = CandidateScorer(made, store, compile="off")
    with pytest.raises(ValueError, match="positions: -1 is not a row"):
        scorer(query, torch.tensor([3, -1]))
    with pytest.raises(ValueError, match="store: rows are 16 wide, the projection's 4"):
        CandidateScorer(projection(TopMLP([8, 16], (4,)), 16), store)
    with pytest.raises(ValueError, match="compile='yes': must be auto or off"):
        CandidateScorer(made, store, compile="yes")  # type: ignore[arg-type]
    with (store.folder / "rows.bin").open("r+b") as stream:
        stream.truncate(100)
    with pytest.raises(StoreError, match="was changed in place"):
        scorer(query, torch.tensor([3]))
