"""Metrics: a local file first, MLflow in the background.

`metrics.jsonl` is the truth: one JSON object a step, appended and flushed before anything else. A thread sends its
lines to MLflow as they come; while MLflow cannot be reached, training goes on and the lines wait in the file. MLflow's
history only grows: after a resume it is sent the steps, and the evaluations, beyond the last it has.
"""

import contextlib
import json
import logging
import math
import os
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from configs.schema import Config
from data_prep.files import is_url, write_whole

METRICS = "metrics.jsonl"
EVENTS = "events.jsonl"
RUN_ID = "mlflow_run_id"
PARENT_RUN = "mlflow.parentRunId"
NOT_METRICS = ("step", "tokens", "time")
VALIDATION = "validation/"
"""What the names of an evaluation's metrics begin with."""
SEND_SECONDS = 5.0
LONGEST_WAIT_SECONDS = 300.0
RETRY_SECONDS = 1.0
"""Between attempts while a run that has ended waits for MLflow."""
LINES_PER_CALL = 30
"""MLflow takes 1000 metrics a call."""
PARAMS_PER_CALL = 100
EXPERIMENT_TAGS = {"mlflow.experimentKind": "custom_model_development"}
"""Opens MLflow's pages for training rather than those for language-model applications."""
DATASET_DIGEST_CHARACTERS = 36
"""MLflow takes no longer ones."""
SQLITE = "sqlite:///"
DATA_DIGEST = "data.digest"
DATA_FOLDER = "data.folder"
DATA_RUN = "data.run_id"
GIT_COMMIT = "mlflow.source.git.commit"
"""The tag in which MLflow's own pages look for the commit."""

logger = logging.getLogger("tracking")


class MetricsFile:
    """`metrics.jsonl` of a run, cut back to the finished step that the run continues from.

    `late` are metrics of that step which were not to be had before.
    """

    def __init__(self, folder: Path, finished_step: int, late: dict[str, float] | None = None):
        self.path = folder / METRICS
        kept = [line for line in _whole_lines(self.path) if json.loads(line)["step"] <= finished_step]
        if late:
            kept[-1] = json.dumps(json.loads(kept[-1]) | _finite(late)) + "\n"
        write_whole(self.path, "".join(kept))

    def append(self, step: int, tokens: int, values: dict[str, float]) -> None:
        """One line: `step`, the `tokens` seen so far, the `time` now (seconds since 1970), and `values` by name.

        What is not finite is left out: JSON has no numbers for it.
        """
        line = {"step": step, "tokens": tokens, "time": round(time.time(), 3), **_finite(values)}
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
        except OSError as error:
            raise OSError(f"{self.path} could not be written: {error}") from error


def _finite(values: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in values.items() if math.isfinite(value)}


class EventsFile:
    """`events.jsonl` of a run: what went wrong and what was done, one JSON object an event; it only grows."""

    def __init__(self, folder: Path):
        self.path = folder / EVENTS

    def append(self, event: dict) -> None:
        """One line: the `time` now and `event`, with null for what is not finite, which JSON has no numbers for."""
        event = {
            key: None if isinstance(value, float) and not math.isfinite(value) else value
            for key, value in event.items()
        }
        try:
            with open(self.path, "a", encoding="utf-8") as file:
                file.write(json.dumps({"time": round(time.time(), 3), **event}) + "\n")
        except OSError as error:
            logger.warning("%s could not be written: %s", self.path, error)


def run_id_file(folder: Path, rollbacks: int) -> Path:
    """Where the id of the MLflow run lies that a training run has after so many `rollbacks`, each a run of its own."""
    return folder / (f"{RUN_ID}-{rollbacks}" if rollbacks else RUN_ID)


def read_metrics(folder: Path) -> Iterator[dict]:
    """The lines of a run's `metrics.jsonl`; one cut off by a kill is passed over."""
    return (json.loads(line) for line in _whole_lines(folder / METRICS))


def _whole_lines(path: Path) -> Iterator[str]:
    if not path.exists():
        return
    with open(path, encoding="utf-8") as file:
        for line in file:
            if line.endswith("\n"):
                yield line


def git_commit() -> str | None:
    """The commit of the working directory's repository, with `-dirty` where files differ from it."""
    try:
        command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return None


