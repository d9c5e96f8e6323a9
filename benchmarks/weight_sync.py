"""Measures the speed of weight transfer from the trainer to the rollout replicas, and of a plain copy of the same bytes.

python benchmarks/weight_sync.py                                # shared and broadcast, 1 and 2 replicas; prints a table
python benchmarks/weight_sync.py --transports ipc --replicas 1 -- model.path=FOLDER trainer.device=cuda

Checksums are off. The model is an enlarged, untrained embedded model, unless model.path is given.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch

from tandem.launch.assembly import inputs
from tandem.launch.assembly.ray_roles import RayRoles
from tandem.launch.compose.compose import compose
from tandem.platform.algorithms.registry import algorithm_of
from tandem.platform.loop.protocols import Roles
from tandem.platform.system.terminal import say
from tandem.platform.system.text import human_bytes
from tandem.workers.cluster.cluster import connected

ENLARGED = [
    *("model.tiny.hidden_size=512", "model.tiny.intermediate_size=2048", "model.tiny.layers=12", "model.tiny.heads=8"),
    *("model.warmstart.steps=0", "task.eval_size=4"),
]
REPEATS = 5


def publish(roles: Roles, version: int) -> float:
    """Seconds of one weight synchronisation."""
    start = time.perf_counter()
    for bucket in roles.actor.weight_buckets(verify=False):
        roles.rollouts.load_weights(bucket)
    roles.rollouts.finish_weights(version, {})
    return time.perf_counter() - start


def copy_seconds(count: int, copies: int) -> float:
    """Seconds to copy `count` bytes `copies` times in memory; the median of several repetitions."""
    source = torch.ones(count, dtype=torch.uint8)
    targets = [torch.empty_like(source) for _ in range(copies)]
    seconds = []
    for _ in range(REPEATS):
        start = time.perf_counter()
        for target in targets:
            target.copy_(source)
        seconds.append(time.perf_counter() - start)
    return statistics.median(seconds)


def measure(transport: str, replicas: int, overrides: list[str]) -> str:
    """A line of the table. Repetitions of the transport and of the copy alternate."""
    settings = [
        f"rollout.replicas={replicas}",
        f"trainer.weight_transport={transport}",
        f"data.prompts_per_step={replicas}",
    ]
    has_model = any(override.startswith("model.path=") for override in overrides)
    config, _ = compose(["algo=grpo", "cluster=local", *([] if has_model else ENLARGED), *settings, *overrides])
    algorithm = algorithm_of(config)
    path = inputs.model_path(config, lambda step, total: None)
    with connected(config.cluster):
        ray_roles = RayRoles(config, algorithm, path, say)
        try:
            roles = ray_roles.wait()
            size = roles.actor.memory()["weights"] // config.actor.ranks
            publish(roles, 0)  # the first synchronisation opens connections
            pairs = [(publish(roles, version + 1), copy_seconds(size, replicas)) for version in range(REPEATS)]
        finally:
            ray_roles.close()
    sync, plain = (statistics.median(column) for column in zip(*pairs, strict=True))
    moved = size * replicas
    return (
        f"| {transport} | {replicas} | {human_bytes(size)} | {sync:.2f} | {human_bytes(moved / sync)}/s "
        f"| {human_bytes(moved / plain)}/s | {sync / plain:.1f} |"
    )


def main() -> None:
    """Prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--transports", nargs="+", default=["shared", "broadcast"])
    parser.add_argument("--replicas", nargs="+", type=int, default=[1, 2])
    parser.add_argument("overrides", nargs="*", help="settings, after --")
    options = parser.parse_args()
    say("| transport | replicas | weights | seconds | moved | plain copy | times a plain copy |")
    say("|---|---|---|---|---|---|---|")
    for transport in options.transports:
        for replicas in options.replicas:
            say(measure(transport, replicas, options.overrides))


if __name__ == "__main__":
    main()
