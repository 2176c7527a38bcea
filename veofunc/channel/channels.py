"""`Channels`: the names of data sources and their ids, of which more may come during a run."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor

__all__ = ["Channels"]


class Channels:
    """Names of channels; the id of a channel is its position. New names get the next ids.

    Sums have one slot for each of `capacity` channels, named or not, so those from before a name was added
    and those after have one shape. It can live in a train state
    (`train_state(model, optimizer, channels=channels)`) and comes back as `Channels(**state["channels"])`;
    ranks that add names merge them first (`all_merge`). Threads may share it. A process that was started
    with it, such as a worker of a data loader, has a copy, whose new names stay there.

    Args:
        names: the first names, non-empty and different, ids from 0.
        capacity: C, how many there can be.

    Raises:
        TypeError: a name is no str, or `capacity` no int.
        ValueError: a name is empty or there twice, there are more than `capacity`, or it is below 1.

    Example:
        >>> import veofunc as vf
        >>> channels = vf.Channels(("code", "prose"), capacity=8)
        >>> channels.ids(["prose", "law", "code"])
        tensor([1, 2, 0])
        >>> channels
        Channels(('code', 'prose', 'law'), capacity=8)
        >>> len(channels), "law" in channels
        (3, True)
    """

    def __init__(self, names: Iterable[str] = (), capacity: int = 64):
        if isinstance(capacity, bool) or not isinstance(capacity, int):
            raise TypeError(f"capacity must be an int, the number of slots of the sums, got {capacity!r}")
        if capacity < 1:
            raise ValueError(f"capacity must be at least 1, got {capacity}")
        names = _checked(names)
        if len(set(names)) < len(names):
            raise ValueError(f"names must be different, got {names!r}")
        self._capacity, self._ids = capacity, dict[str, int]()
        self._lock = threading.Lock()
        self._add(names)

    @property
    def names(self) -> tuple[str, ...]:
        """The names so far, in the order of their ids."""
        return tuple(self._ids)

    @property
    def capacity(self) -> int:
        """C, how many channels there can be."""
        return self._capacity

    def id(self, name: str) -> int:
        """The id of `name`, which is added if it is new.

        Raises:
            TypeError: `name` is no str.
            ValueError: `name` is empty, or new when all ids are taken.
        """
        return self._add(_checked([name]))[0]

    def ids(self, names: Sequence[str]) -> Tensor:
        """The ids of `names`, int64 [len(names)]; new ones are added, all or none of them.

        Raises:
            TypeError: a name is no str, or `names` is one.
            ValueError: a name is empty, or new when all ids are taken.
        """
        return torch.tensor(self._add(_checked(names)), dtype=torch.int64)

    def update(self, other: Channels | Sequence[str]) -> None:
        """Add the names of `other`, under the ids that they have there.

        Args:
            other: channels, or names in the order of their ids, e.g. `state["channels"]["names"]`.

        Raises:
            TypeError: a name is no str.
            ValueError: an id has two names, or there are too many; then nothing is added.
        """
        names = other.names if isinstance(other, Channels) else Channels(other, self.capacity).names
        with self._lock:
            self._grow(_merged([self.names, names]))

    def all_merge(self, group: dist.ProcessGroup | None = None, *, names: Sequence[str] = ()) -> None:
        """Make the names of all ranks known to each, under one id. A collective: every rank calls it.

        Names that ranks added on their own must have the same id wherever they have one. Names that are
        new in `names` get their ids here, rank by rank, the same everywhere: so ranks may meet different
        sources. Without an initialised process group there is one rank.

        Args:
            group: the ranks; by default all.
            names: what this rank wants to be known, too.

        Raises:
            TypeError: a name is no str.
            ValueError: on every rank, if an id has two names, there are too many, or capacities differ;
                then nothing is added.
        """
        mine = (self.names, self.capacity, names)  # checked below: an error here would leave others waiting
        ranks = [mine]
        if dist.is_available() and dist.is_initialized():
            ranks = [mine] * dist.get_world_size(group)
            dist.all_gather_object(ranks, mine, group=group)
        capacities = [capacity for _, capacity, _ in ranks]
        if len(set(capacities)) > 1:
            raise ValueError(f"capacity must be the same on every rank, got {capacities}")
        merged = _merged([known for known, _, _ in ranks])
        wanted = [name for _, _, others in ranks for name in _checked(others)]
        with self._lock:  # another thread may have added names since
            self._grow(_merged([self.names, tuple(dict.fromkeys([*merged, *wanted]))]))

    def _add(self, names: tuple[str, ...]) -> list[int]:
        with self._lock:
            if not self._ids.keys() >= set(names):
                self._grow(tuple(dict.fromkeys([*self._ids, *names])))
            return [self._ids[name] for name in names]

    def _grow(self, names: tuple[str, ...]) -> None:
        """Take `names`, which begin with those so far. The lock is held."""
        if len(names) > self._capacity:
            raise ValueError(
                f"there can be {self._capacity} channels, no id is left for {names[self._capacity]!r}: make "
                "Channels with a larger capacity=, which changes the shape of the sums"
            )
        self._ids = {name: i for i, name in enumerate(names)}  # a new one: reading needs no lock

    def __len__(self) -> int:
        return len(self.names)

    def __contains__(self, name: object) -> bool:
        return name in self._ids

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Channels):
            return NotImplemented
        return (self.names, self.capacity) == (other.names, other.capacity)

    def __reduce__(self):  # a lock is not copied
        return Channels, (self.names, self.capacity)

    def __repr__(self) -> str:
        return f"Channels({self.names!r}, capacity={self.capacity})"


def _checked(names: Iterable[str]) -> tuple[str, ...]:
    if isinstance(names, str):
        raise TypeError(f"names must be a sequence of names, got the str {names!r}")
    names = tuple(names)
    for name in names:
        if not isinstance(name, str):
            raise TypeError(f"a name must be a str, got {name!r}")
        if not name:
            raise ValueError("a name must not be empty, got ''")
    return names


def _merged(lists: Sequence[tuple[str, ...]]) -> tuple[str, ...]:
    """The longest of `lists`, of which all others must be the beginning."""
    longest = max(lists, key=len)
    for names in lists:
        for i, (one, other) in enumerate(zip(names, longest, strict=False)):
            if one != other:
                raise ValueError(
                    f"id {i} has two names, {other!r} and {one!r}: ids are positions, so add new names in "
                    "one order everywhere, e.g. with all_merge(names=...)"
                )
    return longest
