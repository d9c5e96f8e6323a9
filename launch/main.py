"""Train: `python launch/main.py algo=ppo`.

Heavy imports come after the command line is checked, so help and mistakes answer at once.
"""

from __future__ import annotations

import os
import sys
import time

USAGE = """usage: python launch/main.py [algo=ppo|grpo] [SETTING=VALUE ...]

Trains a language model with reinforcement learning on a Ray cluster.

  algo=ppo                          actor and learned critic (the default)
  algo=grpo                         group baseline, no critic
  adv_estimator=gae|grpo            only the estimator; decides whether there is a critic
  model.path=FOLDER data.train=FILE your own model and data (.jsonl or .parquet with prompt and answer)
  reward.functions.NAME=WEIGHT      built-in rewards; reward.function=path.py:name for your own
  cluster=local|inline              a private Ray, or no Ray at all; cluster.address=HOST:PORT joins one
  actor.ranks=2 critic.ranks=2      data-parallel ranks
  run.seed=1 run.steps=100          any setting, by its dotted name

  dry_run=true                      print the plan (batch sizes, roles, bundles, memory) and stop
  --settings                        list every setting with its default and meaning
  --help                            this text

Records go to outputs/<run.name>/: metrics.jsonl, summary.json, report.html, checkpoints/, samples/, config.yaml.
Started again with its run.name, a run goes on from its newest checkpoint."""


def main(argv: list[str] | None = None) -> int:
    """Runs a command line; returns the exit code (0 finished, 1 failed, 2 not started, 130 interrupted)."""
    arguments = sys.argv[1:] if argv is None else argv
    if {"-h", "--help"} & set(arguments):
        print(USAGE)
        return 0
    if "--settings" in arguments:
        from tandem.launch.settings import settings_table

        print(settings_table())
        return 0
    started_at = _command_start()
    # OpenMP threads that spin while they wait make a step ten times slower as soon as another process wants a core.
    # Read when torch is loaded; a private Ray hands it to every worker.
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")  # the display is ours
    from tandem.platform.config import ConfigError
    from tandem.platform.redact import redacted

    try:
        from tandem.launch.compose import compose

        unknown = [argument for argument in arguments if argument.startswith("-") and "=" not in argument]
        if unknown:
            raise ConfigError(f"{unknown[0]}: no such option; settings are given as key=value, see --help")
        config, given = compose(arguments)
        from tandem.platform.validate import validate

        for warning in validate(config, given):
            print(f"warning: {redacted(warning)}", file=sys.stderr)
        if config.dry_run:
            from tandem.launch.dry_run import dry_run

            print(dry_run(config))
            return 0
        from tandem.launch.run import run

        return run(config, started_at)
    except ConfigError as error:
        print(f"configuration error: {redacted(str(error))}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _command_start() -> float:
    """Seconds since the epoch at which this process was started, interpreter and all."""
    try:
        import psutil

        return float(psutil.Process().create_time())
    except ImportError:
        return time.time()


if __name__ == "__main__":
    sys.exit(main())
