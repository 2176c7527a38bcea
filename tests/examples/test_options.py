"""The command line of the example."""

import options
import pytest
import train


def parse(*argv):
    return options.parse(list(argv), description="Train.", num_tokens=256)


def test_defaults_are_those_of_the_readme():
    chosen = parse()
    assert (str(chosen.out), chosen.steps, chosen.resume, chosen.threads) == ("runs/example", 400, True, 1)
    assert not parse("--no-resume").resume


def test_largest_seed_is_one():
    train.seed(parse(f"--seed={2**32 - 1}").seed)


def test_help_names_every_option_and_its_default(capsys):
    with pytest.raises(SystemExit, match="0"):
        parse("--help")
    text = capsys.readouterr().out
    for name in ("steps", "out", "no-resume", "seed", "device", "batch-size", "log-every", "save-every"):
        assert f"--{name}" in text
    assert "rows of 256 bytes per step (default: 8)" in " ".join(text.split())
