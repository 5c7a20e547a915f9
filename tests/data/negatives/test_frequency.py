from __future__ import annotations

import numpy as np
import pytest
import torch

from torchrec_ext.data.negatives.mixed import StreamingFrequency

pytestmark = pytest.mark.unit


def test_it_follows_algorithm_2(device: torch.device) -> None:
    frequency = StreamingFrequency(1000, rate=0.25, initial_gap=8, device=device)
    expected = {3: (0, 8.0), 4: (0, 8.0)}
    for step, ids in enumerate(([3, 3, 4], [4], [3], [], [3, 4]), start=1):
        frequency.update(torch.tensor(ids, dtype=torch.int64, device=device))
        for item in set(ids):
            last, gap = expected[item]
            expected[item] = (step, 0.75 * gap + 0.25 * (step - last))
    made = frequency.log_q(torch.tensor([3, 4], device=device)).cpu()
    torch.testing.assert_close(
        made, -torch.tensor([expected[3][1], expected[4][1]]).log()
    )


@pytest.mark.parametrize("seed", range(3))
def test_known_frequencies_are_found(seed: int) -> None:
    items, size = 300, 64
    generator = np.random.default_rng(seed)
    p = 1 / np.arange(1, items + 1) ** 0.8
    p /= p.sum()
    batches = torch.from_numpy(generator.choice(items, (6000, size), p=p) + 1)
    frequency = StreamingFrequency(1 << 14, rate=0.02, initial_gap=20, seed=seed)
    for batch in batches:
        frequency.update(batch)
    in_batch = 1 - (1 - p) ** size  # the probability that a batch holds the item
    error = frequency.log_q(torch.arange(1, items + 1)).numpy() - np.log(in_batch)
    # about 6 standard deviations of sqrt(rate / 2) = 0.1
    assert np.abs(error).max() < 0.6
    assert np.sqrt((error**2).mean()) < 0.13
    assert abs(error.mean()) < 0.03


def test_a_change_is_followed() -> None:
    frequency = StreamingFrequency(100, rate=0.1)
    for every in (2, 10):
        for step in range(1, 1001):
            frequency.update(torch.tensor([1 if step % every == 0 else 0]))
        assert float(frequency.log_q(torch.tensor([1])).exp()) == pytest.approx(
            1 / every, rel=0.01
        )


def test_several_hash_functions_undo_collisions() -> None:
    errors = []
    for hashes in (1, 4):
        frequency = StreamingFrequency(64, rate=0.1, hashes=hashes)
        for step in range(3000):
            # item k every k steps
            frequency.update(torch.arange(1, 21) * (step % torch.arange(1, 21) == 0))
        errors.append(
            float(
                (frequency.log_q(torch.arange(1, 21)) + torch.arange(1, 21).log())
                .abs()
                .sum()
            )
        )
    assert errors[0] > 1  # a shared bucket looks too frequent
    assert errors[1] < 0.2


def test_padding_is_not_counted_and_ids_of_any_size_are() -> None:
    frequency = StreamingFrequency(1000)
    before = frequency.gap.clone()
    frequency.update(torch.zeros(5, dtype=torch.int64))
    assert torch.equal(frequency.gap[:, :-1], before[:, :-1])
    frequency.update(torch.tensor([1 << 62, -5]))
    assert torch.isfinite(frequency.log_q(torch.tensor([1 << 62, -5, 0]))).all()


def test_it_continues_from_its_state_and_refuses_another_setting() -> None:
    generator = torch.Generator().manual_seed(0)
    batches = torch.randint(1, 50, (40, 8), generator=generator)
    whole = StreamingFrequency(500)
    first = StreamingFrequency(500)
    rest = StreamingFrequency(500)
    for batch in batches:
        whole.update(batch)
    for batch in batches[:20]:
        first.update(batch)
    rest.load_state_dict(first.state_dict())
    for batch in batches[20:]:
        rest.update(batch)
    assert torch.equal(rest.log_q(torch.arange(50)), whole.log_q(torch.arange(50)))
    with pytest.raises(
        ValueError,
        match=r"buckets was 500 and is 400, seed was 0 and is 1; restore these",
    ):
        StreamingFrequency(400, seed=1).load_state_dict(first.state_dict())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"buckets": 0}, "buckets=0: must be 1 or more"),
        ({"hashes": 0}, "hashes=0: must be 1 or more"),
        ({"rate": 0.0}, "rate=0.0: must be above 0 and at most 1"),
        ({"initial_gap": 0.5}, "initial_gap=0.5: must be 1 step or more"),
    ],
)
def test_wrong_settings_are_named(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StreamingFrequency(**options)  # type: ignore[arg-type]
