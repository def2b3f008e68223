import pytest
import torch
from transformers import AlbertConfig, AlbertForPreTraining

from configs.schema import ModelConfig
from training.model import Albert, pretraining_losses

VOCABULARY_SIZE = 60
SMALL = ModelConfig(
    hidden_size=32,
    embedding_size=16,
    num_hidden_layers=5,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=24,
)
PRESETS = {
    "base": ModelConfig(),
    "large": ModelConfig(hidden_size=1024, num_hidden_layers=24, num_attention_heads=16, intermediate_size=4096),
    "xlarge": ModelConfig(hidden_size=2048, num_hidden_layers=24, num_attention_heads=16, intermediate_size=8192),
    "xxlarge": ModelConfig(hidden_size=4096, num_hidden_layers=12, num_attention_heads=64, intermediate_size=16384),
}


def hugging_face_names(config: ModelConfig) -> dict[str, str]:
    """Our parameter names to those of Hugging Face's `AlbertForPreTraining`, for layers shared within groups."""
    embeddings = "albert.embeddings"
    modules = {
        "embeddings.layer_norm": f"{embeddings}.LayerNorm",
        "projection": "albert.encoder.embedding_hidden_mapping_in",
        "mlm_head.dense": "predictions.dense",
        "mlm_head.layer_norm": "predictions.LayerNorm",
        "pooler": "albert.pooler",
        "sentence_head": "sop_classifier.classifier",
    }
    names = {"mlm_head.bias": "predictions.bias"}
    for group in range(config.num_hidden_groups):
        layer = f"albert.encoder.albert_layer_groups.{group}.albert_layers.0"
        modules[f"attention.{group}.output"] = f"{layer}.attention.dense"
        modules[f"attention.{group}.layer_norm"] = f"{layer}.attention.LayerNorm"
        modules[f"feed_forward.{group}.intermediate"] = f"{layer}.ffn"
        modules[f"feed_forward.{group}.output"] = f"{layer}.ffn_output"
        modules[f"feed_forward.{group}.layer_norm"] = f"{layer}.full_layer_layer_norm"
        for part in ("query", "key", "value"):
            for kind in ("weight", "bias"):
                names[f"attention.{group}.{part}_{kind}"] = f"{layer}.attention.{part}.{kind}"
    for kind in ("word", "position", "token_type"):
        names[f"embeddings.{kind}_embeddings.weight"] = f"{embeddings}.{kind}_embeddings.weight"
    names |= {f"{ours}.{kind}": f"{theirs}.{kind}" for ours, theirs in modules.items() for kind in ("weight", "bias")}
    return names


def small_albert(config: ModelConfig = SMALL, **options) -> Albert:
    """A small model whose biases and LayerNorms are not at their plain first values either."""
    model = Albert(config, VOCABULARY_SIZE, **options)
    generator = torch.Generator().manual_seed(0)
    model.initialise(generator)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
    return model


