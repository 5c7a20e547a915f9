"""why_slow on programs that no rule was written for: the rows `others` and `others-healthy` of diagnose.py.

    python benchmarks/diagnose_others.py NAME SEED BUDGET_S

`others`: programs with a fault, those of diagnose_faults.py, the demos of TraceML with the cause that each plants, and
recommenders of torch-rechub, DeepCTR-Torch and RecBole as zoo_models.py builds them. A verdict on the latter is right
if the lines of its first finding, which are tried, make the step 1.15 times as fast. Ours is the share of right first
verdicts, of which `noisy` is none.
`others-healthy`: networks of TorchBench and of pytorch/examples at sizes at which a step takes 5 to 200 ms on one
thread, and programs in which an audit found nothing; ours is the number with a finding above "small".
None of these is a part of this package: `brought` clones a pinned commit into the cache folder, and a program that
cannot be had is left out by name. Files are loaded one by one; what a file imports besides torch and numpy, and does
not need for its network, is stood in for. Last line: one JSON object.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from diagnose_faults import FAULTS, Case, Fault, mlp
from harness import ROOT, Options, Row, checkout, last_json, row
from torch import Tensor, nn
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset

from torchrec_ext.diagnose import why_slow

LIMIT_S = 300.0  # of pip
TORCHBENCH = "pytorch/benchmark@0e83c440a51cd63464fee34724d01b7c814ce39b"
EXAMPLES = "pytorch/examples@77f55b912142e11fcfdf5b530231fb9c52f181e8"
TRACEML = "traceopt-ai/traceml@d5cec51180c4c828f195656890ef5bc91c3cc4d4"
SOURCES = {"TorchBench's": TORCHBENCH, "examples'": EXAMPLES, "TraceML's": TRACEML}


def brought(source: str) -> Path:
    """Returns the folder of a repository at a commit in the cache folder; raises as :func:`checkout`."""
    # not beside the numpy that recommenders bring
    from torchrec_ext.data.catalog import cache_folder

    return checkout(source, cache_folder() / source.replace("/", "-"))


class _Named(type):
    """A class whose attributes are such classes too."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _StandIn(ModuleType):
    """A module that a file imports and does not need for its network: any name of it is a class."""

    __path__: Sequence[str] = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _Named(name, (), {})


class _Finder:
    """Stands in for modules that are not installed."""

    names = ("torchvision", "torchbenchmark", "requests", "matplotlib", "traceml_ai")

    def find_spec(self, name: str, *_: Any) -> Any:
        if name.split(".")[0] not in self.names:
            return None
        return importlib.util.spec_from_loader(name, self)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        pass


