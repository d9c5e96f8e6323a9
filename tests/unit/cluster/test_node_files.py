"""Files that roles on other nodes read: when their content counts as equal, and the errors if it differs."""

from __future__ import annotations

from pathlib import Path

import pytest

from tandem.launch.assembly.roles import files_of
from tandem.platform.config.schema import Config, ConfigError
from tandem.workers.cluster.node_files import END, READ_WHOLE, NodeFile, check_node, digest, look


def test_content_and_names_make_the_digest(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        (folder / "inner").mkdir(parents=True)
        (folder / "inner" / "a.py").write_text("x = 1")
    assert digest(str(first)) == digest(str(second))
    (second / "__pycache__").mkdir()
    (second / "__pycache__" / "a.pyc").write_text("compiled")
    (second / ".cache").write_text("hidden")
    assert digest(str(first)) == digest(str(second))
    (second / "inner" / "a.py").write_text("x = 2")
    assert digest(str(first)) != digest(str(second))
    assert digest(str(tmp_path / "none")) is None
    assert digest(str(first / "inner" / "a.py")) != digest(str(second / "inner" / "a.py"))


@pytest.mark.parametrize(("place", "differs"), [(0, True), (-1, True), (READ_WHOLE // 2, False), (END, False)])
def test_the_ends_of_a_long_file_are_read(tmp_path: Path, place: int, differs: bool) -> None:
    content = bytearray(READ_WHOLE + 1)
    (tmp_path / "one").write_bytes(content)
    content[place] = 1
    (tmp_path / "other").write_bytes(content)
    (tmp_path / "one").rename(tmp_path / "file")
    before = digest(str(tmp_path / "file"))
    (tmp_path / "other").rename(tmp_path / "file")
    assert (digest(str(tmp_path / "file")) != before) == differs


FILE = NodeFile("reward.function", "/shared/mine.py", ("reward",))
VERSIONS = {"torch": "2.13.0", "ray": "2.56.1"}


@pytest.mark.parametrize(
    ("there", "message"),
    [
        (
            None,
            "reward.function: /shared/mine.py does not exist on node 10.0.0.2, which runs reward. Put it at the same path",
        ),
        ("b", "reward.function: /shared/mine.py has other content on node 10.0.0.2, which runs reward, than on the node"),
    ],
)
def test_a_node_that_lacks_a_file_is_named(there: str | None, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        check_node("10.0.0.2", [FILE], ({FILE.path: "a"}, VERSIONS), ({FILE.path: there}, VERSIONS), print)
    assert str(caught.value).startswith(message)


def test_other_versions_are_noted() -> None:
    notes: list[str] = []
    check_node("10.0.0.2", [FILE], ({FILE.path: "a"}, VERSIONS), ({FILE.path: "a"}, VERSIONS), notes.append)
    assert notes == []
    check_node("10.0.0.2", [FILE], ({FILE.path: "a"}, VERSIONS), ({FILE.path: "a"}, {"torch": "2.12.0"}), notes.append)
    said = "warning: node 10.0.0.2 has torch 2.12.0 (2.13.0 here), ray missing (2.56.1 here). Install the same versions on"
    assert notes == [f"{said} every node"]


def test_what_a_run_reads_by_path(tmp_path: Path) -> None:
    mine, critic, judge = tmp_path / "mine.py", tmp_path / "critic", tmp_path / "judge"
    mine.write_text("def score(sample): return 1.0")
    critic.mkdir()
    judge.mkdir()
    config = Config()
    config.reward.function, config.reward.model, config.critic.path = f"{mine}:score", str(judge), str(critic)
    roles = ["rollout", "reward", "actor", "critic"]
    found = {(file.setting, file.path): file.roles for file in files_of(config, str(tmp_path), roles)}
    assert found == {
        ("model.path", str(tmp_path)): ("rollout", "actor", "reward"),  # the reward model reads the policy's tokens
        ("critic.path", str(critic)): ("critic",),
        ("reward.model", str(judge)): ("reward",),
        ("reward.function", str(mine)): ("reward",),
    }
    assert files_of(config, "hub/name", ["rollout"]) == []
    config.critic.path = None
    assert files_of(config, str(tmp_path), roles)[0].roles == ("rollout", "actor", "critic", "reward")


def test_look_names_the_versions_here(tmp_path: Path) -> None:
    digests, versions = look([str(tmp_path / "none")])
    assert digests == {str(tmp_path / "none"): None}
    assert {"torch", "ray", "transformers"} <= versions.keys()
