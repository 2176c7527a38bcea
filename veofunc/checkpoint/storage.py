"""Where steps are: a directory of this machine or network, or whatever fsspec has a URL for.

They differ in how a step becomes visible at once: a directory is renamed, and where nothing can be
renamed the manifest, which makes a step complete, is written last.
"""

from __future__ import annotations

import errno
import fcntl
import logging
import os
import re
import shutil
import socket
import time
from collections.abc import Iterable, Iterator
from contextlib import suppress
from io import BytesIO
from pathlib import Path
from typing import IO, Protocol
from uuid import uuid4

import fsspec
from fsspec.implementations.memory import MemoryFile

from veofunc.checkpoint.writer import Pace, sync_directory, write_file

__all__ = [
    "LOCK",
    "MANIFEST",
    "Content",
    "LocalStorage",
    "Storage",
    "UrlStorage",
    "open_storage",
    "step_name",
]

MANIFEST = "manifest.json"
UNFINISHED = ".unfinished-"  # no name that starts with a dot can be taken for a step
REPLACED = ".replaced-"
DAMAGED = ".damaged-"
LOCK = ".lock"

logger = logging.getLogger(__name__)


class Content(Protocol):
    """A file to be written."""

    size: int
    crc32: int  # once all blocks are taken

    def blocks(self) -> Iterator[memoryview]:
        """It, in blocks; each is good until the next but one is taken."""
        ...


class Storage(Protocol):
    """A directory of steps. Names are relative to it; what is written is durable when a method returns."""

    root: str
    in_process: bool  # whether this process must write the files of a step itself

    def names(self) -> list[str]:
        """What is in it."""
        ...

    def size(self, name: str) -> int:
        """Bytes of a file; OSError if there is none."""
        ...

    def open(self, name: str) -> IO[bytes]:
        """A file for reading."""
        ...

    def claim(self) -> str:
        """Become its only writer; if there is one already, who that is. Sees to what a killed one left."""
        ...

    def release(self) -> None:
        """Let others write."""
        ...

    def begin(self, step: int, slots: Iterable[str]) -> str:
        """A new place for the files of `step`, with a directory for each of `slots`: its name."""
        ...

    def write(self, name: str, content: Content, pace: Pace) -> None:
        """Write a new file."""
        ...

    def publish(self, unfinished: str, step: int, slots: Iterable[str], manifest: bytes) -> None:
        """Make what `begin` gave the step, in one move."""
        ...

    def remove(self, name: str) -> None:
        """Remove a step, or what `begin` gave; at no moment is a step half there."""
        ...

    def set_aside(self, step: int) -> str:
        """Move away what is in the place of `step` but is not one: its new name."""
        ...


def open_storage(directory: str | os.PathLike[str]) -> Storage:
    """The storage at a path or URL.

    Raises:
        NotADirectoryError: it is a file.
        TypeError: it is neither a path nor a str.
        ValueError: fsspec knows no such URL, or lacks a package for it.
    """
    if not isinstance(directory, str | os.PathLike):
        raise TypeError(f"directory must be a path or a URL, got {directory!r}")
    text = os.fspath(directory)
    if "://" not in text or text.startswith("file://"):
        return LocalStorage(Path(text.removeprefix("file://")).expanduser().absolute())
    try:
        return UrlStorage(text)
    except ImportError as error:
        raise ValueError(f"directory {text} needs a package that is not installed: {error}") from error


def step_name(step: int) -> str:
    """Name of the directory of `step`."""
    return f"step_{step}"


