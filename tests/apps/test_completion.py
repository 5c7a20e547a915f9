"""The completion script, run by bash and zsh without a terminal: components, flags, recipes, keys and values."""

import contextlib
import io
import shutil
import subprocess
from pathlib import Path

import pytest

from torchx_apps import completion

# What the shells set before they call the function, and what they read after it.
_TRY = """
try() { COMP_LINE="$1"; COMP_POINT=${#1}; COMPREPLY=(); %s; echo "${COMPREPLY[*]}"; }
"""
_CALL = {
    "bash": "_torchrec_ext",
    "zsh": "() { emulate -L sh; setopt kshglob noshglob braceexpand; _torchrec_ext; }",
}
LINES = {
    "torchx run rec.tr": "rec.train.hybrid rec.train.networks rec.train.stream",
    ".venv/bin/torchx run rec.train.hybrid --rec": "--recipe",
    "torchx run rec.train.hybrid --recipe n": "n_tower ncf",
    "torchx run rec.train.hybrid -j 1x2 --set train.ep": "train.epochs=",
    "torchx run rec.train.hybrid --recipe bst --set model.pos": "model.position=",
    "torchx run rec.train.hybrid --recipe ncf --set model.pos": "",
    "torchx run rec.train.hybrid --recipe my_recipe.py:job --set model.pos": "model.position=",
    "torchx run rec.data.preprocess --set config.fol": "config.folder=",
    "torchx run rec.data.preprocess --recipe taobao --set config.zo": "config.zone=",
    "torchx run rec.train.stream --recipe two_tower --set data.until": "data.until_idle_s=",
    "torchx run rec.train.hybrid --run_dir ": "",
}
# bash replaces the part behind the last "=" alone.
PARTS = {
    "torchx run rec.train.hybrid --set train.compile=": (
        "train.compile=",
        "auto off require",
    ),
    "torchx run --set=train.compile=a": ("--set=train.compile=", "auto"),
    "torchx run --set=train.ep": ("--set=", "train.epochs="),
    "torchx run rec.train.hybrid --recipe=b": ("--recipe=", "bst"),
}


@pytest.mark.unit
@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_line_is_completed(shell: str, tmp_path: Path) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        assert completion.main([shell]) == 0
    expected = dict(LINES)
    for line, (lead, words) in PARTS.items():
        expected[line] = (
            words
            if shell == "bash"
            else " ".join(lead + word for word in words.split())
        )
    script = (
        out.getvalue()
        + _TRY % _CALL[shell]
        + "".join(f"try '{line}'\n" for line in expected)
    )
    done = subprocess.run(
        [shell, *(["-f"] if shell == "zsh" else [])],
        input=script,
        capture_output=True,
        text=True,
    )
    assert dict(zip(expected, done.stdout.split("\n"), strict=False)) == expected, (
        done.stderr
    )
