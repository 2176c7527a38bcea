"""What makes a directory a complete step: a manifest, and the rename that shows it."""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import shutil
import zlib
from collections.abc import Generator, Iterable
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias
from uuid import uuid4

__all__ = [
    "FORMAT",
    "CheckpointError",
    "Entry",
    "FileRecord",
    "Json",
    "Manifest",
    "TreePath",
    "check_step",
    "commit",
    "damage",
    "describe_file",
    "read_complete",
    "remove_abandoned",
    "remove_step",
    "step_name",
    "step_numbers",
    "temporary_step",
    "verify_files",
]

FORMAT = 1
FILENAME = "manifest.json"
UNFINISHED = ".unfinished-"  # no name that starts so can be taken for a step

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
TreePath: TypeAlias = tuple[str, ...]

logger = logging.getLogger(__name__)


class CheckpointError(Exception):
    """A step could not be saved, verified or restored; the message names rank, file and cause."""


@dataclass(frozen=True)
class FileRecord:
    """One file of a step: its size in bytes and the CRC-32 of its content."""

    size: int
    crc32: int


@dataclass(frozen=True)
class Entry:
    """One leaf of a saved state.

    Attributes:
        path: keys from the root of the state.
        kind: "tensor", "json" or "empty" (a TensorDict without entries).
        rank: the rank that it belongs to; None if all ranks share it.
        slot: for a tensor, the directory that holds it.
        key: for a tensor, its key in that directory.
        shape: for a tensor, its global shape.
        dtype: for a tensor, the name of its dtype, as in "float32".
        value: for JSON, the value.
    """

    path: TreePath
    kind: str
    rank: int | None = None
    slot: str = ""
    key: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    value: Json = None


@dataclass(frozen=True)
class Manifest:
    """All there is to know about a step without reading its tensors.

    Attributes:
        step: number of the step.
        world_size: number of ranks that saved it.
        slots: directories with tensors.
        versions: package name to version that wrote it.
        files: relative path to size and checksum.
        entries: every leaf of the state.
    """

    step: int
    world_size: int
    slots: tuple[str, ...]
    versions: dict[str, str]
    files: dict[str, FileRecord]
    entries: tuple[Entry, ...]


def check_step(step: object) -> None:
    """Refuse what cannot be the number of a step.

    Raises:
        TypeError: it is not an int.
        ValueError: it is below 0 or too large.
    """
    if isinstance(step, bool) or not isinstance(step, int):
        raise TypeError(f"step must be an int, got {step!r}")
    if step.bit_length() > 63:  # too long to print, perhaps
        raise ValueError(f"step must be at least 0 and below 2**63, got a number of {step.bit_length()} bits")
    if step < 0:
        raise ValueError(f"step must be at least 0, got {step}")


def step_name(step: int) -> str:
    """Name of the directory of `step`."""
    return f"step_{step}"


def step_numbers(directory: Path) -> list[int]:
    """Steps that have a directory, complete or not, in ascending order."""
    names = (child.name for child in directory.iterdir())
    found = (re.fullmatch(r"step_(0|[1-9][0-9]*)", name) for name in names)
    return sorted(int(match[1]) for match in found if match)


def damage(path: Path) -> str:
    """Why the step at `path` is not complete, by manifest and file sizes; empty if it is."""
    try:
        read_complete(path)
    except CheckpointError as error:
        return str(error)
    return ""


