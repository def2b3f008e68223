import json
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.schema import (
    ConfigError,
    DataConfig,
    absolute_path,
    fingerprint,
    flat,
    load_config,
    resolved,
    validate_config,
)

MINIMAL = {
    "name": "tiny",
    "data": {"output": "data/tiny", "inputs": [{"kind": "text", "path": "texts/*.txt"}]},
    "training": {"output": "runs/tiny"},
}


@pytest.fixture
def config_file(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "tiny.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    return path


def refusal(*overrides: str, path: Path) -> str:
    with pytest.raises(ConfigError) as error:
        load_config(path, overrides)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("language", ["english", "e", "''", "de_DE", "pt-BRA"])
def test_what_is_no_language_code_is_refused(config_file, language):
    assert "is no language code such as en" in refusal(f"data.language={language}", path=config_file)


@pytest.mark.parametrize("language", ["en", "yue", "pt-BR", "zh-Hant", "sr-Latn-RS", "es-419"])
def test_language_codes_are_taken_with_script_and_region(config_file, language):
    assert load_config(config_file, [f"data.language={language}"]).data.language == language


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("data.max_lenght=64", "unknown key data.max_lenght (did you mean max_length?)"),
        (
            "training.optimizer.weigth_decay=1",
            "unknown key training.optimizer.weigth_decay (did you mean weight_decay?)",
        ),
        ("data.inputs.0.kidn=text", "unknown key data.inputs.0.kidn (did you mean kind?)"),
        ("data.masking.zzz=1", "unknown key data.masking.zzz (known here: mode, copies, probability"),
        ("modle.hidden_size=8", "unknown key modle (did you mean model?)"),
        ("training.checkpoint.evry=1", "unknown key training.checkpoint.evry (did you mean every?)"),
    ],
)
def test_unknown_keys_are_refused_with_a_suggestion(config_file, override, expected):
    message = refusal(override, path=config_file)
    assert expected in message and message.startswith(str(config_file))


def test_several_faults_are_told_together(config_file):
    message = refusal("data.max_lenght=64", "seed=minus", "training.steps=0", path=config_file)
    assert all(part in message for part in ("max_lenght", "seed: ", "training.steps: "))


@pytest.mark.parametrize(
    "key",
    [
        "seed",
        "training.steps",
        "training.zero_stage",
        "training.learning_rate",
        "training.processes_per_node",
        "training.stop_after",
        "training.checkpoint.every",
        "training.on_divergence",
        "data.filters.min_words",
        "model.hidden_size",
    ],
)
def test_true_and_false_are_no_numbers(config_file, key):
    assert f"{key}: takes no true" in refusal(f"{key}=true", path=config_file)
    assert f"{key}: takes no false" in refusal(f"{key}=false", path=config_file)


def test_true_is_no_number_in_a_list_either(config_file):
    assert "clamp: takes no true" in refusal("training.optimizer.clamp=[true, 2]", path=config_file)


@pytest.mark.parametrize("value", [".inf", "-.inf", ".nan"])
def test_every_number_is_finite(config_file, value):
    keys = [key for key, number in flat(resolved(load_config(config_file))).items() if isinstance(number, float)]
    assert "training.optimizer.eps" in keys and "training.gradient_clipping" in keys
    for key in keys:
        assert f"{key}: " in refusal(f"{key}={value}", path=config_file)


def test_a_clamp_is_refused_where_there_is_no_trust_ratio(config_file):
    message = refusal("training.optimizer={name: adamw, clamp: [0, 10]}", path=config_file)
    assert "clamp bounds LAMB's trust ratio, which adamw has not: leave it out" in message


def test_missing_sections_are_named(tmp_path):
    (tmp_path / "empty.yaml").write_text("")
    message = refusal(path=tmp_path / "empty.yaml")
    assert all(part in message for part in ("name: ", "data: ", "training: "))


@pytest.mark.parametrize(
    ("override", "read", "value"),
    [
        ("seed=7", lambda c: c.seed, 7),
        ("name='7'", lambda c: c.name, "7"),
        ("training.learning_rate=1e-3", lambda c: c.training.learning_rate, 1e-3),
        ("data.vocab.size=500", lambda c: c.data.vocab.size, 500),
        ("data.filters={min_words: 3, max_nonletter_fraction: 0.5}", lambda c: c.data.filters.min_words, 3),
        ("data.filters.min_words=null", lambda c: c.data.filters.min_words, None),
        ("data.filters.min_words=", lambda c: c.data.filters.min_words, None),
        ("data.inputs.0.kind=jsonl", lambda c: c.data.inputs[0].kind, "jsonl"),
        ("data.inputs[0].text_field=body", lambda c: c.data.inputs[0].text_field, "body"),
        (
            "data.inputs=[{kind: docstrings, path: 'a b'}, {kind: text, path: /x=y}]",
            lambda c: [i.path for i in c.data.inputs],
            ["a b", "/x=y"],
        ),
        (
            "training.optimizer={name: adamw}",
            lambda c: (c.training.optimizer.name, c.training.optimizer.eps),
            ("adamw", 1e-6),
        ),
        ("training.optimizer.clamp=[0.01, 10]", lambda c: c.training.optimizer.clamp, (0.01, 10.0)),
        ("training.optimizer.clamp=[0.01, .inf]", lambda c: c.training.optimizer.clamp, (0.01, float("inf"))),
        (
            "training.deepspeed={zero_optimization: {overlap_comm: true}}",
            lambda c: c.training.deepspeed,
            {"zero_optimization": {"overlap_comm": True}},
        ),
        ("training.processes_per_node=2", lambda c: c.training.processes_per_node, 2),
        ("training.activation_checkpointing=3", lambda c: c.training.activation_checkpointing, 3),
        ("training.activation_checkpointing=true", lambda c: c.training.activation_checkpointing, True),
    ],
)
def test_overrides_take_yaml_values(config_file, override, read, value):
    assert read(load_config(config_file, [override])) == value


