"""adopt() inside of the Trainers of Lightning and Hugging Face: the weights of their own loops.

`pip install --no-deps --target FOLDER lightning transformers accelerate` with what these import brings them,
with FOLDER on PYTHONPATH. Both classes stand in docs/adopt.md.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from torchrec_ext.adopt import adopt

pytestmark = pytest.mark.slow
USERS, ITEMS, B, STEPS = 2_000, 1_000, 64, 24


class Factors(nn.Module):
    """Two tables and a layer over their product."""

    def __init__(self) -> None:
        super().__init__()
        self.user = nn.Embedding(USERS, 8)
        self.item = nn.Embedding(ITEMS, 8)
        self.out = nn.Linear(8, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        return self.out(self.user(user) * self.item(item)).squeeze(-1)


def columns() -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(0)
    rows = B * STEPS
    user, item = (
        torch.randint(size, (rows,), generator=draw) for size in (USERS, ITEMS)
    )
    return user, item, torch.randint(2, (rows,), generator=draw).float()


def furthest(one: nn.Module, other: nn.Module) -> float:
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max(float((a - b).detach().abs().max()) for a, b in pairs)


def lightning_run(folder: Path, adopted: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the module that Lightning's Trainer trained, and what its callbacks saw."""
    lightning = pytest.importorskip(
        "lightning", reason="the package lightning is not installed"
    )
    from lightning.pytorch.callbacks import (
        Callback,
        LearningRateMonitor,
        ModelCheckpoint,
    )
    from lightning.pytorch.loggers import CSVLogger

    class Plain(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.factors = Factors()

        def loss(self, user: Tensor, item: Tensor, label: Tensor) -> Tensor:
            return F.binary_cross_entropy_with_logits(self.factors(user, item), label)

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return self.loss(*batch)

        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.AdamW(self.parameters(), 1e-2)
            return [optimizer], [
                {
                    "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5),
                    "interval": "epoch",
                }
            ]

    class Adopted(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.automatic_optimization = False

        def on_train_start(self) -> None:
            self.adopted = adopt(
                self.factors, self.optimizers().optimizer, self.loss, compile="require"
            )

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss, _ = self.adopted(*batch)
            counted = self.optimizers()
            counted.zero_grad()
            counted.step()  # no gradient is left: it counts trainer.global_step
            return loss

        def on_train_epoch_end(self) -> None:
            self.lr_schedulers().step()

    seen: dict[str, Any] = {"losses": []}

    class Watching(Callback):
        def on_train_batch_end(
            self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int
        ) -> None:
            seen["losses"].append(float(outputs["loss"]))

    torch.manual_seed(0)
    module = (Adopted if adopted else Plain)()
    saves = ModelCheckpoint(folder, every_n_train_steps=10, save_top_k=-1)
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=2,
        callbacks=[Watching(), saves, LearningRateMonitor()],
        logger=CSVLogger(folder),
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(TensorDataset(*columns()), B))
    seen |= {
        "steps": trainer.global_step,
        "saved": sorted(path.name for path in folder.glob("*.ckpt")),
    }
    seen["way"] = module.adopted.describe() if adopted else ""
    state = torch.load(next(folder.glob("*step=40*.ckpt")), weights_only=False)
    seen["of step 40"] = {
        name.removeprefix("factors."): tensor
        for name, tensor in state["state_dict"].items()
    }
    return module.factors, seen


class Columns(Dataset[dict[str, Tensor]]):
    """Rows as Hugging Face's Trainer takes them."""

    def __init__(self) -> None:
        self.columns = dict(zip(("user", "item", "labels"), columns(), strict=True))

    def __len__(self) -> int:
        return B * STEPS

    def __getitem__(self, row: int) -> dict[str, Tensor]:
        return {name: column[row] for name, column in self.columns.items()}


class WithLoss(nn.Module):
    """A model that returns its loss, as Hugging Face's Trainer asks of it."""

    def __init__(self) -> None:
        super().__init__()
        self.factors = Factors()

    def forward(self, user: Tensor, item: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.factors(user, item)
        return {
            "loss": F.binary_cross_entropy_with_logits(logits, labels),
            "logits": logits,
        }


def hugging_face_run(folder: Path, adopted: bool) -> tuple[nn.Module, dict[str, Any]]:
    """Returns the model that Hugging Face's Trainer trained, and what its callback saw."""
    transformers = pytest.importorskip(
        "transformers", reason="the package transformers is not installed"
    )
    pytest.importorskip("accelerate", reason="the package accelerate is not installed")
    seen: dict[str, Any] = {"losses": [], "steps": 0}

    class Watching(transformers.TrainerCallback):
        def on_log(
            self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any
        ) -> None:
            seen["losses"] += [logs["loss"]] if "loss" in logs else []

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            seen["steps"] += 1

    class Adopted(transformers.Trainer):
        adopted: Callable[..., Any] | None = None

        def training_step(
            self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None
        ) -> Tensor:
            if self.adopted is None:
                loss = lambda inputs: model(**inputs)["loss"]  # noqa: E731
                clip_norm = self.args.max_grad_norm
                self.adopted = adopt(
                    model,
                    self.optimizer.optimizer,
                    loss,
                    clip_norm=clip_norm,
                    compile="require",
                )
            loss, _ = self.adopted(self._prepare_inputs(inputs))
            self.optimizer.zero_grad()  # the Trainer's own step finds no gradient
            return loss

    torch.manual_seed(0)
    model = WithLoss()
    settings = transformers.TrainingArguments(
        str(folder),
        per_device_train_batch_size=B,
        num_train_epochs=2,
        learning_rate=1e-2,
        weight_decay=0.01,
        logging_steps=1,
        save_steps=40,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    kind = Adopted if adopted else transformers.Trainer
    trainer = kind(model, settings, train_dataset=Columns(), callbacks=[Watching()])
    trainer.train()
    seen["way"] = trainer.adopted.describe() if adopted else ""
    seen["saved"] = sorted(path.name for path in folder.iterdir())
    return model, seen


@pytest.mark.parametrize(
    ("run", "near"),
    # Hugging Face logs four digits.
    [(lightning_run, 1e-5), (hugging_face_run, 2e-4)],
)
def test_a_trainer_with_one_adopted_step_trains_as_its_own(
    run: Callable[..., tuple[nn.Module, dict[str, Any]]], near: float, tmp_path: Path
) -> None:
    plain, seen = run(tmp_path / "plain", adopted=False)
    adopted, also = run(tmp_path / "adopted", adopted=True)
    assert also["way"].startswith("captured since step 3")
    assert furthest(plain, adopted) < 1e-5
    assert (also["steps"], also["saved"]) == (seen["steps"], seen["saved"])
    assert also["steps"] == 2 * STEPS
    assert also["losses"] == pytest.approx(seen["losses"], abs=near)
    for name, tensor in seen.get("of step 40", {}).items():
        torch.testing.assert_close(also["of step 40"][name], tensor, atol=1e-5, rtol=0)
