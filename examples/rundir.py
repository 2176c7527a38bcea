"""The directory of a run: made or known again, and kept from every other run meanwhile."""

import fcntl
import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO


@contextmanager
def claim(out: Path, settings: dict[str, str], *, resume: bool = True) -> Iterator[None]:
    """Hold `out` as the directory of the run with these settings; never touch anything else.

    They stand in `out/run.json`. The system forgets the lock on that file when the process ends, however
    it ends.

    Raises:
        SystemExit: `out` cannot be made, is no run's directory, or holds a run that must not go on here.
    """
    with open_file(out) as file:
        lock(file, out)
        if not file.read(1):  # new, or killed before it was written
            file.write(json.dumps(settings) + "\n")
            file.flush()
        elif not resume:
            raise SystemExit(f"{out} holds a run; choose another --out, or go on with it by --resume")
        refuse_changes(read_settings(file, settings), settings, out)
        yield


def open_file(out: Path) -> TextIO:
    """Open `run.json`, unless its directory belongs to something else."""
    path = out / "run.json"
    try:
        others = set(out.iterdir()) - {path} if out.exists() else set()
        if others and not (path.exists() and path.stat().st_size):
            raise SystemExit(f"{out} holds something else than a run; choose another --out")
        out.mkdir(parents=True, exist_ok=True)
        return path.open("a+", encoding="utf-8", errors="replace")
    except OSError as error:
        raise SystemExit(f"{out} cannot hold a run: {error.strerror}; choose another --out") from error


def lock(file: TextIO, out: Path) -> None:
    """Refuse a directory that another process has locked."""
    file.seek(0)  # "a+" begins at the end
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        message = f"{out} is in use by another run; wait for it or choose another --out"
        raise SystemExit(message) from None
    except OSError:
        pass  # a file system without locks: then nobody can know


def read_settings(file: TextIO, settings: dict[str, str]) -> dict[str, str]:
    """What the run began with: values for all names that `settings` has."""
    file.seek(0)
    try:
        theirs = json.load(file)
    except ValueError:
        theirs = None
    if not isinstance(theirs, dict) or not settings.keys() <= theirs.keys():
        names = ", ".join(settings)
        raise SystemExit(f"{file.name} is damaged: it must hold {names}; mend it or choose another --out")
    return theirs


def refuse_changes(theirs: dict[str, str], ours: dict[str, str], out: Path) -> None:
    """Refuse to go on with a run whose result these settings would change."""
    changed = [name for name in ours if theirs[name] != ours[name]]
    if changed:
        differences = ", ".join(f"{name} {theirs[name]} (now {ours[name]})" for name in changed)
        raise SystemExit(
            f"{out} holds a run with {differences}, which cannot go on exactly; "
            "choose another --out, or the settings it began with"
        )
