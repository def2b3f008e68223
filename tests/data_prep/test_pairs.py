import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from data_prep import pairs as cutting
from data_prep.pairs import IN_ORDER, NO_LABEL, SWAPPED, Cut, Pair

ROOM = 61


def length(segment: tuple[int, int]) -> int:
    return segment[1] - segment[0]


def in_reading_order(pair: Pair) -> tuple[tuple[int, int], tuple[int, int]]:
    return (pair.a, pair.b) if pair.label == IN_ORDER else (pair.b, pair.a)


def random_document(rng: np.random.Generator, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """(sentence ends, word begins) of sentences of `lengths`; a sentence begins a word."""
    ends = np.cumsum(lengths)
    begins = rng.random(ends[-1]) < 0.7
    begins[np.concatenate(([0], ends[:-1]))] = True
    return ends, np.flatnonzero(begins)


def documents(count: int, seed: int, sentences: int = 30, mean: float = 20):
    rng = np.random.default_rng(seed)
    for _ in range(count):
        lengths = np.maximum(1, rng.gamma(2.5, mean / 2.5, size=rng.integers(2, sentences))).astype(int)
        yield *random_document(rng, lengths), int(rng.integers(2**63))


def sentence_pairs(ends: np.ndarray, word_begins: np.ndarray, key: int, room: int, short: float, swap: bool) -> Cut:
    """The cut of a single document."""
    return cutting.sentence_pairs([ends], lambda _: word_begins, np.array([key], dtype=np.uint64), room, short, swap)


def running_texts(ends: np.ndarray, key: int, room: int, short: float) -> Cut:
    return cutting.running_texts([ends], np.array([key], dtype=np.uint64), room, short)


def assert_sound(cut: Cut, ends: np.ndarray, word_begins: np.ndarray, room: int) -> None:
    total, covered, reached, truncated_before = int(ends[-1]), 0, 0, False
    borders = set(ends.tolist())
    sentences_longer_than_room = np.diff(ends, prepend=0).max() > room
    for pair in cut.pairs:
        first, second = in_reading_order(pair)
        assert length(first) > 0 and length(second) > 0
        assert reached <= first[0] and first[1] <= second[0] and second[1] <= total
        size = length(first) + length(second)
        assert size <= room
        if size < room:
            assert first[1] == second[0] and (first[0] == reached or truncated_before)
            if len(ends) > 1 and not sentences_longer_than_room:
                assert first[1] in borders and second[1] in borders
            elif len(ends) == 1 and not sentences_longer_than_room:
                assert first[1] in word_begins and second[1] == total
        covered += size
        truncated_before = size == room
        reached = second[1]
    if cut.pairs:
        assert covered + cut.truncated.sum() == total
    else:
        assert cut.truncated.sum() == 0


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=30),
    word_seed=st.integers(0, 2**32),
    key=st.integers(0, 2**64 - 1),
    room=st.integers(5, 80),
    short=st.sampled_from([0.0, 0.1, 1.0]),
    swap=st.booleans(),
)
@settings(max_examples=1000, deadline=None)
def test_pairs_are_neighbouring_segments_and_every_token_is_in_one_or_counted(
    lengths, word_seed, key, room, short, swap
):
    ends, word_begins = random_document(np.random.default_rng(word_seed), np.array(lengths))
    cut = sentence_pairs(ends, word_begins, key, room, short, swap)
    assert_sound(cut, ends, word_begins, room)
    assert swap or all(pair.label == IN_ORDER for pair in cut.pairs)
    if not cut.pairs:
        assert len(ends) == 1 and len(word_begins) == 1 and ends[0] <= room
    assert cut.pairs == sentence_pairs(ends, word_begins, key, room, short, swap).pairs


def test_thousands_of_documents_give_sound_pairs():
    for ends, word_begins, key in documents(3000, seed=1):
        assert_sound(sentence_pairs(ends, word_begins, key, ROOM, 0.1, True), ends, word_begins, ROOM)


