"""Runs one tracker in a separate process: `python -m tandem.launch.trackers.sink_process NAME`, fed by `sinks.py`.

Reads JSON lines: first the facts of the run, then {"step", "metrics"} for each step, last {"status"}. A tracker that
prompts, hangs or crashes affects only this process.
"""

from __future__ import annotations

import os
import sys
from typing import Any, Protocol

from tandem.launch.compose.command import command
from tandem.platform.system.readers import parse_json, parsed
from tandem.platform.system.terminal import say


class Tracker(Protocol):
    """A tracker of runs, created from the facts of the run; see `identity.for_trackers`."""

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Logs the record of a step."""
        ...

    def finish(self, status: str) -> None:
        """Records the end of the run."""
        ...


class TensorBoard:
    """Event files in the run's folder: `tensorboard --logdir outputs`."""

    def __init__(self, facts: dict[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter

        after = facts.get("resumed_after")  # later steps in the file will run again
        folder = os.path.join(facts["folder"], "tracking", "tensorboard")
        self._writer = SummaryWriter(folder, purge_step=None if after is None else after + 1)
        for name in ("config", "versions"):
            self._writer.add_text(name, "\n".join(f"    {key}: {value}" for key, value in facts[name].items()))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes scalars."""
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def finish(self, status: str) -> None:
        """Closes the file."""
        self._writer.close()


class WandB:
    """Weights & Biases: online if there is a key and the settings allow it, else offline files for `wandb sync`."""

    def __init__(self, facts: dict[str, Any]) -> None:
        os.environ |= {"WANDB_MODE": facts["wandb_mode"], "WANDB_SILENT": "true", "WANDB_DISABLE_GIT": "true"}
        import wandb

        folder = os.path.join(facts["folder"], "tracking")
        self._run = wandb.init(
            project=facts["project"],
            name=facts["run"],
            dir=folder,
            tags=facts["tags"],
            config={**facts["config"], "versions": facts["versions"], "user": facts["user"]},
            settings=wandb.Settings(disable_code=True, x_disable_stats=True, x_disable_meta=True, console="off"),
        )

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes a row of the history."""
        self._run.log(metrics, step=step)

    def finish(self, status: str) -> None:
        """Sends or writes remaining data."""
        self._run.summary["status"] = status
        self._run.finish(exit_code=0 if status == "finished" else 1)


class MLflow:
    """MLflow: files below `run.dir` unless `tracking.mlflow_uri` names a server."""

    def __init__(self, facts: dict[str, Any]) -> None:
        # MLflow discourages the file store, but files need no server and no further packages.
        os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        import mlflow

        self._mlflow = mlflow
        mlflow.set_tracking_uri(facts["mlflow_uri"])
        mlflow.set_experiment(facts["project"])
        tags = {"tags": ",".join(facts["tags"]), "user": facts["user"], **facts["versions"]}
        mlflow.start_run(run_name=facts["run"], tags=tags)
        params = [(key, str(value)[:6000]) for key, value in facts["config"].items()]
        for start in range(0, len(params), 100):  # the limit of one call
            mlflow.log_params(dict(params[start : start + 100]))

    def log(self, step: int, metrics: dict[str, float]) -> None:
        """Writes metrics. MLflow does not allow @ in names."""
        self._mlflow.log_metrics({name.replace("@", "_at_"): value for name, value in metrics.items()}, step=step)

    def finish(self, status: str) -> None:
        """Sets the status."""
        self._mlflow.end_run({"finished": "FINISHED", "interrupted": "KILLED"}.get(status, "FAILED"))


TRACKERS: dict[str, Any] = {"tensorboard": TensorBoard, "wandb": WandB, "mlflow": MLflow}
"""Trackers by their names in `tracking.sinks`."""


@command("tracker")
def main(arguments: list[str]) -> int:
    """Runs the tracker named on the command line."""
    try:
        tracker: Tracker = TRACKERS[arguments[0]](_message(sys.stdin.readline()))
    except ImportError as error:
        say(f"{error.name} is not installed: pip install 'tandem-rl[tracking]'", error=True)
        return 1
    for line in sys.stdin:
        message = _message(line)
        if "status" in message:
            tracker.finish(message["status"])
            return 0
        tracker.log(message["step"], message["metrics"])
    tracker.finish("failed")  # the run ended without a status
    return 0


def _message(line: str) -> dict[str, Any]:
    where = "what the run sends"
    return parsed(parse_json(line, where), dict[str, Any], where)


if __name__ == "__main__":
    sys.exit(main())