def module_of(source: str, path: str, package: str = "") -> Any:
    """Returns a file of a repository as a module; of a package inside of a folder where the file is part of one."""
    sys.meta_path.append(_Finder())  # type: ignore[arg-type]
    file = brought(source) / path
    if package:
        sys.path.insert(0, str(file))
        return importlib.import_module(package)
    # Two levels of packages, so that `from ...util` finds a stand-in too.
    spec = importlib.util.spec_from_file_location(
        "torchbenchmark.models.program", file, submodule_search_locations=[]
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    words, sys.argv = sys.argv, [str(file)]  # which some files parse
    try:
        spec.loader.exec_module(module)
    finally:
        sys.argv = words
    return module


bench = functools.partial(module_of, TORCHBENCH)
example = functools.partial(module_of, EXAMPLES)
_MODELS = "torchbenchmark/models"


def supervised(
    model: nn.Module,
    make: Callable[[], tuple[Tensor, ...]],
    loss: Callable[..., Tensor],
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
) -> Case:
    """Returns the usual step over batches that are there."""
    moving = optimizer(model.parameters(), lr=1e-3)
    model.train()

    def step(*batch: Tensor) -> None:
        moving.zero_grad()
        loss(model, *batch).backward()
        moving.step()

    return Case(step, [make() for _ in range(8)])


def classified(
    model: nn.Module,
    rows: int,
    shape: tuple[int, ...],
    classes: int,
    optimizer: Any = torch.optim.Adam,
) -> Case:
    return supervised(
        model,
        lambda: (torch.randn(rows, *shape), torch.randint(classes, (rows,))),
        lambda net, x, y: F.cross_entropy(net(x).flatten(1)[:, :classes], y),
        optimizer,
    )


def images(
    model: nn.Module,
    rows: int,
    shape: tuple[int, ...],
    out: tuple[int, ...] | None = None,
) -> Case:
    """A network from images to images."""
    return supervised(
        model,
        lambda: (torch.rand(rows, *shape), torch.rand(rows, *(out or shape))),
        lambda net, x, y: F.mse_loss(net(x), y),
    )


def next_tokens(
    model: nn.Module,
    rows: int,
    length: int,
    words: int,
    logits: Callable[[nn.Module, Tensor], Tensor],
) -> Case:
    return supervised(
        model,
        lambda: (
            torch.randint(words, (rows, length)),
            torch.randint(words, (rows, length)),
        ),
        lambda net, x, y: F.cross_entropy(
            logits(net, x).reshape(-1, words), y.reshape(-1)
        ),
    )


def resnet() -> Case:
    return classified(
        bench(f"{_MODELS}/phlippe_resnet/__init__.py").ResNetModel(),
        24,
        (3, 32, 32),
        10,
    )


def discriminator() -> Case:
    module = bench(f"{_MODELS}/dcgan/__init__.py")
    settings = module.DCGAN(SimpleNamespace(device="cpu"))
    settings.ndf = 32
    return supervised(
        module.Discriminator(settings),
        lambda: (torch.randn(16, 3, 64, 64), torch.rand(16)),
        lambda net, x, y: F.binary_cross_entropy(net(x).flatten(), y),
    )


def nanogpt() -> Case:
    module = bench(f"{_MODELS}/nanogpt/model.py")
    model = module.GPT(
        module.GPTConfig(
            block_size=64, vocab_size=2_000, n_layer=3, n_head=4, n_embd=128
        )
    )
    return supervised(
        model,
        lambda: (torch.randint(2_000, (8, 64)), torch.randint(2_000, (8,))),
        lambda net, x, y: F.cross_entropy(net(x).flatten(1), y),
    )


def bert() -> Case:
    module = bench(f"{_MODELS}/BERT_pytorch", "bert_pytorch.model")
    model = module.BERTLM(
        module.BERT(2_000, hidden=128, n_layers=2, attn_heads=4), 2_000
    )
    return next_tokens(
        model, 8, 64, 2_000, lambda net, x: net(x, torch.ones_like(x))[1]
    )


def autoencoder() -> Case:
    module = bench(f"{_MODELS}/nvidia_deeprecommender/reco_encoder/model/model.py")
    model = module.AutoEncoder(
        [3_000, 256, 256, 512], dp_drop_prob=0.8, is_constrained=False
    )
    return supervised(
        model,
        lambda: (
            torch.randint(6, (128, 3_000)).float() * (torch.rand(128, 3_000) < 0.05),
        ),
        lambda net, x: functools.reduce(Tensor.div, module.MSEloss(net(x), x)),
        functools.partial(torch.optim.SGD, momentum=0.9),
    )


def unet() -> Case:
    module = bench(f"{_MODELS}/pytorch_unet/pytorch_unet", "unet.unet_model")
    model = module.UNet(n_channels=3, n_classes=2, bilinear=True)
    return supervised(
        model,
        lambda: (torch.rand(1, 3, 32, 32), torch.randint(2, (1, 32, 32))),
        lambda net, x, y: F.cross_entropy(net(x), y),
        functools.partial(torch.optim.SGD, momentum=0.9),
    )


def renderer() -> Case:
    return images(
        bench(f"{_MODELS}/LearningToPaint/baseline/Renderer/model.py").FCN(),
        8,
        (10,),
        (128, 128),
    )


def painter() -> Case:
    return classified(
        bench(f"{_MODELS}/LearningToPaint/baseline/DRL/actor.py").ResNet(9, 18, 65),
        2,
        (9, 128, 128),
        65,
    )


def speaker() -> Case:
    model = bench(f"{_MODELS}/tts_angular/model.py").SpeakerEncoder(
        40, proj_dim=64, lstm_dim=128
    )
    return classified(model, 32, (50, 40), 64)


def stargan() -> Case:
    model = bench(f"{_MODELS}/pytorch_stargan/model.py").Discriminator(
        image_size=64, conv_dim=16, repeat_num=5
    )
    return supervised(
        model,
        lambda: (torch.randn(8, 3, 64, 64),),
        lambda net, x: sum(each.square().mean() for each in net(x)),
    )


def pix2pix() -> Case:
    module = bench(f"{_MODELS}/pytorch_CycleGAN_and_pix2pix/models/networks.py")
    return images(module.ResnetGenerator(3, 3, ngf=16, n_blocks=4), 2, (3, 64, 64))


def lennard_jones() -> Case:
    module = bench(f"{_MODELS}/lennard_jones/__init__.py")
    layers = [
        nn.Linear(1, 128),
        *(each for _ in range(3) for each in (nn.Tanh(), nn.Linear(128, 128))),
    ]
    model = nn.Sequential(*layers, nn.Tanh(), nn.Linear(128, 1))

    def loss(
        net: nn.Module, distances: Tensor, energy: Tensor, force: Tensor
    ) -> Tensor:
        return module.loss_fn(energy, force, *module.make_prediction(net, distances))

    return supervised(
        model,
        lambda: (
            0.5 + torch.rand(1_000, 3),
            torch.randn(1_000, 1),
            torch.randn(1_000, 3),
        ),
        loss,
    )


def language_model() -> Case:
    model = example("word_language_model/model.py").RNNModel("LSTM", 5_000, 128, 128, 2)
    return supervised(
        model,
        lambda: (torch.randint(5_000, (35, 20)), torch.randint(5_000, (700,))),
        lambda net, x, y: F.nll_loss(net(x, net.init_hidden(20))[0], y),
        torch.optim.SGD,
    )


def language_transformer() -> Case:
    model = example("word_language_model/model.py").TransformerModel(
        5_000, 128, 4, 256, 2
    )
    return supervised(
        model,
        lambda: (torch.randint(5_000, (35, 20)), torch.randint(5_000, (700,))),
        lambda net, x, y: F.nll_loss(net(x).view(-1, 5_000), y),
        torch.optim.SGD,
    )


def super_resolution() -> Case:
    return images(
        example("super_resolution/model.py").Net(3), 4, (1, 48, 48), (1, 144, 144)
    )


def neural_style() -> Case:
    return images(
        example("fast_neural_style/neural_style/transformer_net.py").TransformerNet(),
        1,
        (3, 48, 48),
    )


def graph_convolution() -> Case:
    model = example("gcn/main.py").GCN(256, 64, 7)
    nodes = 2_000
    graph = (torch.rand(nodes, nodes) < 0.01).float() / 20
    x, y = torch.randn(nodes, 256), torch.randint(7, (nodes,))
    return supervised(
        model,
        lambda: (torch.randperm(nodes)[:500],),
        lambda net, rows: F.nll_loss(net(x, graph)[rows], y[rows]),
    )


def graph_attention() -> Case:
    model = example("gat/main.py").GAT(64, 32, 4, 7)
    nodes = 500
    graph = (torch.rand(nodes, nodes) < 0.05).float()
    x, y = torch.randn(nodes, 64), torch.randint(7, (nodes,))
    return supervised(
        model,
        lambda: (torch.randperm(nodes)[:200],),
        lambda net, rows: F.nll_loss(net(x, graph)[rows], y[rows]),
    )


def translation() -> Case:
    module = example("language_translation/src/model.py")
    model = module.Translator(2, 2, 128, 4, 2_000, 2_000, 256, 0.1)

    def loss(net: nn.Module, source: Tensor, target: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(len(target) - 1)
        nothing = torch.zeros(len(source), len(source))
        words = net(source, target[:-1], nothing, mask, None, None, None)
        return F.cross_entropy(words.reshape(-1, 2_000), target[1:].reshape(-1))

    return supervised(
        model,
        lambda: (torch.randint(2_000, (24, 16)), torch.randint(2_000, (25, 16))),
        loss,
    )


def digits() -> Case:
    return classified(
        example("mnist/main.py").Net(), 32, (1, 28, 28), 10, torch.optim.Adadelta
    )


def digits_by_rows() -> Case:
    return classified(
        example("mnist_rnn/main.py").Net(), 64, (1, 28, 28), 10, torch.optim.Adadelta
    )


# What an audit of why_slow found without a false alarm.


def lstm() -> Case:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.lstm, self.top = nn.LSTM(32, 128, batch_first=True), nn.Linear(128, 10)

        def forward(self, x: Tensor) -> Tensor:
            return self.top(self.lstm(x)[0][:, -1])

    return classified(Net(), 64, (40, 32), 10)


def transformer() -> Case:
    layer = nn.TransformerEncoderLayer(128, 4, 256, batch_first=True)
    return classified(
        nn.Sequential(
            nn.TransformerEncoder(layer, 2), nn.Flatten(), nn.Linear(32 * 128, 10)
        ),
        16,
        (32, 128),
        10,
    )


def convolution() -> Case:
    layers = [
        nn.Conv2d(3, 32, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.ReLU(),
    ]
    return classified(
        nn.Sequential(
            *layers, nn.AdaptiveAvgPool2d(4), nn.Flatten(), nn.Linear(512, 10)
        ),
        16,
        (3, 32, 32),
        10,
    )


def in_batch_softmax() -> Case:
    users = nn.Embedding(20_000, 64, sparse=True)
    items = nn.Embedding(10_000, 64, sparse=True)
    towers = nn.ModuleList([mlp(64, 256, 128), mlp(64, 256, 128)])
    tables = torch.optim.SparseAdam([users.weight, items.weight])
    layers = torch.optim.Adam(towers.parameters())

    def step(user: Tensor, item: Tensor) -> None:
        tables.zero_grad()
        layers.zero_grad()
        logits = towers[0](users(user)) @ towers[1](items(item)).T
        F.cross_entropy(logits, torch.arange(len(user))).backward()
        tables.step()
        layers.step()

    return Case(
        step,
        [
            (torch.randint(20_000, (1_024,)), torch.randint(10_000, (1_024,)))
            for _ in range(8)
        ],
    )


def batch_sampler() -> Case:
    data = TensorDataset(torch.randn(50_000, 128), torch.randint(10, (50_000,)))
    sampler = BatchSampler(RandomSampler(data), 512, drop_last=True)
    loader = DataLoader(data, sampler=sampler, batch_size=None)
    return classified(mlp(128, 512, 512, 10), 512, (128,), 10)._replace(batches=loader)


HEALTHY: dict[str, Callable[[], Case]] = {
    "TorchBench's phlippe_resnet": resnet,
    "TorchBench's dcgan": discriminator,
    "TorchBench's nanogpt": nanogpt,
    "TorchBench's BERT_pytorch": bert,
    "TorchBench's nvidia_deeprecommender": autoencoder,
    "TorchBench's pytorch_unet": unet,
    "TorchBench's LearningToPaint, renderer": renderer,
    "TorchBench's LearningToPaint, actor": painter,
    "TorchBench's tts_angular": speaker,
    "TorchBench's pytorch_stargan": stargan,
    "TorchBench's pytorch_CycleGAN_and_pix2pix": pix2pix,
    "TorchBench's lennard_jones": lennard_jones,
    "examples' word_language_model, LSTM": language_model,
    "examples' word_language_model, transformer": language_transformer,
    "examples' super_resolution": super_resolution,
    "examples' fast_neural_style": neural_style,
    "examples' gcn": graph_convolution,
    "examples' gat": graph_attention,
    "examples' language_translation": translation,
    "examples' mnist": digits,
    "examples' mnist_rnn": digits_by_rows,
    "an LSTM": lstm,
    "a transformer": transformer,
    "convolutions": convolution,
    "an in-batch softmax": in_batch_softmax,
    "a batch sampler": batch_sampler,
}


# ------------------------------------------------------------------- programs of others


def bottleneck() -> Case:
    """TraceML's dataloader_bottleneck_demo as its scenario "slow": each row sleeps for 8 ms."""
    module = module_of(TRACEML, "examples/diagnosis/dataloader_bottleneck_demo.py")
    words, sys.argv = sys.argv, ["demo", "--scenario", "slow"]
    config = module.parse_args()
    sys.argv = words
    loader = module.build_dataloader(config, torch.device("cpu"))
    model = module.TinyMLP(config.input_dim, config.hidden_dim, config.depth)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)

    def step(x: Tensor, y: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        F.cross_entropy(model(x), y).backward()
        optimizer.step()

    return Case(step, loader, step, [next(iter(loader)) for _ in range(4)])


DEMOS: dict[str, Fault] = {
    "TraceML's dataloader bottleneck": Fault(bottleneck, ("loader_waits",)),
}
RECOMMENDERS = {
    "torch-rechub's DSSM": ("torch-rechub", "DSSM"),
    "torch-rechub's DIN": ("torch-rechub", "DIN"),
    "torch-rechub's DeepFM": ("torch-rechub", "DeepFM"),
    "DeepCTR-Torch's DeepFM": ("deepctr-torch", "DeepFM"),
    "DeepCTR-Torch's AutoInt": ("deepctr-torch", "AutoInt"),
    "RecBole's BPR": ("recbole", "BPR"),
    "RecBole's NeuMF": ("recbole", "NeuMF"),
    "RecBole's SASRec": ("recbole", "SASRec"),
}
WITH_FAULT = {**FAULTS, **DEMOS}


def case_of(name: str) -> Case:
    return WITH_FAULT[name].make() if name in WITH_FAULT else HEALTHY[name]()


def recommended(name: str, budget_s: float) -> None:
    """Diagnoses a recommender of a library in its own training, and prints what the first finding's lines gained."""
    import zoo
    from zoo_models import LIBRARIES, Size

    library, model = RECOMMENDERS[name]
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)  # packages write logs into it
        zoo.seed_all(0)
        case = LIBRARIES[library].build(model, Size(), 8)()
        start = time.perf_counter()
        diagnosis = why_slow(
            case.model,
            case.optimizers,
            case.loss,
            case.batches,
            budget_s=budget_s,
            capture=True,
        )
        os.chdir("/")
    print(diagnosis)
    faults = [each for each in diagnosis.findings if each.size != "offer"]
    pasted = {each.lines for each in (faults[0].remedies if faults else ())}
    gains = [each.gain.middle for each in diagnosis.trials if each.lines in pasted]
    gain = max(gains, default=None)
    made = {
        "verdict": diagnosis.verdict,
        "first": faults[0].cause if faults else diagnosis.verdict,
        "gain": gain,
        "right": gain is not None and gain >= 1.15,
        "noisy": diagnosis.noisy,
    }
    made |= {
        "seconds": time.perf_counter() - start,
        "above": [each.cause for each in faults if each.size != "small"],
    }
    print(json.dumps(made))


def diagnosed(name: str, seed: int, budget_s: float) -> None:
    """Diagnoses a program, measures the remedy of its fault, and prints what came of it."""
    torch.set_num_threads(1)
    torch.manual_seed(seed)
    np.random.seed(seed)
    if name in RECOMMENDERS:
        recommended(name, budget_s)
        return
    # The one thread is no fault of a program.
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    case = case_of(name)
    start = time.perf_counter()
    diagnosis = why_slow.step(case.step, case.batches, budget_s=budget_s)
    made: dict[str, Any] = {
        "verdict": diagnosis.verdict,
        "noisy": diagnosis.noisy,
        "seconds": time.perf_counter() - start,
    }
    made["above"] = [
        each.cause for each in diagnosis.findings if each.size in ("large", "medium")
    ]
    offers = [each.cause for each in diagnosis.findings if each.size == "offer"]
    offers += [each.name for each in diagnosis.trials if each.gain.helps == "yes"]
    made["first"] = [*made["above"], *offers, diagnosis.verdict][0]
    if name in WITH_FAULT:
        made["right"] = made["first"] in WITH_FAULT[name].causes
    if case.mended is not None:
        made["gain"] = diagnosis.realised(case.mended, case.mended_batches).middle
    print(diagnosis)
    print(json.dumps(made))


def run(name: str, options: Options) -> dict[str, Any] | None:
    """Returns what a process of its own, or one for each rank, found; None where the program cannot be had."""
    command, environment = [sys.executable], {}
    try:
        if name in RECOMMENDERS:
            import zoo

            zoo.install(zoo.CACHE)
            paths = (str(ROOT), str(zoo.CACHE), os.environ.get("PYTHONPATH", ""))
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, paths))
        for prefix, source in SOURCES.items():
            if name.startswith(prefix):
                brought(source)
    except (ImportError, RuntimeError, subprocess.CalledProcessError) as error:
        print(
            f"others, {name}: left out: {str(error).splitlines()[-1]}",
            file=sys.stderr,
            flush=True,
        )
        return None
    try:
        made = last_json(
            [*command, __file__, name, 0, 5.0 if options.quick else 25.0],
            limit_s=LIMIT_S,
            **environment,
        )
    except RuntimeError as error:
        # of the program or of why_slow: no verdict is a wrong one
        made = {
            "first": str(error).splitlines()[-1],
            "right": False,
            "above": ["failed"],
            "noisy": "",
        }
    text = f"{made['first']}, gain {made.get('gain')}, above small: {made['above']}"
    print(f"others, {name}: {text} {made['noisy']}", file=sys.stderr, flush=True)
    return dict(made)


