"""Measures a model on held-out data, without training: `python launch/evaluate.py model.path=FOLDER data.eval=FILE`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from tandem.launch.compose.command import command
from tandem.launch.settings import settings_table
from tandem.platform.config.schema import ConfigError
from tandem.platform.system.files import write_json
from tandem.platform.system.terminal import say

USAGE = """usage: python launch/evaluate.py [model.path=FOLDER] [data.eval=FILE] [to=FILE] [SETTING=VALUE ...]

Samples responses to held-out prompts and scores them, in this process. Takes the settings of launch/main.py.

  model.path=FOLDER           a model, or an export by launch/export.py; default: the embedded model
  data.eval=FILE              .jsonl or .parquet with prompt and answer; data.eval_sets.NAME=FILE for more of them
  eval.samples_per_prompt=8   sampled responses besides the greedy one: mean, pass@n, majority
  reward.functions.NAME=1     how responses are scored
  to=FILE                     also write the numbers as JSON"""


@command("cannot evaluate", USAGE, settings_table)
def main(arguments: list[str]) -> int:
    """Runs a command line; returns the exit code (0 measured, 2 not)."""
    to = [argument.removeprefix("to=") for argument in arguments if argument.startswith("to=")]
    metrics = evaluate([argument for argument in arguments if not argument.startswith("to=")])
    for name, value in metrics.items():
        say(f"{name.removeprefix('eval/'):<40} {value:.4f}")
    for path in to:
        try:
            write_json(Path(path), metrics)
        except OSError as error:
            raise ConfigError(f"to={path}: cannot be written ({error.strerror})") from error
    return 0


def evaluate(overrides: Sequence[str]) -> dict[str, float]:
    """The metrics `eval/<set>/...` of the model in the settings.

    Raises:
        ConfigError: a setting cannot work, or there is no held-out data.
    """
    from tandem.launch.assembly import inputs
    from tandem.launch.assembly.roles import role_specs
    from tandem.launch.compose.compose import compose
    from tandem.launch.views.display import PlainDisplay, warm_start
    from tandem.platform.algorithms.registry import algorithm_of
    from tandem.platform.loop.protocols import Roles
    from tandem.platform.planning.validate import validate
    from tandem.workers.cluster.runtime import Rank
    from tandem.workers.groups.inline import InlineRollouts
    from tandem.workers.models.tokenizer import load_tokenizer
    from tandem.workers.roles.reward import RewardRank
    from tandem.workers.roles.rollout import RolloutWorker

    config, explicit = compose(overrides)
    validate(config, explicit)
    inputs.check_engine(config)
    display = PlainDisplay(error=True)
    path = inputs.model_path(config, warm_start(display))
    inputs.check_context(config, path)
    tokenizer = load_tokenizer(path, trust_remote_code=config.model.trust_remote_code)
    inputs.check_stop_ids(config, path, tokenizer)
    sets = inputs.evaluations(config, path, tokenizer, display.note)
    if not sets:
        raise ConfigError("there is no held-out data. Set data.eval=FILE")
    specs, rank = role_specs(config, algorithm_of(config), path), Rank()
    worker, rewards = RolloutWorker(specs["rollout"], rank), RewardRank(specs["reward"], rank)
    try:
        worker.start()
        rewards.start()
        # Evaluation uses only these two roles.
        roles = Roles(actor=None, rewards=rewards, rollouts=InlineRollouts(worker))  # type: ignore[arg-type]
        metrics: dict[str, float] = {}
        for evaluation in sets:
            metrics |= evaluation.run(roles, config.sampling_seed, step=0)
        return metrics
    finally:
        rewards.close()


if __name__ == "__main__":
    sys.exit(main())
