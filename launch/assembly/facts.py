"""Who made a run, when, with what: for its folder and its trackers."""

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
    """What `run.json` holds."""
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
    """The same with the resolved settings, the versions, and where trackers write."""
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
    except (KeyError, OSError):  # a container may run as a number without a name
        return str(os.getuid())
