import resource

import pytest

from data_prep.corpus import Document
from data_prep.sampling import is_whole_sample, merged_sample, sample_content, sampled_documents
from data_prep.text import sentences_of


@pytest.fixture(scope="module")
def documents(pseudo_documents) -> list[Document]:
    texts = pseudo_documents(400, 30)
    return [Document(text, f"a:{number}") for number, text in enumerate(texts + texts[:50])]


def merged(tmp_path, groups: list[list[Document]], data, seed: int, rate: float = 1.0) -> list[str]:
    """The sample of units that hold `groups` of documents."""
    paths = []
    for number, group in enumerate(groups):
        paths.append(tmp_path / f"{number}.jsonl")
        paths[-1].write_text(sample_content(sampled_documents(group, data, seed, rate)))
    return list(merged_sample(paths, data))


def test_the_sample_does_not_depend_on_units_or_the_order_of_documents(tmp_path, documents, data_config):
    data = data_config(vocab={"sample_sentences": 500})
    whole = merged(tmp_path, [documents], data, 1)
    assert merged(tmp_path, [documents[::-1]], data, 1) == whole
    assert merged(tmp_path, [documents[number::7] for number in range(7)], data, 1) == whole
    assert merged(tmp_path, [documents[:10], documents[10:]], data, 1, rate=0.5) == whole


def test_the_sample_is_bounded_by_whole_documents(tmp_path, documents, data_config):
    longest = max(len(sentences_of(document.text, "en")) for document in documents)
    for bound in (1, 100, 1000):
        sample = merged(tmp_path, [documents], data_config(vocab={"sample_sentences": bound}), 1)
        assert bound <= len(sample) < bound + longest


def test_a_large_bound_takes_every_text_once(tmp_path, documents, data_config):
    sample = merged(tmp_path, [documents[:200], documents[200:]], data_config(), 1)
    assert sorted(sample) == sorted(s for document in documents[:400] for s in sentences_of(document.text, "en"))


def test_another_seed_draws_another_sample(tmp_path, documents, data_config):
    data = data_config(vocab={"sample_sentences": 300})
    assert set(merged(tmp_path, [documents], data, 1)) != set(merged(tmp_path, [documents], data, 2))


def test_unusable_documents_are_not_drawn(tmp_path, documents, data_config):
    bad = [Document("broken", "a:0", "broken_json"), Document(" \n", "a:1"), Document("too short", "a:2")]
    sample = merged(tmp_path, [bad + documents[:20]], data_config(filters={"min_words": 3}), 1)
    assert sample and not {"broken", "too short"} & set(sample)


def test_a_sample_that_was_cut_short_is_known_by_its_size(tmp_path, data_config):
    path = tmp_path / "sample.jsonl"
    assert not is_whole_sample(path)
    for sample in ([], [(1, "Da dö.")], [(1, "Da do."), (2, "Be\nde.")]):
        path.write_text(sample_content(sample))
        content = path.read_bytes()
        assert is_whole_sample(path)
        assert list(merged_sample([path], data_config())) == [s for _, text in sample for s in sentences_of(text, "en")]
        for size in range(len(content)):
            path.write_bytes(content[:size])
            assert not is_whole_sample(path)


def test_a_sample_of_many_units_needs_few_open_files(tmp_path, documents, data_config):
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (100, hard))
    try:
        sample = merged(tmp_path, [[document] for document in documents[:300]], data_config(), 1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert sorted(sample) == sorted(s for document in documents[:300] for s in sentences_of(document.text, "en"))
