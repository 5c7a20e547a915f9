"""Models of four packages as their own trainers train them, on generated data: the builders of zoo.py.

A builder makes the data of one model, and returns a function that makes the model, its optimizers and its loss anew.
Sizes of layers are those of each package's own examples or of its Config; optimizer, learning rate, decay, losses and
clipping are read from its trainer.
"""

from __future__ import annotations

import ast
import copy
import functools
import importlib
import inspect
import itertools
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import MagicMock

import numpy as np
import torch
from torch import Tensor, nn


class Size(NamedTuple):
    """Sizes of the data: ids of users and items, rows of a batch (None for the package's default), ids of a list."""

    users: int = 20_000
    items: int = 10_000
    rows: int | None = None
    length: int = 20


class Case(NamedTuple):
    """A model in training, and the arguments of its loss, by batch."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    loss: Callable[..., Tensor]
    batches: list[tuple[Any, ...]]
    clip_norm: float = 0.0


# of a model's name, sizes and the number of batches
Builder = Callable[[str, Size, int], Callable[[], Case]]


class CannotBuildError(Exception):
    """A model has no case here, for a reason that is not the package's."""


def class_names(file: Path, base: str = "") -> Iterator[str]:
    """Yields the classes that a file defines, or those whose bases name ``base``."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.ClassDef) and base in " ".join(
            map(ast.unparse, node.bases)
        ):
            yield node.name


def exported(file: Path) -> list[str]:
    """Returns the names in ``__all__`` of a file."""
    for node in ast.parse(file.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return list(ast.literal_eval(node.value))
    raise ValueError(f"{file} has no __all__")


def ids(draw: torch.Generator, high: int, *shape: int) -> Tensor:
    """Draws ids from 1 to ``high`` - 1."""
    return torch.randint(1, high, shape, generator=draw)


def padded(draw: torch.Generator, high: int, rows: int, length: int) -> Tensor:
    """Draws lists of ids, (rows, length), with zeros after a random length of 1 or more."""
    lengths = ids(draw, length + 1, rows, 1)
    return ids(draw, high, rows, length) * (torch.arange(length) < lengths)


# torch-rechub


def rechub_names(folder: Path) -> list[str]:
    models = folder / "torch_rechub" / "models"
    return [
        *(
            name
            for file in sorted(models.glob("*/__init__.py"))
            for name in exported(file)
        ),
        "DSSM-SENet",
    ]


def rechub(name: str, size: Size, count: int) -> Callable[[], Case]:
    """Models of torch-rechub with CTRTrainer, MatchTrainer, MTLTrainer, SeqTrainer or RQVAETrainer."""
    if name == "TIGERModel":
        raise CannotBuildError(
            "needs the package transformers, whose own Trainer trains it"
        )
    rows, draw = size.rows or 256, torch.Generator().manual_seed(1)

    def batch() -> dict[str, Tensor]:
        made = {
            "user_id": ids(draw, size.users, rows),
            "age": ids(draw, 9, rows),
            "dense": torch.rand(rows),
        }
        made |= {
            each: ids(draw, size.items, rows) for each in ("item_id", "neg_item_id")
        }
        hist = padded(draw, size.items, rows, size.length)
        made |= {"hist": hist, "seq": hist, "negatives": ids(draw, size.items, rows, 3)}
        made |= {
            each: ids(draw, size.items, rows, size.length) * (hist > 0)
            for each in ("neg_hist", "pos", "neg")
        }
        made |= {
            "weight": torch.rand(rows) + 0.1,
            "seconds": torch.rand(rows, size.length) * 1e5,
        }
        return made | {
            "label": torch.randint(2, (rows,), generator=draw).float(),
            "vector": torch.randn(rows, 64),
        }

    batches = [(batch(),) for _ in range(count)]
    return lambda: _rechub_case(name, size, rows, copy.deepcopy(batches))


def _rechub_case(
    name: str, size: Size, rows: int, batches: list[tuple[Any, ...]]
) -> Case:
    from torch_rechub.basic.features import DenseFeature, SequenceFeature, SparseFeature

    def sequence(column: str, table: str | None = "item_id") -> Any:
        return SequenceFeature(
            column, size.items, 16, pooling="concat", shared_with=table, padding_idx=0
        )

    user = [SparseFeature("user_id", size.users, 16), SparseFeature("age", 9, 16)]
    item = [SparseFeature("item_id", size.items, 16, padding_idx=0)]
    dense = [DenseFeature("dense")]
    sparse = [*user, *item]
    layers = {"dims": [64, 32], "dropout": 0.2, "activation": "relu"}
    hist, negatives = [sequence("hist")], [sequence("negatives")]
    tower, towers = {"dims": [32, 16]}, [{"dims": [8]}, {"dims": [8]}]
    two = ["classification"] * 2
    apart = [SparseFeature("neg_item_id", size.items, 16, shared_with="item_id")]
    crossed = [SparseFeature(each.name, each.vocab_size * 3, 10) for each in sparse]
    linear = [SparseFeature(each.name, each.vocab_size, 1) for each in sparse]
    lists = (user, hist, item, negatives)
    sessions = [sequence("seq", None), sequence("pos", "seq"), sequence("neg", "seq")]
    ranking: dict[str, tuple[Any, ...]] = {
        "WideDeep": (dense, sparse, layers),
        "DeepFM": (dense, sparse, layers),
        "DCN": (sparse + dense, 3, layers),
        "DCNv2": (sparse + dense, 3, layers),
        "EDCN": (sparse, 3, layers),
        "AFM": (sparse, 16),
        "FiBiNet": (sparse, layers),
        "DeepFFM": (linear, crossed, 10, layers),
        "FatDeepFFM": (linear, crossed, 10, 1, layers),
        "BST": (user, hist, item, layers),
        "DIN": (user, hist, item, {"dims": [64, 32]}, {"dims": [64, 32]}),
        "DIEN": (user, hist, [sequence("neg_hist")], item, {"dims": [64, 32]}),
        "AutoInt": (sparse, dense, 3, 2, 0.0, layers),
    }
    matching: dict[str, tuple[int, tuple[Any, ...]]] = {
        "DSSM": (0, (user, item, tower, tower)),
        "DSSM-SENet": (0, (user, item, tower, tower)),
        "FaceBookDSSM": (1, (user, item, apart, tower, tower)),
        "YoutubeDNN": (2, (user, item, negatives, tower)),
        "YoutubeSBC": (2, (user, item, [DenseFeature("weight")], tower, tower, rows)),
        "MIND": (2, (*lists, size.length)),
        "GRU4Rec": (2, (*lists, tower)),
        "NARM": (2, (sequence("hist", None), 16, 0.25, 0.5)),
        "SASRec": (1, (sessions, size.length)),
        "SINE": (
            2,
            (
                ["hist"],
                ["item_id"],
                ["negatives"],
                size.items,
                16,
                32,
                10,
                2,
                size.length,
            ),
        ),
        "STAMP": (2, (sequence("hist", None), 0.05, 0.002)),
        "ComirecDR": (2, (*lists, size.length)),
        "ComirecSA": (2, lists),
    }
    multi_task: dict[str, tuple[Any, ...]] = {
        "SharedBottom": (sparse, two, {"dims": [32]}, towers),
        "ESMM": (user, item, tower, tower),
        "MMOE": (sparse, two, 4, {"dims": [16]}, towers),
        "PLE": (sparse, two, 1, 2, 1, {"dims": [16]}, towers),
        "AITM": (sparse, 2, tower, towers),
    }
    module = (
        "matching.dssm_senet"
        if name == "DSSM-SENet"
        else _group_of(name, ranking, matching, multi_task)
    )
    kind = getattr(
        importlib.import_module(f"torch_rechub.models.{module}"),
        name.removesuffix("-SENet"),
    )
    trainers = importlib.import_module("torch_rechub.trainers")
    if name in ranking:
        trainer = trainers.CTRTrainer(kind(*ranking[name]), loss_mode=name != "DIEN")
        return _trained_by(trainer, functools.partial(_rechub_ctr, trainer), batches)
    if name in matching:
        mode, arguments = matching[name]
        trainer = trainers.MatchTrainer(kind(*arguments), mode)
        # else the first of the scores
        answer = "item_id" if name in ("NARM", "STAMP") else ""
        return _trained_by(
            trainer, functools.partial(_rechub_match, trainer, answer), batches
        )
    if name in multi_task:
        trainer = trainers.MTLTrainer(
            kind(*multi_task[name]), two + two[:1] if name == "ESMM" else two
        )
        return _trained_by(trainer, functools.partial(_rechub_tasks, trainer), batches)
    if name == "RQVAEModel":
        rqvae = importlib.import_module("torch_rechub.trainers.rqvae_trainer").Trainer
        trainer = rqvae(kind(64, [32, 32], 16, [48], sk_epsilons=[0.0, 0.003]))
        return _trained_by(trainer, functools.partial(_rechub_rqvae, trainer), batches)
    sizes = {"d_model": 64, "n_heads": 2, "n_layers": 2, "max_seq_len": size.length}
    model = (
        kind(torch.randn(size.items, 64), size.items, **sizes)
        if name == "HLLMModel"
        else kind(size.items, **sizes)
    )
    trainer = importlib.import_module("torch_rechub.trainers.seq_trainer").SeqTrainer(
        model
    )
    return _trained_by(trainer, functools.partial(_rechub_sequence, trainer), batches)


def _group_of(name: str, ranking: Any, matching: Any, multi_task: Any) -> str:
    groups = {"ranking": ranking, "matching": matching, "multi_task": multi_task}
    return next(
        (group for group, names in groups.items() if name in names), "generative"
    )


def _trained_by(
    trainer: Any, loss: Callable[..., Tensor], batches: list[tuple[Any, ...]]
) -> Case:
    trainer.model.train()
    return Case(trainer.model, [trainer.optimizer], loss, batches)


def _rechub_ctr(trainer: Any, batch: dict[str, Tensor]) -> Tensor:
    scores, label = trainer.model(batch), batch["label"]
    loss = (
        trainer.criterion(scores, label)
        if trainer.loss_mode
        else trainer.criterion(scores[0], label) + scores[1]
    )
    return loss + trainer.reg_loss_fn(trainer.model)  # type: ignore[no-any-return]


def _rechub_match(trainer: Any, answer: str, batch: dict[str, Tensor]) -> Tensor:
    scores = trainer.model(batch)
    if trainer.mode == 1:
        # SASRec's are lists, which BPRLoss refuses
        loss = trainer.criterion(*(each.flatten() for each in scores))
    elif trainer.mode == 2:
        loss = trainer.criterion(
            scores,
            batch[answer] if answer else torch.zeros(len(scores), dtype=torch.long),
        )
    else:
        loss = trainer.criterion(scores, batch["label"])
    return loss + trainer.reg_loss_fn(trainer.model)  # type: ignore[no-any-return]


def _rechub_tasks(trainer: Any, batch: dict[str, Tensor]) -> Tensor:
    scores, label = trainer.model(batch), batch["label"]
    losses = [
        loss_fn(scores[:, task], label) for task, loss_fn in enumerate(trainer.loss_fns)
    ]
    whole_space = type(trainer.model).__name__ == "ESMM"
    loss = sum(losses[1:]) if whole_space else sum(losses) / trainer.n_task
    return loss + trainer.reg_loss_fn(trainer.model)  # type: ignore[no-any-return]


def _rechub_rqvae(trainer: Any, batch: dict[str, Tensor]) -> Tensor:
    out, quantized, _ = trainer.model(batch["vector"])
    return trainer.model.compute_loss(out, quantized, xs=batch["vector"])[0]  # type: ignore[no-any-return]


def _rechub_sequence(trainer: Any, batch: dict[str, Tensor]) -> Tensor:
    scores = trainer.model(batch["seq"], batch["seconds"])
    return trainer._compute_next_token_loss(scores, batch["seq"], batch["item_id"])  # type: ignore[no-any-return]


# DeepCTR-Torch


def deepctr_names(folder: Path) -> list[str]:
    files = sorted((folder / "deepctr_torch" / "models").rglob("*.py"))
    return [name for file in files for name in class_names(file, "BaseModel")]


def deepctr(name: str, size: Size, count: int) -> Callable[[], Case]:
    """Models of DeepCTR-Torch with the loop of BaseModel.fit, compiled for Adam and binary_crossentropy."""
    rows, draw = size.rows or 256, torch.Generator().manual_seed(1)
    from deepctr_torch.inputs import DenseFeat, SparseFeat, VarLenSparseFeat

    sizes = {"user_id": size.users, "item_id": size.items, "age": 9, "gender": 3}
    columns: list[Any] = [SparseFeat(column, high) for column, high in sizes.items()]
    sessions, dense = name in ("DIN", "DIEN"), name not in ("AFM", "CCPM")
    columns += [DenseFeat("score")] if dense else []
    if sessions:
        table = SparseFeat("hist_item_id", size.items, embedding_name="item_id")
        columns.append(VarLenSparseFeat(table, size.length, length_name="seq_length"))

    def batch() -> tuple[Tensor, Tensor]:
        made = [ids(draw, high, rows, 1).float() for high in sizes.values()]
        made += [torch.rand(rows, 1)] if dense else []
        if sessions:
            hist = padded(draw, size.items, rows, size.length)
            made += [hist.float(), (hist > 0).sum(1, keepdim=True).float()]
        return torch.cat(made, 1), torch.randint(2, (rows, 2), generator=draw).float()

    batches = [batch() for _ in range(count)]

    def case() -> Case:
        kind = getattr(importlib.import_module("deepctr_torch.models"), name)
        given = {
            "linear_feature_columns": columns,
            "dnn_feature_columns": columns,
            "region_feature_columns": columns,
        }
        given["history_feature_list"] = ["item_id"]
        model = kind(
            **{
                key: given[key]
                for key in inspect.signature(kind).parameters
                if key in given
            }
        )
        tasks = getattr(model, "num_tasks", 1)
        model.compile(
            "adam",
            "binary_crossentropy" if tasks == 1 else ["binary_crossentropy"] * tasks,
        )
        model.train()
        return Case(
            model,
            [model.optim],
            functools.partial(_deepctr_loss, model, tasks),
            copy.deepcopy(batches),
        )

    return case


def _deepctr_loss(model: Any, tasks: int, x: Tensor, y: Tensor) -> Tensor:
    scores = model(x)
    if tasks > 1:
        losses = [
            each(scores[:, task], y[:, task], reduction="sum")
            for task, each in enumerate(model.loss_func)
        ]
        loss = sum(losses)
    else:
        loss = model.loss_func(scores.squeeze(-1), y[:, 0], reduction="sum")
    return loss + model.get_regularization_loss() + model.aux_loss  # type: ignore[no-any-return]


# FuxiCTR

_RAY = "ray.data.datasource.filename_provider"


def fuxictr_names(folder: Path) -> list[str]:
    files = sorted((folder / "model_zoo").rglob("*.py"))
    return [
        file.stem
        for file in files
        if file.stem == file.parent.name and file.stem in class_names(file)
    ]


def fuxictr(name: str, size: Size, count: int) -> Callable[[], Case]:
    """Models of FuxiCTR's model_zoo, as far as its distribution has them, with the loop of BaseModel.fit."""
    for unused in (
        "polars",
        "h5py",
        *itertools.accumulate(_RAY.split("."), "{}.{}".format),
    ):
        # which its metrics and its own loaders import
        sys.modules.setdefault(unused, MagicMock())
    # they look for 50 of more
    rows, draw, length = (size.rows or 256, torch.Generator().manual_seed(1), 60)
    from fuxictr.features import FeatureMap

    features = FeatureMap("zoo", tempfile.gettempdir())
    sizes = {
        "user_id": (size.users, "user"),
        "item_id": (size.items, "item"),
        "cate_id": (100, "item"),
    }
    for column, (high, source) in sizes.items():
        spec = {
            "type": "categorical",
            "source": source,
            "vocab_size": high,
            "padding_idx": 0,
        }
        features.features[column] = spec
    features.labels, features.default_emb_dim, features.num_fields = ["label"], 16, 3
    features.set_column_index()

    def batch() -> tuple[Any, ...]:
        hist = padded(draw, size.items, rows, length).flip(1)
        items = torch.cat([hist, ids(draw, size.items, rows, 1)], 1).flatten()
        label = torch.randint(2, (rows,), generator=draw)
        of_user = {"label": label, "user_id": ids(draw, size.users, rows)}
        return of_user, {"item_id": items, "cate_id": items % 100}, (hist > 0).float()

    batches = [(batch(),) for _ in range(count)]

    def case() -> Case:
        kind = getattr(
            importlib.import_module(f"model_zoo.LongCTR.{name}.{name}"), name
        )
        of_trainer = {
            "optimizer": "adam",
            "loss": "binary_cross_entropy",
            "verbose": 0,
            "model_root": "",
        }
        model = kind(
            features,
            embedding_dim=16,
            metrics=["AUC"],
            parallel_dnn_hidden_units=[64, 32],
            **of_trainer,
        )
        model.train()
        limit = inspect.signature(model.fit).parameters["max_gradient_norm"].default
        loss = functools.partial(_fuxictr_loss, model)
        return Case(model, [model.optimizer], loss, copy.deepcopy(batches), limit)

    return case


