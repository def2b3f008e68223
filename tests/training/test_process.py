import pytest

from configs.schema import load_config
from training.process import rate_warning


@pytest.mark.parametrize(
    ("overrides", "warns"),
    [
        ([], False),
        (["training.global_batch_size=1025"], False),
        (["training.global_batch_size=1024"], True),
        (["training.global_batch_size=256"], True),
        (["training.global_batch_size=256", "training.learning_rate=0.0004"], False),
        (["training.global_batch_size=256", "training.scale_from_batch=4096"], False),
    ],
    ids=str,
)
@pytest.mark.parametrize("preset", ["base", "xxlarge"])
def test_the_published_rate_with_a_much_smaller_batch_is_warned_of_with_the_remedy(preset, overrides, warns):
    training = load_config(f"configs/{preset}.yaml", overrides).training
    warning = rate_warning(training)
    assert (warning is not None) == warns
    if warns:
        assert f"0.00176 is meant for batches of 4,096, not {training.global_batch_size:,}" in warning
        assert "training.scale_from_batch=4096 converts rate and steps" in warning
