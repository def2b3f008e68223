import numpy as np
import pytest

from data_prep.randomness import Permutation, digest64, draws, uniforms


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 16, 17, 63, 1000, 4096, 4097, 65_537])
@pytest.mark.parametrize("key", [0, 1, 2**64 - 1])
def test_permutation_reaches_every_position_once(size, key):
    images = Permutation(key, size)(np.arange(size))
    assert images.dtype == np.int64
    np.testing.assert_array_equal(np.sort(images), np.arange(size))


def test_permutation_differs_between_keys_and_repeats_under_one():
    positions = np.arange(1000)
    assert (Permutation(7, 1000)(positions) == Permutation(7, 1000)(positions)).all()
    assert (Permutation(7, 1000)(positions) == Permutation(8, 1000)(positions)).mean() < 0.01


def test_permutation_of_part_of_the_positions_equals_that_part():
    permutation = Permutation(3, 4097)
    whole = permutation(np.arange(4097))
    chosen = np.array([4096, 0, 17, 17, 2048])
    np.testing.assert_array_equal(permutation(chosen), whole[chosen])


def test_permutation_sends_a_position_everywhere_equally_often():
    size, keys = 10, 4000
    images = np.array([Permutation(key, size)(np.arange(size)) for key in range(keys)])
    counts = np.array([np.bincount(images[:, position], minlength=size) for position in range(size)])
    chi_squared = ((counts - keys / size) ** 2 / (keys / size)).sum(axis=1)
    assert chi_squared.max() < 40  # 9 degrees of freedom: P(X > 40) < 1e-5


def test_permutation_leaves_no_trace_of_the_order():
    positions = np.arange(100_000)
    images = Permutation(5, len(positions))(positions)
    assert abs(np.corrcoef(positions, images)[0, 1]) < 4 / np.sqrt(len(positions))
    assert abs(np.corrcoef(images[:-1], images[1:])[0, 1]) < 4 / np.sqrt(len(positions))


def test_permutation_of_nothing_is_refused():
    with pytest.raises(ValueError, match="at least one"):
        Permutation(0, 0)


def test_draws_do_not_depend_on_the_shape_of_the_batch():
    keys = np.array([0, 1, 2**63, 2**64 - 1], dtype=np.uint64)
    counters = np.array([0, 1, 5, 1 << 40])
    table = draws(keys[:, None], counters)
    one_by_one = [[draws(int(key), int(counter))[0] for counter in counters] for key in keys]
    np.testing.assert_array_equal(table, np.array(one_by_one, dtype=np.uint64))


def test_draws_are_those_of_splitmix64():
    def splitmix64(state: int, number: int) -> int:
        mask = 2**64 - 1
        value = (state + (number + 1) * 0x9E3779B97F4A7C15) & mask
        value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & mask
        value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & mask
        return value ^ (value >> 31)

    key = 2**63 + 12345
    expected = [splitmix64(key, number) for number in range(100)]
    assert draws(key, np.arange(100)).tolist() == expected
    assert draws(0, 0)[0] == 0xE220A8397B1DCDAF  # splitmix64's published first output of seed 0


def test_uniforms_fill_the_unit_interval_evenly():
    values = uniforms(11, np.arange(100_000))
    assert values.min() >= 0 and values.max() < 1
    counts = np.histogram(values, bins=100, range=(0, 1))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() < 170  # 99 degrees of freedom: P(X > 170) < 1e-5


def test_digest_delimits_its_parts():
    assert digest64("ab", "c") != digest64("a", "bc")
    assert digest64("ab") != digest64("ab", "")
    assert digest64("") != digest64()
    assert digest64(1, 23) != digest64(12, 3)


def test_digest_repeats_and_takes_text_bytes_and_numbers():
    assert digest64("ä", b"\0", 5) == digest64("ä", b"\0", 5)
    assert digest64("ä") == digest64("ä".encode())
    assert 0 <= digest64("\ud800") < 2**64
