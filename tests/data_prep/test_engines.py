"""The same job on every engine that can be had on one machine."""

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from data_prep.locks import locked
from tests.ports import free_port, wait_for_port

pytestmark = pytest.mark.engines
ROOT = Path(__file__).parents[2]
FILES = 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory, pseudo_documents) -> Path:
    """A corpus of several files, each of which is a unit of work."""
    folder = tmp_path_factory.mktemp("engines")
    documents = pseudo_documents(600, 31)
    for number in range(FILES):
        (folder / f"{number:02d}.txt").write_text("\n\n".join(documents[number::FILES] + documents[:2]))
    return folder


@pytest.fixture(scope="module")
def job(folder, write_config, data_prep) -> Callable[..., dict[str, bytes]]:
    """Runs the job with Beam options, `during` being called while it runs; returns the bytes of the files it made."""

    def run(name: str, *options: str, during: Callable[[Path], None] | None = None) -> dict[str, bytes]:
        inputs = [{"kind": "text", "path": str(folder / "*.txt")}]
        vocab = {"size": 400, "sample_sentences": 2000}
        config = write_config(folder, name, inputs=inputs, vocab=vocab, stall_seconds=120)
        process = data_prep("--config", config, *options)
        if during:
            during(folder / name)
        _, errors = process.communicate(timeout=300)
        assert process.returncode == 0, errors
        return {path.name: path.read_bytes() for path in (folder / name).iterdir() if path.name != ".lock"}

    return run


@pytest.fixture(scope="module")
def expected(job) -> dict[str, bytes]:
    """What Beam's runner makes in one process."""
    made = job("one-process")
    assert len(made) == 7
    return made


@pytest.fixture(scope="module")
def programs(tmp_path_factory) -> Iterator[Callable[..., subprocess.Popen]]:
    """Starts a Python module in a process that ends with the tests."""
    started = []
    log = (tmp_path_factory.mktemp("programs") / "log").open("wb")

    def start(*command: str) -> subprocess.Popen:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        process = subprocess.Popen(
            [sys.executable, "-m", *command], stdout=log, stderr=subprocess.STDOUT, env=environment, process_group=0
        )
        started.append(process)
        return process

    yield start
    for process in started:
        os.killpg(process.pid, signal.SIGTERM)
    for process in started:
        process.wait(30)
    log.close()


@pytest.mark.parametrize("workers", [2, 3])
def test_worker_processes_make_the_same_bytes(job, expected, workers):
    options = ["--direct_running_mode=multi_processing", f"--direct_num_workers={workers}"]
    assert job(f"workers-{workers}", *options) == expected


def test_prism_makes_the_same_bytes(job, expected):
    prism = shutil.which("prism")
    if prism is None:
        pytest.skip("no program prism: go install github.com/apache/beam/sdks/v2/go/cmd/prism@v2.77.0")
    assert job("prism", "--runner=PrismRunner", f"--prism_location={prism}") == expected


def test_a_job_server_makes_the_same_bytes(job, expected, programs):
    port = free_port()
    programs("apache_beam.runners.portability.local_job_service_main", "--port", str(port))
    wait_for_port(port)
    options = ["--runner=PortableRunner", f"--job_endpoint=127.0.0.1:{port}", "--environment_type=LOOPBACK"]
    assert job("job-server", *options) == expected


@contextmanager
def dask_cluster(programs: Callable[..., subprocess.Popen]) -> Iterator[tuple[str, list[subprocess.Popen]]]:
    """(Beam options for, nannies of) a scheduler with two workers, one thread each."""
    port = free_port()
    address = f"tcp://127.0.0.1:{port}"
    programs("distributed.cli.dask_scheduler", "--host", f"127.0.0.1:{port}", "--no-dashboard")
    wait_for_port(port)
    worker = ["distributed.cli.dask_worker", address, "--nthreads", "1", "--host", "127.0.0.1", "--no-dashboard"]
    yield address, [programs(*worker) for _ in range(2)]


@pytest.fixture(scope="module")
def dask(programs) -> Iterator[tuple[list[str], list[subprocess.Popen]]]:
    with dask_cluster(programs) as (address, workers):
        yield ["--runner=DaskRunner", f"--dask_client_address={address}", "--dask_npartitions=6"], workers


