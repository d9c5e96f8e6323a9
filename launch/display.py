"""What a person sees of a run: a live display on a terminal, plain lines elsewhere. Neither can stop the run."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol

from tandem.platform.config import TrackingConfig
from tandem.platform.evaluate import DETAILS
from tandem.platform.metrics import Metrics
from tandem.platform.terminal import one_line, say, shown


class Display(Protocol):
    """Shows the run's progress."""

    def note(self, text: str) -> None:
        """A line that stays."""
        ...

    def phase(self, name: str) -> None:
        """What the run does now, by its span name."""
        ...

    def begin(self, steps: int) -> None:
        """Training of so many steps begins."""
        ...

    def step(self, step: int, metrics: Metrics) -> None:
        """A step has ended."""
        ...

    def close(self) -> None:
        """The run has ended."""
        ...


def make_display(tracking: TrackingConfig) -> Display:
    """The display that `tracking.console` asks for; auto is rich on a terminal and plain lines elsewhere."""
    console = tracking.console
    if console == "auto":
        console = "rich" if sys.stdout.isatty() else "plain"
    return Unfailing({"rich": RichDisplay, "plain": PlainDisplay, "none": SilentDisplay}[console]())


def headline(metrics: Metrics) -> list[tuple[str, str]]:
    """(label, value) of what is worth a glance."""
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
    shown = [(label, form.format(metrics[key])) for label, key, form in wanted if key in metrics]
    if metrics.get("reward/unscorable"):
        shown.append(("unscorable", f"{metrics['reward/unscorable']:.0f} of {metrics['samples/sampled']:.0f}"))
    evals = [
        (name, f"{value:.3f}") for name, value in metrics.items() if name.startswith("eval/") and not name.endswith(DETAILS)
    ]
    return shown + evals


class SilentDisplay:
    """Shows nothing."""

    def note(self, text: str) -> None:
        """Nothing."""

    def phase(self, name: str) -> None:
        """Nothing."""

    def begin(self, steps: int) -> None:
        """Nothing."""

    def step(self, step: int, metrics: Metrics) -> None:
        """Nothing."""

    def close(self) -> None:
        """Nothing."""


class Unfailing:
    """Shows what another display shows; one that fails, as when nobody reads its output any more, is given up."""

    def __init__(self, display: Display) -> None:
        self._display: Display | None = display

    def note(self, text: str) -> None:
        """A line that stays."""
        self._show(lambda display: display.note(text))

    def phase(self, name: str) -> None:
        """What the run does now."""
        self._show(lambda display: display.phase(name))

    def begin(self, steps: int) -> None:
        """Training of so many steps begins."""
        self._show(lambda display: display.begin(steps))

    def step(self, step: int, metrics: Metrics) -> None:
        """A step has ended."""
        self._show(lambda display: display.step(step, metrics))

    def close(self) -> None:
        """The run has ended."""
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
    """One line for the first step, about fifty more, and every evaluation."""

    def __init__(self) -> None:
        self._steps, self._every = 0, 1

    def note(self, text: str) -> None:
        """A line."""
        say(text)

    def begin(self, steps: int) -> None:
        """Training of so many steps begins."""
        self._steps, self._every = steps, max(1, steps // 50)

    def step(self, step: int, metrics: Metrics) -> None:
        """A line, if this step is due one."""
        evaluated = any(name.startswith("eval/") for name in metrics)
        if step <= 1 or step == self._steps or step % self._every == 0 or evaluated:
            values = "  ".join(f"{label} {value}" for label, value in headline(metrics))
            if values:
                self.note(f"step {step}/{self._steps}  {values}")


class RichDisplay(SilentDisplay):
    """A progress bar with the phase and the time left, over a table of the last step."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeElapsedColumn,
            TimeRemainingColumn,
        )

        self._console = Console()
        self._bar = Progress(
            TextColumn("{task.description:<18}", style="bold", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("elapsed"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=self._console,
        )
        self._task = self._bar.add_task("starting", total=None)
        self._live = Live(self._bar, console=self._console, refresh_per_second=4, transient=False)
        self._live.start()
        self._shown_at = 0.0

    def note(self, text: str) -> None:
        """A line above the display."""
        self._console.print(shown(text), markup=False, highlight=False, emoji=False)

    def phase(self, name: str) -> None:
        """The phase, left of the bar."""
        self._bar.update(self._task, description=one_line(name))

    def begin(self, steps: int) -> None:
        """Training of so many steps begins."""
        self._bar.reset(self._task, total=steps)

    def step(self, step: int, metrics: Metrics) -> None:
        """Moves the bar; the table is renewed at most four times a second."""
        self._bar.update(self._task, completed=step)
        evaluated = any(name.startswith("eval/") for name in metrics)
        if evaluated:
            values = [(name, f"{value:.3f}") for name, value in metrics.items() if name.startswith("eval/")]
            self.note(
                f"step {step}: " + ", ".join(f"{name} {value}" for name, value in values if not name.endswith(DETAILS))
            )
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
        values = headline(metrics)
        half = (len(values) + 1) // 2
        for row in range(half):
            cells = [Text.assemble((one_line(label), "dim"), f" {value}") for label, value in values[row::half]]
            grid.add_row(*cells)
        return Group(self._bar, grid)
