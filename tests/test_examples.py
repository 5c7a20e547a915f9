"""The examples run as they stand, and end with the answer that their data has."""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.contracts import free_ports
from tests.retrieval.small import Small

ROOT = Path(__file__).parents[1]
TWO_RANKS = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]


def run(name: str, *arguments: str, launcher: tuple[str, ...] = ()) -> str:
    """Returns the output of an example."""
    command = [
        sys.executable,
        *launcher,
        str(ROOT / "examples" / f"{name}.py"),
        *arguments,
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        command,
        env=environment,
        capture_output=True,
        text=True,
        timeout=180,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.slow
@pytest.mark.launch
def test_the_notebooks_cells_run_from_top_to_bottom(tmp_path: Path) -> None:
    notebook = json.loads((ROOT / "examples" / "demo.ipynb").read_text())
    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert all(cell["outputs"] for cell in code), "it is kept with its output"
    shell, *others = ("".join(cell["source"]) for cell in code)
    assert shell.startswith("%%bash\n")
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    command = ["bash", "-ec", shell.removeprefix("%%bash\n")]
    subprocess.run(
        command,
        cwd=tmp_path,
        env={**os.environ, "PATH": folders},
        check=True,
        timeout=300,
    )
    program = "\n".join(others)
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    (mean,) = re.findall(r"^mean (\d+\.\d); by chance 0.8$", done.stdout, re.MULTILINE)
    assert float(mean) > 2


@pytest.mark.slow
@pytest.mark.launch
def test_torchrecs_dlrm_learns_what_the_rows_can_tell() -> None:
    text = run("dlrm_hybrid", launcher=tuple(TWO_RANKS))
    assert re.search(r"^user .* row_wise", text, re.MULTILINE)
    (loss,) = re.findall(r"held out log loss (0\.\d+)", text)
    assert float(loss) < 0.45, "0.325 is the least, 0.611 that of no knowledge"


@pytest.mark.slow
@pytest.mark.launch
def test_own_towers_are_trained_exported_and_rank_the_right_items(
    tmp_path: Path,
) -> None:
    text = run("own_two_towers", str(tmp_path))
    assert len(re.findall(r"^  item \d+ of kind 3$", text, re.MULTILINE)) == 10
    assert (tmp_path / "bundle" / "manifest.json").exists()


@pytest.mark.slow
@pytest.mark.launch
def test_two_networks_learn_more_from_each_other() -> None:
    alone, together = (
        ast.literal_eval(line[line.index("{") :])
        for line in run("two_networks").splitlines()
        if line.startswith("log loss")
    )
    assert all(0.5 < together[name] < alone[name] < 0.69 for name in alone)


@pytest.mark.slow
@pytest.mark.launch
def test_the_client_asks_a_served_bundle(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="needs the extra `serve`")
    pytest.importorskip("starlette", reason="needs the extra `serve`")
    pytest.importorskip("prometheus_client", reason="needs the extra `serve`")
    from tests.retrieval.running import serving

    Small().write(tmp_path / "bundle")
    with serving(tmp_path / "bundle") as server:
        lines = run("serve_client", f"http://127.0.0.1:{server.port}").splitlines()
    assert re.fullmatch(r"bundle \w{12}: 50 items, \d+ users", lines[0])
    assert lines[1].startswith("for {")
    assert all(re.fullmatch(r" +-?\d+\.\d{3}  Film \d+", line) for line in lines[2:5])


@pytest.mark.slow
@pytest.mark.launch
def test_the_planned_memory_is_that_of_the_tables_and_their_state() -> None:
    lines = run("plan").splitlines()
    held = [float(line.split()[2]) for line in lines if line.startswith("rank")]
    assert len(held) == 64
    # float32 weights, and one number of row-wise Adagrad for each row
    tables = 312_000_000 * (64 + 1) * 4 / 2**30
    assert tables <= sum(held) < 1.01 * tables


@pytest.mark.slow
def test_a_log_becomes_a_service_and_finished_stages_are_skipped(
    tmp_path: Path,
) -> None:
    pytest.importorskip("duckdb", reason="needs the extra `data`")
    (port,) = free_ports(1)
    made = serve_log(tmp_path / "chain", port)
    assert made["data/summary.json"] < made["run/summary.json"]
    assert serve_log(tmp_path / "chain", port) == made


def serve_log(folder: Path, port: int) -> dict[str, int]:
    """Runs the example until its service answers; returns when each stage's last file was written."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
        "PORT": str(port),
        "PYTHONPATH": str(ROOT),
    }
    bash = shutil.which("bash")
    assert bash is not None
    command = [bash, str(ROOT / "examples" / "log_to_service.sh"), str(folder)]
    with subprocess.Popen(command, env=environment) as script:
        try:
            ready = f"http://127.0.0.1:{port}/readyz"
            while True:
                assert script.poll() is None
                try:
                    with urllib.request.urlopen(ready) as answer:
                        assert answer.status == 200
                    break
                except urllib.error.URLError:
                    time.sleep(0.2)
        finally:
            # The last command has replaced the shell, so the server gets the signal.
            script.send_signal(signal.SIGTERM)
    assert script.returncode == 0
    return {
        name: (folder / name).stat().st_mtime_ns
        for name in ("data/summary.json", "run/summary.json")
    }