def test_dask_makes_the_same_bytes(job, expected, dask):
    assert job("dask", *dask[0]) == expected


def test_a_worker_that_dies_half_way_does_not_show(job, expected, dask):
    options, nannies = dask

    def kill_a_worker(output: Path) -> None:
        deadline = time.monotonic() + 60
        while not any(output.glob(".work-*/units/*.json")):
            assert time.monotonic() < deadline
            time.sleep(0.001)
        worker = psutil.Process(nannies[0].pid).children(recursive=True)[-1]
        worker.kill()

    assert job("dask-killed", *options, during=kill_a_worker) == expected


def test_a_job_that_stands_still_is_ended_with_its_logs_end(folder, write_config, data_prep):
    inputs = [{"kind": "text", "path": str(folder / "*.txt")}]
    config = write_config(folder, "stuck", inputs=inputs, vocab={"size": 400}, stall_seconds=4)
    process = data_prep("--config", config)
    deadline = time.monotonic() + 60
    while not any((folder / "stuck").glob(".work-*/samples/*.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    step = psutil.Process(process.pid).children()[0]
    step.suspend()
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 2 and not step.is_running()
    *log, error = errors.splitlines()
    assert error.startswith("error: step 'sample' got nothing done for 4 s (data.stall_seconds) and was ended")
    assert log[0].startswith("the end of ") and "WARNING:root:" in log[-1]
    process = data_prep("--config", config)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 0, errors


def test_the_work_ends_with_the_driver(folder, write_config, data_prep):
    inputs = [{"kind": "text", "path": str(folder / "*.txt")}]
    config = write_config(folder, "orphans", inputs=inputs, vocab={"size": 400})
    process = data_prep("--config", config, "--direct_running_mode=multi_processing", "--direct_num_workers=2")
    deadline = time.monotonic() + 60
    while not any((folder / "orphans").glob(".work-*/samples/*.jsonl")):
        assert time.monotonic() < deadline
        time.sleep(0.001)
    started = psutil.Process(process.pid).children(recursive=True)
    assert len(started) >= 3
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(started, timeout=5)
    assert not alive


def test_a_job_killed_in_every_phase_goes_on_to_the_same_bytes(folder, write_config, data_prep, expected):
    inputs = [{"kind": "text", "path": str(folder / "*.txt")}]
    vocab = {"size": 400, "sample_sentences": 2000}
    config = write_config(folder, "killed", inputs=inputs, vocab=vocab, stall_seconds=120)
    output = folder / "killed"
    kills = 0
    for sign in (
        ".work-*/samples/*.jsonl",
        ".work-*/vocabulary.log",
        ".work-*/spiece.model",
        ".work-*/units/*.json",
        ".work-*/shard-reports/*.json",
        "train-*.arrow",
    ):
        process = data_prep("--config", config)
        while process.poll() is None and not any(output.glob(sign)):
            time.sleep(0.0005)
        kills += process.poll() is None
        process.kill()
        process.communicate()
    assert kills >= 5
    process = data_prep("--config", config)
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 0, errors
    assert {path.name: path.read_bytes() for path in output.iterdir() if path.name != ".lock"} == expected


def test_a_step_ends_with_a_driver_that_dies_while_it_starts(folder, write_config, data_prep):
    inputs = [{"kind": "text", "path": str(folder / "*.txt")}]
    config = write_config(folder, "early", inputs=inputs, vocab={"size": 400})
    process = data_prep("--config", config)
    while not psutil.Process(process.pid).children():
        time.sleep(0.001)
    started = psutil.Process(process.pid).children()
    process.kill()
    process.communicate()
    _, alive = psutil.wait_procs(started, timeout=3)
    assert not alive


def test_another_process_waits_for_the_lock_where_it_may(tmp_path):
    begin = time.monotonic()
    code = f"import time; from data_prep.locks import locked\nwith locked('{tmp_path}/x'):\n print(flush=True)"
    code += "; time.sleep(4)"
    holder = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": str(ROOT)}, stdout=-1)
    holder.stdout.readline()
    with locked(tmp_path / "x", wait=True):
        assert holder.wait(5) == 0 and time.monotonic() - begin > 3
