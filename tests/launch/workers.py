"""Workers that misbehave, each by its name: `python -m workers JOB EVENTS` does what `job["deed"]` says."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    job = json.loads(Path(sys.argv[1]).read_text())
    with Path(sys.argv[2]).open("a") as events:

        def say(**event: object) -> None:
            events.write(json.dumps(event) + "\n")
            events.flush()

        def stubborn(**options: bool) -> None:
            child = subprocess.Popen([sys.executable, "-c", _STUBBORN], **options)  # type: ignore[call-overload]
            Path(job["pids"]).write_text(f"{os.getpid()} {child.pid}")

        say(event="phase", phase="first_step")
        say(event="window", name="first_step", peak={"allocated_bytes": 7}, phase_peaks={}, live_bytes=7)
        match job["deed"]:
            case "finish":
                say(event="end", status="ok", error=None)
            case "crash":
                sys.stdout.buffer.write(b"not \xff UTF-8\n")
                sys.stdout.flush()
                raise ValueError("the step is wrong")
            case "half a line":
                events.write('{"event": "window", "na')
                events.flush()
                os.kill(os.getpid(), signal.SIGKILL)
            case "garbage between lines":
                events.flush()
                os.write(events.fileno(), b'\xff\xfe {"event": "loss"\n[1, 2]\n' + b"[" * 100_000 + b"\n")
                say(event="loss", loss=1.0)
                say(event="end", status="ok", error=None)
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "be the shell of a killed one":
                return 137
            case "abort":
                os.abort()
            case "vanish":
                return 0
            case "say how it failed":
                failure = {"window": "first_step", "requested_bytes": 5}
                say(event="end", status="error:kernel_limit", error="index", failure=failure, poisoned=True)
            case "say nonsense":
                say(event="end", status="splendid", error="so it was")
            case "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                stubborn()
                say(event="phase", phase="warmup")
                time.sleep(600)
            case "hang between steps":
                say(event="phase", phase="timed")
                for _ in range(4):
                    say(event="step", ns=10_000_000)
                    time.sleep(0.15)
                time.sleep(600)
            case "step slowly":
                say(event="phase", phase="timed")
                for pause_s in (0.3, 0.3, 0.9):
                    say(event="step", ns=1)
                    time.sleep(pause_s)
                say(event="end", status="ok", error=None)
            case "hang after the end":
                say(event="end", status="ok", error=None)
                time.sleep(600)
            case "leave a child":
                stubborn()
                say(event="end", status="ok", error=None)
            case "leave a child elsewhere":
                stubborn(start_new_session=True)
                say(event="end", status="ok", error=None)
            case "leave children that have children":
                subprocess.Popen([sys.executable, "-c", _FORKING], start_new_session=True)
                say(event="end", status="ok", error=None)
            case "talk without end":
                while True:
                    sys.stdout.write("blah " * 10_000 + "\n")
            case "talk much":
                for number in range(2_000):
                    print(number, "blah " * 100)
                say(event="end", status="ok", error=None)
            case "show its start":
                score = Path("/proc/self/oom_score_adj").read_text().strip()
                say(event="warning", text=score, group=os.getpgrp() == os.getpid(), torch="torch" in sys.modules)
                say(event="end", status="ok", error=None)
            case "take its time":
                for phase in ("first_step", "timed"):
                    say(event="phase", phase=phase)
                    time.sleep(0.25)
                say(event="end", status="ok", error=None)
    return 0


_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"
_FORKING = """
import os, time
for _ in range(3):
    if os.fork() == 0:
        os.setsid()
time.sleep(600)
"""

if __name__ == "__main__":
    sys.exit(main())
