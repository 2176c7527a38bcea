"""What is in a directory of checkpoints, and whether it is whole: `python -m veofunc.checkpoint --help`.

It only reads: a run may save there meanwhile.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Iterable, Sequence
from datetime import datetime
from math import prod
from pathlib import Path

import torch

from veofunc.checkpoint.export import choose_step, to_safetensors
from veofunc.checkpoint.manifest import (
    CheckpointError,
    DamageError,
    Entry,
    Manifest,
    read_complete,
    step_numbers,
    verify_files,
)
from veofunc.checkpoint.plan import SlotIndex
from veofunc.checkpoint.restore import read_indices
from veofunc.checkpoint.storage import DAMAGED, REPLACED, UNFINISHED, Storage, open_storage, step_name

LEFT = {
    UNFINISHED: "unfinished: being written, or left by a run that was killed; the next save removes it",
    REPLACED: "replaced by a newer one of that number; the next save removes it",
    DAMAGED: "set aside, as it was no complete step; remove it if nothing in it is wanted",
}
WIDTH = 60  # characters of a JSON value


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command.

    Returns:
        The exit code: 0, 1 if a step is damaged, or 2 if the command cannot be carried out.
    """
    options = _parser().parse_args(arguments)
    try:
        storage = open_storage(options.directory)
        if not storage.names() and not Path(storage.root).is_dir():
            raise NotADirectoryError(f"there is nothing at {storage.root}")
        code = options.command(storage, options)
        sys.stdout.flush()
        return code
    except BrokenPipeError:  # nobody reads any more, as with `| head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except (CheckpointError, ImportError, OSError, TypeError, ValueError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1 if isinstance(error, DamageError) else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m veofunc.checkpoint", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def add(command, text: str, step: str) -> argparse.ArgumentParser:
        added = commands.add_parser(command.__name__.removeprefix("_"), help=text, description=text)
        added.set_defaults(command=command)
        added.add_argument("directory", metavar="DIR", help="directory of the steps, or its URL")
        if step:
            added.add_argument("--step", type=int, metavar="N", help=step)
        return added

    newest = "which one; by default the newest complete one"
    add(_list, "One line for each step, and for what else lies there.", "")
    add(_verify, "Read all files and compare them with their checksums.", "only this one")
    show = add(_show, "What a step holds.", newest)
    show.add_argument("--tensors", action="store_true", help="list all tensors")
    export = add(_export, "Write the tensors of a slot into a safetensors file.", newest)
    export.add_argument("file", metavar="FILE.safetensors", help="the new file")
    export.add_argument("--slot", default="model", help="which one (default: %(default)s)")
    export.add_argument("--force", action="store_true", help="replace the file if it exists")
    return parser


def _list(storage: Storage, options: argparse.Namespace) -> int:
    rows = [("step", "saved", "size", "ranks", "slots", "")]
    for step in step_numbers(storage):
        try:
            manifest = read_complete(storage, step)
        except DamageError as error:
            rows.append((f"{step}", "-", "-", "-", "-", _short(error, storage, step)))
        else:
            slots = " ".join(manifest.slots)
            rows.append(
                (
                    f"{step}",
                    _date(manifest),
                    _size(_nbytes(manifest)),
                    f"{manifest.world_size}",
                    slots,
                    "complete",
                )
            )
    _print_table(rows, right=(0, 2, 3)) if rows[1:] else print(f"no steps in {storage.root}")
    left = [
        (name, text)
        for name in sorted(storage.names())
        for start, text in LEFT.items()
        if name.startswith(start)
    ]
    if left:
        print()
        _print_table(left)
    return 0


def _verify(storage: Storage, options: argparse.Namespace) -> int:
    steps = step_numbers(storage) if options.step is None else [choose_step(storage, options.step)]
    if not steps:
        raise CheckpointError(f"there is no step in {storage.root}")
    code, width = 0, len(str(steps[-1]))
    for step in steps:
        start = time.monotonic()
        try:
            manifest = read_complete(storage, step)
            problems = _problems(storage, manifest)
        except DamageError as error:
            problems = [_short(error, storage, step)]
        if problems:
            code = 1
            print(f"step {step:>{width}}  damaged  {'; '.join(problems)}", flush=True)
        else:
            seconds = time.monotonic() - start
            size = f"{_size(_nbytes(manifest))} in {len(manifest.files)} files"
            print(f"step {step:>{width}}  good     {size}, {seconds:.1f} s", flush=True)
    return code