def test_rate_and_steps_are_converted_to_another_batch_by_the_square_root_rule_once():
    overrides = ["training.global_batch_size=1024", "training.scale_from_batch=4096"]
    training = load_config("configs/base.yaml", overrides).training
    assert training.learning_rate == 0.00176 / 2
    assert (training.steps, training.warmup_steps) == (500_000, 12_500)
    again = validate_config(resolved(load_config("configs/base.yaml", overrides)), source="run")
    assert again.training == training


@pytest.mark.parametrize(
    ("overrides", "named"),
    [
        (["training.depth_schedule=[{num_layers: 12, steps: 5}]"], "below num_hidden_layers 12"),
        (["training.depth_schedule=[{num_layers: 6, steps: 5}, {num_layers: 3, steps: 5}]"], "must grow"),
        (["training.depth_schedule=[{num_layers: 3, steps: 125000}]"], "below steps 125000"),
        (["training.depth_schedule=[{num_layers: 3, steps: 5}]", "model.share=ffn"], "needs model.share: all"),
        (["training.depth_schedule=[{num_layers: 1, steps: 5}]", "model.num_hidden_groups=2"], "num_hidden_groups 2"),
        (["training.compile=true", "training.zero_stage=3"], "compile does not work at zero_stage 3"),
        (["training.offload_optimizer=true", "training.zero_stage=0"], "offload_optimizer needs zero_stage 1"),
    ],
)
def test_depths_compilation_and_offloading_that_cannot_be_are_refused_in_one_line(overrides, named):
    with pytest.raises(ConfigError, match=named) as refused:
        load_config("configs/base.yaml", overrides)
    assert "\n" not in str(refused.value)


def test_later_overrides_win(config_file):
    assert load_config(config_file, ["seed=1", "seed=2"]).seed == 2


@pytest.mark.parametrize(
    "override",
    [
        "seed",
        "=3",
        " =3",
        "name=[1",
        "name={a: b",
        "name=a: b",
        "name=${nothing}",
        "name=${",
        "data.inputs.7.path=x",
        "data.inputs.x.path=y",
    ],
)
def test_malformed_overrides_are_refused_by_name(config_file, override):
    assert repr(override) in refusal(override, path=config_file)


@given(
    st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), max_size=12),
    st.text(st.sampled_from("a0.[]{}:='\"$#&*!\n -"), max_size=10),
)
@settings(max_examples=200, deadline=None)
def test_any_override_is_taken_or_refused_in_one_line(tmp_path_factory, key, value):
    path = tmp_path_factory.getbasetemp() / "any.yaml"
    path.write_text(yaml.safe_dump(MINIMAL))
    refusals = []
    for override in (f"{key}={value}", f"name={value}", f"data.{key}={value}"):
        try:
            load_config(path, [override])
        except ConfigError as error:
            refusals.append(str(error))
    assert not any("\n" in message for message in refusals)


def test_a_missing_file_names_the_presets(tmp_path):
    message = refusal(path=tmp_path / "nothing.yaml")
    presets = sorted(f"configs/{path.name}" for path in Path(__file__).parents[2].glob("configs/*.yaml"))
    assert "nothing.yaml not found; presets: " in message and ", ".join(presets) in message


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"name: [", "is not valid YAML"),
        (b"name: \xff", "is not valid YAML"),
        (b"- 1\n", "must hold a mapping"),
        (b"name: a\nname: b\n", "is not valid YAML"),
    ],
)
def test_files_that_are_no_mapping_are_refused(tmp_path, content, expected):
    path = tmp_path / "bad.yaml"
    path.write_bytes(content)
    assert expected in refusal(path=path)


def test_relative_paths_become_absolute(config_file, tmp_path):
    config = load_config(
        config_file,
        ["data.vocab.model=old/spiece.model", "training.init_from=~/weights", "tracking.uri=sqlite:///runs/x.db"],
    )
    assert config.data.output == f"{tmp_path}/data/tiny"
    assert config.data.inputs[0].path == f"{tmp_path}/texts/*.txt"
    assert config.data.vocab.model == f"{tmp_path}/old/spiece.model"
    assert config.training.output == f"{tmp_path}/runs/tiny"
    assert config.training.init_from == str(Path.home() / "weights")
    assert config.tracking.uri == f"sqlite:///{tmp_path}/runs/x.db"


