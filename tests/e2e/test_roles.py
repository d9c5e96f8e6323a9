"""Which roles exist, as Ray itself sees them."""

from __future__ import annotations

import pytest

pytestmark = pytest.mark.slow


def test_no_critic_without_an_estimator_that_needs_one(tiny_path: str) -> None:
    """Ray's state API lists a critic actor for PPO; for GRPO it lists no critic actor and no bundle for a critic."""
    import ray
    from ray.util.state import list_actors, list_placement_groups

    from tandem.launch.assembly.ray_roles import RayRoles
    from tandem.launch.compose.compose import compose
    from tandem.platform.algorithms.registry import algorithm_of
    from tandem.workers.cluster.cluster import connected

    expected = {
        ("ppo", "colocated"): ({"actor-0", "critic-0", "reward-0", "rollout-0"}, 1),
        ("grpo", "split"): ({"actor-0", "reference-0", "reward-0", "rollout-0"}, 4),
    }
    config, _ = compose(["cluster.num_cpus=2"])
    with connected(config.cluster, dashboard=True):
        own = ray.get_runtime_context().gcs_address  # other clusters may run on this machine
        for (algo, placement), (names, bundles) in expected.items():
            kl = ["algo.kl_loss_coef=0.1"] if algo == "grpo" else []
            config, _ = compose([f"algo={algo}", f"placement={placement}", "cluster.num_cpus=2", *kl])
            algorithm = algorithm_of(config)
            roles = RayRoles(config, algorithm, tiny_path, print)
            ready = roles.wait()
            alive = list_actors(own, filters=[("state", "=", "ALIVE")])
            assert {actor.name for actor in alive} == names
            assert any("Critic" in actor.class_name for actor in alive) == (algo == "ppo")
            [group] = [one for one in list_placement_groups(own, detail=True) if one.state == "CREATED"]
            assert len(group.bundles) == bundles
            assert set(ready.named()) == {name.partition("-")[0] for name in names}
            assert (ready.critic is None) == (algo == "grpo")
            roles.close()
            assert not list_actors(own, filters=[("state", "=", "ALIVE")])