def _show(storage: Storage, options: argparse.Namespace) -> int:
    step = choose_step(storage, options.step)
    manifest, indices = read_indices(storage, step)
    versions = ", ".join(f"{name} {version}" for name, version in manifest.versions.items())
    rows = [
        ("saved", f"{_date(manifest)} by {manifest.world_size} rank{'s' * (manifest.world_size > 1)}"),
        ("with", versions),
        ("size", f"{_size(_nbytes(manifest))} in {len(manifest.files)} files"),
        *((name, f"{value:g}") for name, value in manifest.metrics.items()),
    ]
    print(f"{storage.root}/{step_name(step)}")
    _print_table(rows, indent=2)
    for name, index in indices.items():
        _print_slot(name, index, options.tensors)
    values = [(_name(entry), _value(entry)) for entry in manifest.values]
    if values:
        print("\nvalues")
        _print_table(values, indent=2)
    return 0


def _print_slot(name: str, index: SlotIndex, with_tensors: bool) -> None:
    stored = [entry for entry in index.entries if not entry.tie]
    print(f"\n{name}: {len(index.entries)} tensors, {_size(sum(map(_tensor_nbytes, stored)))}")
    if with_tensors:
        rows = []
        for entry in index.entries:
            size = f"as {entry.tie}" if entry.tie else _size(_tensor_nbytes(entry))
            rows.append((_name(entry), entry.dtype, f"{list(entry.shape)}", size))
        _print_table(rows, indent=2)


def _export(storage: Storage, options: argparse.Namespace) -> int:
    step = choose_step(storage, options.step)
    tensors = to_safetensors(
        options.directory, options.file, step=step, slot=options.slot, force=options.force
    )
    size = _size(sum(tensor.nbytes for tensor in tensors.values()))
    print(f"step {step}: {len(tensors)} tensors of {options.slot}, {size}, verified, to {options.file}")
    return 0


def _problems(storage: Storage, manifest: Manifest) -> list[str]:
    """What is wrong with the files of a step, one by one."""
    problems = []
    for name in manifest.files:
        try:
            verify_files(storage, manifest, [name])
        except (DamageError, OSError) as error:
            problems.append(_short(error, storage, manifest.step))
    return problems


def _short(error: Exception, storage: Storage, step: int) -> str:
    return str(error).replace(f"{storage.root}/{step_name(step)}/", "")


def _print_table(rows: Iterable[Sequence[str]], right: Sequence[int] = (), indent: int = 0) -> None:
    """Print rows with aligned columns, those in `right` to the right."""
    rows = [*rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        print(" " * indent + "  ".join(cells).rstrip())


def _name(entry: Entry) -> str:
    owner = "" if entry.rank is None else f" of rank {entry.rank}"
    return ".".join(entry.path) + owner


def _value(entry: Entry) -> str:
    text = "empty" if entry.kind == "empty" else json.dumps(entry.value)
    return text if len(text) <= WIDTH else f"{text[: WIDTH - 3]}..."


def _date(manifest: Manifest) -> str:
    return f"{datetime.fromtimestamp(manifest.time):%Y-%m-%d %H:%M:%S}"


def _nbytes(manifest: Manifest) -> int:
    return sum(record.size for record in manifest.files.values())


def _tensor_nbytes(entry: Entry) -> int:
    return prod(entry.shape) * getattr(torch, entry.dtype).itemsize


def _size(nbytes: float) -> str:
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if nbytes < 1000:
            break
        nbytes /= 1024
    else:
        unit = "TiB"
    return f"{nbytes} bytes" if unit == "bytes" else f"{nbytes:.3g} {unit}"


if __name__ == "__main__":
    sys.exit(main())
