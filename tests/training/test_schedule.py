import pytest

from configs.schema import DepthConfig
from training.schedule import learning_rate_at, num_layers_at

PAPER = {"peak": 0.00176, "warmup_steps": 3125, "total_steps": 125_000}


@pytest.mark.parametrize(
    ("step", "rate"),
    [(0, 0.0), (1, 0.00176 / 3125), (3124, 0.0017594368), (3125, 0.001716), (62_500, 0.00088), (125_000, 0.0)],
)
def test_rate_follows_the_reference_schedule(step, rate):
    assert learning_rate_at(step, **PAPER) == pytest.approx(rate, rel=1e-12, abs=0)


def test_rate_stays_zero_beyond_the_last_step():
    assert learning_rate_at(125_001, **PAPER) == 0
    assert learning_rate_at(10**9, **PAPER) == 0


def test_rate_starts_at_the_peak_without_warmup():
    assert learning_rate_at(0, peak=1.0, warmup_steps=0, total_steps=10) == 1.0


def test_depth_grows_as_scheduled():
    schedule = [DepthConfig(num_layers=3, steps=10), DepthConfig(num_layers=6, steps=5)]
    depths = [num_layers_at(step, schedule, 12) for step in range(20)]
    assert depths == [3] * 10 + [6] * 5 + [12] * 5
    assert num_layers_at(0, [], 12) == 12
