"""The samplers in torch are those in numpy, bit for bit."""

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.data.negatives.test_negatives import (
    SAMPLERS,
    Sampler,
    known_by,  # noqa: F401
    random_pairs,
)
from torchrec_ext.data.negatives import on_device as module
from torchrec_ext.data.negatives.known_pairs import KnownPairs
from torchrec_ext.data.negatives.on_device import DeviceKnownPairs, sampler_on_device
from torchrec_ext.data.negatives.random import device_uniform, stream, uniform
from torchrec_ext.data.negatives.samplers import PopularityNegatives, UniformNegatives
from torchrec_ext.schema import DataError

pytestmark = pytest.mark.unit
WAITS = {
    "aten._local_scalar_dense.default",
    "aten.nonzero.default",
    "aten.item.default",
    "aten._unique2.default",
}


def test_the_random_numbers_are_the_same(device: torch.device) -> None:
    positions = np.array([0, 1, 5, 1 << 40, (1 << 62) + 3])[:, None]
    draws = np.arange(1000)
    for seed in (0, 1, -1, 1 << 70, (1 << 63) + 5):
        key = stream(seed, 3, 1)
        made = device_uniform(
            key,
            torch.from_numpy(positions).to(device),
            torch.from_numpy(draws).to(device),
        )
        assert np.array_equal(made.cpu().numpy(), uniform(key, positions, draws))


@pytest.mark.usefixtures("known_by")
@pytest.mark.parametrize("density", [0.0, 0.3, 0.97])
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_hundred_thousand_draws_are_bit_for_bit_the_same(
    sampler: Sampler, density: float, device: torch.device
) -> None:
    users, items = random_pairs(50, 300, density)
    for seed in range(3):
        drawer = sampler(300, users, items, seed=seed)
        rows = np.arange(1000) * 7919
        who = rows % 53 - 1  # unknown users among them
        expected = drawer.draw(who, rows, seed, 100)
        made = sampler_on_device(drawer, device).draw(
            torch.from_numpy(who).to(device),
            torch.from_numpy(rows).to(device),
            seed,
            100,
        )
        assert np.array_equal(made.ids.cpu().numpy(), expected.ids)
        assert np.array_equal(made.log_q.cpu().numpy(), expected.log_q)


class Ops(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.usefixtures("known_by")
@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_draw_runs_the_same_ops_whatever_it_rejects_and_waits_for_none(
    sampler: Sampler,
) -> None:
    ops = []
    for density in (0.05, 0.95):
        drawer = sampler_on_device(
            sampler(300, *random_pairs(50, 300, density)), torch.device("cpu")
        )
        with Ops() as seen:
            drawer.draw(torch.arange(40), torch.arange(40), 0, 4)
        ops.append(seen.names)
    assert ops[0] == ops[1]
    assert not WAITS & set(ops[0])


@pytest.mark.usefixtures("known_by")
def test_known_pairs_agree(device: torch.device) -> None:
    known = KnownPairs(30, *random_pairs(6, 30, 0.5))
    users, items = np.arange(-1, 8), np.arange(1, 31)
    made = DeviceKnownPairs(known, device).contains(
        torch.from_numpy(users).to(device)[:, None], torch.from_numpy(items).to(device)
    )
    assert np.array_equal(made.cpu().numpy(), known.contains(users[:, None], items))


def test_a_user_who_has_taken_every_item_is_named_before_the_first_draw(
    device: torch.device,
) -> None:
    drawer = UniformNegatives(3, np.array([7, 7, 7, 8]), np.array([1, 2, 3, 3]))
    with pytest.raises(DataError, match="user 7 has taken all 3 items"):
        sampler_on_device(drawer, device)
    made = sampler_on_device(drawer, device, users=np.array([8])).draw(
        torch.tensor([8, 7], device=device), torch.arange(2, device=device), 0, 9
    )
    assert made.ids[0].min() > 0
    assert (made.ids[1] == 0).all()


def test_a_sampler_without_a_torch_form_is_refused() -> None:
    class Mine(PopularityNegatives):
        pass

    with pytest.raises(
        ValueError,
        match="sampler=Mine: must be UniformNegatives or PopularityNegatives",
    ):
        sampler_on_device(Mine(3, np.array([1]), np.array([1])), torch.device("cpu"))


@pytest.mark.unit
@pytest.mark.parametrize("most_bits", [1 << 28, 1])
def test_known_items_of_a_batch_are_those_of_the_pairs(
    most_bits: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(module, "MOST_BITS", most_bits)
    rng = np.random.default_rng(1)
    known = KnownPairs(37, rng.integers(9, size=100), rng.integers(1, 38, size=100))
    users = rng.integers(-1, 12, size=20)
    items = np.r_[rng.integers(0, 38, size=40), 5, 5, 99]
    made = module.KnownItems(known).to(device)
    assert not made.state_dict()
    found = made(torch.from_numpy(users).to(device), torch.from_numpy(items).to(device))
    assert np.array_equal(
        found.cpu().numpy(),
        known.contains(users[:, None], np.where(items < 38, items, 0)),
    )
    nobody = module.KnownItems(KnownPairs(37, users[:0], users[:0])).to(device)
    assert not nobody(
        torch.arange(3, device=device), torch.arange(4, device=device)
    ).any()
