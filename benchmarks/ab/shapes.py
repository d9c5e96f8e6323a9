"""The shapes of an arm's models, and the machine's peak rate of matrix products."""

from __future__ import annotations

import os
import time
from typing import Any

import psutil
import torch
from torch import nn

from tandem.platform.planning.costs import ModelShape, Peak


def shape_of(path: str, trust_remote_code: bool = False, values: bool = False) -> ModelShape:
    """The shape of the decoder at `path`, from its configuration alone; `values`: with a value head."""
    from transformers import AutoConfig, AutoModel

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        body: Any = AutoModel.from_config(config, trust_remote_code=trust_remote_code)
    text: Any = config.get_text_config()
    heads = text.num_attention_heads
    width = heads * (getattr(text, "head_dim", None) or text.hidden_size // heads)
    embeddings = {id(module.weight) for module in body.modules() if isinstance(module, nn.Embedding)}
    blocks = sum(p.numel() for p in body.parameters() if p.dim() >= 2 and id(p) not in embeddings)
    return ModelShape(text.num_hidden_layers, width, blocks, text.hidden_size * (1 if values else text.vocab_size))


def parameters_of(path: str, trust_remote_code: bool = False) -> int:
    """Parameters of the causal language model at `path`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code)
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    return sum(parameter.numel() for parameter in model.parameters())


def measured_peak(dtype: str, size: int | None = None, trials: int = 15) -> Peak:
    """Operations per second of square matrix products, on one GPU or on all cores, without the first product."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    size = size or (8192 if device.type == "cuda" else 2048)  # a small size would measure kernel launches
    before = torch.get_num_threads()
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    matrix, load_average = torch.randn(size, size, dtype=getattr(torch, dtype), device=device), os.getloadavg()[0]
    rates = []
    with Others() as others:
        for _ in range(trials + 1):
            start = time.perf_counter()
            float((matrix @ matrix)[0, 0])  # waits for the device
            rates.append(2 * size**3 / (time.perf_counter() - start))
    torch.set_num_threads(before)
    return Peak.of(rates[1:], others.share, load_average)


class Others:
    """Measures the share of the machine's cores that other processes or virtual machines use during the body."""

    share: float = 0.0

    def __enter__(self) -> Others:
        self._before = self._now()
        return self

    def __exit__(self, *_: object) -> None:
        busy, idle, mine = (now - before for now, before in zip(self._now(), self._before, strict=True))
        self.share = max(0.0, busy - mine) / (busy + idle) if busy + idle > 0 else 0.0

    @staticmethod
    def _now() -> tuple[float, float, float]:
        """Seconds so far: busy and idle over all cores, and CPU seconds of this process."""
        times = psutil.cpu_times()._asdict()
        idle = times["idle"] + times.get("iowait", 0.0)
        # Linux includes guest time in user time.
        busy = sum(times.values()) - idle - times.get("guest", 0.0) - times.get("guest_nice", 0.0)
        return busy, idle, time.process_time()


def others_now(seconds: float = 0.5) -> float:
    """The share of the cores that other processes use at the moment."""
    with Others() as others:
        time.sleep(seconds)
    return others.share
