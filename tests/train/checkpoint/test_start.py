"""A model that has grown begins with what was learned; publish writes one file with the unsharded model's names."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from tests.contracts import gather_state, run_ranks
from tests.examples import DIM, ITEMS, META, USERS, small_model, table
from tests.train.checkpoint.test_plans import losses, made, whole
from torchrec_ext.distributed.runtime import Runtime
from torchrec_ext.models.tower_model import two_tower
from torchrec_ext.train.checkpoint.checkpointer import Checkpointer
from torchrec_ext.train.checkpoint.run import StartConfig, begin_with
from torchrec_ext.train.checkpoint.state import model_state
from torchrec_ext.train.checkpoint.storage import CheckpointError
from torchx_apps.publish import main

COLD, KIND = 3, "row_wise_adagrad"


def grown_model(users: int = USERS + 30) -> Any:
    """The small model with more users, a table more and no history."""
    return two_tower(
        [table("user_id", users), table("country", 7)],
        [table("item_id", ITEMS)],
        user_dense=["age"],
        item_dense=["price"],
        tower_widths=(16, 8),
        device=META,
    )


def saved(runtime: Runtime, folder: str, sharding: str) -> Any:
    model, optimizer = made(runtime, small_model(META), sharding, KIND)
    losses(runtime, model, optimizer, 5, seed=1)
    checkpointer = Checkpointer(folder, runtime)
    state = model_state(model, optimizer)
    checkpointer.save(5, state)
    checkpointer.close()
    return whole(state), gather_state(model)


def begun(runtime: Runtime, path: str, sharding: str) -> Any:
    model, optimizer = made(runtime, grown_model(), sharding, KIND)
    first = gather_state(model)
    checkpointer = Checkpointer(f"{path}-other", runtime)
    together = checkpointer.together
    smaller = made(runtime, grown_model(USERS - 1), sharding, KIND)
    other = made(runtime, grown_model(), "data_parallel", "adam")
    refusals = []
    for (its_model, its_optimizer), partial in (
        ((model, optimizer), False),
        (smaller, True),
        (other, True),
    ):
        with pytest.raises(CheckpointError) as caught:
            begin_with(
                path,
                its_model,
                its_optimizer,
                together,
                StartConfig(path=path, partial=partial),
                {"user_id": COLD},
            )
        refusals.append(str(caught.value))
    untouched = gather_state(model)
    config = StartConfig(path=path, partial=True)
    said = begin_with(path, model, optimizer, together, config, {"user_id": COLD})
    state = whole(model_state(model, optimizer))
    manifest = checkpointer.load(path, model_state(model, optimizer), partial=True)
    assert manifest["step"] == 5
    return {
        "first": first,
        "untouched": untouched,
        "refusals": refusals,
        "state": state,
        "said": said,
    }


@pytest.mark.parametrize(
    ("before", "after"), [("column_wise", "row_wise"), ("row_wise", "data_parallel")]
)
def test_new_rows_begin_as_the_row_for_unknown_ids_and_old_ones_as_they_were(
    before: str, after: str, tmp_path: Path
) -> None:
    was, _ = run_ranks(saved, 2, str(tmp_path), before)[0]
    path = str(tmp_path / "step-0000000005")
    found = run_ranks(begun, 2, path, after)[0]
    users, old = found["state"]["tables.user_id.weight"], was["tables.user_id.weight"]
    assert (
        f"table 'user_id' had {USERS} rows, the others begin as row {COLD}"
        in found["said"]
    )
    assert "tables.country.weight was not saved" in found["said"]
    assert torch.equal(users[:USERS], old)
    assert torch.equal(users[USERS:], old[COLD].expand(30, DIM))
    assert torch.equal(
        found["state"]["tables.item_id.weight"], was["tables.item_id.weight"]
    )
    sums = found["state"]["tables.user_id.sum"]
    assert torch.equal(sums[:USERS].mean(dim=1), was["tables.user_id.sum"].mean(dim=1))
    assert not sums[USERS:].any()
    name = next(name for name in found["first"] if name.endswith("country.weight"))
    assert torch.equal(found["state"]["tables.country.weight"], found["first"][name])
    assert torch.equal(
        found["state"]["dense.interaction.mlp.0.weight"],
        was["dense.interaction.mlp.0.weight"],
    )
    assert all(
        torch.equal(value, found["untouched"][key])
        for key, value in found["first"].items()
    ), "a refusal wrote something"
    differs, smaller, other = found["refusals"]
    assert max(map(len, found["refusals"])) <= 200
    assert "--start.partial true" in differs
    for said in (smaller, other):
        assert "--start.partial" not in said
    assert f"is ({USERS - 1}, 16), saved as ({USERS}, 16)" in smaller
    assert "exp_avg was not saved" in other


def test_a_published_file_is_the_unsharded_models_state_dict(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, trained = run_ranks(
        saved, 2, str(tmp_path / "run" / "checkpoints"), "column_wise"
    )[0]
    file = tmp_path / "model.safetensors"
    assert main([str(tmp_path / "run"), "--out", str(file)]) == 0
    assert "tensors of" in capsys.readouterr().out
    model = small_model(torch.device("cpu"))
    model.load_state_dict(load_file(file), strict=True)
    assert {
        name: tuple(value.shape) for name, value in model.named_parameters()
    }.keys() == trained.keys()
    for name, value in model.named_parameters():
        assert torch.equal(value, trained[name]), name
    assert main([str(tmp_path / "nothing"), "--out", str(file)]) == 1
    assert "is '" in capsys.readouterr().err
