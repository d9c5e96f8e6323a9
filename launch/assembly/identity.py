"""Facts about a run for its folder and its trackers: who started it, when, and with what."""

from __future__ import annotations

import getpass
import os
import platform
import time
from pathlib import Path
from typing import Any

from tandem.launch.assembly.versions import versions
from tandem.launch.compose.compose import flat
from tandem.platform.config.schema import Config
from tandem.platform.rewards.functions import part_name, verifier_of
from tandem.platform.system.redact import redacted_values


def about(config: Config, started_at: float) -> dict[str, Any]:
    """The content of `run.json`."""
    verifier = verifier_of(config.eval.function, config.reward.functions)
    return {
        "run": config.run.name,
        "algo": config.algo.name,
        "adv_estimator": config.adv_estimator,
        "tags": redacted_values(config.tracking.tags),
        "verifier": part_name(verifier) if verifier else None,
        "user": _user(),
        "host": platform.node(),
        "started_at": time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(started_at)),
    }


def for_trackers(config: Config, folder: Path, started_at: float) -> dict[str, Any]:
    """As `about`, with the resolved settings, the versions, and the places where trackers write."""
    tracking = config.tracking
    online = tracking.wandb == "online" or (tracking.wandb == "auto" and bool(os.environ.get("WANDB_API_KEY")))
    return {
        **about(config, started_at),
        "project": tracking.project,
        "folder": str(folder.absolute()),
        "wandb_mode": "online" if online else "offline",
        "mlflow_uri": tracking.mlflow_uri or (Path(config.run.dir).absolute() / "mlruns").as_uri(),
        "config": flat(config),
        "versions": versions(),
    }


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # in a container the user id may have no name
        return str(os.getuid())
