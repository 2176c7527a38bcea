"""The example in the style of torch.func against torch.optim and against what it prints."""

import re
from pathlib import Path

import data
import functional
import pytest
import torch
from tensordict import TensorDict


def test_adam_equals_torch_optim():
    torch.manual_seed(0)
    start = TensorDict({"layer.weight": torch.randn(3, 2), "bias": torch.randn(2)})
    leaves = {name: leaf.clone().requires_grad_() for name, leaf in start.items()}
    optimizer = torch.optim.Adam(leaves.values(), lr=4e-3, betas=(0.9, 0.95))
    params, moments = start, TensorDict(mean=start * 0, square=start * 0)
    for step in range(1, 6):
        grads = TensorDict({name: torch.randn_like(leaf) for name, leaf in start.items()})
        params, moments = functional.adam(params, grads, moments, step)
        for name, leaf in leaves.items():
            leaf.grad = grads[name].clone()
        optimizer.step()
        for name, leaf in leaves.items():
            torch.testing.assert_close(params[name], leaf.detach())
    assert set(start.keys()) == {"layer.weight", "bias"}


def test_adam_leaves_its_arguments_alone():
    params = TensorDict({"w": torch.ones(2)})
    moments = TensorDict(mean=params * 0, square=params * 0)
    before = params.clone(), moments.clone()
    functional.adam(params, params * 3, moments, 1)
    assert (params == before[0]).all()
    assert (moments == before[1]).all()


def test_loss_of_every_channel_falls(capsys):
    functional.main(["--steps=16", "--log-every=8"])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(" | ")[0] for line in lines] == ["step 8", "step 16"]
    for name in data.CHANNELS:
        first, last = (float(re.search(rf"channel_loss/{name} (\S+)", line)[1]) for line in lines)
        assert last < first - 0.3


def test_is_as_short_as_it_claims():
    assert len(Path(functional.__file__).read_text().splitlines()) <= 60


@pytest.mark.parametrize("wrong", ["--steps=0", "--log-every=0", "--steps=-1"])
def test_a_number_that_makes_no_sense_is_an_error_of_usage(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        functional.main([wrong])
    assert f"argument {wrong.split('=')[0]}: must be" in capsys.readouterr().err
