"""Benchmarks: `python -m tests.bench` lists them, `python -m tests.bench NAME` runs one, `all` runs all.

Each prints medians in seconds and their ratio to the first row's, measured interleaved in one run.
"""

import argparse
import inspect
from importlib import import_module

ENTRIES = ("offload", "channel", "router", "checkpoint")


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    commands = parser.add_subparsers(dest="name", metavar="NAME")
    entries = {name: import_module(f"tests.bench.{name}") for name in ENTRIES}
    for name, entry in entries.items():
        command = commands.add_parser(name, help=entry.__doc__.splitlines()[0])
        for option in inspect.signature(entry.run).parameters.values():
            flag = f"--{option.name.replace('_', '-')}"
            command.add_argument(
                flag, type=type(option.default), default=option.default, help="default: %(default)s"
            )
    commands.add_parser("all", help="all of them, with their defaults")
    options = vars(parser.parse_args(argv))
    name = options.pop("name")
    if name is None:
        parser.print_help()
    for chosen in ENTRIES if name == "all" else () if name is None else (name,):
        print(f"== {chosen}: {entries[chosen].__doc__.splitlines()[0]}")
        print(entries[chosen].run(**options), flush=True)


if __name__ == "__main__":
    main()