def read_complete(path: Path) -> Manifest:
    """The manifest of the step at `path`, if every file has the size that it lists.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    manifest = _read(path)
    for name, record in manifest.files.items():
        _check_size(path / name, record)
    return manifest


def verify_files(path: Path, manifest: Manifest, names: Iterable[str]) -> None:
    """Read the files `names` of the step at `path` and compare them with their checksums.

    Raises:
        CheckpointError: naming the first file that differs, and how.
    """
    for name in names:
        record = manifest.files[name]
        _check_size(path / name, record)
        crc32 = describe_file(path / name).crc32
        if crc32 != record.crc32:
            raise CheckpointError(
                f"{path / name}: its CRC-32 is {crc32:08x}, must be {record.crc32:08x}; "
                "the file changed after it was saved"
            )


def commit(unfinished: Path, path: Path, manifest: Manifest) -> None:
    """Make the files in `unfinished` durable, then its manifest, then show it as `path`.

    Files of the slots must be synced already; their directories are synced here.
    """
    for slot in manifest.slots:
        _sync_directory(unfinished / slot)
    with open(unfinished / FILENAME, "w") as file:
        json.dump(_to_json(manifest), file, indent=1)
        file.flush()
        os.fsync(file.fileno())
    _sync_directory(unfinished)
    unfinished.rename(path)
    _sync_directory(path.parent)


@contextmanager
def temporary_step(directory: Path, step: int) -> Generator[Path]:
    """A new directory beside the steps to write `step` in; if it was not renamed, it is removed.

    It is locked while in use, so that `remove_abandoned` knows it from what a killed process left.
    """
    path = directory / f"{UNFINISHED}{step_name(step)}-{uuid4().hex}"
    path.mkdir()
    lock = os.open(path, os.O_RDONLY)
    try:
        with suppress(OSError):  # a file system without locks: then nothing counts as abandoned
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield path
    finally:
        shutil.rmtree(path, ignore_errors=True)
        os.close(lock)


def remove_abandoned(directory: Path) -> None:
    """Remove what killed processes left half-written; what a living one writes stays."""
    for path in directory.glob(f"{UNFINISHED}*"):
        if path.is_dir() and _is_abandoned(path):
            shutil.rmtree(path, ignore_errors=True)
            logger.warning("removed %s, which a save left unfinished", path)


def remove_step(path: Path) -> None:
    """Remove the step at `path`; at no moment is it half there."""
    doomed = path.with_name(f"{UNFINISHED}{path.name}-{uuid4().hex}")
    path.rename(doomed)
    shutil.rmtree(doomed)


def describe_file(file: Path) -> FileRecord:
    """Size and checksum of `file`, read in pieces of 8 MiB."""
    crc32 = size = 0
    with open(file, "rb") as stream:
        while piece := stream.read(8 << 20):
            crc32 = zlib.crc32(piece, crc32)
            size += len(piece)
    return FileRecord(size, crc32)


def _read(path: Path) -> Manifest:
    file = path / FILENAME
    try:
        body = json.loads(file.read_bytes())
        crc32 = body.pop("crc32", None) if isinstance(body, dict) else None
        expected = zlib.crc32(_canonical(body))
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}; the save was not finished") from error
    except ValueError as error:
        raise CheckpointError(f"{file}: is not JSON ({error})") from error
    except RecursionError as error:
        raise CheckpointError(f"{file}: is nested too deeply; it changed after it was saved") from error
    if crc32 != expected:
        raise CheckpointError(f"{file}: differs from its checksum; it changed after it was saved")
    if body.pop("format") != FORMAT:
        raise CheckpointError(f"{file}: was written by another veofunc, {body['versions']}")
    if step_name(body["step"]) != path.name:
        raise CheckpointError(f"{file}: is of step {body['step']}")
    return _from_json(body)


def _check_size(file: Path, record: FileRecord) -> None:
    try:
        size = file.stat().st_size
    except OSError as error:
        raise CheckpointError(f"{file}: {error.strerror}") from error
    if size != record.size:
        raise CheckpointError(f"{file}: has {size} bytes, must have {record.size}")


def _canonical(body: object) -> bytes:
    return json.dumps(body, sort_keys=True).encode()


def _to_json(manifest: Manifest) -> dict[str, Any]:
    default = asdict(Entry((), ""))
    body = {"format": FORMAT, **asdict(manifest)}
    body["entries"] = [
        {name: value for name, value in entry.items() if value != default[name]} for entry in body["entries"]
    ]
    return {**body, "crc32": zlib.crc32(_canonical(body))}


def _from_json(body: dict[str, Any]) -> Manifest:
    def entry(fields: dict[str, Any]) -> Entry:
        shape = tuple(fields.pop("shape", ()))
        return Entry(tuple(fields.pop("path")), shape=shape, **fields)

    return Manifest(
        body["step"],
        body["world_size"],
        tuple(body["slots"]),
        body["versions"],
        {name: FileRecord(**record) for name, record in body["files"].items()},
        tuple(map(entry, body["entries"])),
    )


def _is_abandoned(path: Path) -> bool:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # a living process holds it, or the file system has no locks
        return False
    finally:
        os.close(descriptor)
    return True


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
