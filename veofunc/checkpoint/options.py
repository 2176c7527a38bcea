"""The options of a checkpointer, checked."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from veofunc.checkpoint.retention import Retention
from veofunc.checkpoint.snapshot import Sections

__all__ = ["Options", "names_of"]

PER_RANK = frozenset({"rng", "window", "loader"})


@dataclass(frozen=True)
class Options:
    """The options of `async_checkpointer`, of the kinds and values that they must have."""

    sections: Sections
    retention: Retention
    copy: bool
    num_buffers: int
    num_files: int
    bytes_per_second: float | None
    timeout: float

    @staticmethod
    def of(
        *,
        slots: Mapping[str, Iterable[str]] | None,
        per_rank: Iterable[str],
        keep: tuple[Any, Any, Any],
        copy: bool,
        double_buffer: bool,
        files_per_rank: int,
        bytes_per_second: float | None,
        timeout: float,
    ) -> Options:
        """Checked options.

        Raises:
            TypeError: one is of a wrong kind.
            ValueError: one has a wrong value.
        """
        for name, value in {"copy": copy, "double_buffer": double_buffer}.items():
            if not isinstance(value, bool):
                raise TypeError(f"{name} must be True or False, got {value!r}")
        if isinstance(files_per_rank, bool) or not isinstance(files_per_rank, int):
            raise TypeError(f"files_per_rank must be an int, got {files_per_rank!r}")
        if not 1 <= files_per_rank <= 64:
            raise ValueError(f"files_per_rank must be from 1 to 64, got {files_per_rank}")
        if bytes_per_second is not None:
            _check_positive("bytes_per_second", bytes_per_second, " or None")
        _check_positive("timeout", timeout, "")
        return Options(
            Sections(_slots(slots), PER_RANK | {*names_of("per_rank", per_rank)}),
            Retention.of(*keep),
            copy,
            1 + double_buffer,
            files_per_rank,
            bytes_per_second,
            timeout,
        )


def _slots(slots: Any) -> dict[str, str]:
    """The slot of each top-level key."""
    if slots is None:
        return {"model": "model", "optimizer": "optimizer"}
    if not isinstance(slots, Mapping):
        raise TypeError(f'slots must be a mapping as {{"ema": ["ema"]}}, got {slots!r}')
    found: dict[str, str] = {}
    for slot, keys in slots.items():
        if not isinstance(slot, str) or not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", slot):
            raise ValueError(
                f"the name of a slot must do for a directory (letters, digits, _, -, .), got {slot!r}"
            )
        for key in names_of(f"slots[{slot!r}]", keys):
            if key in found:
                raise ValueError(
                    f"slots must have each key once; {key!r} is in {found[key]!r} and in {slot!r}"
                )
            found[key] = slot
    return found


def names_of(where: str, names: Any) -> list[str]:
    """Top-level keys, checked.

    Raises:
        TypeError: it is something else.
    """
    if isinstance(names, str) or not isinstance(names, Iterable):
        raise TypeError(f"{where} must be a list or tuple of top-level keys, got {names!r}")
    listed = [*names]
    if not all(isinstance(name, str) for name in listed):
        raise TypeError(f"{where} must hold top-level keys, which are str, got {listed!r}")
    return listed


def _check_positive(name: str, value: Any, otherwise: str) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} must be a number{otherwise}, got {value!r}")
    if not 0 < value < math.inf:
        raise ValueError(f"{name} must be above 0 and finite{otherwise}, got {value}")
