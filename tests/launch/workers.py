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
            case "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            case "abort":
                os.abort()
            case "vanish":
                return 0
            case "hang":
                signal.signal(signal.SIGTERM, signal.SIG_IGN)
                child = subprocess.Popen([sys.executable, "-c", _STUBBORN])
                Path(job["pids"]).write_text(f"{os.getpid()} {child.pid}")
                say(event="phase", phase="warmup")
                time.sleep(600)
            case "leave a child":
                child = subprocess.Popen([sys.executable, "-c", _STUBBORN])
                Path(job["pids"]).write_text(f"{os.getpid()} {child.pid}")
                say(event="end", status="ok", error=None)
    return 0


_STUBBORN = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep(600)"

if __name__ == "__main__":
    sys.exit(main())