def test_chunks_hold_at_least_two_sentences_and_reach_their_target():
    ends, word_begins = np.arange(1, 1001), np.arange(1000)
    sizes = [length(p.a) + length(p.b) for p in sentence_pairs(ends, word_begins, 5, 50, 0.0, True).pairs]
    assert sizes == [50] * 20
    sizes = [length(p.a) + length(p.b) for p in sentence_pairs(ends[:102], word_begins[:102], 5, 50, 0.0, True).pairs]
    assert sorted(sizes) == [2, 50, 50]


def test_a_sentence_left_alone_takes_its_neighbour_along():
    ends, word_begins = np.arange(1, 102), np.arange(101)
    for key in range(20):
        sizes = [length(p.a) + length(p.b) for p in sentence_pairs(ends, word_begins, key, 50, 0.0, True).pairs]
        assert sorted(sizes) == [2, 49, 50]


def test_a_tenth_of_the_targets_is_short_and_uniform():
    ends, word_begins = np.arange(1, 20_001), np.arange(20_000)
    sizes = []
    for key in range(30):
        pairs = sentence_pairs(ends, word_begins, key, 100, 0.1, True).pairs
        sizes += [length(pair.a) + length(pair.b) for pair in pairs[1:-1]]
    sizes = np.array(sizes)
    short = sizes[sizes < 100]
    expected = 0.1 * 98 / 99
    assert len(short) / len(sizes) == pytest.approx(expected, abs=4 * np.sqrt(expected / len(sizes)))
    assert short.min() == 2 and short.max() == 99
    assert short.mean() == pytest.approx((2 + 99) / 2, abs=4 * 28.3 / np.sqrt(len(short)))


def test_half_of_the_pairs_are_swapped_and_labels_say_so():
    labels = [
        p.label
        for ends, words, key in documents(3000, 2)
        for p in sentence_pairs(ends, words, key, ROOM, 0.1, True).pairs
    ]
    assert set(labels) == {IN_ORDER, SWAPPED}
    assert np.mean(labels) == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(len(labels)))
    pairs = [
        p for ends, words, key in documents(300, 3) for p in sentence_pairs(ends, words, key, ROOM, 0.1, True).pairs
    ]
    assert all((pair.a[0] < pair.b[0]) == (pair.label == IN_ORDER) for pair in pairs)


@pytest.mark.parametrize("sentences", [2, 3, 6])
def test_the_first_segment_gets_each_number_of_sentences_equally_often(sentences):
    rng = np.random.default_rng(4)
    ends = np.cumsum(rng.integers(1, 20, size=sentences))
    keys = 4000
    firsts = [
        in_reading_order(sentence_pairs(ends, np.arange(ends[-1]), key, 1000, 0.0, True).pairs[0])[0][1]
        for key in range(keys)
    ]
    counts = np.array([firsts.count(end) for end in ends[:-1]])
    assert counts.sum() == keys
    share = 1 / (sentences - 1)
    assert np.abs(counts / keys - share).max() <= 4 * np.sqrt(share * (1 - share) / keys)


def slowly_truncated(a: tuple[int, int], b: tuple[int, int], room: int, rng: np.random.Generator) -> list[list[int]]:
    tokens_a, tokens_b = list(range(*a)), list(range(*b))
    while len(tokens_a) + len(tokens_b) > room:
        longer = tokens_a if len(tokens_a) > len(tokens_b) else tokens_b
        longer.pop(0 if rng.random() < 0.5 else -1)
    return [tokens_a, tokens_b]


