"""Two optimizer steps of ALBERT-xxlarge on two processes of this machine, at ZeRO 1, 2 and 3: time and peak memory.

    python benchmarks/xxlarge.py [--examples 2] [--stages 1 2 3] [--folder DIR]

`configs/xxlarge.yaml` as it is (bf16, LAMB, activation checkpointing, examples of 512 tokens), but for the batch: one
micro-batch of one example a process. The checkpoint of 2.7 GB that ends a run is made, too.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])

from benchmarks.processes import ROOT, prepare, run, set_options
from training.tracking import read_metrics

STEPS = 2
LENGTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--examples", type=int, default=2, help="global batch size")
    parser.add_argument("--stages", type=int, nargs="*", default=[1, 2, 3])
    parser.add_argument("--folder", help="keep the prepared examples and the runs' metrics here")
    arguments = parser.parse_args()
    os.chdir(ROOT)
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(arguments.folder or temporary)
        settings = [
            f"data.output={folder}/data",
            "data.inputs=[{kind: docstrings, path: scipy networkx pandas sklearn}]",
            "data.vocab.size=20000",
            "data.shards=4",
            f"tracking.uri=sqlite:///{folder}/mlflow.db",
            f"training.global_batch_size={arguments.examples}",
            f"training.micro_batch_tokens={LENGTH}",
            "training.learning_rate=0.0001",
            f"training.stop_after={STEPS}",
            "training.evaluate.batches=1",
        ]
        prepare("configs/xxlarge.yaml", settings)
        for stage in arguments.stages:
            output = folder / f"stage-{stage}"
            shutil.rmtree(output, ignore_errors=True)
            launcher = ["-m", "deepspeed.launcher.runner", "--num_gpus", "2", "--module", "training.pretrain"]
            own = [f"training.zero_stage={stage}", f"training.output={output}"]
            options = ["--config", "configs/xxlarge.yaml", *set_options([*settings, *own])]
            used = run(*launcher, *options, watch_memory=True)
            shutil.rmtree(output / "checkpoints")
            lines = list(read_metrics(output))
            losses = ", ".join(f"{line['train/loss']:.3f}" for line in lines)
            rate = statistics.harmonic_mean(line["speed/tokens_per_second"] for line in lines)
            print(
                f"ZeRO {stage}: losses {losses}, {rate:.1f} tokens a second, peak memory {used.memory / 1e9:.1f} GB, "
                f"{used.wall:.0f} s in all",
                flush=True,
            )


if __name__ == "__main__":
    main()
