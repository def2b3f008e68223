"""Which pieces of work serve another plan too."""

import platform
from collections.abc import Callable

import pytest

from configs.schema import ConfigError, load_config
from data_prep.files import write_whole
from data_prep.plan import Plan
from data_prep.vocabulary import Vocabulary


@pytest.fixture
def planned(tmp_path, write_config, vocabulary: Vocabulary) -> Callable[..., Plan]:
    """The plan for `a.txt` and `b.txt` with overrides of the settings, and in its work folder a vocabulary."""
    for name in "ab":
        (tmp_path / f"{name}.txt").write_text("Da do. Be de.\n")
    config = write_config(tmp_path, "data", inputs=[{"kind": "text", "path": str(tmp_path / "*.txt")}])

    def plan(*overrides: str, trained: bytes = vocabulary.model) -> Plan:
        made = Plan.make(load_config(config, overrides))
        write_whole(made.vocabulary, trained)
        return made

    return plan


@pytest.mark.parametrize(
    ("override", "sampled", "spilled"),
    [
        ("seed=2", False, False),
        ("data.filters.min_words=3", False, False),
        ("data.vocab.sample_sentences=7", False, True),
        ("data.vocab.size=500", True, True),
        ("data.max_length=32", True, False),
        ("data.shards=5", True, False),
        ("data.deduplicate=false", True, False),
        ("data.language=de", True, False),
        ("data.masking.mode=static", True, True),
        ("data.max_bad_fraction=0.5", True, True),
        ("data.inputs.0.document_per=file", False, False),
    ],
)
def test_pieces_serve_a_plan_with_other_settings_where_those_do_not_shape_them(planned, override, sampled, spilled):
    first, second = planned(), planned(override)
    assert (first.sample_keys == second.sample_keys) == sampled
    assert (first.unit_keys == second.unit_keys) == spilled
    assert (first.fingerprint == second.fingerprint) == (override.startswith("data.max_bad_fraction"))


def test_another_vocabulary_gives_other_spills(planned, vocabulary):
    first = planned()
    spilled = set(first.unit_keys)
    second = planned(trained=vocabulary.model + b"\0")
    assert not spilled & set(second.unit_keys)
    assert first.sample_keys == second.sample_keys and first.source_keys == second.source_keys


def test_a_changed_and_an_added_file_leave_the_pieces_of_others_as_they_are(planned, tmp_path):
    first = planned()
    (tmp_path / "a.txt").write_text("Another text.\n")
    (tmp_path / "aa.txt").write_text("Da do. Be de.\n")
    second = planned()
    for keys in ("sample_keys", "unit_keys", "source_keys"):
        before, after = getattr(first, keys), getattr(second, keys)
        assert len(set(after)) == 3 and set(before) & set(after) == {before[1]} == {after[2]}


def test_a_little_more_text_is_sampled_at_the_same_rate(tmp_path, write_config):
    inputs = [{"kind": "text", "path": str(tmp_path / "*.txt")}]
    (tmp_path / "a.txt").write_text("da do\n" * 50_000)
    config = load_config(write_config(tmp_path, "rate", inputs=inputs, vocab={"sample_sentences": 100}))
    first = Plan.make(config)
    (tmp_path / "b.txt").write_text("da do\n" * 3_000)
    second = Plan.make(config)
    assert 100 * 250 / 300_000 <= first.sampling_rate < 2 * 100 * 250 / 300_000
    assert first.sample_keys == second.sample_keys[:1] and len(second.sample_keys) == 2
    assert first.fingerprint != second.fingerprint


def test_what_other_versions_made_serves_no_plan_but_a_finished_data_set_stays(planned, monkeypatch):
    first = planned()
    first.save()
    monkeypatch.setattr("data_prep.plan.versions", lambda: {**first.versions, "sentencex": "0.0.1"})
    with pytest.raises(ConfigError, match=r"a worker has sentencex 0.0.1, the job was started with"):
        Plan.load(first.path)
    second = planned()
    assert first.fingerprint == second.fingerprint and first.work != second.work
    for name in ("sample_keys", "unit_keys", "source_keys"):
        assert not set(getattr(first, name)) & set(getattr(second, name))


def test_workers_may_have_another_patch_release_of_python_and_no_other_minor_version(planned, monkeypatch):
    first = planned()
    first.save()
    major, minor, _ = platform.python_version_tuple()
    monkeypatch.setattr("platform.python_version", lambda: f"{major}.{minor}.99")
    assert Plan.load(first.path) == first == planned()
    monkeypatch.setattr("platform.python_version", lambda: "3.9.1")
    with pytest.raises(ConfigError, match=rf"a worker has python 3.9, the job was started with {major}.{minor}:"):
        Plan.load(first.path)
