"""One user, hundreds of candidates: the whole network, its towers once, ONNX Runtime's top NN, stored rows scored."""

import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from serving_rows import Options, Row, compared, in_turn, row
from torch import Tensor, nn
from torchrec import EmbeddingBagConfig, PoolingType

from torchrec_ext.batch import TowerBatch
from torchrec_ext.models.tower_model import TowerModel, two_tower
from torchrec_ext.retrieval.index.projection import projection
from torchrec_ext.retrieval.onnx.layers import export_onnx
from torchrec_ext.retrieval.scorer.candidates import CandidateScorer
from torchrec_ext.retrieval.store.writer import write_store
from torchrec_ext.schema import Jagged

WIDTH, HISTORY = 64, 20


class PlainTop(nn.Module):
    """The interaction as it was trained, of one user with its candidates."""

    def __init__(self, interaction: nn.Module) -> None:
        super().__init__()
        self.interaction = interaction

    def forward(self, query: Tensor, candidates: Tensor) -> Tensor:
        """(N,) of (D,) and (N, D)."""
        return self.interaction([query.expand(candidates.shape[0], -1), candidates])


def network(items: int, shared: tuple[str, ...] = ()) -> TowerModel:
    """Makes towers 128-64 over item, category and price, and over user, history and age, with a top NN over both."""

    def table(name: str, rows: int, **options: object) -> EmbeddingBagConfig:
        return EmbeddingBagConfig(name=name, feature_names=[name], num_embeddings=rows, embedding_dim=WIDTH, **options)  # type: ignore[arg-type]

    torch.manual_seed(0)
    user = [table("user_id", 100_000), table("history", items, pooling=PoolingType.MEAN)]
    item = [table("item_id", items), table("category", 1_000)]
    return two_tower(
        user,
        item,
        user_dense=["age"],
        item_dense=["price"],
        tower_widths=(128, WIDTH),
        interaction="top_nn",
        shared=shared,
    ).eval()


def request(model: TowerModel, shared: bool, items: Tensor, total: int) -> TowerBatch:
    """One user beside each of ``items``."""
    count, users = len(items), 1 if shared else len(items)
    history = torch.arange(HISTORY) * 7 % total
    return model.schema().assemble(
        {
            "user_id": Jagged(torch.full((users,), 5)),
            "history": Jagged(history.repeat(users), torch.full((users,), HISTORY, dtype=torch.int32)),
            "item_id": Jagged(items),
            "category": Jagged(items % 1_000),
        },
        {"age": torch.ones(users), "price": torch.ones(count)},
        labels=torch.zeros(count),
        index=torch.zeros(count, dtype=torch.int64) if shared else None,
        shared_rows=torch.arange(1) if shared else None,
    )


def sides(folder: Path, items: int, count: int, repeats: int) -> dict[str, Callable[[int], object]]:
    """The sides; each round has candidates of its own, which are the same for all."""
    whole, once = network(items), network(items, ("user",))
    once.load_state_dict(whole.state_dict())
    with torch.inference_mode():
        vectors = torch.cat([block(whole, ids, items) for ids in torch.arange(items).split(20_000)])
        user = whole.embed("user", request(whole, False, torch.arange(1), items))[0]
    made = projection(whole.interaction, WIDTH)
    store = write_store(folder / "projected", [(np.arange(items), made.candidates(vectors))])
    plain = write_store(folder / "plain", [(np.arange(items), vectors)]).matrix().numpy()
    scorer = CandidateScorer(made, store)
    export_onnx(PlainTop(whole.interaction).eval(), {"query": user, "candidates": vectors[:4]}, folder / "top.onnx")
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    session = onnxruntime.InferenceSession(str(folder / "top.onnx"), options, providers=["CPUExecutionProvider"])
    places = [torch.randperm(items)[:count] for _ in range(repeats + 3)]
    batches = {shared: request(once if shared else whole, shared, places[0], items) for shared in (False, True)}
    numbers = [each.numpy() for each in places]

    def network_on(model: TowerModel, shared: bool) -> Callable[[int], Tensor]:
        def run(number: int) -> Tensor:
            with torch.inference_mode():
                return model.logits(requests[shared][number])

        return run

    requests = {
        shared: [request(once if shared else whole, shared, each, items) for each in places] for shared in batches
    }
    sides = {
        "naive": network_on(whole, False),
        "tower-once": network_on(once, True),
        "onnx": lambda number: session.run(None, {"query": user.numpy(), "candidates": plain[numbers[number]]})[0],
        "ours": lambda number: scorer(user, places[number]),
    }
    # What no scorer goes below: the rows alone, of other places, so that nothing is in a cache for ours.
    others = [torch.randperm(items)[:count] for _ in range(repeats + 3)]
    matrix, rows = store.matrix(), torch.empty(count, store.width)
    expected = sides["naive"](0)
    for name, call in sides.items():
        difference = float((torch.as_tensor(call(0)).flatten() - expected).abs().max())
        print(f"{name}: differs from the whole network by {difference:.1e}; compiled: {scorer.compiled}")
        assert difference < 1e-5
    return sides | {"gather": lambda number: torch.index_select(matrix, 0, others[number], out=rows)}


def block(model: TowerModel, ids: Tensor, items: int) -> Tensor:
    """The item tower's output."""
    return model.embed("item", request(model, False, ids, items))


def scores(options: Options) -> Iterator[Row]:
    """Times 1 user x 500 candidates of 1,000,000 items, and x 1,000 of a store of 1,000, which stays in the cache."""
    torch.set_num_threads(1)
    items = 20_000 if options.quick else 1_000_000
    repeats = 20 if options.quick else 40 * options.repeats
    with tempfile.TemporaryDirectory() as folder:
        times = in_turn(repeats, sides(Path(folder), items, 500, repeats))
        for name, required in (("naive", 25.0), ("tower-once", 14.0), ("onnx", 1.4)):
            yield compared(f"score-{name}, 500 of {items:,}", times[name], times["ours"], required) | of_gather(
                times, name
            )
        yield row("score-p50, 500 candidates", statistics.median(times["ours"]) * 1e3, "ms", required=0.25)
    with tempfile.TemporaryDirectory() as folder:
        times = in_turn(repeats, sides(Path(folder), 1_000, 1_000, repeats))
        yield compared("score-naive, 1,000 of 1,000", times["naive"], times["ours"], 60.0) | of_gather(times, "naive")


def of_gather(times: dict[str, list[float]], side: str) -> Row:
    """The ratio that the stored rows alone would have, gathered and not scored."""
    return {"ceiling": round(statistics.median(times[side]) / statistics.median(times["gather"]), 4)}
