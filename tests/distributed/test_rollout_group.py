"""Dispatch over replicas, with real Ray actors that only wait or die instead of sampling."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from tandem.platform.config.schema import ClusterConfig
from tandem.platform.experience.batch import Prompt, Rollout, StopReason
from tandem.platform.loop.protocols import Sampling, WeightSyncError
from tandem.workers.cluster.postmortem import WorkerFailed
from tandem.workers.groups import ranks as ranks_module
from tandem.workers.groups.ranks import Home, Ranks, WorkerDied
from tandem.workers.groups.rollouts import RolloutGroup
from tandem.workers.sync.transports import Sent

pytestmark = pytest.mark.slow

SAMPLING = Sampling(samples=2, temperature=1.0, max_tokens=4, seed=(0,))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    from tandem.workers.cluster.cluster import connected

    with connected(ClusterConfig(num_cpus=2)):
        yield


def replica_class() -> type:
    """The class is local so that Ray sends it by value: its workers cannot import this file."""

    class Replica:
        """Takes the number of seconds in the text of a prompt; `die` ends the process the first time."""

        def __init__(self, number: int, folder: str) -> None:
            self.number, self.folder, self.version, self.loaded = number, folder, -1, 0

        def generate(self, prompts: Sequence[Prompt], sampling: Sampling) -> list[Rollout]:
            for prompt in prompts:
                with open(f"{self.folder}/served", "a") as log:
                    log.write(f"{self.number} {prompt.group_id}\n")
                if prompt.text == "die" and not os.path.exists(f"{self.folder}/died"):
                    open(f"{self.folder}/died", "w").close()
                    os._exit(1)
                if prompt.text == "raise":
                    raise RuntimeError("planted")
                time.sleep(0 if prompt.text == "die" else float(prompt.text))
            return [
                Rollout(prompt, (number,), (True,), (0.0,), StopReason.STOP, self.version, "")
                for prompt in prompts
                for number in range(sampling.samples)
            ]

        def load_weights(self, sent: Sent) -> bool:
            self.loaded += 1
            return True

        def finish_weights(self, version: int) -> dict[str, int]:
            self.version = version
            return {"w": self.loaded}

        def memory(self) -> dict[str, int]:
            return {"peak": 1}

    return Replica


class Trainer:
    """A trainer whose weights fill two buckets."""

    def weight_buckets(self, verify: bool = True, shared: bool = False) -> Iterator[list[Sent]]:
        yield from ([Sent({}, verify)], [Sent({}, verify)])

    def weight_checksums(self) -> dict[str, int]:
        return {"w": 2}


def make(folder: Any, replicas: int = 2, continuous: bool = True, restarts: int = 3, timeout_s: float = 30) -> RolloutGroup:
    import ray

    remote = ray.remote(num_cpus=0)(replica_class())

    def spawn(rank: int) -> tuple[Any, Home]:
        return remote.remote(rank, str(folder)), Home("here")

    handles = [spawn(rank)[0] for rank in range(replicas)]
    ray.get([handle.memory.remote() for handle in handles])  # all have started
    ranks = Ranks("rollout", handles, [Home("here")] * replicas, timeout_s, spawn, restarts)
    group = RolloutGroup(ranks, 4, continuous, Trainer(), lambda rank: Home("here"))  # type: ignore[arg-type]
    for bucket in Trainer().weight_buckets():
        group.load_weights(bucket)
    group.finish_weights(7, {"w": 2})
    return group


def prompts(*texts: str) -> list[Prompt]:
    return [Prompt((1, 2), number, text) for number, text in enumerate(texts)]


def served(folder: Any) -> list[tuple[int, int]]:
    """(replica, prompt) in the order in which sampling began."""
    return [tuple(map(int, line.split())) for line in (folder / "served").read_text().splitlines()]  # type: ignore[misc]


def check(rollouts: list[Rollout], count: int) -> None:
    """Checks that each sample of each prompt arrived once, in order, from the published version."""
    assert [(rollout.prompt.group_id, rollout.response_ids[0]) for rollout in rollouts] == [
        (prompt, sample) for prompt in range(count) for sample in range(2)
    ]
    assert {rollout.policy_version for rollout in rollouts} == {7}


def test_a_busy_replica_gets_no_more_than_it_can_queue(tmp_path: Any) -> None:
    group = make(tmp_path)
    check(group.collect(group.submit(prompts("3", *["0.02"] * 15), SAMPLING)), 16)
    shares = [replica for replica, _ in served(tmp_path)]
    slow = dict(reversed([(prompt, replica) for replica, prompt in served(tmp_path)]))[0]
    assert shares.count(slow) <= 4  # 4 sequences running and 4 queued, two per prompt
    assert len(shares) == 16


def test_results_come_as_they_finish(tmp_path: Any) -> None:
    group = make(tmp_path)
    ticket = group.submit(prompts("1.5", "0"), SAMPLING)  # one for each replica
    assert [place for place, _ in group.finished(ticket)] == [1, 0]
    check(group.collect(ticket), 2)  # a finished ticket can be read again


def test_tickets_overlap(tmp_path: Any) -> None:
    group = make(tmp_path)
    first, second = group.submit(prompts("0.2", "0.2"), SAMPLING), group.submit(prompts("0", "0"), SAMPLING)
    check(group.collect(second), 2)
    check(group.collect(first), 2)


def test_replicas_that_run_one_call_at_a_time_get_whole_shares(tmp_path: Any) -> None:
    group = make(tmp_path, continuous=False)
    ticket = group.submit(prompts(*["0"] * 8), SAMPLING)
    assert sorted(len(call.job.places) for call in group._running.values()) == [2, 2, 2, 2]
    check(group.collect(ticket), 8)


@pytest.mark.parametrize("replicas", [1, 2])
def test_a_replica_that_dies_is_replaced_and_no_sample_is_lost_or_doubled(tmp_path: Any, replicas: int) -> None:
    group = make(tmp_path, replicas)
    check(group.collect(group.submit(prompts("0.1", "0.1", "die", "0.1", "0.1", "0.1"), SAMPLING)), 6)
    assert group.restarts == 1
    check(group.collect(group.submit(prompts("0", "0", "0", "0"), SAMPLING)), 4)
    assert group.restarts == 1


def test_two_replicas_that_die_at_once_are_both_replaced(tmp_path: Any) -> None:
    import ray

    group = make(tmp_path)
    for handle in group.ranks.handles:
        ray.kill(handle)
    check(group.collect(group.submit(prompts("0", "0", "0"), SAMPLING)), 3)
    assert group.restarts == 2


def test_a_watched_rank_that_dies_meanwhile_ends_the_wait(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """For example a rank of the trainer, while the replicas sample for minutes."""
    import ray

    monkeypatch.setattr(ranks_module, "LOOK_S", 0.5)
    group = make(tmp_path)
    bystander = ray.remote(num_cpus=0)(replica_class()).remote(9, str(tmp_path))
    ray.get(bystander.memory.remote())
    group.ranks.watch.watched.append(Ranks("actor", [bystander], [Home("there")], 30))
    ticket = group.submit(prompts("20"), SAMPLING)
    ray.kill(bystander)
    start = time.monotonic()
    with pytest.raises(WorkerDied, match="actor rank 0 on node there died: its process ended"):
        group.collect(ticket)
    assert time.monotonic() - start < 10
    assert group.restarts == 0


def test_a_replica_that_dies_between_calls_is_replaced_at_the_next(tmp_path: Any) -> None:
    import ray

    group = make(tmp_path)
    ray.kill(group.ranks.handles[1])
    for bucket in Trainer().weight_buckets():
        group.load_weights(bucket)
    group.finish_weights(7, {"w": 4})
    assert group.restarts == 1
    check(group.collect(group.submit(prompts("0", "0", "0"), SAMPLING)), 3)
    assert group.memory() == {"peak": 2}


def test_restarts_are_bounded(tmp_path: Any) -> None:
    group = make(tmp_path, restarts=0)
    with pytest.raises(WorkerDied, match=r"rollout rank \d on node here died in `generate`(.|\n)*cluster\.max_restarts=0"):
        group.collect(group.submit(prompts("die", "0"), SAMPLING))


def test_a_replica_that_hangs_ends_the_wait(tmp_path: Any) -> None:
    group = make(tmp_path, timeout_s=2)
    start = time.monotonic()
    with pytest.raises(WorkerFailed, match=r"rollout rank \d on node here did not finish `generate` within 2 s"):
        group.collect(group.submit(prompts("60"), SAMPLING))
    assert time.monotonic() - start < 15


def test_an_exception_in_a_replica_is_told_and_not_retried(tmp_path: Any) -> None:
    group = make(tmp_path)
    with pytest.raises(WorkerFailed, match="failed in `generate`: RuntimeError: planted"):
        group.collect(group.submit(prompts("raise"), SAMPLING))
    assert group.restarts == 0


def test_weights_that_did_not_arrive_are_named(tmp_path: Any) -> None:
    group = make(tmp_path)
    with pytest.raises(WeightSyncError, match="rollout replica 0: tensor w has checksum 2, but 9 was sent"):
        group.finish_weights(8, {"w": 9})
