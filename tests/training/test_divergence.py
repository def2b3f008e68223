import json

import numpy as np
import pytest

from training.divergence import DivergenceWatch

UNIGRAM = 6.2


def healthy(steps: int, noise: float, seed: int = 0, plateau: int = 0) -> np.ndarray:
    """A curve from 9 nats down to the unigram model's, after `plateau` steps there down to about 3, with noise."""
    step = np.arange(steps)
    curve = UNIGRAM + 2.8 * np.exp(-step / 60)
    curve -= 3.2 * (1 - np.exp(-np.maximum(0, step - plateau) / 1500))
    return curve + noise * np.random.default_rng(seed).standard_normal(steps)


def observed(losses, warmup: int = 150, steps: int = 20_000, watch: DivergenceWatch | None = None, first: int = 1):
    watch = watch or DivergenceWatch(UNIGRAM, warmup, steps)
    events = [watch.observe(step, float(loss)) for step, loss in enumerate(losses, start=first)]
    return [event for event in events if event is not None]


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("noise", [0.0, 0.05, 0.3])
@pytest.mark.parametrize("plateau", [0, 3000])
def test_a_healthy_run_raises_no_alarm(seed, noise, plateau):
    assert observed(healthy(10_000, noise, seed, plateau)) == []


@pytest.mark.parametrize("noise", [0.02, 0.2])
def test_a_jump_is_noticed_within_three_steps_and_reported_once(noise):
    losses = healthy(2000, noise)
    losses[1500:] = 7.0 + noise * np.random.default_rng(1).standard_normal(500)
    first, *others = observed(losses)
    assert (first.kind, first.step) == ("spike", 1503)
    assert first.healthy_step <= 1500
    assert [event.kind for event in others] in ([], ["plateau"])


def test_a_single_high_loss_is_noise():
    losses = healthy(2000, 0.05)
    losses[[1200, 1500, 1502]] += 5
    assert observed(losses) == []


def test_a_slow_drift_back_to_the_unigram_model_is_noticed_and_dated_to_when_it_was_well():
    losses = healthy(6000, 0.05)
    losses[4000:] = np.minimum(losses[4000] + np.arange(2000) * 0.002, UNIGRAM)
    (event,) = observed(losses)
    assert event.kind == "plateau"
    assert 4000 < event.step < 6000
    assert losses[event.healthy_step] < UNIGRAM - 0.2


def test_a_run_that_never_leaves_the_unigram_model_is_reported_long_after_its_warmup():
    losses = healthy(6000, 0.05, plateau=10_000)
    (event,) = observed(losses)
    assert (event.kind, event.step, event.healthy_step) == ("plateau", 4000, 0)
    assert observed(losses, warmup=1600) == []


def test_a_rate_too_high_from_the_start_is_noticed():
    losses = np.concatenate([np.linspace(5.5, 5.3, 12), np.linspace(6.5, 9, 8)])
    assert observed(losses)[0].step == 15


def test_a_watch_goes_on_from_its_state_as_if_it_had_not_been_cut():
    losses = healthy(2000, 0.2)
    losses[1500:] = 7.0
    for cut in (5, 700, 1501, 1503, 1600):
        watch = DivergenceWatch(UNIGRAM, 150, 20_000)
        events = observed(losses[:cut], watch=watch)
        again = DivergenceWatch(UNIGRAM, 150, 20_000, json.loads(json.dumps(watch.state())))
        assert events + observed(losses[cut:], watch=again, first=cut + 1) == observed(losses), cut


def test_a_higher_loss_that_was_announced_raises_no_alarm():
    losses = healthy(2000, 0.05)
    deeper = losses[1500:] + 1.0
    watch = DivergenceWatch(UNIGRAM, 150, 20_000)
    assert observed(losses[:1500], watch=watch) == []
    watch.forget_level()
    assert observed(deeper[:300], watch=watch, first=1501) == []
    assert observed(deeper[300:], watch=DivergenceWatch(UNIGRAM, 150, 20_000, watch.state()), first=1801) == []