def test_addresses_and_package_names_are_no_paths(config_file):
    config = load_config(
        config_file,
        [
            "data.inputs=[{kind: docstrings, path: networkx}]",
            "tracking.uri=http://host:5000",
            "data.output=s3://bucket/data",
        ],
    )
    assert config.data.inputs[0].path == "networkx"
    assert config.tracking.uri == "http://host:5000" and config.data.output == "s3://bucket/data"
    assert absolute_path("") == ""


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        (["training.warmup_steps=10", "training.steps=10"], "warmup_steps 10 must be below steps 10"),
        (["training.precision=fp16", "training.zero_stage=0"], "precision fp16 does not work at zero_stage 0"),
        (["model.num_attention_heads=7"], "hidden_size 768 is not a multiple of num_attention_heads 7"),
        (["model.num_hidden_groups=13"], "num_hidden_groups 13 exceeds num_hidden_layers 12"),
        (["data.max_length=1024"], "data.max_length 1024 exceeds model.max_position_embeddings 512"),
        (["training.micro_batch_tokens=500"], "training.micro_batch_tokens 500 does not hold one example"),
        (["data.masking.copies=2"], "masking.copies above 1 needs masking.mode: static"),
        (["data.resample_order=true", "data.masking.mode=static"], "resample_order needs"),
        (["data.resample_order=true", "data.sentence_objective=nsp"], "resample_order needs"),
        (["training.deepspeed={bf16: {enabled: true}}"], "deepspeed.bf16 is generated from the other settings"),
        (["training.deepspeed={zero_optimization: {stage: 2}}"], "deepspeed.zero_optimization.stage is generated"),
        (["training.stop_after=0"], "training.stop_after: "),
        (["data.inputs=[]"], "data.inputs: "),
        (["data.validation_fraction=0"], "data.validation_fraction: "),
        (["data.masking.probability=.nan"], "data.masking.probability: "),
        (["seed=-1"], "seed: "),
        (["data.output=''"], "data.output is empty: name a folder"),
        (["training.output=''"], "training.output is empty: name a folder"),
        (["data.sentence_objective=both"], "data.sentence_objective: "),
    ],
)
def test_settings_that_do_not_go_together_are_refused(config_file, overrides, expected):
    assert expected in refusal(*overrides, path=config_file)


@pytest.mark.parametrize(
    ("length", "probability", "expected"),
    [(512, 0.15, 77), (128, 0.15, 19), (10, 0.25, 2), (14, 0.25, 4), (8, 0.05, 1)],
)
def test_max_predictions_default_to_the_rounded_share_half_to_even(length, probability, expected):
    data = DataConfig(
        output="x", inputs=[{"kind": "text", "path": "x"}], max_length=length, masking={"probability": probability}
    )
    assert data.masking.max_predictions == expected


def test_given_max_predictions_are_kept(config_file):
    assert load_config(config_file, ["data.masking.max_predictions=20"]).data.masking.max_predictions == 20


@pytest.mark.parametrize(
    ("overrides", "expected"),
    [
        ([], True),
        (["data.masking.mode=static"], False),
        (["data.sentence_objective=nsp"], False),
        (["data.resample_order=false"], False),
    ],
)
def test_order_is_drawn_anew_where_masks_are(config_file, overrides, expected):
    assert load_config(config_file, overrides).data.resample_order is expected


def test_defaults_are_those_of_albert_base(config_file):
    config = load_config(config_file)
    model = config.model
    assert (model.hidden_size, model.embedding_size, model.num_hidden_layers, model.intermediate_size) == (
        768,
        128,
        12,
        3072,
    )
    assert (config.training.global_batch_size, config.training.steps, config.training.warmup_steps) == (
        4096,
        125_000,
        3125,
    )
    assert (config.training.learning_rate, config.data.vocab.size, config.data.max_length) == (0.00176, 30_000, 512)


def test_a_resolved_configuration_reads_back_as_itself(config_file):
    config = load_config(config_file, ["training.optimizer.clamp=[0.1, 2]", "data.masking.ngram=2"])
    content = json.loads(json.dumps(resolved(config)))
    assert validate_config(content, "again") == config


def test_settings_cannot_be_changed_afterwards(config_file):
    with pytest.raises(ValueError, match="frozen"):
        load_config(config_file).seed = 3


def test_fingerprints_follow_content_and_not_the_order_of_keys():
    assert fingerprint({"a": 1, "b": [1, 2]}) == fingerprint({"b": [1, 2], "a": 1})
    assert fingerprint({"a": 1}) != fingerprint({"a": "1"})
    assert fingerprint([1, 2]) != fingerprint([2, 1])


def test_an_action_on_divergence_may_stand_alone(config_file):
    config = load_config(config_file, ["training.on_divergence=rollback"])
    assert config.training.on_divergence.action == "rollback"
    assert config == load_config(config_file, ["training.on_divergence={action: rollback}"])
    assert "training.on_divergence" in refusal("training.on_divergence=explode", path=config_file)
    assert "did you mean factor?" in refusal("training.on_divergence={facter: 0.1}", path=config_file)
