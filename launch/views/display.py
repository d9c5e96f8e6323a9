"""Shows a run's progress: a live display on a terminal, plain lines elsewhere. A failing display never stops the run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Container
from contextlib import suppress
from typing import Any, Protocol

from tandem.platform.config.schema import TrackingConfig
from tandem.platform.experience.metrics import Metrics, held_out
from tandem.platform.system.terminal import one_line, say, shown

WORDS = {
    "model": "preparing the model",
    "data": "reading the data",
    "ray": "starting a private Ray",
    "cluster": "joining the Ray cluster",
    "roles": "starting the roles",
    "load": "loading the models",
    "resume": "loading the checkpoint",
    "generate": "sampling",
    "score": "scoring",
    "infer": "computing log-probs",
    "infer_old": "log-probs of the policy",
    "infer_reference": "log-probs of the reference",
    "infer_values": "values of the critic",
    "credit": "computing advantages",
    "update": "updating",
    "gradient_noise": "measuring gradient noise",
    "update_critic": "updating the critic",
    "update_actor": "updating the policy",
    "publish": "sending the weights",
    "evaluate": "evaluating",
    "checkpoint": "writing a checkpoint",
}
"""Display names of phases and spans."""
AROUND = frozenset({"step", "infer", "update"})  # spans that contain other spans
ENDINGS = frozenset({"closing", "finished", "interrupted", "failed"})
PROGRESS_S = 10.0  # seconds between progress lines in plain mode


class Display(Protocol):
    """Shows the run's progress."""

    def note(self, text: str) -> None:
        """Shows a permanent line."""
        ...

    def phase(self, name: str) -> None:
        """Shows the current phase, given by its span name."""
        ...

    def progress(self, what: str, done: int, total: int) -> None:
        """Shows the progress of a long job; call it with `done=0` before the job begins."""
        ...

    def begin(self, steps: int) -> None:
        """Starts the display of a training of `steps` steps."""
        ...

    def step(self, step: int, metrics: Metrics) -> None:
        """Shows a finished step."""
        ...

    def close(self) -> None:
        """Ends the display."""
        ...


def make_display(tracking: TrackingConfig, hidden: Container[str] = ()) -> Display:
    """The display that `tracking.console` selects; auto means rich on a terminal and plain lines elsewhere.

    Args:
        hidden: metrics to leave out.
    """
    console = tracking.console
    if console == "auto":
        console = "rich" if sys.stdout.isatty() else "plain"
    if console == "none":
        return Unfailing(SilentDisplay())
    return Unfailing(RichDisplay(hidden) if console == "rich" else PlainDisplay(hidden))


def warm_start(display: Display) -> Callable[[int, int], None]:
    """A callback that shows the progress (step, total) of the embedded model's fine-tuning."""

    def show(step: int, total: int) -> None:
        if step == 0 and total:
            display.note(
                f"building the embedded model: {total} steps of supervised fine-tuning teach it the format of the task. "
                "This happens once; later runs use the cache"
            )
        display.progress("building the embedded model", step, total)

    return show


def worded(name: str) -> str:
    """The display name of a phase or span."""
    return WORDS.get(name, name.replace("_", " "))


def headline(metrics: Metrics, hidden: Container[str] = ()) -> list[tuple[str, str]]:
    """(label, value) of the main metrics."""
    wanted = (
        ("reward", "reward/mean", "{:.3f}"),
        ("length", "response/length_mean", "{:.1f}"),
        ("kl", "policy/kl", "{:.4f}"),
        ("approx kl", "policy/approx_kl", "{:.2g}"),
        ("entropy", "policy/entropy", "{:.3f}"),
        ("explained var", "critic/explained_variance", "{:.2f}"),
        ("epoch", "data/epoch", "{:.2f}"),
        ("tokens/s", "tokens/response_per_s", "{:,.0f}"),
        ("s/step", "time/step_s", "{:.2f}"),
    )
    shown = [(label, form.format(metrics[key])) for label, key, form in wanted if key in metrics and key not in hidden]
    if metrics.get("reward/unscorable"):
        shown.append(("unscorable", f"{metrics['reward/unscorable']:.0f} of {metrics['samples/sampled']:.0f}"))
    return shown + [(key, f"{metrics[key]:.3f}") for key, metric in held_out(metrics).items() if not metric.is_detail]


class SilentDisplay:
    """Shows nothing."""

    def note(self, text: str) -> None:
        """Does nothing."""

    def phase(self, name: str) -> None:
        """Does nothing."""

    def progress(self, what: str, done: int, total: int) -> None:
        """Does nothing."""

    def begin(self, steps: int) -> None:
        """Does nothing."""

    def step(self, step: int, metrics: Metrics) -> None:
        """Does nothing."""

    def close(self) -> None:
        """Does nothing."""


