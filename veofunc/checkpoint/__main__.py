"""Says what is in a directory of checkpoints, and whether it is whole.

It only reads: a run may save there meanwhile. `python -m veofunc.checkpoint --help` lists the commands.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
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
    TreePath,
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
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = _show_warning  # ty: ignore[invalid-assignment]
        try:
            storage = open_storage(options.directory)
            if not storage.names() and not Path(storage.root).is_dir():
                raise NotADirectoryError(f"there is nothing at {storage.root}")
            code = options.command(storage, options)
            sys.stdout.flush()
            return code
        except BrokenPipeError:  # nobody reads any more, as with `| head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 1
        except (CheckpointError, ImportError, OSError, ValueError) as error:
            print(f"error: {error}", file=sys.stderr)
            return 1 if isinstance(error, DamageError) else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m veofunc.checkpoint", description=__doc__.partition(" `python")[0]
    )
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
    export = add(_export, "Write the tensors of a section into a safetensors file.", newest)
    export.add_argument("file", metavar="FILE.safetensors", help="the new file")
    export.add_argument("--section", default="model", help="which one (default: %(default)s)")
    export.add_argument("--force", action="store_true", help="replace the file if it exists")
    return parser


def _list(storage: Storage, options: argparse.Namespace) -> int:
    rows = [("step", "saved", "size", "ranks", "slots", "state")]
    for step in step_numbers(storage):
        try:
            manifest = read_complete(storage, step)
        except DamageError as error:
            rows.append((f"{step}", "-", "-", "-", "-", f"damaged: {_short(error, storage, step)}"))
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
    print(f"{storage.root}/{step_name(step)}")
    about = {
        "saved": f"{_date(manifest)} by {manifest.world_size} rank{'s' * (manifest.world_size > 1)}",
        "with": ", ".join(f"{name} {version}" for name, version in manifest.versions.items()),
        "size": f"{_size(_nbytes(manifest))} in {len(manifest.files)} files",
    }
    _print_table(about.items(), indent=2)
    _print_part("metrics", [(name, f"{value:g}") for name, value in manifest.metrics.items()])
    _print_part("values", _values(manifest.values))
    _print_part("slots", [_total(name, index) for name, index in indices.items()], right=(1, 3))
    if options.tensors:
        for name, index in indices.items():
            _print_part(f"tensors of {name}", _tensors(index))
    return 0


def _values(entries: Iterable[Entry]) -> list[tuple[str, str]]:
    """What is no tensor; of what each rank has its own of, that of the first."""
    owners: dict[TreePath, list[Entry]] = {}
    for entry in entries:
        owners.setdefault(entry.path, []).append(entry)
    more = {path: f" (and of {len(found) - 1} more)" * (len(found) > 1) for path, found in owners.items()}
    return [(_name(found[0]) + more[path], _value(found[0])) for path, found in owners.items()]


def _total(name: str, index: SlotIndex) -> tuple[str, str, str, str]:
    nbytes = sum(_tensor_nbytes(entry) for entry in index.entries if not entry.tie)
    return name, f"{len(index.entries)}", "tensors", _size(nbytes)


def _tensors(index: SlotIndex) -> list[tuple[str, str, str, str]]:
    names = {entry.key: _name(entry) for entry in index.entries}
    sizes = [f"as {names[e.tie]}" if e.tie else _size(_tensor_nbytes(e)) for e in index.entries]
    return [
        (_name(entry), entry.dtype, f"{list(entry.shape)}", size)
        for entry, size in zip(index.entries, sizes, strict=True)
    ]


def _export(storage: Storage, options: argparse.Namespace) -> int:
    step = choose_step(storage, options.step)
    tensors = to_safetensors(
        options.directory, options.file, step=step, section=options.section, force=options.force
    )
    size = _size(sum(tensor.nbytes for tensor in tensors.values()))
    print(f"step {step}: {len(tensors)} tensors of {options.section}, {size}, verified, to {options.file}")
    return 0


def _show_warning(message: Warning | str, *_: object) -> None:
    print(f"warning: {message}", file=sys.stderr)


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


def _print_part(title: str, rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> None:
    if rows:
        print(f"\n{title}")
        _print_table(rows, right, indent=2)


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
    if nbytes < 1000:
        return f"{nbytes} bytes"
    units = iter(("KiB", "MiB", "GiB", "TiB", "PiB"))
    while nbytes >= 1000:
        nbytes, unit = nbytes / 1024, next(units)
    return f"{nbytes:.3g} {unit}"


if __name__ == "__main__":
    sys.exit(main())
