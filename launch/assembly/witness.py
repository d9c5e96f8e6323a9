"""Records the end of a run whose process was killed: `python -m tandem.launch.assembly.witness FOLDER STARTED_AT SESSION`.

Ray ends the driver without a message when this node's raylet dies, and so does the kernel when memory runs out. Each run on
Ray therefore has a witness: a small process that ignores the run's signals. It reads one line when Ray has started, and
another when the run is over. If the second line does not come, the witness ends the remains of a private Ray, removes its
files, and writes the missing `summary.json` and `report.html`.
"""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
from contextlib import ExitStack, suppress
from pathlib import Path

import psutil

from tandem.platform.config.schema import ConfigError
from tandem.platform.records.recorder import Recorder
from tandem.platform.system.terminal import say
from tandem.workers.cluster.private_cluster import end_processes, remove
from tandem.workers.cluster.ray_watch import RAYLET_LOST, connection_to, own_raylet

OVER = b"over\n"
CLAIM_WAITS_S = 2.0  # the kernel releases a killed process's lock only when it closes that file
KILLED = (
    "the run's process was killed, or Ray ended it because Ray's node process (raylet) on this machine was gone. The "
    "likely cause is that the kernel had no memory left (look for 'Killed process' in dmesg). Start it again to resume"
)


class Witness:
    """The run's handle on its witness process.

    Args:
        session: the folder of a private Ray's files.
    """

    def __init__(self, folder: Path, started_at: float, session: Path) -> None:
        command = [sys.executable, "-P", "-m", "tandem.launch.assembly.witness", str(folder), str(started_at), str(session)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, start_new_session=True)

    def ray_has_started(self) -> None:
        """Makes the witness watch the raylet too."""
        self._say(os.fsencode(own_raylet()) + b"\n")

    def close(self) -> None:
        """Ends the witness: the run is over, or records its own end."""
        self._say(OVER)
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        self._process.wait()

    def _say(self, line: bytes) -> None:
        assert self._process.stdin is not None
        with suppress(OSError):  # the witness was killed; the run continues without it
            self._process.stdin.write(line)
            self._process.stdin.flush()


def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code."""
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    run = psutil.Process(os.getppid())
    folder, started_at, session = Path(arguments[0]), float(arguments[1]), Path(arguments[2])
    line = sys.stdin.buffer.readline()
    why = KILLED if line in (b"", OVER) else _what_ended(run, os.fsdecode(line.rstrip(b"\n")))
    if OVER in (line, sys.stdin.buffer.readline()):
        return 0
    with ExitStack() as stack:  # runs in reverse order, each even if another fails
        stack.callback(show, folder)
        stack.callback(remove, session)
        stack.callback(end_processes, session)
        stack.callback(tell, folder, started_at, why)
    return 0


def _what_ended(run: psutil.Process, raylet: str) -> str:
    """Waits until the raylet or the run's process ends; returns the cause of the run's end, if it was not over.

    The raylet of a private Ray dies with the run's process, and its end may be seen first.
    """
    poll = select.poll()
    poll.register(sys.stdin.buffer, select.POLLIN)
    with suppress(OSError), connection_to(raylet) as connection:  # OSError: the raylet has ended
        poll.register(connection, select.POLLIN)
        if connection.fileno() not in {descriptor for descriptor, _ in poll.poll()}:
            return KILLED
    with suppress(psutil.NoSuchProcess):
        if run.status() not in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD):
            return RAYLET_LOST
    return KILLED


def tell(folder: Path, started_at: float, why: str) -> None:
    """Records the end of a run whose process is gone, unless it is recorded already or another process uses the folder."""
    from tandem.launch.storage.claim import claimed

    try:
        with claimed(folder, wait_s=CLAIM_WAITS_S):
            if (folder / "summary.json").exists():
                return
            Recorder.of_ended(folder, started_at).close("failed", why)
    except ConfigError:
        return
    say(f"\nfailed: {why}\nfailed; records in {folder}", error=True)


def show(folder: Path) -> None:
    """Writes the report of a run that has ended, if it is missing; takes seconds."""
    if (folder / "summary.json").exists() and not (folder / "report.html").exists():
        from tandem.launch.views.page import write_report

        write_report(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
