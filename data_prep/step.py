"""The process of a step: it ends with its driver, from its first moment on."""

import os
import signal
import threading
import time

LOOK_SECONDS = 0.2


def main(driver: int) -> None:
    """Entry point: `step plan_path [Beam options]` in the arguments, started by the process `driver`."""
    threading.Thread(target=_end_with, args=(driver,), daemon=True).start()
    # It takes seconds to import.
    from data_prep import job

    job.main()


def _end_with(driver: int) -> None:
    """End this process and the workers in its group when `driver` has died: nobody would move their work into place."""
    while os.getppid() == driver:
        time.sleep(LOOK_SECONDS)
    os.killpg(0, signal.SIGKILL)