class Unfailing:
    """Wraps another display and drops it if it fails, for example when its output pipe is closed."""

    def __init__(self, display: Display) -> None:
        self._display: Display | None = display

    def note(self, text: str) -> None:
        """Shows a permanent line."""
        self._show(lambda display: display.note(text))

    def phase(self, name: str) -> None:
        """Shows the current phase."""
        self._show(lambda display: display.phase(name))

    def progress(self, what: str, done: int, total: int) -> None:
        """Shows the progress of a long job."""
        self._show(lambda display: display.progress(what, done, total))

    def begin(self, steps: int) -> None:
        """Starts the display of a training of `steps` steps."""
        self._show(lambda display: display.begin(steps))

    def step(self, step: int, metrics: Metrics) -> None:
        """Shows a finished step."""
        self._show(lambda display: display.step(step, metrics))

    def close(self) -> None:
        """Ends the display."""
        self._show(lambda display: display.close())

    def _show(self, what: Callable[[Display], None]) -> None:
        if self._display is None:
            return
        try:
            what(self._display)
        except Exception as error:
            self._display = None
            with suppress(Exception):
                say(f"warning: the display has failed ({error}); the run goes on without it", error=True)


class PlainDisplay(SilentDisplay):
    """Prints each phase until the end of the first step, then about fifty step lines and every evaluation.

    Args:
        hidden: metrics to leave out. error: whether lines go to standard error.
    """

    def __init__(self, hidden: Container[str] = (), error: bool = False) -> None:
        self._hidden, self._error = hidden, error
        self._steps, self._every = 0, 1
        self._said: set[str] = set()  # phases already printed
        self._is_first = True  # until the first step ends
        self._began = self._shown_at = 0.0

    def note(self, text: str) -> None:
        """Prints a line."""
        say(text, error=self._error)

    def phase(self, name: str) -> None:
        """Prints a line per phase up to the end of the first step. The run itself reports how it ended."""
        if self._is_first and name not in self._said | AROUND | ENDINGS:
            self._said.add(name)
            self.note(f"first step: {worded(name)}" if self._steps and name != "evaluate" else worded(name))

    def progress(self, what: str, done: int, total: int) -> None:
        """Prints a line every ten seconds, with the time left."""
        now = time.monotonic()
        if done == 0:
            self._began = self._shown_at = now
        elif now - self._shown_at >= PROGRESS_S:
            self._shown_at = now
            left = (now - self._began) / done * (total - done)
            self.note(f"{what}: {done} of {total}, about {left:.0f} s left")

    def begin(self, steps: int) -> None:
        """Sets the interval of step lines for a training of `steps` steps."""
        self._steps, self._every = steps, max(1, steps // 50)

    def step(self, step: int, metrics: Metrics) -> None:
        """Prints a line if one is due for this step."""
        self._is_first = self._is_first and "reward/mean" not in metrics
        evaluated = bool(held_out(metrics))
        if step <= 1 or step == self._steps or step % self._every == 0 or evaluated:
            values = "  ".join(f"{label} {value}" for label, value in headline(metrics, self._hidden))
            if values:
                self.note(f"step {step}/{self._steps}  {values}")


class RichDisplay(SilentDisplay):
    """Shows a progress bar with phase and time left, above a table of the last step's metrics."""

    def __init__(self, hidden: Container[str] = ()) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._console = Console()
        self._bar = Progress(
            TextColumn("{task.description:<27}", style="bold", markup=False),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._hidden, self._steps = hidden, 0
        self._is_a_job = False  # whether the bar shows a job of `progress` instead of the training steps
        self._task = self._bar.add_task("starting", total=None, count="")
        self._live = Live(self._bar, console=self._console, refresh_per_second=4, transient=False)
        self._live.start()
        self._shown_at = 0.0

    def note(self, text: str) -> None:
        """Prints a line above the display."""
        self._console.print(shown(text), markup=False, highlight=False, emoji=False)

    def phase(self, name: str) -> None:
        """Shows the phase to the left of the bar."""
        if self._is_a_job:
            self._restart("", None)
        self._bar.update(self._task, description=one_line(worded(name)))

    def progress(self, what: str, done: int, total: int) -> None:
        """Makes the bar show the job, with the time left."""
        if not self._is_a_job:
            self._restart(what, total)
        self._is_a_job = True
        self._bar.update(self._task, completed=done, count=f"{done}/{total}")

    def begin(self, steps: int) -> None:
        """Starts the bar of a training of `steps` steps."""
        self._steps = steps
        self._restart("", steps)

    def _restart(self, what: str, total: int | None) -> None:
        """Replaces the bar with a new one; without a total it shows no count."""
        self._bar.remove_task(self._task)
        count = "" if total is None else f"0/{total}"
        self._task, self._is_a_job = self._bar.add_task(one_line(what), total=total, count=count), False

    def step(self, step: int, metrics: Metrics) -> None:
        """Advances the bar; updates the table at most four times a second."""
        self._bar.update(self._task, completed=step, count=f"{step}/{self._steps}")
        evaluated = held_out(metrics)
        if evaluated:
            values = (f"{key} {metrics[key]:.3f}" for key, metric in evaluated.items() if not metric.is_detail)
            self.note(f"step {step}: {', '.join(values)}")
        if evaluated or time.monotonic() - self._shown_at > 0.25:
            self._shown_at = time.monotonic()
            self._live.update(self._page(metrics))

    def close(self) -> None:
        """Leaves the last state on the screen."""
        self._live.stop()

    def _page(self, metrics: Metrics) -> Any:
        from rich.console import Group
        from rich.table import Table
        from rich.text import Text

        grid = Table.grid(padding=(0, 3))
        values = headline(metrics, self._hidden)
        half = (len(values) + 1) // 2
        for row in range(half):
            cells = [Text.assemble((one_line(label), "dim"), f" {value}") for label, value in values[row::half]]
            grid.add_row(*cells)
        return Group(self._bar, grid)
