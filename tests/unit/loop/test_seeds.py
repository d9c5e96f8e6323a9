"""Random streams and checksums that are equal in every process."""

from __future__ import annotations

import itertools
import subprocess
import sys

import numpy as np
import pytest
import torch

from tandem.platform.loop.checksum import checksum
from tandem.platform.loop.seeds import mix


@pytest.mark.parametrize(("seed", "first"), [(0, 0xE220A8397B1DCDAF), (1234567, 6457827717110365317)])
def test_mix_of_one_number_is_the_first_output_of_splitmix64(seed: int, first: int) -> None:
    """The generator's published outputs, of which 63 bits are kept."""
    assert mix(seed) == first >> 1


def test_mix_depends_on_every_part_and_its_place() -> None:
    seeds = [mix(*parts) for n in (1, 2, 3) for parts in itertools.product(range(-2, 6), repeat=n)]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)


def test_close_inputs_give_unrelated_seeds() -> None:
    differing = [bin(mix(7, n) ^ mix(7, n + 1)).count("1") for n in range(200)]
    assert 28 < sum(differing) / len(differing) < 35


@pytest.mark.parametrize("part", [2**63, 10**30, -(10**30)])
def test_any_integer_seeds_a_generator(part: int) -> None:
    torch.Generator().manual_seed(mix(part, 1))


def test_mix_does_not_depend_on_the_process() -> None:
    code = "from tandem.platform.loop.seeds import mix; print(mix(7, 0, 3))"
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(other.stdout) == mix(7, 0, 3)


def test_checksum_by_hand() -> None:
    # float32 bits: 1.0 = 0x3F800000, 2.0 = 0x40000000; weights 1 and 2
    assert checksum(torch.tensor([1.0, 2.0])) == 0x3F800000 + 2 * 0x40000000
    assert checksum(torch.tensor([0.0, 1.0])) == 2 * 0x3F800000
    assert checksum(torch.tensor(1.0)) == 0x3F800000
    assert checksum(torch.zeros(0)) == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_checksum_of_every_type_sees_a_change_and_an_exchange(dtype: torch.dtype) -> None:
    tensor = torch.arange(12).reshape(3, 4).to(dtype)
    changed, exchanged = tensor.clone(), tensor.clone()
    changed[2, 3] = 0
    exchanged[0, 0], exchanged[0, 1] = tensor[0, 1], tensor[0, 0]
    assert checksum(tensor) == checksum(tensor.clone())
    assert checksum(changed) != checksum(tensor)
    assert checksum(exchanged) != checksum(tensor)


def test_checksum_reads_values_and_not_memory() -> None:
    tensor = torch.arange(12.0).reshape(3, 4)
    assert checksum(tensor.t()) == checksum(tensor.t().contiguous())
    assert checksum(tensor.t()) != checksum(tensor)
    assert checksum(torch.nn.Parameter(tensor)) == checksum(tensor)


def test_checksum_equals_the_reference_on_many_elements() -> None:
    tensor = torch.randn(200_000, generator=torch.Generator().manual_seed(0))
    bits = tensor.numpy().view(np.int32).astype(np.int64)
    with np.errstate(over="ignore"):
        expected = int((bits * (np.arange(200_000) % 65_521 + 1)).sum())
    assert checksum(tensor) == expected


def test_checksum_sees_one_bit() -> None:
    tensor = torch.ones(1000)
    nudged = tensor.clone()
    nudged[500] = torch.nextafter(torch.tensor(1.0), torch.tensor(2.0))
    assert checksum(nudged) != checksum(tensor)
