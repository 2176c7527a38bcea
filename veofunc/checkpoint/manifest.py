"""What makes a step complete: a manifest of all its files, written last."""

from __future__ import annotations

import json
import re
import zlib
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any, TypeAlias

from veofunc.checkpoint.storage import MANIFEST, Storage, step_name

__all__ = [
    "FORMAT",
    "CheckpointError",
    "DamageError",
    "Entry",
    "FileRecord",
    "Json",
    "Manifest",
    "TreePath",
    "check_crc32",
    "check_size",
    "check_step",
    "damage",
    "read_complete",
    "read_file",
    "step_numbers",
    "to_bytes",
    "verify_files",
]

FORMAT = 2
SEAL = b',\n "crc32": %d\n}'

Json: TypeAlias = "bool | int | float | str | list[Json] | dict[str, Json] | None"
TreePath: TypeAlias = tuple[str, ...]


class CheckpointError(Exception):
    """A step could not be saved, verified or restored; the message names rank, file and cause."""


class DamageError(CheckpointError):
    """A step is not complete, or changed after it was saved; the message names file and cause."""


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
        tie: for a tensor whose values are those of another one, the key of that.
        value: for JSON, the value.
    """

    path: TreePath
    kind: str
    rank: int | None = None
    slot: str = ""
    key: str = ""
    shape: tuple[int, ...] = ()
    dtype: str = ""
    tie: str = ""
    value: Json = None

    def to_json(self) -> dict[str, Any]:
        """Its attributes, but for those that have their default."""
        return {name: value for name, value in vars(self).items() if value != _DEFAULTS[name]}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Entry:
        """The inverse of `to_json`."""
        path, shape = fields.pop("path"), fields.pop("shape", ())
        return Entry(tuple(path), shape=tuple(shape), **fields)


_DEFAULTS = vars(Entry((), ""))


@dataclass(frozen=True)
class Manifest:
    """All there is to know about a step without reading its tensors.

    Attributes:
        step: number of the step.
        world_size: number of ranks that saved it.
        slots: directories with tensors; what tensors, says `index.json` in each.
        versions: package name to version that wrote it.
        time: when it was complete, in seconds since 1970.
        metrics: what was measured at the step, as given to `save`.
        files: relative path to size and checksum.
        values: every leaf of the state that is not a tensor.
    """

    step: int
    world_size: int
    slots: tuple[str, ...]
    versions: dict[str, str]
    time: float
    metrics: dict[str, float]
    files: dict[str, FileRecord]
    values: tuple[Entry, ...]


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


def step_numbers(storage: Storage) -> list[int]:
    """Steps that have a directory, complete or not, in ascending order."""
    found = (re.fullmatch(r"step_(0|[1-9][0-9]*)", name) for name in storage.names())
    return sorted(int(match[1]) for match in found if match)


def damage(storage: Storage, step: int) -> str:
    """Why `step` is not complete, by manifest and file sizes; empty if it is."""
    try:
        read_complete(storage, step)
    except DamageError as error:
        return str(error)
    return ""


def read_complete(storage: Storage, step: int) -> Manifest:
    """The manifest of `step`, if every file has the size that it lists.

    Raises:
        CheckpointError: naming the file and what is wrong with it.
    """
    manifest = _read(storage, step)
    for name, record in manifest.files.items():
        check_size(storage, f"{step_name(step)}/{name}", record)
    return manifest


def read_file(storage: Storage, name: str, record: FileRecord) -> bytes:
    """All of a small file.

    Raises:
        CheckpointError: its checksum is another; names it.
    """
    check_size(storage, name, record)
    try:
        with storage.open(name) as file:
            content = file.read()
    except OSError as error:
        raise DamageError(f"{storage.root}/{name}: cannot be read ({error})") from error
    check_crc32(storage, name, record, zlib.crc32(content))
    return content


def verify_files(storage: Storage, manifest: Manifest, names: Iterable[str]) -> None:
    """Read the files `names` of a step and compare them with their checksums.

    Raises:
        CheckpointError: naming the first file that differs, and how.
    """
    for name in names:
        record, full = manifest.files[name], f"{step_name(manifest.step)}/{name}"
        check_size(storage, full, record)
        crc32 = 0
        try:
            with storage.open(full) as file:
                while piece := file.read(8 << 20):
                    crc32 = zlib.crc32(piece, crc32)
        except OSError as error:
            raise DamageError(f"{storage.root}/{full}: cannot be read ({error})") from error
        check_crc32(storage, full, record, crc32)


def check_crc32(storage: Storage, name: str, record: FileRecord, crc32: int) -> None:
    """Compare the checksum of a file with its record.

    Raises:
        CheckpointError: they differ.
    """
    if crc32 != record.crc32:
        raise DamageError(
            f"{storage.root}/{name}: its CRC-32 is {crc32:08x}, must be {record.crc32:08x}; "
            "the file changed after it was saved"
        )


def to_bytes(manifest: Manifest) -> bytes:
    """The content of the manifest's file; last in it stands the CRC-32 of all the bytes before."""
    body = {"format": FORMAT, **asdict(manifest), "values": [entry.to_json() for entry in manifest.values]}
    content = json.dumps(body, indent=1).encode().removesuffix(b"\n}")
    return content + SEAL % zlib.crc32(content)


def _read(storage: Storage, step: int) -> Manifest:
    name = f"{step_name(step)}/{MANIFEST}"
    file = f"{storage.root}/{name}"
    try:
        with storage.open(name) as stream:
            content = stream.read()
    except FileNotFoundError as error:
        raise DamageError(f"{file}: {error.strerror or error}; the save was not finished") from error
    except OSError as error:
        raise DamageError(f"{file}: cannot be read ({error})") from error
    inside = content[: content.rfind(SEAL[: SEAL.index(b"%")])]
    if content != inside + SEAL % zlib.crc32(inside):
        raise DamageError(f"{file}: differs from its checksum; it changed after it was saved")
    body = json.loads(content)
    del body["crc32"]
    if body.pop("format") != FORMAT:
        raise DamageError(f"{file}: was written by another veofunc, {body['versions']}")
    if body["step"] != step:
        raise DamageError(f"{file}: is of step {body['step']}")
    files = {name: FileRecord(**record) for name, record in body["files"].items()}
    values = tuple(Entry.from_json(fields) for fields in body["values"])
    return Manifest(
        body["step"],
        body["world_size"],
        tuple(body["slots"]),
        body["versions"],
        body["time"],
        body["metrics"],
        files,
        values,
    )


def check_size(storage: Storage, name: str, record: FileRecord) -> None:
    """Compare the size of a file with its record.

    Raises:
        CheckpointError: they differ, or there is no such file.
    """
    try:
        size = storage.size(name)
    except OSError as error:
        raise DamageError(f"{storage.root}/{name}: {error.strerror or 'is not there'}") from error
    if size != record.size:
        raise DamageError(f"{storage.root}/{name}: has {size} bytes, must have {record.size}")
