"""The command line of `train.py`, checked before anything else happens."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

import torch


def parse(argv: list[str] | None, *, description: str | None, num_tokens: int) -> argparse.Namespace:
    """The command line; rows have `num_tokens` tokens."""
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--steps", type=integer(1), default=400, help="steps in all (default: %(default)s)")
    add(
        "--out",
        type=Path,
        default=Path("runs/example"),
        help="the run's directory (default: %(default)s)",
    )
    add(
        "--resume",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="go on with the run in --out, if there is one (default); --no-resume refuses to",
    )
    add(
        "--seed",
        type=integer(0, 2**32 - 1, "numpy's largest seed"),
        default=0,
        help="seed of parameters and batches (default: %(default)s)",
    )
    add(
        "--device",
        type=device,
        default="cuda" if torch.cuda.is_available() else "cpu",
        help="cpu, cuda, cuda:1, ... (default: %(default)s)",
    )
    add(
        "--batch-size",
        type=integer(1),
        default=8,
        help=f"rows of {num_tokens} bytes per step (default: %(default)s)",
    )
    add("--log-every", type=integer(1), default=25, help="steps in one window (default: %(default)s)")
    add(
        "--save-every",
        type=integer(1),
        default=100,
        help="steps between checkpoints (default: %(default)s)",
    )
    add(
        "--threads",
        type=integer(1, os.cpu_count(), "this machine's number of CPUs"),
        default=1,
        help="torch's threads on the CPU (default: %(default)s)",
    )
    return parser.parse_args(argv)


def integer(least: int, most: int | None = None, meaning: str = "") -> Callable[[str], int]:
    """A type of argument: an integer of at least `least` and, if given, at most `most`."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < least:
            raise argparse.ArgumentTypeError(f"must be an integer of at least {least}, got {text!r}")
        if most is not None and int(text) > most:
            raise argparse.ArgumentTypeError(f"must be at most {most}, {meaning}, got {text!r}")
        return int(text)

    return number


def device(text: str) -> torch.device:
    """An argument that is a device of this machine, from which numbers can be read."""
    try:
        probe = torch.zeros(1, device=text)
        probe.item()  # `meta` has none
    except (RuntimeError, AssertionError, ImportError) as error:  # by the kind of device
        reason = str(error).partition("\n")[0]
        raise argparse.ArgumentTypeError(f"{text!r} cannot be used: {reason}") from error
    return probe.device
