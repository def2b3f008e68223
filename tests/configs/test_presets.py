import math
from pathlib import Path

import pytest
import torch

from configs.schema import load_config
from training.model import Albert

PRESETS = sorted((Path(__file__).parents[2] / "configs").rglob("*.yaml"))

# Lan et al., table 1, counted from the shapes with a vocabulary of 30,000: encoder and pooler, then with both heads.
PUBLISHED = {
    "base": (11_683_584, 11_813_810),
    "large": (17_683_968, 17_847_474),
    "xlarge": (58_724_864, 59_021_490),
    "xxlarge": (222_595_584, 223_158_450),
}


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_every_preset_is_valid_and_builds(path):
    config = load_config(path)
    with torch.device("meta"):
        model = Albert(config.model, config.data.vocab.size)
    assert sum(parameter.numel() for parameter in model.parameters()) > 0


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_presets_have_the_published_sizes_and_settings(name):
    config = load_config(f"configs/{name}.yaml")
    with torch.device("meta"):
        model = Albert(config.model, config.data.vocab.size)
    counts = {key: math.prod(value.shape) for key, value in model.named_parameters()}
    heads = sum(count for key, count in counts.items() if key.startswith(("mlm_head", "sentence_head")))
    total = sum(counts.values())
    assert (total - heads, total) == PUBLISHED[name]
    training = config.training
    assert (training.global_batch_size, training.steps, training.warmup_steps) == (4096, 125_000, 3125)
    assert (training.learning_rate, training.gradient_clipping, training.optimizer.name) == (0.00176, 1.0, "lamb")
    assert (config.data.max_length, config.data.masking.max_predictions, config.data.masking.ngram) == (512, 77, 3)
    assert (config.model.hidden_dropout_prob, config.model.attention_probs_dropout_prob) == (0.0, 0.0)


def test_the_chinese_preset_has_the_sizes_of_the_published_chinese_base():
    """10.5 million without the heads: base with 21,128 pieces; the activation was relu."""
    config = load_config("configs/chinese-base.yaml")
    with torch.device("meta"):
        model = Albert(config.model, config.data.vocab.size)
    counts = {key: math.prod(value.shape) for key, value in model.named_parameters()}
    heads = sum(count for key, count in counts.items() if key.startswith(("mlm_head", "sentence_head")))
    fewer = 30_000 - 21_128
    assert sum(counts.values()) - heads == PUBLISHED["base"][0] - 128 * fewer == 10_547_968
    assert sum(counts.values()) == PUBLISHED["base"][1] - (128 + 1) * fewer
    assert (config.data.language, config.model.hidden_act, config.data.vocab.size) == ("zh", "relu", 21_128)
    base = load_config("configs/base.yaml")
    assert config.model.model_copy(update={"hidden_act": base.model.hidden_act}) == base.model
    assert config.training.model_copy(update={"output": base.training.output}) == base.training
