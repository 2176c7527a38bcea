import random

import numpy as np
import pytest
import torch

from veofunc.rng import load_rng_state, of_host, rng_state


def draws() -> list[float]:
    """Odd numbers of normal draws, of which numpy and Python keep the second of each pair."""
    return [
        *torch.randn(3).tolist(),
        *np.random.standard_normal(3).tolist(),
        *(random.gauss(0, 1) for _ in range(3)),
        random.random(),
        float(np.random.randint(1 << 30)),
    ]


@pytest.mark.parametrize("num_before", [0, 1, 2])
def test_the_next_draws_are_those_that_followed(num_before):
    for _ in range(num_before):
        draws()
    state = rng_state()
    expected = draws()
    draws()
    load_rng_state(state)
    assert draws() == expected


def test_taking_the_state_draws_nothing():
    state = rng_state()
    expected = draws()
    load_rng_state(state)
    rng_state()
    assert draws() == expected


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_cuda_device_that_is_not_there_is_warned_about():
    state = rng_state()
    state["cuda", "0"] = torch.zeros(16, dtype=torch.uint8)
    with pytest.warns(RuntimeWarning, match="no device cuda:0"):
        load_rng_state(state)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="needs a machine without an accelerator")
def test_a_device_of_another_kind_is_warned_about():
    state = rng_state()
    state["xpu", "1"] = torch.zeros(16, dtype=torch.uint8)
    with pytest.warns(RuntimeWarning, match="no device xpu:1"):
        load_rng_state(state)


def test_only_what_every_process_has_is_of_the_host():
    state = rng_state()
    state["xpu", "0"] = torch.zeros(16, dtype=torch.uint8)
    assert set(of_host(state).keys()) == {"torch", "numpy", "python"}


@pytest.mark.skipif(not torch.accelerator.is_available(), reason="needs an accelerator")
def test_draws_on_every_device_of_the_accelerator_follow():
    kind = torch.accelerator.current_accelerator()
    devices = [torch.device(kind.type, index) for index in range(torch.accelerator.device_count())]
    state = rng_state()
    expected = [torch.randn(3, device=device).tolist() for device in devices]
    load_rng_state(state)
    assert [torch.randn(3, device=device).tolist() for device in devices] == expected


def test_the_state_is_on_the_cpu_whatever_the_default_device_is():
    expected = rng_state()
    with torch.device("meta"):
        state = rng_state()
        load_rng_state(state)
    for name, value in state.items(include_nested=True, leaves_only=True):
        assert value.device.type == "cpu"
        assert torch.equal(value.nan_to_num(), expected[name].nan_to_num())


@pytest.fixture
def pcg64():
    before = np.random.get_bit_generator()
    np.random.set_bit_generator(np.random.PCG64(0))
    yield
    np.random.set_bit_generator(before)


def test_another_bit_generator_of_numpy_is_refused_with_a_way_out(pcg64):
    with pytest.raises(ValueError, match=r"must be MT19937, .* is PCG64; .*rng=False"):
        rng_state()
