"""Scripts of seven repositories as they train their models, on generated data: the builders `scripts` of zoo.py.

Models, losses and optimizers are those of each repository's own training script. A script that begins to train when it
is imported gives its classes and functions alone. The repositories are cloned with git into the folder of the
packages, at the commits below, where they are not there yet.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import numpy as np
import torch
import torch.nn.functional as F
from harness import checkout
from torch import Tensor, nn
from zoo_models import CannotBuildError, Case, Library, Size, ids, padded

REPOSITORIES = {
    "pytorch-fm": "rixwew/pytorch-fm@f74ad19771eda104e99874d19dc892e988ec53fa",
    "NCF": "guoyang9/NCF@89ff06ffcd2bca6bb773b54925265c208a28d318",
    "SASRec.pytorch": "pmixer/SASRec.pytorch@fde8a9c08febc2c898dc269b1d98ab762c50d2be",
    "BERT4Rec-VAE-Pytorch": "jaywonchung/BERT4Rec-VAE-Pytorch@f66f2534ebfd937778c7174b5f9f216efdebe5de",
    "rtdl": "yandex-research/rtdl@4ca77be57aae445648df63e9ef3a5566b1f0a835",
    "FuxiCTR": "reczoo/FuxiCTR@0245987fdc1d43c36164ea496a02324885a8557a",
    "examples": "pytorch/examples@77f55b912142e11fcfdf5b530231fb9c52f181e8",
}
FACTORIZATION = (
    *("lr", "fm", "hofm", "ffm", "fnn", "wd", "ipnn", "opnn", "dcn"),
    *("nfm", "ncf", "fnfm", "dfm", "xdfm", "afm", "afi", "afn"),
)

# FuxiCTR's models that its distribution lacks; the second row reads lists of ids.
RANKING = (
    *(
        "AFM",
        "AFN",
        "AOANet",
        "APG_DeepFM",
        "AutoInt",
        "CCPM",
        "DCN",
        "DCNv2",
        "DESTINE",
        "DLRM",
        "DNN",
        "DSSM",
    ),
    *(
        "DeepCrossing",
        "DeepFM",
        "DeepIM",
        "EDCN",
        "EulerNet",
        "FFM",
        "FGCNN",
        "FLEN",
        "FM",
        "FiBiNET",
        "FiGNN",
    ),
    *(
        "FinalMLP",
        "FinalNet",
        "FmFM",
        "FwFM",
        "GDCN",
        "HFM",
        "HOFM",
        "InterHAt",
        "LR",
        "LorentzFM",
        "MaskNet",
    ),
    *(
        "MMoE",
        "NFM",
        "ONN",
        "PLE",
        "PNN",
        "PPNet",
        "QNN",
        "SAM",
        "ShareBottom",
        "WideDeep",
        "WuKong",
        "xDeepFM",
    ),
)
LISTS = ("BST", "DIEN", "DIN", "DMIN", "DMR", "TransAct")


def repository(name: str) -> Path:
    """Returns a checkout of a repository, and puts it first on the path."""
    packages = next(
        Path(path) for path in sys.path if (Path(path) / "torch_rechub").exists()
    )
    try:
        folder = checkout(REPOSITORIES[name], packages / "scripts" / name)
    except RuntimeError:
        raise CannotBuildError(
            f"the repository {REPOSITORIES[name]} cannot be cloned"
        ) from None
    sys.path.insert(0, str(folder))
    return folder


def definitions(file: Path) -> ModuleType:
    """Returns the classes and functions of a script, whose other lines are left out."""
    tree = ast.parse(file.read_text())
    kinds = (ast.Import, ast.ImportFrom, ast.ClassDef, ast.FunctionDef)
    tree.body = [node for node in tree.body if isinstance(node, kinds)]
    made = ModuleType(file.stem)
    sys.modules[file.stem], made.__file__ = made, str(file)
    exec(compile(tree, str(file), "exec"), vars(made))
    return made


def without(*modules: str) -> None:
    """Lets imports of modules pass that the training itself does not call."""
    for name in modules:
        sys.modules.setdefault(name, MagicMock())


def adam(model: nn.Module, **options: Any) -> list[torch.optim.Optimizer]:
    return [torch.optim.Adam(model.parameters(), lr=1e-3, **options)]


def factorization(name: str, size: Size, count: int) -> Callable[[], Case]:
    """Models of pytorch-fm with the loop of examples/main.py."""
    folder = repository("pytorch-fm")
    draw = torch.Generator().manual_seed(1)
    rows = size.rows or 2048
    without("lmdb")
    np.long = np.int64  # type: ignore[attr-defined]  # numpy's name of its time
    main = definitions(folder / "examples" / "main.py")
    dataset = main.MovieLens20MDataset.__new__(main.MovieLens20MDataset)
    dataset.field_dims = np.array([size.users, size.items, 100, 9])
    dataset.user_field_idx, dataset.item_field_idx = np.array((0,)), np.array((1,))

    def batch() -> tuple[Tensor, Tensor]:
        columns = [ids(draw, int(high), rows) for high in dataset.field_dims]
        return torch.stack(columns, 1), torch.randint(2, (rows,), generator=draw)

    batches = [batch() for _ in range(count)]

    def case() -> Case:
        model, criterion = main.get_model(name, dataset), nn.BCELoss()
        loss = lambda fields, target: criterion(model(fields), target.float())  # noqa: E731
        return Case(model, adam(model, weight_decay=1e-6), loss, batches)

    return case


def neural_filtering(name: str, size: Size, count: int) -> Callable[[], Case]:
    """NCF with the loop of main.py."""
    folder = repository("NCF")
    draw = torch.Generator().manual_seed(1)
    rows = size.rows or 256
    kind = definitions(folder / "model.py").NCF

    def batch() -> tuple[Tensor, ...]:
        label = torch.randint(2, (rows,), generator=draw)
        return ids(draw, size.users, rows), ids(draw, size.items, rows), label.float()

    batches = [batch() for _ in range(count)]

    def case() -> Case:
        model = kind(size.users, size.items, 32, 3, 0.0, name)
        criterion = nn.BCEWithLogitsLoss()
        return Case(
            model,
            adam(model),
            lambda user, item, label: criterion(model(user, item), label),
            batches,
        )

    return case


def self_attention(name: str, size: Size, count: int) -> Callable[[], Case]:
    """SASRec with the loop of python/main.py, whose batches are numpy arrays."""
    folder = repository("SASRec.pytorch")
    draw = torch.Generator().manual_seed(1)
    rows = size.rows or 128
    kind = definitions(folder / "python" / "model.py").SASRec
    args = {
        "device": "cpu",
        "norm_first": False,
        "hidden_units": 50,
        "maxlen": 50,
        "dropout_rate": 0.2,
    }
    args |= {"num_blocks": 2, "num_heads": 1}

    def batch() -> tuple[Any, ...]:
        lists = [padded(draw, size.items, rows, 50).flip(1).numpy() for _ in range(3)]
        return ids(draw, size.users, rows).numpy(), *lists

    batches = [batch() for _ in range(count)]

    def case() -> Case:
        model = kind(size.users, size.items, SimpleNamespace(**args))
        criterion = nn.BCEWithLogitsLoss()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                nn.init.xavier_normal_(parameter.data)

        def loss(user: Any, seq: Any, pos: Any, neg: Any) -> Tensor:
            pos_logits, neg_logits = model(user, seq, pos, neg)
            pos_labels = torch.ones(pos_logits.shape)
            neg_labels = torch.zeros(neg_logits.shape)
            indices = np.where(pos != 0)
            total: Tensor = criterion(pos_logits[indices], pos_labels[indices])
            return total + criterion(neg_logits[indices], neg_labels[indices])

        return Case(model, adam(model, betas=(0.9, 0.98)), loss, batches)

    return case


def masked_items(name: str, size: Size, count: int) -> Callable[[], Case]:
    """BERT4Rec with the loss of trainers/bert.py."""
    draw, rows = torch.Generator().manual_seed(1), size.rows or 128
    repository("BERT4Rec-VAE-Pytorch")
    without("wget", "tensorboardX", "torch.utils.tensorboard")
    kind = importlib.import_module("models.bert").BERTModel
    args = {
        "model_init_seed": 0,
        "bert_max_len": 50,
        "num_items": 2_000,
        "bert_num_blocks": 2,
        "bert_num_heads": 4,
    }
    args |= {"bert_hidden_units": 64, "bert_dropout": 0.1}

    def batch() -> tuple[Tensor, Tensor]:
        seqs = padded(draw, 2_000, rows, 50).flip(1)
        return seqs, seqs * (torch.rand(seqs.shape, generator=draw) < 0.15)

    batches = [batch() for _ in range(count)]

    def case() -> Case:
        model = kind(SimpleNamespace(**args))
        criterion = nn.CrossEntropyLoss(ignore_index=0)

        def loss(seqs: Tensor, labels: Tensor) -> Tensor:
            logits = model(seqs)
            total: Tensor = criterion(logits.view(-1, logits.size(-1)), labels.view(-1))
            return total

        return Case(model, adam(model), loss, batches)

    return case


def tabular(name: str, size: Size, count: int) -> Callable[[], Case]:
    """FTTransformer of rtdl with its own optimizer, which has two groups of parameters."""
    draw, rows = torch.Generator().manual_seed(1), size.rows or 256
    repository("rtdl")
    kind = importlib.import_module("rtdl").FTTransformer

    def batch() -> tuple[Tensor, ...]:
        label = torch.randint(2, (rows,), generator=draw).float()
        return (
            torch.randn(rows, 8, generator=draw),
            torch.stack([ids(draw, 99, rows), ids(draw, 9, rows)], 1),
            label,
        )

    batches = [batch() for _ in range(count)]

    def case() -> Case:
        model = kind.make_default(
            n_num_features=8,
            cat_cardinalities=[100, 10],
            last_layer_query_idx=[-1],
            n_blocks=2,
            d_out=1,
        )
        loss = lambda x, c, y: F.binary_cross_entropy_with_logits(  # noqa: E731
            model(x, c).squeeze(1), y
        )
        return Case(model, [model.make_default_optimizer()], loss, batches)

    return case


def fuxictr(name: str, size: Size, count: int) -> Callable[[], Case]:
    """Models of FuxiCTR's repository at the defaults of their classes, with the loop of BaseModel.fit."""
    name = name.removeprefix("FuxiCTR ")
    folder = repository("FuxiCTR")
    draw = torch.Generator().manual_seed(1)
    rows = size.rows or 256
    without("polars", "h5py", "keras_preprocessing", "keras_preprocessing.sequence")
    without(
        *itertools.accumulate(
            ["ray", "data", "datasource", "filename_provider"], "{}.{}".format
        )
    )
    from fuxictr.features import FeatureMap

    file = next(
        file
        for file in (folder / "model_zoo").rglob(f"src/{name}.py")
        if "_tf" not in str(file)
    )
    kind = getattr(definitions(file), name)
    features = FeatureMap("zoo", tempfile.gettempdir())
    of_item = {"item_id": size.items, "cate_id": 100}
    for column, high in {"user_id": size.users, **of_item, "btag": 9}.items():
        source = "item" if column in of_item else "user"
        spec = {
            "type": "categorical",
            "source": source,
            "vocab_size": high,
            "padding_idx": 0,
        }
        features.features[column] = spec
    lists = {
        "click": "item_id",
        "neg_click": "item_id",
        "cate": "cate_id",
        "neg_cate": "cate_id",
    }
    of_name = (
        []
        if name not in LISTS
        else [*lists]
        if name in ("DIEN", "DMIN")
        else ["click", "cate"]
    )
    for column, shared in ((column, lists[column]) for column in of_name):
        spec = {
            "type": "sequence",
            "source": "user",
            "vocab_size": of_item[shared],
            "padding_idx": 0,
        }
        features.features[f"{column}_history"] = {
            **spec,
            "max_len": size.length,
            "share_embedding": shared,
        }
    features.labels, features.default_emb_dim = ["label"], 10
    features.num_fields = features.get_num_fields()
    features.set_column_index()

    def batch() -> tuple[dict[str, Tensor]]:
        label = torch.randint(2, (rows,), generator=draw)
        values = {"label": label}
        for column, spec in features.features.items():
            high = spec["vocab_size"]
            is_list = spec["type"] == "sequence"
            values[column] = (
                padded(draw, high, rows, size.length)
                if is_list
                else ids(draw, high, rows)
            )
        return (values,)

    batches = [batch() for _ in range(count)]

    def case() -> Case:
        of_trainer = {
            "optimizer": "adam",
            "loss": "binary_crossentropy",
            "verbose": 0,
            "model_root": "",
            "gpu": -1,
        }
        model = kind(
            features, metrics=["AUC"], task="binary_classification", **of_trainer
        )
        model.train()
        limit = inspect.signature(model.fit).parameters["max_gradient_norm"].default

        def loss(values: dict[str, Tensor]) -> Tensor:
            return model.compute_loss(model(values), model.get_labels(values))  # type: ignore[no-any-return]

        return Case(model, [model.optimizer], loss, batches, limit)

    return case


