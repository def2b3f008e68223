"""Pictures of a run, for people who look before they read."""

import math
from pathlib import Path

from training.tracking import read_metrics


def plot_losses(folder: Path) -> Path | None:
    """Draw `plots/loss.png` from a run's metrics; None where there are none."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    lines = list(read_metrics(folder))
    if not lines:
        return None
    figure, axes = pyplot.subplots(figsize=(8, 5), layout="constrained")
    losses = [line.get("train/mlm_loss", math.nan) for line in lines]
    axes.plot([line["step"] for line in lines], losses, lw=0.6, label="training")
    evaluated = [line for line in lines if "validation/mlm_loss" in line]
    if evaluated:
        steps = [line["step"] for line in evaluated]
        axes.plot(steps, [line["validation/mlm_loss"] for line in evaluated], "o-", label="validation")
        axes.axhline(evaluated[-1]["validation/unigram_cross_entropy"], ls="--", c="grey", label="unigram model")
    axes.set_xlabel("step")
    axes.set_ylabel("MLM loss (nats per masked token)")
    axes.legend()
    path = folder / "plots" / "loss.png"
    path.parent.mkdir(exist_ok=True)
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return path
