"""The engine that `rollout.engine` selects, and the error if it is not installed."""

from __future__ import annotations

import pytest

from tandem.launch.assembly import inputs
from tandem.platform.config.schema import Config, ConfigError, RolloutConfig
from tandem.workers.roles import rollout
from tandem.workers.roles.rollout import engine_name


@pytest.mark.parametrize(
    ("asked", "on_gpu", "installed", "name"),
    [
        ("auto", True, True, "vllm"),
        ("auto", False, True, "hf"),
        ("auto", True, False, "hf"),
        ("auto", False, False, "hf"),
        ("hf", True, True, "hf"),
        ("vllm", True, True, "vllm"),
        ("vllm", False, True, "vllm"),
    ],
)
def test_auto_is_vllm_where_there_is_cuda_and_vllm(
    monkeypatch: pytest.MonkeyPatch, asked: str, on_gpu: bool, installed: bool, name: str
) -> None:
    monkeypatch.setattr(rollout, "find_spec", lambda _: object() if installed else None)
    assert engine_name(asked, on_gpu) == name


def test_a_missing_vllm_is_refused_before_anything_is_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollout, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"pip install 'tandem-rl\[gpu\]'"):
        engine_name("vllm", on_gpu=True)
    with pytest.raises(ConfigError, match=r"not installed here.*\[cpu\].*rollout.engine=hf"):
        engine_name("vllm", on_gpu=False)
    with pytest.raises(ConfigError, match="not installed"):
        inputs.check_engine(Config(rollout=RolloutConfig(engine="vllm")))