def example(name: str, size: Size, count: int) -> Callable[[], Case]:
    """Scripts of pytorch/examples with their own losses."""
    folder = repository("examples")
    draw = torch.Generator().manual_seed(1)
    rows = size.rows or 128
    without(
        "torchvision",
        "torchvision.datasets",
        "torchvision.transforms",
        "torchvision.utils",
        "requests",
    )
    main = definitions(folder / name / "main.py")
    if name in ("gcn", "gat"):
        nodes = 500
        features = torch.rand(nodes, 64, generator=draw)
        adjacent = (
            (torch.rand(nodes, nodes, generator=draw) < 0.02).float().fill_diagonal_(1)
        )
        target, chosen = torch.randint(7, (nodes,), generator=draw), torch.arange(140)
        batches: list[tuple[Any, ...]] = [(features, adjacent, target)] * count
    else:
        images = [torch.rand(rows, 1, 28, 28, generator=draw) for _ in range(count)]
        batches = [
            (image, torch.randint(10, (rows,), generator=draw)) for image in images
        ]

    def case() -> Case:
        if name == "vae":
            model = main.VAE()

            def loss(data: Tensor, _: Tensor) -> Tensor:
                recon, mu, logvar = model(data)
                return main.loss_function(recon, data, mu, logvar)  # type: ignore[no-any-return]

            return Case(model, adam(model), loss, batches)
        if name in ("gcn", "gat"):
            model = main.GCN(64, 16, 7) if name == "gcn" else main.GAT(64, 16, 4, 7)
            criterion = nn.NLLLoss()
            of_nodes = lambda x, a, y: criterion(model(x, a)[chosen], y[chosen])  # noqa: E731
            return Case(
                model,
                [torch.optim.Adam(model.parameters(), lr=0.01, weight_decay=5e-4)],
                of_nodes,
                batches,
            )
        model = main.Net()
        loss = lambda data, target: F.nll_loss(model(data), target)  # noqa: E731
        return Case(
            model, [torch.optim.Adadelta(model.parameters(), lr=1.0)], loss, batches
        )

    return case


