"""Trials of what must hold when things break: `python -m tests.faults` lists them, NAME runs one.

Each prints how often it tried and what was not as it must be. The exit code is 1 if anything was not.
"""

import argparse
import inspect
import os
import sys
from importlib import import_module

# Processes are forked from this one, which must have no thread: the variables are read on import.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

ENTRIES = ("checkpoint",)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.faults", description=__doc__)
    commands = parser.add_subparsers(dest="name", metavar="NAME")
    entries = {name: import_module(f"tests.faults.{name}") for name in ENTRIES}
    for name, entry in entries.items():
        command = commands.add_parser(name, help=entry.__doc__.splitlines()[0])
        for option in inspect.signature(entry.run).parameters.values():
            command.add_argument(
                f"--{option.name}",
                type=type(option.default),
                default=option.default,
                help="default: %(default)s",
            )
    options = vars(parser.parse_args(argv))
    name = options.pop("name")
    if name is None:
        parser.print_help()
        return 0
    text, passed = entries[name].run(**options)
    print(text, flush=True)
    return 0 if passed else 1


if __name__ == "__main__":
    sys.exit(main())
