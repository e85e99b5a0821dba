"""A climb as a process of its own, `python climber.py FOLDER [--resume]`, to be killed at any moment."""

import functools
import sys
from pathlib import Path

from climbing import go

from memplan.launch import process

if __name__ == "__main__":
    process.POLL_S = 0.005
    run = functools.partial(process.run_worker, module="rung_worker")
    climbed = go(Path(sys.argv[1]), run, resume="--resume" in sys.argv, rungs="B1c1,B2c1,B3c1,B11c1,B12c1", repeat=2)
    sys.exit(climbed.exit_code)
