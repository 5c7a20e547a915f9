"""A bundle's scoring compiled into a folder, served by a C++ program without Python."""

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from torch.utils.cpp_extension import include_paths, library_paths

from tests.retrieval.small_bundle import FIRST_ITEM, SmallBundle
from torchrec_ext.retrieval.bundle.manifest import BundleError
from torchrec_ext.retrieval.scorer.cpp_program import write_compiled
from torchrec_ext.retrieval.scorer.requests import ScoreRequest
from torchrec_ext.retrieval.scorer.scorer import Scorer


@pytest.mark.slow(minutes=1)
@pytest.mark.skipif(shutil.which("g++") is None, reason="no g++")
@pytest.mark.parametrize("store", ["fp32", "int8"])
def test_a_cpp_program_answers_as_the_scorer(
    store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    made = SmallBundle(tmp_path / "bundle", store=store)
    certificate = write_compiled(made.bundle, tmp_path / "compiled")
    assert certificate["bundle"] == made.bundle.manifest.digest
    assert 0 <= certificate["greatest_difference"] < 1e-5
    program = tmp_path / "serve"
    libraries = [f"-L{path}" for path in library_paths()] + [
        f"-Wl,-rpath,{path}" for path in library_paths()
    ]
    command = [
        "g++",
        "-std=c++20",
        "-O1",
        tmp_path / "compiled" / "serve.cpp",
        "-o",
        program,
    ]
    command += [f"-I{path}" for path in include_paths()]
    subprocess.run(
        [*command, *libraries, "-ltorch", "-ltorch_cpu", "-lc10"],
        check=True,
        timeout=300,
    )
    fields = [
        line.split()[1]
        for line in (tmp_path / "compiled" / "inputs.txt").read_text().splitlines()[:3]
    ]
    assert sorted(fields) == ["age", "history", "user_id"]
    requests, lines = [], []
    for user in (0, 1, 5, 70):
        for history in ([], [4], [3, 9, 3]):
            features = {"user_id": user, "age": 0.25, "history": history}
            items = [FIRST_ITEM + item for item in range(user % 3, 49, 7)][: 1 + user]
            requests.append(ScoreRequest(user=features, items=items))
            texts = {**features, "history": " ".join(map(str, history))}
            lines.append(
                "|".join(
                    [*(str(texts[name]) for name in fields), " ".join(map(str, items))]
                )
            )
    lines.append(lines[0].rpartition("|")[0] + "|7")  # an item that the catalogue lacks
    done = subprocess.run(
        [program, tmp_path / "compiled", tmp_path / "bundle"],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    *answers, refused = done.stdout.splitlines()
    assert refused == "refused"
    scorer = Scorer(made.bundle)
    for request, answer in zip(requests, answers, strict=True):
        scores = np.array(list(map(float, answer.split())))
        np.testing.assert_allclose(
            scores, scorer.score(request).scores, rtol=1e-4, atol=1e-5
        )


def test_what_cannot_be_compiled_as_a_whole_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    int8 = SmallBundle(tmp_path / "int8", tables="int8", overlap=0.1).bundle
    with pytest.raises(
        BundleError, match="its scoring cannot be compiled as a whole: that needs fp32"
    ):
        write_compiled(int8, tmp_path / "compiled")

    def fails(*_: object, **__: object) -> None:
        raise RuntimeError("no compiler\nlong story")

    monkeypatch.setattr(torch._inductor, "aoti_compile_and_package", fails)
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "cache"))
    with pytest.raises(BundleError, match=r"not compiled: RuntimeError: no compiler$"):
        write_compiled(SmallBundle(tmp_path / "bundle").bundle, tmp_path / "compiled")
    assert not (tmp_path / "compiled").exists()
