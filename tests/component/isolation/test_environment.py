"""The setup leaves an environment in which every engine can be imported."""

from __future__ import annotations

import subprocess
import sys


def test_vllm_and_transformers_import_side_by_side() -> None:
    """A torchvision that does not match the CPU build of torch would break the second import."""
    code = "import vllm; from transformers import Qwen2ForCausalLM; print(vllm.__version__)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1].startswith("0.32")