def apart(name: str, size: Size, count: int) -> Callable[[], Case]:
    """What users wrote around a model: DataParallel, two modules with an optimizer each, weights averaged by hand."""
    draw, rows = torch.Generator().manual_seed(1), size.rows or 256

    def batch() -> tuple[Tensor, ...]:
        label = torch.randint(2, (rows,), generator=draw).float()
        return ids(draw, size.users, rows), ids(draw, size.items, rows), label

    batches = [batch() for _ in range(count)]

    def case() -> Case:
        pair = [
            nn.Sequential(nn.Embedding(high, 16), nn.Linear(16, 16))
            for high in (size.users, size.items)
        ]
        if name == "DataParallel":
            pair = [nn.DataParallel(each) for each in pair]
        model = nn.ModuleList(pair)

        def loss(user: Tensor, item: Tensor, label: Tensor) -> Tensor:
            return F.binary_cross_entropy_with_logits(
                (pair[0](user) * pair[1](item)).sum(1), label
            )

        optimizers: list[torch.optim.Optimizer] = [
            torch.optim.Adam(each.parameters(), 1e-3) for each in pair
        ]
        return Case(model, optimizers, loss, batches)

    return case


BUILDERS: dict[str, Callable[[str, Size, int], Callable[[], Case]]] = {
    **dict.fromkeys(FACTORIZATION, factorization),
    **dict.fromkeys(("GMF", "MLP", "NeuMF-end"), neural_filtering),
    **dict.fromkeys([f"FuxiCTR {name}" for name in (*RANKING, *LISTS)], fuxictr),
    "SASRec": self_attention,
    "BERT4Rec": masked_items,
    "FTTransformer": tabular,
    **dict.fromkeys(("vae", "gcn", "gat", "mnist", "mnist_rnn"), example),
    **dict.fromkeys(("DataParallel", "two modules"), apart),
}
SCRIPTS = Library(
    lambda name, size, count: BUILDERS[name](name, size, count),
    lambda folder: list(BUILDERS),
)