def _fuxictr_loss(model: Any, batch: tuple[Any, ...]) -> Tensor:
    return model.compute_loss(model(batch), model.get_labels(batch))  # type: ignore[no-any-return]


# RecBole

_RECBOLE_UNBUILT = {
    "lightgbm": "is a lightgbm.Booster, no nn.Module",
    "xgboost": "is an xgboost.Booster, no nn.Module",
    "KGAT": "needs the package dgl",
    "KGIN": "needs the package torch_scatter",
    "MCCLK": "needs the package torch_scatter",
    "NCEPLRec": "learns without gradients",
}


def recbole_names(folder: Path) -> list[str]:
    files = sorted((folder / "recbole" / "model").glob("*_recommender/*.py"))
    names = [(file.stem, name) for file in files for name in class_names(file)]
    return [name for stem, name in names if name.lower() == stem]


def recbole(name: str, size: Size, count: int) -> Callable[[], Case]:
    """Models of RecBole over its own Config, Dataset and loaders, with the loss and the optimizer of its Trainer."""
    if name.lower() in _RECBOLE_UNBUILT or name in _RECBOLE_UNBUILT:
        raise CannotBuildError(
            _RECBOLE_UNBUILT.get(name) or _RECBOLE_UNBUILT[name.lower()]
        )
    import yaml
    from recbole.config import Config
    from recbole.data import create_dataset, data_preparation
    from recbole.utils import KGDataLoaderState, ModelType, get_model, get_trainer

    kind = get_model(name)
    if kind.type == ModelType.TRADITIONAL:
        raise CannotBuildError("learns without gradients")
    defaults = yaml.safe_load(
        (
            Path(inspect.getfile(Config)).parents[1] / f"properties/model/{name}.yaml"
        ).read_text()
    )
    folder = tempfile.mkdtemp()
    _write_atomic_files(Path(folder, "zoo"), size)
    settings: dict[str, Any] = {
        "data_path": folder,
        "use_gpu": False,
        "show_progress": False,
        "state": "ERROR",
    }
    settings["load_col"] = {"inter": ["user_id", "item_id", "rating", "timestamp"]}
    settings |= {"checkpoint_dir": folder, "MAX_ITEM_LIST_LENGTH": size.length}
    if size.rows:
        settings["train_batch_size"] = size.rows
    if kind.type in (ModelType.CONTEXT, ModelType.SEQUENTIAL):
        settings["load_col"] |= {
            "user": ["user_id", "age"],
            "item": ["item_id", "class"],
        }
    if kind.type == ModelType.CONTEXT:
        settings["threshold"] = {"rating": 3}
    if kind.type == ModelType.SEQUENTIAL and (defaults or {}).get("loss_type") == "CE":
        settings["train_neg_sample_args"] = None
    if kind.type == ModelType.KNOWLEDGE or name == "KSR":
        settings["load_col"] |= {
            "kg": ["head_id", "relation_id", "tail_id"],
            "link": ["item_id", "entity_id"],
        }
    if name in ("KSR", "GRU4RecKG"):
        settings["load_col"] |= {
            "ent": ["ent_id", "ent_emb"],
            "rel": ["rel_id", "rel_emb"],
        }
        settings["load_col"] |= {
            "kg": ["head_id", "relation_id", "tail_id"],
            "link": ["item_id", "entity_id"],
        }
        settings["eval_args"] = {
            "split": {"LS": "valid_and_test"},
            "order": "TO",
            "mode": "full",
        }
        settings |= {
            "additional_feat_suffix": ["ent", "rel"],
            "alias_of_entity_id": ["ent_id"],
        }
        settings |= {
            "preload_weight": {"ent_id": "ent_emb", "rel_id": "rel_emb"},
            "alias_of_relation_id": ["rel_id"],
        }
    sys.argv = sys.argv[:1]  # which Config reads
    config = Config(name, "zoo", config_dict=settings)
    dataset = create_dataset(config)
    loader, *_ = data_preparation(config, dataset)
    training = loader._dataset  # as its run_recbole takes it
    if kind.type == ModelType.KNOWLEDGE:
        loader.set_mode(
            KGDataLoaderState.RS if name == "MKR" else KGDataLoaderState.RSKG
        )
    found = [dict(each.interaction) for each in itertools.islice(loader, count + 1)]
    shapes = {key: value.shape for key, value in found[0].items()}
    alike = [
        (each,)
        for each in found
        if {key: value.shape for key, value in each.items()} == shapes
    ]
    batches = list(itertools.islice(itertools.cycle(alike), count))

    def case() -> Case:
        model = kind(config, training)
        trainer = get_trainer(config["MODEL_TYPE"], name)(config, model)
        if name == "NCL":
            model.e_step()
        optimizer = trainer.optimizer_encoder if name == "RecVAE" else trainer.optimizer
        model.train()
        limit = (trainer.clip_grad_norm or {}).get("max_norm", 0.0)
        return Case(
            model,
            [optimizer],
            functools.partial(_recbole_loss, name, model),
            copy.deepcopy(batches),
            limit,
        )

    return case


