import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import yaml

from configs.schema import DataConfig
from data_prep.vocabulary import Vocabulary, train_vocabulary

ROOT = Path(__file__).parents[2]
SYLLABLES = [consonant + vowel for consonant in "bdfgklmnprstvz" for vowel in "aeiou"]


def pseudo_sentence(rng: np.random.Generator, words: int) -> str:
    chosen = ["".join(rng.choice(SYLLABLES, rng.integers(1, 4))) for _ in range(words)]
    if rng.random() < 0.2:
        chosen[rng.integers(words)] = str(rng.integers(10_000))
    if rng.random() < 0.3:
        chosen[rng.integers(words)] += ","
    return " ".join(chosen).capitalize() + str(rng.choice([".", "!", "?"]))


@pytest.fixture(scope="session")
def pseudo_documents() -> Callable[[int, int], list[str]]:
    """(count, seed) -> so many different documents of 1 to 24 sentences of random words, one line each."""

    def make(count: int, seed: int) -> list[str]:
        rng = np.random.default_rng(seed)
        return [
            " ".join(pseudo_sentence(rng, int(rng.integers(3, 14))) for _ in range(rng.integers(1, 25)))
            for _ in range(count)
        ]

    return make


@pytest.fixture(scope="session")
def data_config() -> Callable[..., DataConfig]:
    """A `DataConfig` from what differs from the defaults."""

    def make(**settings) -> DataConfig:
        return DataConfig(**{"output": "unused", "inputs": [{"kind": "text", "path": "unused"}], **settings})

    return make


@pytest.fixture(scope="session")
def train(tmp_path_factory) -> Callable[..., bytes]:
    """Trains a vocabulary in a folder of its own, and comes back to the working directory."""

    def run(sentences: list[str], data: DataConfig) -> bytes:
        here = os.getcwd()
        try:
            return train_vocabulary(iter(sentences), data, tmp_path_factory.mktemp("training"))
        finally:
            os.chdir(here)

    return run


@pytest.fixture(scope="session")
def vocabulary(train, pseudo_documents, data_config) -> Vocabulary:
    return Vocabulary(train(pseudo_documents(600, 1), data_config(vocab={"size": 1000})))


@pytest.fixture(scope="session")
def write_config() -> Callable[..., Path]:
    """Writes `<folder>/<name>.yaml` for a small job with the given data settings; its output is `<folder>/<name>`."""

    def write(folder: Path, name: str, seed: int = 1, **data) -> Path:
        settings = {"output": str(folder / name), "max_length": 64, "shards": 3, "validation_fraction": 0.2, **data}
        content = {"name": name, "seed": seed, "data": settings, "training": {"output": str(folder / "run")}}
        path = folder / f"{name}.yaml"
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@pytest.fixture(scope="session")
def data_prep() -> Callable[..., subprocess.Popen]:
    """Starts `python -m data_prep` with the given arguments, in a process group of its own."""

    def start(*arguments: object) -> subprocess.Popen:
        return subprocess.Popen(
            [sys.executable, "-m", "data_prep", *map(str, arguments)],
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    return start
