"""A worker without torch, `python -m rung_worker JOB EVENTS`: says what a rung of 10 MiB a sample would, little by
little."""

import json
import os
import sys
import threading
import time
from pathlib import Path

PAUSE_S = 0.01
"""Between two events, so that there are moments to be killed at."""


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    batch = job["run"]["step"]["batch"]
    threading.Thread(target=end_with_parent, daemon=True).start()
    peak = {"allocated_bytes": batch * 10 * 2**20}
    with Path(sys.argv[2]).open("a") as events:
        for event in (
            {"event": "phase", "phase": "first_step"},
            {"event": "window", "name": "first_step", "peak": peak, "phase_peaks": {}},
            {"event": "environment", "pid": os.getpid()},
            {"event": "phase", "phase": "timed"},
            {"event": "step", "ns": 10**9},
            {"event": "end", "status": "ok", "error": None},
        ):
            time.sleep(PAUSE_S)
            events.write(json.dumps(event) + "\n")
            events.flush()
    return 0


def end_with_parent() -> None:
    os.read(sys.stdin.fileno(), 1)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
