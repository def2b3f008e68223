"""The data set as a run in MLflow, which the training runs point to."""

import threading
import time

from rich.console import Console

from configs.schema import Config, flat
from data_prep.shards import MANIFEST, Dataset
from training.tracking import DATA_DIGEST, DATA_FOLDER, GIT_COMMIT, RUN_ID, Run, git_commit

WAIT_SECONDS = 45


def log_data_run(config: Config, dataset: Dataset, console: Console) -> None:
    """Log `dataset` as a run, once: its id lies beside the data. An MLflow that does not answer is only warned of."""
    known, manifest_file = dataset.folder / RUN_ID, dataset.folder / MANIFEST
    if known.exists() and known.stat().st_mtime >= manifest_file.stat().st_mtime:
        return
    manifest = dataset.manifest
    commit = git_commit()
    tags = {
        "kind": "data preparation",
        DATA_FOLDER: dataset.origin,
        DATA_DIGEST: dataset.digest,
        **({GIT_COMMIT: commit} if commit else {}),
    }
    params = {f"data.{key}": value for key, value in flat(manifest["config"]).items()} | {"seed": manifest["seed"]}
    problem = [f"no answer within {WAIT_SECONDS} s"]

    def log() -> None:
        try:
            run = Run(dataset.folder, config, f"{config.name} data", params, tags)
            run.send([{"step": 0, "time": time.time(), **_measures(manifest)}])
            run.client.log_text(run.id, manifest_file.read_text(), MANIFEST)
            run.client.set_terminated(run.id)
            problem.clear()
        except Exception as error:
            problem[:] = [" ".join(str(error).split())]

    thread = threading.Thread(target=log, name="data run", daemon=True)
    thread.start()
    thread.join(WAIT_SECONDS)
    if problem:
        known.unlink(missing_ok=True)
        console.print(f"warning: MLflow did not take the data run ({problem[0]}); going on without it", soft_wrap=True)


def _measures(manifest: dict) -> dict[str, float]:
    documents, corpus = manifest["documents"], manifest["corpus"]
    return {
        "data/documents_read": documents["read"],
        "data/documents_used": documents["used"],
        **{f"data/dropped_{reason}": count for reason, count in documents["dropped"].items()},
        "data/examples": manifest["examples"],
        "data/tokens": manifest["tokens"],
        "data/truncated_fraction": corpus["truncated_tokens"] / max(1, corpus["tokens"]),
        "data/unknown_fraction": manifest["vocabulary"]["unknown_fraction"],
        "data/tokens_per_word": manifest["vocabulary"]["tokens_per_word"],
    }