class LocalStorage:
    """A directory, which all ranks see."""

    in_process = False

    def __init__(self, path: Path):
        if path.exists() and not path.is_dir():
            raise NotADirectoryError(f"directory must be a directory or new, {path} is a file")
        self.root = str(path)
        self._path = path
        self._lock: int | None = None
        self._process = 0  # that has taken it

    def names(self) -> list[str]:
        return os.listdir(self._path) if self._path.exists() else []

    def size(self, name: str) -> int:
        return (self._path / name).stat().st_size

    def open(self, name: str) -> IO[bytes]:
        return open(self._path / name, "rb", buffering=0)

    def claim(self) -> str:
        if self._lock is not None:
            return ""
        self._path.mkdir(parents=True, exist_ok=True)
        try:
            descriptor = os.open(self._path / LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS):
                raise
            return f"nobody here ({error.strerror})"  # who may not write can read
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = os.pread(descriptor, 1000, 0).decode(errors="replace")
            os.close(descriptor)
            return owner or "another process"
        except OSError as error:
            logger.warning(
                "%s has no locks (%s): nothing keeps a second run from writing there", self.root, error
            )
        self._lock, self._process = descriptor, os.getpid()
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        self._clean()
        return ""

    def release(self) -> None:
        if self._lock is not None:
            if self._process == os.getpid():  # a fork holds the same lock, and must not keep or end it
                fcntl.flock(self._lock, fcntl.LOCK_UN)
            os.close(self._lock)
            self._lock = None

    def begin(self, step: int, slots: Iterable[str]) -> str:
        name = f"{UNFINISHED}{step_name(step)}-{uuid4().hex}"
        for slot in (".", *slots):
            (self._path / name / slot).mkdir(parents=True)
        return name

    def write(self, name: str, content: Content, pace: Pace) -> None:
        write_file(str(self._path / name), content.blocks(), content.size, pace)

    def publish(self, unfinished: str, step: int, slots: Iterable[str], manifest: bytes) -> None:
        source, target = self._path / unfinished, self._path / step_name(step)
        for slot in slots:
            sync_directory(str(source / slot))
        with open(source / MANIFEST, "wb") as file:
            file.write(manifest)
            file.flush()
            os.fsync(file.fileno())
        sync_directory(str(source))
        aside = self._path / f"{REPLACED}{step_name(step)}-{uuid4().hex}"
        if target.exists():  # to be replaced; killed in between, `_clean` brings it back
            target.rename(aside)
        source.rename(target)
        sync_directory(str(self._path))
        shutil.rmtree(aside, ignore_errors=True)

    def remove(self, name: str) -> None:
        doomed = self._path / name
        if not name.startswith("."):
            doomed = self._path / f"{UNFINISHED}{name}-{uuid4().hex}"
            (self._path / name).rename(doomed)
        shutil.rmtree(doomed, ignore_errors=name.startswith("."))

    def set_aside(self, step: int) -> str:
        name = f"{DAMAGED}{step_name(step)}-{uuid4().hex}"
        (self._path / step_name(step)).rename(self._path / name)
        return name

    def _clean(self) -> None:
        """See to what a killed process left: no living one writes here."""
        for name in sorted(self.names()):
            replaced = re.fullmatch(re.escape(REPLACED) + r"(step_\d+)-\w+", name)
            if replaced and not (self._path / replaced[1]).exists():
                (self._path / name).rename(self._path / replaced[1])
                logger.warning(
                    "%s/%s: brought back, as its replacement was not finished", self.root, replaced[1]
                )
            elif replaced or name.startswith(UNFINISHED):
                for _ in range(100):  # a writer whose training process was killed may just be ending, too
                    shutil.rmtree(self._path / name, ignore_errors=True)
                    if not (self._path / name).exists():
                        break
                    time.sleep(0.01)
                logger.warning("removed %s/%s, which a save left unfinished", self.root, name)


class UrlStorage:
    """A place that fsspec has a URL for, such as a bucket: no renames, no locks.

    A step is written where it is to be, its manifest last.
    """

    in_process = True

    def __init__(self, url: str):
        if not url.partition("://")[2].strip("/"):
            raise ValueError(f"directory must have a path after ://, got {url}")
        self.root = url.rstrip("/")
        self._is_clean = False
        self._fs, self._prefix = fsspec.core.url_to_fs(self.root)
        self._fs.invalidate_cache()

    def names(self) -> list[str]:
        self._fs.invalidate_cache()
        with suppress(FileNotFoundError):
            return [path.rstrip("/").rsplit("/", 1)[-1] for path in self._fs.ls(self._prefix, detail=False)]
        return []

    def size(self, name: str) -> int:
        return self._fs.size(self._full(name))

    def open(self, name: str) -> IO[bytes]:
        file = self._fs.open(self._full(name), "rb")
        if isinstance(file, MemoryFile):  # one for all who open it, with one position
            return BytesIO(file.getvalue())
        return file

    def claim(self) -> str:
        return ""  # who only reads must not touch what another writes; `begin` cleans

    def release(self) -> None:
        pass

    def begin(self, step: int, slots: Iterable[str]) -> str:
        if not self._is_clean:
            self._is_clean = True
            self._clean()
        if self._fs.exists(self._full(f"{step_name(step)}/{MANIFEST}")):
            raise FileExistsError(
                f"{self.root}/{step_name(step)} exists, and cannot be replaced at once where nothing can be "
                "renamed; remove it, or save another step"
            )
        return step_name(step)

    def write(self, name: str, content: Content, pace: Pace) -> None:
        with self._fs.open(self._full(name), "wb") as file:
            for block in content.blocks():
                file.write(block)
                pace.wrote(len(block))

    def publish(self, unfinished: str, step: int, slots: Iterable[str], manifest: bytes) -> None:
        self._fs.pipe_file(self._full(f"{unfinished}/{MANIFEST}"), manifest)

    def remove(self, name: str) -> None:
        with suppress(FileNotFoundError):  # the manifest first: without it nothing is taken for a step
            self._fs.rm(self._full(f"{name}/{MANIFEST}"))
        with suppress(FileNotFoundError):
            self._fs.rm(self._full(name), recursive=True)

    def set_aside(self, step: int) -> str:
        name = step_name(step)
        if self._fs.exists(self._full(f"{name}/{MANIFEST}")):
            raise FileExistsError(f"{self.root}/{name} exists, damaged; remove it to save the step again")
        self.remove(name)
        return "nowhere"

    def _clean(self) -> None:
        """Remove what a killed process left, before the first save of this one."""
        for name in self.names():
            is_step = re.fullmatch(r"step_(0|[1-9][0-9]*)", name)
            if is_step and not self._fs.exists(self._full(f"{name}/{MANIFEST}")):
                self.remove(name)
                logger.warning("removed %s/%s, which a save left unfinished", self.root, name)

    def _full(self, name: str) -> str:
        return f"{self._prefix}/{name}"
