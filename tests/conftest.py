"""What tests of several rooms share."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.small_run import run, settings, write_corpus

# Before torch is imported: on tensors as small as the tests' a second thread costs more than it brings.
os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def small_data(tmp_path_factory) -> Path:
    """A folder with `corpus.txt` and the data set `data` made from it."""
    folder = tmp_path_factory.mktemp("small")
    write_corpus(folder / "corpus.txt", documents=400)
    result = run("-m", "data_prep", *settings(folder))
    assert result.returncode == 0, result.stderr
    return folder


@pytest.fixture(scope="session")
def workspace(small_data, tmp_path_factory) -> Callable[[str], Path]:
    """Makes a folder with a copy of the small data set."""

    def make(name: str) -> Path:
        folder = tmp_path_factory.mktemp(name)
        shutil.copytree(small_data / "data", folder / "data")
        shutil.copy(small_data / "corpus.txt", folder / "corpus.txt")
        return folder

    return make
