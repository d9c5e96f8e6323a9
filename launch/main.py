"""Train: `python launch/main.py algo=ppo`.

Heavy imports come after the check of the command line, so help and error messages appear at once.
"""

from __future__ import annotations

import sys
import time

try:
    from tandem.launch.compose.command import command
    from tandem.launch.settings import settings_table
    from tandem.platform.system.terminal import say
except ModuleNotFoundError as error:
    raise SystemExit(
        f"tandem is not installed in this Python ({sys.executable}: no module {error.name}). `make train` installs it into "
        ".venv; then run `source .venv/bin/activate`"
    ) from None

USAGE = """usage: python launch/main.py [algo=ppo|grpo] [SETTING=VALUE ...]

Trains a language model with reinforcement learning on a Ray cluster.

  algo=ppo                          actor and learned critic (the default)
  algo=grpo                         group baseline, no critic
  adv_estimator=gae|grpo            only the estimator; determines whether there is a critic
  model.path=FOLDER data.train=FILE your own model and data (.jsonl or .parquet with prompt and answer)
  reward.functions.NAME=WEIGHT      built-in rewards; reward.function=path.py:name for your own
  cluster=local|inline              a private Ray, or no Ray at all; cluster.address=HOST:PORT joins one
  actor.ranks=2 critic.ranks=2      data-parallel ranks
  run.seed=1 run.steps=100          any setting, by its dotted name

  dry_run=true                      print the plan (batch sizes, roles, bundles, memory) and stop
  --settings                        list every setting with its default and meaning
  --help                            this text

Records go to outputs/<run.name>/: metrics.jsonl, summary.json, report.html, checkpoints/, samples/, config.yaml.
A run that is started again with the same run.name resumes from its newest checkpoint."""


@command("configuration error", USAGE, settings_table)
def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code (0 finished, 1 failed, 2 not started, 130 interrupted)."""
    started_at = _command_start()
    from tandem.launch.compose.compose import compose

    config, explicit = compose(arguments)
    from tandem.platform.planning.validate import validate

    for warning in validate(config, explicit):
        say(f"warning: {warning}", error=True)
    if config.dry_run:
        from tandem.launch.assembly.dry_run import dry_run

        say(dry_run(config, say))
        return 0
    if config.tracking.console != "none":
        say("loading PyTorch, transformers and Ray")
    from tandem.launch.assembly.run import run

    return run(config, started_at)


def _command_start() -> float:
    """The start time of this process in seconds since the epoch, before the interpreter's own startup."""
    try:
        import psutil

        return float(psutil.Process().create_time())
    except ImportError:
        return time.time()


if __name__ == "__main__":
    sys.exit(main())
