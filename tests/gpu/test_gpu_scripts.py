"""What is prepared for an accelerator runs without one, in small. What it measures is no test."""

import math
import re

import pytest
import torch

from tests.gpu import checkpoint, no_sync, offload

TINY = "--device cpu --rounds 1 --width 16 --layers 2 --heads 2 --batch 2 --tokens 8 --dtype float32"


# How much a budget lets through depends on what is measured, and here it may be nothing.
@pytest.mark.filterwarnings("ignore:offload moved nothing:UserWarning")
def test_the_rehearsal_checks_and_measures_every_variant(capsys):
    offload.main(TINY.split())
    out = capsys.readouterr().out
    assert "checked: gradients of 11 variants are equal bit for bit" in out
    assert f"checked: {offload.check_options.__doc__}" in out
    ratios = [float(ratio) for ratio in re.findall(r" ([\d.naif]+)x ", out)]
    assert len(ratios) == 12
    assert all(math.isfinite(ratio) and ratio > 0 for ratio in ratios)


def test_the_rehearsal_of_steps_without_synchronisation_checks_every_loss(capsys):
    no_sync.main(["--device", "cpu"])
    out = capsys.readouterr().out
    assert out == "checked on cpu: output, output, deterministic, intercept, pair, router\n"


def test_the_rehearsal_of_saves_checks_every_way_and_measures(capsys):
    checkpoint.main(["--device", "cpu", "--width", "16", "--rounds", "1"])
    out = capsys.readouterr().out
    assert f"checked on cpu: {', '.join(checkpoint.WAYS)}" in out
    assert re.search(r"^save .* [\d.]+x$", out, re.MULTILINE)


def test_gradients_that_differ_are_an_error():
    model = torch.nn.Linear(3, 1)
    variants = {"plain": lambda: model(torch.ones(3)), "wrong": lambda: model(torch.ones(3)) * 2}
    with pytest.raises(RuntimeError, match="the gradients of 'wrong' are not plain's"):
        offload.check_gradients(model, variants)


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator: it would measure")
def test_without_an_accelerator_it_says_so(capsys):
    offload.main([])
    assert capsys.readouterr().out.startswith("no accelerator: nothing measured")