def others(options: Options) -> Iterator[Row]:
    """Yields the share of right first verdicts."""
    names = [*WITH_FAULT, *RECOMMENDERS]
    results = {
        name: made
        for name in names[:: 6 if options.quick else 1]
        if (made := run(name, options)) is not None
    }
    wrong = {
        name: made
        for name, made in results.items()
        if made["noisy"] or not made["right"]
    }
    share = 1 - len(wrong) / len(results)
    verdicts = [
        f"{name}: {made['noisy'] or made['first']}" for name, made in wrong.items()
    ]
    yield row(
        "others",
        share,
        "right first verdicts",
        better="more",
        required=0.9,
        of=len(results),
        wrong=verdicts,
    )


def others_healthy(options: Options) -> Iterator[Row]:
    """Yields the number of healthy programs with a finding above "small"."""
    results = {
        name: run(name, options)
        for name in list(HEALTHY)[:: 10 if options.quick else 1]
    }
    known = {name: made for name, made in results.items() if made is not None}
    wrong = [
        f"{name}: {made['above'] or made['noisy']}"
        for name, made in known.items()
        if made["above"] or made["noisy"]
    ]
    yield row(
        "others-healthy",
        len(wrong),
        "with a finding above small",
        required=0,
        of=len(known),
        wrong=wrong,
    )


if __name__ == "__main__":
    os.environ["OMP_NUM_THREADS"] = "1"
    diagnosed(sys.argv[1], int(sys.argv[2]), float(sys.argv[3]))
