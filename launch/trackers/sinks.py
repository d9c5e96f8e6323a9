"""Trackers in addition to `metrics.jsonl`, fed with the same records. A tracker can never stop, slow or block the run.

Each tracker has its own process and a queue. A tracker that fails, hangs or is too slow is dropped with one warning.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tandem.platform.system.files import FileError, open_regular, own_folder, refuse_links
from tandem.platform.system.redact import redacted
from tandem.workers.cluster.postmortem import last_lines

QUEUE = 1000  # records that a tracker may be behind
CLOSE_S = 20.0  # seconds for all trackers together to finish


class Sink:
    """The run's side of one tracker.

    Args:
        command: of the tracker's process. log: the file for its output. note: shows a warning.
    """

    def __init__(
        self, name: str, command: Sequence[str], facts: Mapping[str, Any], log: Path, note: Callable[[str], None]
    ) -> None:
        self.name, self._log, self._note = name, log, note
        descriptor = open_regular(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, below=log.parent)
        self._log_file = os.fdopen(descriptor, "w", encoding="utf-8", errors="backslashreplace")
        self._lines: queue.Queue[str | None] = queue.Queue(QUEUE)
        self._given_up = False
        # A new session shields the process from Ctrl-C in the terminal.
        pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self._process = subprocess.Popen(list(command), **pipes, text=True, errors="replace", start_new_session=True)
        self._writer = threading.Thread(target=self._write_log, name=f"log of sink {name}", daemon=True)
        self._writer.start()
        self._feeder = threading.Thread(target=self._feed, name=f"sink {name}", daemon=True)
        self._feeder.start()
        self.send(facts)

    def send(self, message: Mapping[str, Any]) -> None:
        """Queues a message without waiting."""
        if self._given_up:
            return
        if (code := self._process.poll()) is not None:
            self._give_up(f"has ended with code {code}: {self._last_words()}")
            return
        try:
            self._lines.put_nowait(json.dumps(message, default=str))
        except queue.Full:
            self._give_up(f"is {QUEUE} records behind")

    def close(self, deadline: float) -> None:
        """Ends the process, by force after the deadline (`time.monotonic`)."""
        try:
            self._lines.put_nowait(None)
            code = self._process.wait(max(0.0, deadline - time.monotonic()))
            if code and not self._given_up:
                self._give_up(f"has ended with code {code}: {self._last_words()}")
        except (subprocess.TimeoutExpired, queue.Full):
            if not self._given_up:
                self._give_up(f"did not finish within {CLOSE_S:g} s")
        self._process.kill()
        self._process.wait()

    def _feed(self) -> None:
        assert self._process.stdin is not None
        try:
            while (line := self._lines.get()) is not None:
                self._process.stdin.write(line + "\n")
                self._process.stdin.flush()
            self._process.stdin.close()
        except OSError:
            pass  # the process has ended; the next `send` notices

    def _write_log(self) -> None:
        assert self._process.stdout is not None
        with self._log_file as file:
            for line in self._process.stdout:
                file.write(redacted(line))
                file.flush()

    def _give_up(self, why: str) -> None:
        self._given_up = True
        self._note(f"warning: tracking.sinks: {self.name} {why}; the run goes on without it (its log: {self._log})")

    def _last_words(self) -> str:
        self._writer.join(1.0)
        try:
            lines = [line for line in last_lines(self._log) if line.strip()]
        except OSError:
            lines = []
        return lines[-1] if lines else "no output"


class Sinks:
    """All trackers of a run."""

    def __init__(self, names: Sequence[str], facts: Mapping[str, Any], folder: Path, note: Callable[[str], None]) -> None:
        command = [sys.executable, "-m", "tandem.launch.trackers.sink_process"]
        self._sinks = []
        for name in names:
            try:
                place = own_folder(folder / "tracking", below=folder)
                refuse_links(place / name, folder)
                self._sinks.append(Sink(name, [*command, name], facts, place / f"{name}.log", note))
            except (OSError, FileError) as error:
                note(f"warning: tracking.sinks: {name} cannot be started: {error}; the run goes on without it")

    def record(self, record: Mapping[str, float | int | None]) -> None:
        """Sends a record of `metrics.jsonl` to all trackers."""
        metrics = {name: value for name, value in record.items() if name != "step" and value is not None}
        for sink in self._sinks:
            sink.send({"step": record["step"], "metrics": metrics})

    def close(self, status: str) -> None:
        """Sends the run's status to all trackers, and waits for them up to CLOSE_S."""
        for sink in self._sinks:
            sink.send({"status": status})
        deadline = time.monotonic() + CLOSE_S
        for sink in self._sinks:
            sink.close(deadline)