def mlflow_client(uri: str):
    """An MLflow client for `uri`, with MLflow's telemetry switched off."""
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "10")
    logging.getLogger("alembic").setLevel(logging.WARNING)
    from mlflow import MlflowClient

    if uri.startswith(SQLITE):
        _make_store(Path(uri.removeprefix(SQLITE)))
    return MlflowClient(tracking_uri=uri)


def _make_store(path: Path) -> None:
    """Make the SQLite store at `path`, whole or not at all: one killed amid its migrations is beyond repair."""
    from mlflow import MlflowClient

    if path.exists():
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    for leftover in path.parent.glob(f".{path.name}.*.tmp*"):
        maker = leftover.name.removeprefix(f".{path.name}.").split(".")[0]
        if not Path("/proc", maker).exists():
            leftover.unlink(missing_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    MlflowClient(tracking_uri=f"{SQLITE}{temporary}").search_experiments()
    with contextlib.suppress(FileExistsError):  # another process was faster
        os.link(temporary, path)
    temporary.unlink()


def experiment_id(client, name: str, uri: str) -> str:
    """The id of the experiment `name`, made if need be; beside a SQLite store, artifacts lie in `artifacts/`."""
    found = client.get_experiment_by_name(name)
    if found is not None:
        return found.experiment_id
    place = None
    if uri.startswith(SQLITE):
        place = (Path(uri.removeprefix(SQLITE)).parent / "artifacts").as_uri()
    return client.create_experiment(name, artifact_location=place, tags=EXPERIMENT_TAGS)


class Run:
    """One run in MLflow: found again by the id that lies in `folder` if it is about the same data, or made.

    After `rollbacks` it is a child of the run before.
    """

    def __init__(self, folder: Path, config: Config, name: str, params: dict, tags: dict[str, str], rollbacks: int = 0):
        from mlflow.entities import Param, RunTag

        self.client = mlflow_client(config.tracking.uri)
        known = run_id_file(folder, rollbacks)
        before = run_id_file(folder, rollbacks - 1) if rollbacks else None
        if before is not None and before.exists():
            tags = tags | {PARENT_RUN: before.read_text().strip()}
        self.id = self._known_id(known, tags[DATA_DIGEST])
        if self.id is not None:
            self.client.update_run(self.id, status="RUNNING")
            self.client.log_batch(self.id, tags=[RunTag(key, value) for key, value in tags.items()])
            return
        experiment = experiment_id(self.client, config.tracking.experiment, config.tracking.uri)
        run = self.client.create_run(experiment, run_name=name, tags=tags)
        self.id = run.info.run_id
        write_whole(known, self.id + "\n")
        items = [Param(key, str(value)) for key, value in params.items()]
        for begin in range(0, len(items), PARAMS_PER_CALL):
            self.client.log_batch(self.id, params=items[begin : begin + PARAMS_PER_CALL])
        self._log_dataset(tags[DATA_DIGEST], tags[DATA_FOLDER])

    def _known_id(self, file: Path, data_digest: str) -> str | None:
        from mlflow.exceptions import MlflowException

        if not file.exists():
            return None
        try:
            found = self.client.get_run(file.read_text().strip())
        except MlflowException as error:
            if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                return None
            raise
        usable = found.info.lifecycle_stage == "active" and found.data.tags.get(DATA_DIGEST) == data_digest
        return found.info.run_id if usable else None

    def _log_dataset(self, digest: str, folder: str) -> None:
        from mlflow.entities import Dataset, DatasetInput

        source = json.dumps({"uri": folder if is_url(folder) else Path(folder).as_uri()})
        dataset = Dataset(Path(folder).name, digest[:DATASET_DIGEST_CHARACTERS], "local", source)
        self.client.log_inputs(self.id, datasets=[DatasetInput(dataset)])

    def last_step(self, metric: str) -> int:
        """The last step of `metric` that MLflow has, 0 if none."""
        history = self.client.get_metric_history(self.id, metric)
        return max((point.step for point in history), default=0)

    def send(self, lines: list[dict]) -> None:
        """Send lines of `metrics.jsonl` in one call: MLflow takes them all or none."""
        from mlflow.entities import Metric

        metrics = [
            Metric(name, float(value), int(line["time"] * 1000), line["step"])
            for line in lines
            for name, value in line.items()
            if name not in NOT_METRICS
        ]
        self.client.log_batch(self.id, metrics=metrics)


class BackgroundRun:
    """Follows a run's `metrics.jsonl` and keeps MLflow up to it, in a thread that never raises into training."""

    STEP_METRIC = "train/loss"
    EVALUATION_METRIC = f"{VALIDATION}unigram_cross_entropy"
    """Of every evaluation, also where losses are not finite. It may come later than the rest of its step."""

    def __init__(
        self,
        folder: Path,
        config: Config,
        name: str,
        params: dict,
        tags: dict[str, str],
        rollbacks: int = 0,
        first_after: int = 0,
    ):
        """After `rollbacks` a run of its own, with the steps after `first_after` alone."""
        self._folder = folder
        self._first_after = first_after
        self._make_run = lambda: Run(folder, config, name, params, tags, rollbacks)
        self._run: Run | None = None
        self._sent = self._sent_evaluations = 0
        self._position = 0
        self._unsure_what_was_taken = False
        self._answered = threading.Event()
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="tracking", daemon=True)
        self._thread.start()

    def run_id(self, timeout: float) -> str | None:
        """The run's id in MLflow; None if MLflow has not answered once within `timeout` seconds, or with an error."""
        self._answered.wait(timeout)
        return self._run.id if self._run is not None else None

    def close(self, status: str, artifacts: list[Path], timeout: float, tags: dict[str, str] | None = None) -> bool:
        """Send what is left, `artifacts` and `tags` too, and set the run's `status` (FINISHED, KILLED or FAILED).

        Returns whether MLflow has it all; what it has not after `timeout` seconds is sent when the run goes on.
        """
        self._closing.set()
        self._thread.join(timeout)
        if self._thread.is_alive() or self._run is None:
            return False
        try:
            for path in artifacts:
                if path.exists():
                    self._run.client.log_artifact(self._run.id, str(path))
            for key, value in (tags or {}).items():
                self._run.client.set_tag(self._run.id, key, value)
            self._run.client.set_terminated(self._run.id, status)
        except Exception as error:
            logger.warning("MLflow did not take the end of the run: %s", error)
            return False
        return True

    def _follow(self) -> None:
        wait, reported = SEND_SECONDS, False
        while True:
            closing = self._closing.is_set()
            try:
                self._send_new()
                wait = SEND_SECONDS
                if reported:
                    logger.warning("MLflow answers again")
                    reported = False
                if closing:
                    return
            except Exception as error:
                self._answered.set()
                self._unsure_what_was_taken = True
                if not reported:
                    logger.warning("MLflow does not answer; metrics wait in %s: %s", self._folder / METRICS, error)
                    reported = True
                wait = min(2 * wait, LONGEST_WAIT_SECONDS)
            if closing:
                time.sleep(RETRY_SECONDS)
            else:
                self._closing.wait(wait)

    def _send_new(self) -> None:
        if self._run is None:
            run = self._make_run()
            self._ask_what_was_taken(run)
            self._run = run
            self._answered.set()
        if self._unsure_what_was_taken:
            self._ask_what_was_taken(self._run)
            self._unsure_what_was_taken = False
        path = self._folder / METRICS
        if not path.exists():
            return
        with open(path, "rb") as file:
            file.seek(self._position)
            content = file.read()
        content = content[: content.rfind(b"\n") + 1]
        lines = [json.loads(line) for line in content.splitlines()]
        new = [part for line in lines if (part := self._not_sent(line))]
        for begin in range(0, len(new), LINES_PER_CALL):
            sent = new[begin : begin + LINES_PER_CALL]
            self._run.send(sent)
            self._sent = max(self._sent, sent[-1]["step"])
            self._sent_evaluations = max(self._sent_evaluations, sent[-1]["step"])
        self._position += len(content)

    def _ask_what_was_taken(self, run: Run) -> None:
        self._sent = max(self._sent, self._first_after, run.last_step(self.STEP_METRIC))
        self._sent_evaluations = max(self._first_after, run.last_step(self.EVALUATION_METRIC))

    def _not_sent(self, line: dict) -> dict | None:
        """What MLflow lacks of `line`."""
        if line["step"] > self._sent:
            return line
        if line["step"] <= self._sent_evaluations or self.EVALUATION_METRIC not in line:
            return None
        return {name: value for name, value in line.items() if name in NOT_METRICS or name.startswith(VALIDATION)}