def _recbole_loss(name: str, model: Any, columns: dict[str, Tensor]) -> Tensor:
    from recbole.data.interaction import Interaction

    call = model.calculate_rs_loss if name == "MKR" else model.calculate_loss
    losses = call(
        Interaction(columns), **({"encoder_flag": True} if name == "RecVAE" else {})
    )
    if name == "NCL":
        losses = losses[:-1]  # in its first epochs
    return sum(losses) if isinstance(losses, tuple) else losses  # type: ignore[return-value]


def _write_atomic_files(folder: Path, size: Size) -> None:
    """Writes ratings in which each user has three items and a thousand users 40 more, attributes and a graph."""
    draw, folder_name = np.random.default_rng(1), folder.name
    folder.mkdir()
    users = np.concatenate(
        [np.tile(np.arange(1, size.users), 3), draw.integers(1, 1001, 40_000)]
    )
    items = np.concatenate(
        [
            np.arange(1, size.items),
            draw.integers(1, size.items, len(users) - size.items + 1),
        ]
    )
    classes = [
        " ".join(map(str, draw.integers(0, 20, draw.integers(1, 4))))
        for _ in range(size.items)
    ]
    vectors = [
        " ".join(f"{value:.4f}" for value in row)
        for row in draw.normal(size=(size.items, 64))
    ]
    triples = zip(
        *(draw.integers(1, high, 30_000) for high in (size.items, 10, size.items)),
        strict=True,
    )
    rows: dict[str, tuple[str, Any]] = {
        "inter": (
            "user_id:token item_id:token rating:float timestamp:float",
            zip(
                users,
                items,
                draw.integers(1, 6, len(users)),
                draw.integers(0, 10**6, len(users)),
                strict=True,
            ),
        ),
        "user": (
            "user_id:token age:token",
            ((user, draw.integers(0, 9)) for user in range(1, size.users)),
        ),
        "item": (
            "item_id:token class:token_seq",
            ((item, classes[item]) for item in range(1, size.items)),
        ),
        "kg": ("head_id:token relation_id:token tail_id:token", triples),
        "link": (
            "item_id:token entity_id:token",
            ((item, item) for item in range(1, size.items)),
        ),
        "ent": (
            "ent_id:token ent_emb:float_seq",
            ((item, vectors[item]) for item in range(1, size.items)),
        ),
        "rel": (
            "rel_id:token rel_emb:float_seq",
            ((item, vectors[item]) for item in range(1, 10)),
        ),
    }
    for suffix, (names, lines) in rows.items():
        text = [
            "\t".join(names.split()),
            *("\t".join(map(str, line)) for line in lines),
        ]
        (folder / f"{folder_name}.{suffix}").write_text("\n".join(text) + "\n")


class Library(NamedTuple):
    """A package: its builder, and a function from the folder of all packages to the names of its models."""

    build: Builder
    names: Callable[[Path], list[str]]


LIBRARIES = {
    "torch-rechub": Library(rechub, rechub_names),
    "deepctr-torch": Library(deepctr, deepctr_names),
    "fuxictr": Library(fuxictr, fuxictr_names),
    "recbole": Library(recbole, recbole_names),
}
