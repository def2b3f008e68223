import io

import pytest
from rich.console import Console

from configs.schema import load_config
from data_prep.shards import Dataset
from pipeline.report import print_summary
from tests.small_run import ROOT, small_overrides
from training.checkpoint import CheckpointWriter
from training.loop import Progress
from training.run_folder import RunFolder

ROLLBACKS = [
    {"kind": "spike", "from_step": 1020, "to_step": 1000, "skipped_batches": [1000, 1020], "rate_factor": 0.5},
    {"kind": "plateau", "from_step": 1040, "to_step": 900, "skipped_batches": [900, 1060], "rate_factor": 0.25},
]


@pytest.mark.parametrize("rollbacks", [[], ROLLBACKS], ids=["none", "two"])
def test_the_summary_tells_of_rollbacks_if_there_were_any(small_data, tmp_path, rollbacks):
    dataset = Dataset.open(small_data / "data")
    progress = Progress(step=1100, rate_factor=0.25 if rollbacks else 1.0, rollbacks=rollbacks)
    writer = CheckpointWriter(tmp_path / "run" / "checkpoints", keep=1)
    writer.write(1100, {}, {}, {**progress.state(), "data": {"digest": dataset.digest}})
    writer.wait()
    config = load_config(
        ROOT / "configs" / "demo.yaml", small_overrides(small_data, training__output=f"{tmp_path}/run")
    )
    printed = io.StringIO()
    folder = RunFolder.open(config, dataset, extend=False)
    print_summary(config, dataset, folder, {"training": 3.0}, Console(file=printed, width=120))
    lines = [line for line in printed.getvalue().splitlines() if line.startswith("rollbacks")]
    told = "from step 1,020 to 1,000, 1,040 to 900; the rate is 0.25 times that of the config"
    assert [line.removeprefix("rollbacks").strip() for line in lines] == ([told] if rollbacks else [])
