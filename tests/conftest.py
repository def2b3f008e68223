"""What tests of several rooms share."""

from pathlib import Path

import pytest

from tests.small_run import run, settings, write_corpus


@pytest.fixture(scope="session")
def small_data(tmp_path_factory) -> Path:
    """A folder with `corpus.txt` and the data set `data` made from it."""
    folder = tmp_path_factory.mktemp("small")
    write_corpus(folder / "corpus.txt", documents=400)
    result = run("-m", "data_prep", *settings(folder))
    assert result.returncode == 0, result.stderr
    return folder
