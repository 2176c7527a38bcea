"""The example that compares policies: what it prints is true, and every policy leaves the gradients alone."""

import re

import activations
import pytest


def test_recomputation_holds_least_and_the_plot_is_there(tmp_path, capsys):
    activations.main([f"--out={tmp_path}", "--layers=2", "--rounds=1"])
    head, *rows, last = capsys.readouterr().out.splitlines()
    held = {row[:35].strip(): float(row[35:45]) for row in rows}
    moved = {row[:35].strip(): float(row[45:55]) for row in rows}
    assert head.split() == ["policy", "held", "MiB", "moved", "recomputed", "time"]
    assert held["nothing"] > held["matmuls"] > held["recompute"] > held["first_of(recompute, everything)"]
    assert moved["larger_than(262144)"] > moved["first_of(recompute, everything)"] > 0 == moved["nothing"]
    assert re.fullmatch(r".*plan\.png: bytes held over one step with first_of\(recompute, everything\)", last)
    assert (tmp_path / "plan.png").stat().st_size > 1000
    assert list((tmp_path / "store").iterdir()) == []


@pytest.mark.parametrize("wrong", ["--layers=0", "--rounds=0", "--rounds=-1", "--layers=two"])
def test_a_number_that_makes_no_sense_is_an_error_of_usage(wrong, capsys):
    with pytest.raises(SystemExit, match="2"):
        activations.main([wrong])
    assert f"argument {wrong.split('=')[0]}: must be" in capsys.readouterr().err
