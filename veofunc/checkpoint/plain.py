"""Reading what plain torch.distributed.checkpoint wrote. It has no checksums."""

from __future__ import annotations

import io
import os
import pickle
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
)

from veofunc.checkpoint.manifest import DamageError, Entry, Json, TreePath
from veofunc.checkpoint.plan import DCP_METADATA, Piece, SlotIndex
from veofunc.checkpoint.restore import Request, with_kept
from veofunc.checkpoint.snapshot import Leaf, match, name_of
from veofunc.checkpoint.targets import reads_of, targets_of
from veofunc.checkpoint.values import to_json

__all__ = ["read_plain"]

SLOT = "plain"
ALLOWED = {  # all that the metadata of such a checkpoint is made of
    "collections": {"OrderedDict"},
    "pathlib": {"Path", "PosixPath", "PurePosixPath"},
    "torch": {"Size", "device"}
    | {name for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
}


def read_plain(path: os.PathLike[str], request: Request) -> dict[TreePath, Leaf]:
    """What a state like `request.like` has of the checkpoint at `path`, as new leaves.

    A leaf is what has its path there as its name, with dots between.

    Raises:
        CheckpointError: there is none, it is not whole, or it differs from `like`.
    """
    folder, like = Path(path), request.chosen
    metadata = _metadata(folder)
    paths = {".".join(path): path for path in like}
    saved: dict[TreePath, Entry] = {}
    pieces: dict[str, tuple[Piece, ...]] = {}
    for key, stored in metadata.state_dict_metadata.items():
        where = paths.get(key, tuple(map(str, (metadata.planner_data or {}).get(key, (key,)))))
        if request.only is not None and where[0] not in request.only:
            continue
        if isinstance(stored, BytesStorageMetadata):
            saved[where] = Entry(where, "json", key=key, value=_json(metadata, folder, key))
        else:
            dtype = name_of(stored.properties.dtype)
            saved[where] = Entry(where, "tensor", None, SLOT, key, tuple(stored.size), dtype)
            pieces[key] = tuple(_piece(metadata, key, chunk) for chunk in stored.chunks)
    index = SlotIndex(tuple(entry for entry in saved.values() if entry.kind == "tensor"), pieces)
    index.check_complete()
    wanted = match(saved, like, strict=request.strict, cast=request.cast)
    targets = targets_of(wanted, like, request.device)
    for name, reads in reads_of(wanted, SLOT, index, targets).items():
        for read in reads:
            values = _load(folder / name, read.piece.item, read.piece.length)
            for part, inside in read.parts:
                part.copy_(values[inside])
    values = {entry.path: entry.value for entry in wanted if entry.kind == "json"}
    return with_kept(like, values | {path: target.finished() for path, target in targets.items()})


def _metadata(folder: Path) -> Metadata:
    try:
        with open(folder / DCP_METADATA, "rb") as file:
            metadata = _Unpickler(file).load()
    except OSError as error:
        raise DamageError(f"{folder / DCP_METADATA}: {error.strerror}; is it a checkpoint?") from error
    except Exception as error:  # pickle raises all kinds for bytes that are none
        raise DamageError(
            f"{folder / DCP_METADATA}: cannot be read ({type(error).__name__}: {error})"
        ) from error
    if not isinstance(metadata, Metadata):
        raise DamageError(
            f"{folder / DCP_METADATA}: holds {type(metadata).__name__}, not a checkpoint's metadata"
        )
    return metadata


class _Unpickler(pickle.Unpickler):
    """Makes objects of the classes of `ALLOWED` only."""

    def find_class(self, module: str, name: str) -> Any:
        if name not in ALLOWED.get(module, ()):
            raise pickle.UnpicklingError(f"{module}.{name} does not belong there")
        return super().find_class(module, name)


def _piece(metadata: Metadata, key: str, chunk: ChunkStorageMetadata) -> Piece:
    place = (metadata.storage_data or {})[MetadataIndex(key, chunk.offsets)]
    values = place.offset  # where in the item they are, torch.load finds
    file = str(place.relative_path)
    return Piece(tuple(chunk.offsets), tuple(chunk.sizes), file, place.offset, values, place.length)


def _json(metadata: Metadata, folder: Path, key: str) -> Json:
    place = (metadata.storage_data or {})[MetadataIndex(key)]
    return to_json(_load(folder / place.relative_path, place.offset, place.length), key)


def _load(file: Path, start: int, length: int) -> Any:
    """The item of a file."""
    try:
        with open(file, "rb") as stream:
            stream.seek(start)
            return torch.load(io.BytesIO(stream.read(length)), map_location="cpu", weights_only=True)
    except OSError as error:
        raise DamageError(f"{file}: {error.strerror or error}") from error
    except (RuntimeError, EOFError, pickle.UnpicklingError) as error:
        text = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise DamageError(f"{file}: the item at {start} cannot be read ({text})") from error
