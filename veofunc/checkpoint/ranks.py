"""How the processes that save together agree, without a collective.

Each says what it has through the store of the process group, rank 0 decides, and all hear of it. So
background threads of several saves never meet in one collective, nor any that training is in, and
who waits looks for signs of life meanwhile.
"""

from __future__ import annotations

import json
import threading
import time
import weakref
from collections.abc import Callable, Generator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from queue import SimpleQueue
from types import TracebackType
from typing import Any

import torch.distributed as dist

from veofunc.checkpoint.manifest import CheckpointError

__all__ = ["BEAT", "Agreement", "Ranks", "explain"]

LONGEST_PAUSE = 0.05  # seconds between two looks into the store
BEAT = 1.0  # seconds between two signs of life
FAREWELL = 10.0  # seconds that rank 0, whose process may host the store, waits for the others to have heard


class Ranks:
    """The processes that save together. Without torch.distributed: this one alone.

    Which they are, and their store, is settled here, once: whatever becomes of the process group, no
    rank takes itself for the only one. All ranks of `group` construct it in the same order.

    Args:
        group: by default all.
        patience: seconds without a sign of life of another rank after which it is given up.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, patience: float = 300.0):
        self.patience = patience
        self.rank, self.size = 0, 1
        self._counts: dict[str, count[int]] = {}
        if dist.is_available() and dist.is_initialized():
            members = dist.get_process_group_ranks(group)
            if dist.get_rank() not in members:
                raise ValueError(
                    f"process_group must have this rank, {dist.get_rank()}, in it, has {members}"
                )
            self.rank, self.size = members.index(dist.get_rank()), len(members)
            self._host: Any = dist.distributed_c10d._get_default_store()  # as long as this lives, so does it
            self._name = f"veofunc/checkpoint/{'-'.join(map(str, members)) if group else 'all'}"
            self._name += f"/{self._host.add(f'{self._name}/{self.rank}', 1)}"
            self._main = _Store(lambda: self._host, patience)
            # Ready before it is needed: when several ranks connect at once, it may take seconds.
            self._idle = [_Store(self._host.clone, patience)]

    def agreement(self, about: str, *, background: bool = False) -> Agreement:
        """The next one about this. All ranks ask for it in the same order.

        Args:
            about: its subject.
            background: whether it goes on while the main thread may be using the store.
        """
        number = next(self._counts.setdefault(about, count()))
        return Agreement(self, f"{self._name}/{about}/{number}" if self.size > 1 else "", background)

    def part(self, about: str) -> dist.Store | None:
        """A new part of the store, with a connection of its own; None if there are no other ranks."""
        if self.size == 1:
            return None
        number = next(self._counts.setdefault(about, count()))
        return dist.PrefixStore(f"{self._name}/{about}/{number}", self._host.clone())

    @contextmanager
    def store(self, background: bool) -> Generator[_Store]:
        """The store; in the background by a connection of its own, as the main thread may wait in torch's."""
        if not background:
            yield self._main
            return
        try:
            store = self._idle.pop()
        except IndexError:
            store = _Store(self._host.clone, self.patience)
        yield store
        if store.answers:
            self._idle.append(store)