@pytest.mark.parametrize(
    ("first", "second", "room"), [(30, 40, 61), (10, 70, 75), (50, 50, 61), (9, 8, 10), (200, 200, 61)]
)
def test_truncation_is_that_of_one_token_at_a_time(first, second, room):
    ends = np.array([first, first + second])
    rng = np.random.default_rng(5)
    fast, slow = [], []
    long_sentences = max(first, second) > room
    for key in range(3000):
        for pair in sentence_pairs(ends, np.arange(ends[-1]), key, room, 0.0, True).pairs:
            if long_sentences:
                assert length(pair.a) + length(pair.b) <= room
                continue
            whole = [(0, first), (first, first + second)]
            plain = slowly_truncated(*(whole if pair.label == IN_ORDER else whole[::-1]), room, rng)
            assert [length(pair.a), length(pair.b)] == [len(tokens) for tokens in plain]
            fast.append(
                [
                    pair.a[0] - (0 if pair.label == IN_ORDER else first),
                    pair.b[0] - (first if pair.label == IN_ORDER else 0),
                ]
            )
            slow.append(
                [
                    plain[0][0] - (0 if pair.label == IN_ORDER else first),
                    plain[1][0] - (first if pair.label == IN_ORDER else 0),
                ]
            )
    if fast:
        fast, slow = np.array(fast), np.array(slow)
        error = np.sqrt((fast.var(axis=0) + slow.var(axis=0)) / len(fast))
        assert (np.abs(fast.mean(axis=0) - slow.mean(axis=0)) <= 4 * error).all()
        assert fast.var(axis=0) == pytest.approx(slow.var(axis=0), rel=0.15, abs=1e-9)
        assert (
            abs(np.cov(fast.T)[0, 1] - np.cov(slow.T)[0, 1])
            <= 4 * np.sqrt(2 * fast.var(axis=0).prod() / len(fast)) + 0.05
        )


def test_a_single_sentence_is_split_at_each_word_border_equally_often():
    word_begins = np.array([0, 3, 4, 9, 15])
    keys = 4000
    borders = []
    for key in range(keys):
        cut = sentence_pairs(np.array([20]), word_begins, key, ROOM, 0.1, True)
        assert len(cut.pairs) == 1 and cut.truncated.sum() == 0
        first, second = in_reading_order(cut.pairs[0])
        assert first[0] == 0 and first[1] == second[0] and second[1] == 20
        borders.append(first[1])
    counts = np.array([borders.count(border) for border in (3, 4, 9, 15)])
    assert counts.sum() == keys
    assert np.abs(counts / keys - 0.25).max() < 4 * np.sqrt(0.25 * 0.75 / keys)


def test_a_single_word_makes_no_pair():
    cut = sentence_pairs(np.array([4]), np.array([0]), 1, ROOM, 0.1, True)
    assert cut.pairs == [] and cut.truncated.sum() == 0


def test_sentences_longer_than_the_room_are_parted_at_word_borders():
    rng = np.random.default_rng(6)
    for key in range(300):
        ends, word_begins = random_document(rng, rng.integers(70, 400, size=3))
        whole = set(word_begins.tolist()) | set(ends.tolist())
        cut = sentence_pairs(ends, word_begins, key, ROOM, 0.1, True)
        assert_sound(cut, ends, word_begins, ROOM)
        for pair in cut.pairs:
            first, second = in_reading_order(pair)
            if length(first) + length(second) < ROOM:
                assert {first[0], first[1], second[1]} <= whole


def test_words_longer_than_the_room_are_parted_all_the_same():
    cut = sentence_pairs(np.array([500]), np.array([0]), 3, ROOM, 0.0, True)
    assert_sound(cut, np.array([500]), np.array([0]), ROOM)
    assert len(cut.pairs) > 5


def logistic_accuracy(features: np.ndarray, labels: np.ndarray) -> float:
    """Held-out accuracy of logistic regression (Newton's method), trained on the first half."""
    features = (features - features.mean(axis=0)) / (features.std(axis=0) + 1e-9)
    features = np.column_stack([np.ones(len(features)), features])
    half = len(labels) // 2
    weights = np.zeros(features.shape[1])
    for _ in range(10):
        chance = 1 / (1 + np.exp(-features[:half] @ weights))
        gradient = features[:half].T @ (labels[:half] - chance) - weights
        curvature = (features[:half].T * (chance * (1 - chance))) @ features[:half] + np.eye(len(weights))
        weights += np.linalg.solve(curvature, gradient)
    return float(((features[half:] @ weights > 0) == labels[half:]).mean())


