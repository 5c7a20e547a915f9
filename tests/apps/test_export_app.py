"""Each recipe ends with a bundle that ranks as its evaluator does, or says why not; so does a run's checkpoint."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from tests.contracts import run_ranks
from tests.settings import with_settings
from torchrec_ext.distributed.parallel import hybrid_parallel
from torchrec_ext.distributed.plan.config import PlanConfig
from torchrec_ext.distributed.plan.planner import plan_sharding
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.retrieval.bundle import Bundle
from torchrec_ext.retrieval.manifest import BundleError
from torchrec_ext.retrieval.search import open_search
from torchrec_ext.schema import BatchSchema
from torchrec_ext.train.config import EarlyStop
from torchrec_ext.train.loop import train
from torchx_apps import export, recipes
from torchx_apps.jobs.exporting import bundle_of_run, export_task
from torchx_apps.jobs.setup import build_model, load_task
from torchx_apps.jobs.training import run_training
from torchx_apps.recipes.by_name import load_recipe
from torchx_apps.recipes.saved_job import saved_job
from torchx_apps.tasks.export_data import ExportData
from torchx_apps.tasks.task import Task

# Of each bundle its recipe, and the settings of its data.
RECIPES: dict[str, tuple[str, ...]] = {
    "session": ("session", "data.name=planted", "data.users=60", "data.items=60"),
    "folder": ("two_tower", "data.name=mine"),
}


def write_folder(root: Path) -> None:
    """A set whose ids begin at 0."""
    rng = np.random.default_rng(0)
    folder = root / "mine"
    folder.mkdir()
    # so many that every item is trained: those that are not tie
    users = np.arange(20).repeat(12)
    items = np.concatenate([rng.permutation(30)[:12] for _ in range(20)])
    context = {
        "hour": [f"{hour}h" for hour in np.arange(len(users)) % 24],
        "price": rng.random(len(users)),
    }
    table = pa.table(
        {
            "user_id": users,
            "item_id": items,
            "timestamp": np.arange(len(users)),
            **context,
        }
    )
    pq.write_table(table, folder / "inter.parquet")


def job_of(name: str, root: Path) -> Any:
    recipe, *settings = RECIPES[name]
    if name != "session":
        settings.append(f"data.folder={root}")
    return with_settings(load_recipe(recipe), settings)


def exported(runtime: Runtime, root: Path) -> dict[str, Any]:
    """Exports a bundle of each of these recipes after one epoch; returns what evaluators recommend."""
    recommended = {}
    for name in RECIPES:
        job = job_of(name, root)
        task = load_task(job, runtime)
        torch.manual_seed(0)
        model = job.build(job.model, task.data)
        schema = model.schema(out_of_range=job.model.out_of_range)
        # Not what the planner likes: TorchRec divides means twice where one collection
        # has row-wise and other tables.
        plan = plan_sharding(model, runtime, PlanConfig(), optimizer=job.optimizer)
        sharded, optimizer = hybrid_parallel(
            model, runtime, plan=plan, optimizer=job.optimizer
        )
        loader = task.loader(
            schema, job.loader, rank=runtime.rank, world_size=runtime.world_size
        )
        train(
            sharded,
            optimizer,
            loader,
            runtime,
            dataclasses.replace(
                job.train, epochs=1, early_stop=EarlyStop(), compile="off"
            ),
        )
        export_task(sharded, task, schema, runtime, root / f"bundle-{name}", details={})
        evaluator = task.evaluator(schema, sharded, runtime)
        if task.data.form == "pairs":
            sharded.eval()
            answer = evaluator.recommend()
            recommended[name] = (
                task.data.values_of("user_id")[answer.user],
                task.data.values_of("item_id")[answer.items].tolist(),
            )
    return recommended


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("sets")
    write_folder(root)
    return root


@pytest.fixture(scope="module")
def recommended(root: Path) -> dict[str, Any]:
    return run_ranks(exported, 1, root, timeout_s=600)[0]  # type: ignore[no-any-return]


def ranked(bundle: Bundle, user: Any, k: int) -> list[Any]:
    """The best items for a user who is named by id alone."""
    users = bundle.users
    assert users is not None
    named = user if isinstance(user, str) else int(user)
    row = int(users.ids.positions([named])[0])
    query = bundle.query.embed([users.features(row)])[0]
    mask = np.ones(len(bundle.items), np.bool_)
    mask[users.seen(row)] = False
    return bundle.items.ids.ids(open_search(bundle).search(query, k, mask).positions)


def test_a_user_who_is_named_by_id_gets_what_the_evaluator_recommends(
    recommended: dict[str, Any], root: Path
) -> None:
    user, items = recommended["folder"]
    bundle = Bundle.load(root / "bundle-folder")
    assert bundle.users is not None
    (row,) = bundle.users.ids.positions([user if isinstance(user, str) else int(user)])
    # The evaluator leaves out what stands before a user's test rows, a service these too.
    seen = bundle.items.ids.ids(bundle.users.seen(int(row)))
    new = [item for item in items if item not in seen]
    assert ranked(bundle, user, len(new)) == new
    # Ids of files that begin at 0 stay what they are.
    assert bundle.items.ids.positions([0]).tolist() == [0]
    for user_row, is_unknown in ((0, False), (-1, True)):
        features = bundle.users.features(user_row)
        read = bundle.query.columns.read([features])
        assert read.unknown["user_id"].tolist() == [is_unknown]
    assert bundle.users.features(0)["user_id"] == 0


def test_a_session_may_be_longer_than_the_model_reads(
    recommended: dict[str, Any], root: Path
) -> None:
    bundle = Bundle.load(root / "bundle-session")
    long = list(range(1, 60)) * 3
    np.testing.assert_allclose(
        bundle.query.embed([{"session": long}]),
        bundle.query.embed([{"session": long[-50:]}]),
    )
    read = bundle.query.columns.read([{"session": [1, 2]}, {"session": [1, 10**6]}])
    assert read.unknown["session"].tolist() == [False, True]
    users = bundle.users
    assert users is not None
    assert len(ranked(bundle, int(users.ids.ids([0])[0]), 5)) == 5
    # What a user named by id took last, which the rows held out, is in the session.
    for user in range(5):
        items = bundle.items.ids.arrow().take(users.seen(user)).to_pylist()
        assert items
        assert set(items) <= set(users.features(user)["session"])


class MyTask(Task):
    """A task whose items cannot be served."""

    def export_data(self, schema: BatchSchema) -> ExportData:
        raise BundleError("the shop has closed")


def refused(runtime: Runtime, root: Path) -> tuple[str, str]:
    small = ("data.name=planted", "data.users=80", "data.items=60")
    job = with_settings(load_recipe("two_tower"), small)
    task = load_task(job, runtime)
    model = job.build(job.model, task.data)
    sharded, _ = hybrid_parallel(model, runtime, optimizer=job.optimizer)
    bare = MyTask(task.data)
    messages = []
    for when in ("require", "auto"):
        try:
            text = bundle_of_run(
                when,  # type: ignore[arg-type]
                sharded,
                bare,
                model.schema(),
                runtime,
                root / "none",
                details={},
            )
            messages.append(text)
        except ValueError as error:
            messages.append(str(error))
    return messages[0], messages[1]


def test_a_task_that_cannot_be_served_is_refused_with_its_reason(
    tmp_path: Path,
) -> None:
    first, second = run_ranks(refused, 1, tmp_path)[0]
    assert "the shop has closed" in first
    assert second == "no bundle: the shop has closed"


@pytest.mark.parametrize("name", recipes.RECIPES)
def test_a_job_is_made_again_from_its_run_folder(name: str, tmp_path: Path) -> None:
    job = with_settings(
        load_recipe(name),
        ["train.epochs=3", "optimizer.dense_lr=0.5", "checkpoint.keep=7"],
    )
    config = dataclasses.asdict(dataclasses.replace(job, build=None, task=None))
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    assert saved_job(tmp_path) == job


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (None, r"config\.json: cannot be read .*name a run folder"),
        ("{", r"config\.json: is not a JSON file"),
        (
            '{"name": "mine"}',
            r"recipe 'mine' is not built in; say where it is: --recipe my_recipe\.py:job",
        ),
        (
            '{"name": "two_tower", "train": {"epochs": -1}}',
            r"does not fit the recipe as it is now .*give what differs",
        ),
    ],
)
def test_a_folder_that_is_no_run_is_told(
    config: str | None, message: str, tmp_path: Path
) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(ValueError, match=message):
        saved_job(tmp_path)


@pytest.mark.slow
@pytest.mark.launch
def test_a_run_ends_with_the_bundle_that_its_checkpoint_gives(tmp_path: Path) -> None:
    sets = [
        "data.name=planted",
        "data.users=80",
        "data.items=60",
        "train.epochs=1",
        "export=require",
        "device=cpu",
    ]
    flags = [f"--{item}" for item in sets]
    run = tmp_path / "run"
    trained = app("train", "--recipe=two_tower", f"--run_dir={run}", *flags)
    assert f"torchx_apps.serve {run / 'bundle'}" in trained.splitlines()[-2]
    output = app("export", str(run), f"--out={tmp_path / 'again'}")
    assert "its logits are the trained model's within" in output
    assert (
        app("export", str(run), f"--out={tmp_path / 'two'}", ranks=2).count(
            "its logits are the trained model's"
        )
        == 1
    )
    bundles = [
        Bundle.load(folder)
        for folder in (run / "bundle", tmp_path / "again", tmp_path / "two")
    ]
    assert len({bundle.manifest.digest for bundle in bundles}) == 1
    assert [bundle.manifest.certificate["ranks"] for bundle in bundles] == [1, 1, 2]
    assert bundles[1].manifest.certificate["checkpoint"].startswith(str(run))


def test_a_bundle_is_of_the_checkpoint_asked_for_and_says_that_its_run_was_worse_than_a_constant(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """At this rate the network learns nothing but the noise of its last rows, each epoch another one."""
    sets = [
        "data.name=planted",
        "train.epochs=9",
        "train.eval_every=1",
        "loader.batch_size=2048",
        "data.ranked=0",
        "checkpoint.keep=9",
    ]
    sets += ["optimizer.tables_lr=1", "optimizer.dense_lr=1", "train.compile=off"]
    sets += [
        f"train.early_stop.{item}" for item in ("metric=auc", "mode=max", "patience=1")
    ]
    run = tmp_path / "run"
    run_training(
        with_settings(load_recipe("contextual_ncf"), [*sets, "device=cpu"]), run
    )
    warning = json.loads((run / "summary.json").read_text())["warning"]
    assert warning.startswith("this model is worse than the same for all by ")
    assert "log_loss (" in warning
    best = json.loads((run / "checkpoints/best.json").read_text())["step"]
    last = max(int(path.name[-10:]) for path in (run / "checkpoints").glob("step-*"))
    assert best < last
    digests = set()
    for name, flags, step in (
        ("none", [], best),
        ("last", ["--checkpoint=last"], last),
    ):
        assert export.main([str(run), f"--out={tmp_path / name}", *flags]) == 0
        manifest = Bundle.load(tmp_path / name).manifest
        assert manifest.certificate["steps"] == step
        assert manifest.certificate["warning"] == warning
        digests.add(manifest.digest)
    assert len(digests) == 2
    assert capfd.readouterr().out.count(f"warning: {warning}\n") == 3, (
        "after the training, and by each bundle"
    )


def app(name: str, *flags: str, ranks: int = 0) -> str:
    """What an app prints, by itself, or under torchrun's agent on so many ranks."""
    agent = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={ranks}"]
        if ranks
        else []
    )
    done = subprocess.run(
        [sys.executable, *agent, "-m", f"torchx_apps.{name}", *flags],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_bundle_is_not_replaced_unasked(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = dataclasses.asdict(
        dataclasses.replace(load_recipe("two_tower"), build=None, task=None)
    )
    (tmp_path / "config.json").write_text(json.dumps(config, default=str))
    (tmp_path / "bundle").mkdir()
    (tmp_path / "bundle" / "notes").touch()
    assert export.main([str(tmp_path)]) == 1
    stderr = capsys.readouterr().err
    assert (
        f"--out {tmp_path / 'bundle'}: there is something already; give another folder, or --overwrite"
        in stderr
    )


def test_towers_that_no_bundle_can_have_are_refused_before_the_first_step() -> None:
    job = with_settings(load_recipe("stream"), ["data.name=planted", "export=require"])
    task = job.task(job.data)
    assert build_model(job, task) is not None, "the towers of the recipe can be served"
    users, items, context = (
        ",".join(task.data.towers[name][0]) for name in ("user", "item", "context")
    )
    towers = [f"model.towers.user={users}", f"model.towers.item={items},{context}"]
    job = with_settings(job, towers)
    with pytest.raises(ValueError, match=r"export=require: .*tower 'item' reads"):
        build_model(job, task)
    assert build_model(with_settings(job, ["export=auto"]), task) is not None