class Agreement:
    """Rounds in which every rank says something and hears what rank 0 makes of it.

    A context manager, in which all ranks meet. If one leaves it with an exception, so do all.
    """

    def __init__(self, ranks: Ranks, name: str, background: bool):
        self._ranks = ranks
        self._name = name
        self._background = background
        self._store: Any = None  # of more than one rank, while they meet
        self._stack = ExitStack()
        self._keys = [f"{name}/heard", f"{name}/failure"]
        self._round = self._beats = 0
        self._beat_at = 0.0

    def round(self, doing: str, work: Callable[[], Any], decide: Callable[[list[Any]], Any]) -> Any:
        """What `decide` makes, on rank 0, of what `work` gave on each of the ranks.

        Args:
            doing: what all this is, for errors.
            work: gives this rank's part, as JSON; run on every rank.
            decide: from the parts of all ranks, in their order, to JSON; run on rank 0.

        Raises:
            CheckpointError: on every rank, if anything failed on any; names rank, `doing` and cause.
        """
        self._round += 1
        rank, ranks = self._ranks.rank, range(self._ranks.size)
        parts = [f"{self._name}/{self._round}/{other}" for other in ranks]
        decision = f"{self._name}/{self._round}/decision"
        self._keys += [*parts, decision]
        try:
            own = work()
            if self._store is None:
                return decide([own])
            self._store.set(parts[rank], json.dumps(own))
            if rank:
                return self._hear(decision, 0)
            heard = [self._hear(parts[other], other) for other in ranks]
            if failure := self._read(
                f"{self._name}/failure"
            ):  # another has given up this rank, which was late
                raise _Heard(failure)
            decided = decide(heard)
            self._store.set(decision, json.dumps(decided))
            return decided
        except _Heard:
            raise
        except Exception as error:
            raise CheckpointError(f"rank {rank}, {doing}: {explain(error)}") from error

    def tick(self) -> None:
        """Give a sign of life, while this rank is busy.

        Raises:
            CheckpointError: meanwhile another rank has failed.
        """
        now = time.monotonic()
        if self._store is None or now - self._beat_at < BEAT:
            return
        self._beat_at, self._beats = now, self._beats + 1
        self._store.set(self._beat_of(self._ranks.rank), str(self._beats))
        if failure := self._read(f"{self._name}/failure"):
            raise _Heard(failure)

    def __enter__(self) -> Agreement:
        if self._ranks.size > 1:
            self._store = self._stack.enter_context(self._ranks.store(self._background))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._store is None:
            return
        with self._stack, suppress(OSError):  # it may be gone with its process
            if error is not None and not isinstance(error, _Heard):
                self._store.set(f"{self._name}/failure", explain(error))
            if self._everyone_heard():
                for key in (*self._keys, *map(self._beat_of, range(self._ranks.size))):
                    self._store.delete_key(key)

    def _everyone_heard(self) -> bool:
        """Whether nobody looks at the keys any more, as far as rank 0 knows in time; the others do not."""
        heard = f"{self._name}/heard"
        if self._ranks.rank:
            self._store.add(heard, 1)
            return False
        until = time.monotonic() + min(FAREWELL, self._ranks.patience)
        while self._store.add(heard, 0) < self._ranks.size - 1:
            if time.monotonic() > until:
                return False
            time.sleep(0.001)
        return True

    def _hear(self, key: str, rank: int) -> Any:
        """What `rank` says at `key`, once it does."""
        beat, alive_at, pause = "", time.monotonic(), 0.0005
        while not self._store.check([key]):
            if failure := self._read(f"{self._name}/failure"):
                raise _Heard(failure)
            self.tick()
            if (newest := self._read(self._beat_of(rank))) != beat:
                beat, alive_at = newest, time.monotonic()
            elif time.monotonic() - alive_at > self._ranks.patience:
                raise TimeoutError(
                    f"rank {rank} gave no sign of life in {self._ranks.patience:g} s; all ranks must make "
                    "the same calls in the same order"
                )
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE)
        return json.loads(self._store.get(key))

    def _read(self, key: str) -> str:
        return self._store.get(key).decode() if self._store.check([key]) else ""

    def _beat_of(self, rank: int) -> str:
        return f"{self._name}/beat/{rank}"


class _Store:
    """A store that answers in time or raises, as torch's do not when the process of one is stopped."""

    def __init__(self, connect: Callable[[], dist.Store], patience: float):
        self.answers = True
        self._patience = patience
        self._calls: SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None] = SimpleQueue()
        weakref.finalize(self, self._calls.put, None)
        # A daemon: it may never return, and nobody shall wait for it.
        threading.Thread(target=_serve, args=(connect, self._calls), daemon=True).start()

    def set(self, key: str, value: str) -> None:
        self._call("set", key, value)

    def get(self, key: str) -> bytes:
        return self._call("get", key)

    def check(self, keys: list[str]) -> bool:
        return self._call("check", keys)

    def add(self, key: str, amount: int) -> int:
        return self._call("add", key, amount)

    def delete_key(self, key: str) -> bool:
        return self._call("delete_key", key)

    def _call(self, method: str, *args: Any) -> Any:
        answer: Future[Any] = Future()
        self._calls.put((answer, method, args))
        try:
            return answer.result(self._patience)
        except TimeoutError as error:
            self.answers = False
            text = (
                f"the process group's store did not answer in {self._patience:g} s; is its process stopped?"
            )
            raise TimeoutError(text) from error


def _serve(
    connect: Callable[[], dist.Store], calls: SimpleQueue[tuple[Future[Any], str, tuple[Any, ...]] | None]
) -> None:
    store = None
    while (call := calls.get()) is not None:
        answer, method, args = call
        try:
            store = store or connect()
            answer.set_result(getattr(store, method)(*args))
        except RuntimeError as error:
            text = f"the process group's store, which lives with rank 0 or its launcher, is gone ({error})"
            answer.set_exception(ConnectionError(text))
        except Exception as error:  # of whoever waits for the answer
            answer.set_exception(error)


class _Heard(CheckpointError):
    """What failed on another rank, in its words."""


def explain(error: BaseException) -> str:
    """What went wrong, and what before: torch hides the error of a full disk behind another."""
    if isinstance(error, CheckpointError):
        return str(error)
    text = f"{type(error).__name__}: {error}"
    before = error.__cause__ or error.__context__
    return f"{text} (after {explain(before)})" if before else text