def batch(lengths: list[int]) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    shape = (len(lengths), max(lengths))
    lengths = torch.tensor(lengths)
    is_real = torch.arange(shape[1]) < lengths[:, None]
    input_ids = torch.randint(1, VOCABULARY_SIZE, shape, generator=generator) * is_real
    is_masked = (torch.rand(shape, generator=generator) < 0.3) & is_real
    return {
        "input_ids": input_ids,
        "token_type_ids": (torch.arange(shape[1]) >= lengths[:, None] // 2).long() * is_real,
        "lengths": lengths,
        "masked_positions": is_masked.flatten().nonzero().squeeze(1),
    }


def labels(inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(2)
    words = torch.randint(0, VOCABULARY_SIZE, inputs["masked_positions"].shape, generator=generator)
    return words, torch.randint(0, 2, inputs["lengths"].shape, generator=generator)


def gradients(model: Albert, inputs: dict, **options) -> dict[str, torch.Tensor]:
    mlm_labels, sentence_labels = labels(inputs)
    mlm_logits, sentence_logits = model(**inputs, **options)
    losses = pretraining_losses(mlm_logits, mlm_labels, sentence_logits, sentence_labels)
    model.zero_grad()
    (losses.mlm_loss + losses.sentence_loss).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def count(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Equal to 1e-5 of the norm of `expected`."""
    assert actual.shape == expected.shape
    assert (actual - expected).norm() <= 1e-5 * expected.norm()


@pytest.mark.parametrize("positions", [[], [0], [13, 17, 19, 20, 59], range(20, 40), range(60)])
@pytest.mark.parametrize("spare", [None, 0, 3])
def test_the_heads_read_what_the_encoder_makes_wherever_tokens_are_masked(positions, spare):
    model = small_albert(SMALL)
    inputs = batch([20, 20, 20])
    inputs["masked_positions"] = masked = torch.tensor(positions, dtype=torch.long)
    most_masked = None if spare is None else int(torch.bincount(masked // 20, minlength=3).max()) + spare
    mlm_logits, sentence_logits = model(**inputs, most_masked=most_masked)
    hidden = model.encode(inputs["input_ids"], inputs["token_type_ids"], inputs["lengths"])
    table = model.embeddings.word_embeddings.weight
    assert_close(mlm_logits, model.mlm_head(hidden.flatten(0, 1)[masked], table))
    assert_close(sentence_logits, model.sentence_head(model.pool(hidden)))


@pytest.mark.parametrize("lengths", [[20, 20, 20], [20, 7, 13]], ids=["full", "padded"])
@pytest.mark.parametrize("activation", ["gelu_new", "gelu", "relu"])
@pytest.mark.parametrize("groups", [1, 2])
def test_logits_losses_and_gradients_equal_those_of_hugging_face(lengths, activation, groups):
    config = SMALL.model_copy(update={"hidden_act": activation, "num_hidden_groups": groups})
    model = small_albert(config)
    theirs = AlbertForPreTraining(
        AlbertConfig(
            **config.model_dump(exclude={"share"}),
            vocab_size=VOCABULARY_SIZE,
            classifier_dropout_prob=0,
            inner_group_num=1,
        )
    )
    names = hugging_face_names(config)
    parameters, their_parameters = dict(model.named_parameters()), dict(theirs.named_parameters())
    assert names.keys() == parameters.keys()
    assert set(names.values()) == their_parameters.keys()
    with torch.no_grad():
        for ours, name in names.items():
            their_parameters[name].copy_(parameters[ours])

    inputs = batch(lengths)
    positions, (mlm_labels, sentence_labels) = inputs["masked_positions"], labels(inputs)
    their_labels = torch.full(inputs["input_ids"].shape, -100)
    their_labels.view(-1)[positions] = mlm_labels
    output = theirs(
        input_ids=inputs["input_ids"],
        token_type_ids=inputs["token_type_ids"],
        attention_mask=(torch.arange(max(lengths)) < inputs["lengths"][:, None]).long(),
        labels=their_labels,
        sentence_order_label=sentence_labels,
    )
    output.loss.backward()

    if len(set(lengths)) == 1:
        inputs["lengths"] = None
    mlm_logits, sentence_logits = model(**inputs)
    losses = pretraining_losses(mlm_logits, mlm_labels, sentence_logits, sentence_labels)
    loss = losses.mlm_loss / len(positions) + losses.sentence_loss / len(lengths)
    loss.backward()

    assert_close(mlm_logits, output.prediction_logits.flatten(0, 1)[positions])
    assert_close(sentence_logits, output.sop_logits)
    assert_close(loss, output.loss)
    for ours, name in names.items():
        if ours.endswith("key_bias"):  # a shift of all scores, so its gradient is rounding
            assert parameters[ours].grad.norm() < 1e-6 * parameters[ours.replace("key", "query")].grad.norm()
        else:
            assert_close(parameters[ours].grad, their_parameters[name].grad)
    assert losses.mlm_correct == (mlm_logits.argmax(1) == mlm_labels).sum()
    assert losses.sentence_correct == (sentence_logits.argmax(1) == sentence_labels).sum()


@pytest.mark.parametrize(
    ("preset", "with_heads", "encoder_and_pooler"),
    [
        ("base", 11_813_810, 11_683_584),
        ("large", 17_847_474, 17_683_968),
        ("xlarge", 59_021_490, 58_724_864),
        ("xxlarge", 223_158_450, 222_595_584),
    ],
)
def test_presets_have_the_published_numbers_of_parameters(preset, with_heads, encoder_and_pooler):
    with torch.device("meta"):
        model = Albert(PRESETS[preset], 30_000)
    assert count(model) == with_heads
    assert count(model) - count(model.mlm_head) - count(model.sentence_head) == encoder_and_pooler
    assert len(list(model.parameters())) == 32


@pytest.mark.parametrize(
    ("share", "parameters"),
    [("all", 11_683_584), ("attention", 63_647_232), ("ffn", 37_686_528), ("none", 89_650_176)],
)
def test_sharing_modes_have_their_numbers_of_parameters(share, parameters):
    with torch.device("meta"):
        model = Albert(ModelConfig(share=share), 30_000)
    assert count(model) - count(model.mlm_head) - count(model.sentence_head) == parameters


def test_equal_widths_need_no_projection():
    config = SMALL.model_copy(update={"embedding_size": SMALL.hidden_size})
    model = small_albert(config)
    assert not any(name.startswith("projection") for name, _ in model.named_parameters())
    assert model(**batch([20, 7]))[0].isfinite().all()


def test_without_a_sentence_head_only_masked_words_are_predicted():
    model = small_albert(sentence_head=False)
    inputs = batch([20, 7])
    mlm_logits, sentence_logits = model(**inputs)
    losses = pretraining_losses(mlm_logits, labels(inputs)[0], sentence_logits, None)
    (losses.mlm_loss + losses.sentence_loss).backward()
    assert sentence_logits is None
    assert losses.sentence_loss == losses.sentence_correct == 0
    assert all(parameter.grad is not None for parameter in model.parameters())


@pytest.mark.parametrize(
    ("share", "groups", "attentions", "feed_forwards"),
    [
        ("all", 2, [0, 0, 0, 1, 1], [0, 0, 0, 1, 1]),
        ("all", 3, [0, 0, 1, 1, 2], [0, 0, 1, 1, 2]),
        ("attention", 2, [0, 0, 0, 1, 1], [0, 1, 2, 3, 4]),
        ("ffn", 1, [0, 1, 2, 3, 4], [0, 0, 0, 0, 0]),
        ("none", 1, [0, 1, 2, 3, 4], [0, 1, 2, 3, 4]),
    ],
)
def test_layers_use_the_weights_of_their_group(share, groups, attentions, feed_forwards):
    model = small_albert(SMALL.model_copy(update={"share": share, "num_hidden_groups": groups}))
    used = []
    for kind in ("attention", "feed_forward"):
        for index, module in enumerate(getattr(model, kind)):
            module.register_forward_hook(lambda *_, kind=kind, index=index: used.append((kind, index)))
    model(**batch([20, 7]))
    assert [index for kind, index in used if kind == "attention"] == attentions
    assert [index for kind, index in used if kind == "feed_forward"] == feed_forwards


def test_activation_checkpointing_leaves_gradients_as_they_are():
    config = SMALL.model_copy(update={"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.1})
    calls, results = [], []
    for checkpointed in (0, config.num_hidden_layers - 1, config.num_hidden_layers):
        model = small_albert(config, activation_checkpointing=checkpointed)
        model.attention[0].register_forward_pre_hook(lambda *_, checkpointed=checkpointed: calls.append(checkpointed))
        torch.manual_seed(3)
        results.append(gradients(model, batch([20, 7])))
    layers = config.num_hidden_layers
    assert [calls.count(checkpointed) for checkpointed in (0, layers - 1, layers)] == [
        layers,
        2 * layers - 1,
        2 * layers,
    ]
    for name, gradient in results[0].items():
        assert torch.equal(gradient, results[1][name]) and torch.equal(gradient, results[2][name]), name


@pytest.mark.parametrize("depth", [2, 8])
def test_another_depth_equals_a_model_of_that_depth(depth):
    config = SMALL.model_copy(update={"num_hidden_groups": 2})
    model = small_albert(config)
    other = Albert(config.model_copy(update={"num_hidden_layers": depth}), VOCABULARY_SIZE)
    other.load_state_dict(model.state_dict())
    expected = gradients(other, batch([20, 7]))
    for name, gradient in gradients(model, batch([20, 7]), num_layers=depth).items():
        assert torch.equal(gradient, expected[name]), name


def test_another_depth_is_refused_where_layers_are_not_shared():
    with pytest.raises(ValueError, match="num_layers 3"):
        small_albert(SMALL.model_copy(update={"share": "attention"}))(**batch([20]), num_layers=3)


def test_padding_does_not_change_the_other_rows():
    model = small_albert().eval()
    short = batch([7])
    padded = {name: torch.nn.functional.pad(short[name], (0, 9)) for name in ("input_ids", "token_type_ids")}
    alone = model.encode(short["input_ids"], short["token_type_ids"], None)
    assert_close(model.encode(**padded, lengths=short["lengths"])[:, :7], alone)


def test_dropout_acts_in_training_only():
    for setting in ("hidden_dropout_prob", "attention_probs_dropout_prob"):
        model, inputs = small_albert(SMALL.model_copy(update={setting: 0.5})), batch([20, 7])
        assert not torch.equal(model(**inputs)[0], model(**inputs)[0]), setting
        model.eval()
        assert torch.equal(model(**inputs)[0], model(**inputs)[0]), setting


def test_first_values_are_a_cut_normal_and_repeat_themselves():
    with torch.device("meta"):
        models = [Albert(SMALL, 5_000), Albert(SMALL, 5_000)]
    for model in models:
        model.to_empty(device="cpu").initialise(torch.Generator().manual_seed(7))
    first, second = (dict(model.named_parameters()) for model in models)
    assert all(torch.equal(parameter, second[name]) for name, parameter in first.items())
    matrices = torch.cat([parameter.detach().flatten() for parameter in first.values() if parameter.ndim > 1])
    assert matrices.std().item() == pytest.approx(0.0176, rel=0.01)
    assert matrices.abs().max() <= 0.04
    for name, parameter in first.items():
        if parameter.ndim == 1:
            assert (parameter == (1 if name.endswith("layer_norm.weight") else 0)).all(), name


def test_no_masked_tokens_give_a_zero_loss_with_gradients():
    model, inputs = small_albert(), batch([20, 7])
    inputs["masked_positions"] = torch.empty(0, dtype=torch.long)
    mlm_logits, sentence_logits = model(**inputs)
    losses = pretraining_losses(mlm_logits, inputs["masked_positions"], sentence_logits, torch.tensor([-1, -1]))
    (losses.mlm_loss + losses.sentence_loss).backward()
    assert all(value == 0 and value.dtype == torch.float32 and value.ndim == 0 for value in losses)
    assert all((parameter.grad == 0).all() for parameter in model.parameters())


def test_rows_without_a_sentence_label_do_not_count():
    logits = torch.tensor([[2.0, 0.0], [0.0, 5.0]])
    losses = pretraining_losses(torch.zeros(1, 4), torch.tensor([2]), logits, torch.tensor([0, -1]))
    assert losses.sentence_loss.item() == pytest.approx(0.126928, rel=1e-5)
    assert losses.sentence_correct == 1
    assert losses.mlm_loss.item() == pytest.approx(1.386294, rel=1e-5)


def test_constant_rows_stay_finite_in_bfloat16():
    model = Albert(SMALL, VOCABULARY_SIZE)
    model.initialise(torch.Generator().manual_seed(0))
    with torch.no_grad():
        for parameter in model.embeddings.parameters():
            parameter.fill_(0.3)
    model.bfloat16()
    assert all(gradient.isfinite().all() for gradient in gradients(model, batch([20, 7])).values())