@pytest.mark.parametrize(
    ("room", "sentences", "mean"),
    [(61, 30, 20), (125, 30, 20), (61, 6, 20), (61, 4, 150), (29, 40, 10)],
    ids=["medium", "large", "short-documents", "long-sentences", "small"],
)
def test_cuts_do_not_tell_the_order(room, sentences, mean):
    """But for where a sentence is cut because it is longer than the room: that its first part opens it is a fact."""
    sentences_fit = mean < room
    rows, labels = [], []
    for ends, word_begins, key in documents(4000, seed=7, sentences=sentences, mean=mean):
        begins, borders = np.zeros(ends[-1] + 1, dtype=bool), np.zeros(ends[-1] + 1, dtype=bool)
        begins[word_begins] = begins[-1] = True
        borders[ends] = True
        borders[0] = True
        for pair in sentence_pairs(ends, word_begins, key, room, 0.1, True).pairs:
            a, b = length(pair.a), length(pair.b)
            cuts = [begins[place] for place in pair.a + pair.b]
            if sentences_fit:
                cuts += [borders[place] for place in pair.a + pair.b]
            rows.append([a, b, a + b, a > b, a == b, (a - b) ** 2, a == b + 1, *cuts])
            labels.append(pair.label == SWAPPED)
    labels = np.array(labels)
    error = 0.5 / np.sqrt(len(labels) - len(labels) // 2)
    assert logistic_accuracy(np.array(rows, dtype=float), labels) < 0.5 + 4 * error


def test_the_classifier_of_cuts_finds_a_telltale_that_is_there():
    rng = np.random.default_rng(8)
    labels = rng.random(20_000) < 0.5
    features = rng.normal(size=(20_000, 3))
    features[:, 1] += 0.15 * labels
    assert logistic_accuracy(features, labels) > 0.5 + 4 * 0.5 / np.sqrt(10_000)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=40),
    key=st.integers(0, 2**64 - 1),
    room=st.integers(6, 80),
    short=st.sampled_from([0.0, 0.1, 1.0]),
)
@settings(max_examples=500, deadline=None)
def test_running_texts_hold_every_token_once_in_order(lengths, key, room, short):
    ends = np.cumsum(lengths)
    cut = running_texts(ends, key, room, short)
    reached = 0
    for pair in cut.pairs:
        assert pair.label == NO_LABEL and length(pair.b) == 0
        assert pair.a[0] == reached and 0 < length(pair.a) <= room
        reached = pair.a[1]
    assert reached == ends[-1] and cut.truncated.sum() == 0


def test_running_texts_end_with_the_last_sentence_that_fits():
    cut = running_texts(np.array([10, 25, 60, 61, 200]), 1, 50, 0.0)
    assert [pair.a for pair in cut.pairs] == [(0, 25), (25, 61), (61, 111), (111, 161), (161, 200)]


def test_a_tenth_of_the_running_texts_is_short():
    ends = np.arange(1, 20_001)
    sizes = np.array([length(p.a) for key in range(30) for p in running_texts(ends, key, 100, 0.1).pairs[:-1]])
    expected = 0.1 * 98 / 99
    assert (sizes < 100).mean() == pytest.approx(expected, abs=4 * np.sqrt(expected / len(sizes)))


def test_documents_cut_together_are_cut_as_if_alone():
    many = list(documents(200, 9))
    ends, begins, keys = zip(*many, strict=True)
    keys = np.array(keys, dtype=np.uint64)
    for together, alone in (
        (
            cutting.sentence_pairs(ends, lambda number: begins[number], keys, ROOM, 0.1, True),
            [sentence_pairs(*document, ROOM, 0.1, True) for document in many],
        ),
        (cutting.running_texts(ends, keys, ROOM, 0.1), [running_texts(e, key, ROOM, 0.1) for e, _, key in many]),
    ):
        assert together.pairs == [pair for cut in alone for pair in cut.pairs]
        assert together.counts.tolist() == [len(cut.pairs) for cut in alone]
        assert together.truncated.sum() == sum(cut.truncated.sum() for cut in alone)
