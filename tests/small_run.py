"""A small corpus, and the command-line settings of a run of seconds on it."""

import subprocess
import sys
from pathlib import Path

import numpy as np

from tests.ports import free_port

ROOT = Path(__file__).parents[1]

SMALL = {
    "data.validation_fraction": "0.1",
    "data.shards": "3",
    "data.vocab.size": "250",
    "data.max_length": "64",
    "model.hidden_size": "32",
    "model.embedding_size": "16",
    "model.num_hidden_layers": "2",
    "model.num_attention_heads": "2",
    "model.intermediate_size": "64",
    "model.max_position_embeddings": "64",
    "training.global_batch_size": "24",
    "training.micro_batch_tokens": "512",
    "training.steps": "40",
    "training.warmup_steps": "4",
    "training.evaluate.every": "20",
    "training.checkpoint.every": "10",
    "training.precision": "fp32",
    "training.learning_rate": "0.004",
}
"""Settings over configs/demo.yaml for a run of seconds."""


def sentences(generator: np.random.Generator, count: int, words: list[str]) -> list[str]:
    """Sentences whose words follow on from each other, so that there is something to learn."""
    made = []
    for _ in range(count):
        start = int(generator.integers(len(words)))
        chosen = [words[(start + 7 * place) % len(words)] for place in range(int(generator.integers(4, 12)))]
        made.append(" ".join(chosen).capitalize() + ".")
    return made


def write_corpus(path: Path, documents: int, seed: int = 0) -> None:
    """A text file of blank-line separated `documents` of several sentences each."""
    generator = np.random.default_rng(seed)
    syllables = [consonant + vowel for consonant in "bcdfghjklmnpqrstvwxz" for vowel in "aeiou"]
    words = ["".join(generator.choice(syllables, int(generator.integers(1, 4)))) for _ in range(1000)]
    blocks = [" ".join(sentences(generator, int(generator.integers(2, 20)), words)) for _ in range(documents)]
    path.write_text("\n\n".join(blocks) + "\n")


def small_overrides(folder: Path, **overrides: str) -> list[str]:
    """`key=value` settings for a small run whose data and runs lie in `folder`; `a__b=value` overrides `a.b`."""
    values = SMALL | {
        "data.inputs": f"[{{kind: text, path: {folder}/corpus.txt}}]",
        "data.output": f"{folder}/data",
        "training.output": f"{folder}/run",
        "tracking.uri": f"sqlite:///{folder}/mlflow.db",
    }
    values |= {key.replace("__", "."): value for key, value in overrides.items()}
    return [f"{key}={value}" for key, value in values.items()]


def settings(folder: Path, **overrides: str) -> list[str]:
    """The same as arguments of a command."""
    arguments = ["--config", str(ROOT / "configs" / "demo.yaml")]
    for override in small_overrides(folder, **overrides):
        arguments += ["--set", override]
    return arguments


def launched(processes: int, *arguments: str) -> list[str]:
    """The arguments of `python` that train on so many processes under DeepSpeed's launcher."""
    launcher = ["-m", "deepspeed.launcher.runner", f"--num_gpus={processes}", f"--master_port={free_port()}"]
    return [*launcher, "--module", "training.pretrain", *arguments]


def run(*command: str, timeout: float = 120) -> subprocess.CompletedProcess:
    """Run `python command…` from the repository's root, with its output as text."""
    return subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True, timeout=timeout)
