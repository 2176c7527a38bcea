"""A last save when the machine is about to be taken away.

A signal may reach only one of several ranks, or each at another moment, and all must save the same step.
They agree through the store of the process group. At the end of each step a rank (1) notes the number of
the step and (2) looks whether a last one was asked for. Whoever got the signal (a) asks, (b) reads what
all have noted, and (c) names the step after the highest of these the last.

No rank is past that step: one that noted it in time would have been read in (b), and one that notes it
later finds in (2) that (a) has happened. This needs no collective in a step, nor a host that waits for
its accelerator: a rank that is ahead is read as such, and the others catch up with it.
"""

from __future__ import annotations

import os
import signal
import threading
import time
import warnings
from collections.abc import Callable, Generator, Iterable
from contextlib import AbstractContextManager, contextmanager
from datetime import timedelta
from types import FrameType
from typing import Any

import torch.distributed as dist
from tensordict import TensorDictBase

from veofunc.checkpoint.checkpointer import Checkpointer
from veofunc.checkpoint.manifest import CheckpointError, check_step

__all__ = ["save_on_signal"]

ECHO = 1.0  # seconds in which the same signal comes once more: from the scheduler, and from the launcher


def save_on_signal(
    ckpt: Checkpointer,
    make_state: Callable[[], TensorDictBase],
    *,
    signals: Iterable[int] = (signal.SIGTERM,),
) -> AbstractContextManager[Callable[[int], bool]]:
    """Save a last step, and stop, after a signal such as the one by which a scheduler ends a job.

    While the block runs, the first signal only sets a flag; a save that is under way goes on. At the
    end of each step, when the state is whole, the loop asks `last_save(step)`. That is False until a
    signal came. Then it saves `make_state()` as `step`, unless that is a complete step already, waits
    until it is durable, and is True: the loop should end.

    A second signal (more than a second later, as launchers repeat what schedulers send) goes to the
    handler from before: by default SIGTERM then ends the process at once. Blocks may be nested; a signal
    is for all of them. Leaving puts the handlers back, and after a signal waits for pending saves.

    One process stops after the step in which the signal came. Several ranks, of which one is enough to
    get it, all stop after the same step: the one after the furthest that any of them has finished. Each
    calls `last_save` with the same ascending numbers; it costs two short messages to the store of the
    process group, and no collective. If the loop ends before, `last_save` is never True.

    Args:
        ckpt: saves the step.
        make_state: gives the state to save, as `lambda: vf.train_state(model, optimizer, step=step)`.
        signals: which ones.

    Returns:
        A context manager that gives `last_save`.

    Raises:
        CheckpointError: from `last_save`, if the step could not be saved; on leaving, as `ckpt.wait`.
        TypeError: an argument is of a wrong kind; in `last_save`, the step is not an int.
        ValueError: `signals` is empty, or one of them cannot be handled; in `last_save`, the step is not
            from 0 to 2**63 - 1.

    Warns:
        RuntimeWarning: this is not the main thread, the only one that can handle signals; the block
            then learns of them from other ranks only. Or a handler can't be put back, as Python did not
            install it. Or an earlier save failed, while the last one succeeded.

    Example:
        >>> import signal, torch, veofunc as vf
        >>> model = torch.nn.Linear(2, 1)
        >>> step = 0
        >>> def make_state():
        ...     return vf.train_state(model, step=step)
        >>> with vf.async_checkpointer(make_state()) as ckpt:
        ...     with vf.save_on_signal(ckpt, make_state) as last_save:
        ...         for step in range(100):
        ...             if step == 7:
        ...                 signal.raise_signal(signal.SIGTERM)  # as a scheduler would
        ...             if last_save(step):
        ...                 break
        >>> step, ckpt.latest()
        (7, 7)
    """
    if not isinstance(ckpt, Checkpointer):
        raise TypeError(f"ckpt must be what async_checkpointer gives, got {type(ckpt)}")
    if not callable(make_state):
        raise TypeError(
            "make_state must be a function without arguments that gives the state, as "
            f"lambda: vf.train_state(model), got {type(make_state)}"
        )
    return _block(_LastSave(ckpt, make_state), _checked(signals))


@contextmanager
def _block(last_save: _LastSave, signals: tuple[int, ...]) -> Generator[Callable[[int], bool]]:
    last_save.previous = _handlers(signals)
    try:
        for number in last_save.previous:
            signal.signal(number, last_save.handle)
        yield last_save
    except BaseException as error:
        try:
            last_save.finish()
        except CheckpointError as failure:  # must not hide why the block was left
            error.add_note(str(failure))
        raise
    finally:
        for number, handler in last_save.previous.items():
            signal.signal(number, handler)
    last_save.finish()


class _LastSave:
    """Asked at the end of each step; saves the last one.

    Attributes:
        previous: the handlers of the signals from before.
    """

    def __init__(self, ckpt: Checkpointer, make_state: Callable[[], TensorDictBase]):
        self.previous: dict[int, Any] = {}
        self._process = os.getpid()
        self._ckpt = ckpt
        self._ranks = ckpt._ranks
        self._make_state = make_state
        self._store = self._ranks.part("last step")
        self._came_at: float | None = None  # when the first signal came
        self._last: int | None = None  # the step after which all ranks stop, once they agree on it

    def __call__(self, step: int) -> bool:
        check_step(step)
        if not self._is_last(step):
            return False
        failures = self._failures()
        if not self._is_saved(step):
            self._ckpt.save(self._make_state(), step).result()
        for failure in failures:
            warnings.warn(f"{failure}; step {step}, the last one, is saved", RuntimeWarning, stacklevel=2)
        return True

    def handle(self, number: int, frame: FrameType | None) -> None:
        """What a signal does."""
        now, handler = time.monotonic(), self.previous[number]
        if os.getpid() != self._process:  # a fork, which has inherited this
            signal.signal(number, handler)
            signal.raise_signal(number)
            return
        is_first = self._came_at is None
        self._came_at = now if self._came_at is None else self._came_at
        is_ours = isinstance(getattr(handler, "__self__", None), _LastSave)  # of a block around this one
        if not is_ours and (is_first or now - self._came_at < ECHO):
            return
        if callable(handler):
            handler(number, frame)
        elif handler == signal.SIG_DFL:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)

    def finish(self) -> None:
        """After a signal, wait for all pending saves."""
        if self._came_at is not None or self._last is not None:
            self._ckpt.wait()

    def _is_last(self, step: int) -> bool:
        if self._store is None:
            return self._came_at is not None
        if self._last is None:
            self._last = self._agreed(step, self._store)
        return self._last is not None and step >= self._last

    def _agreed(self, step: int, store: dist.Store) -> int | None:
        """The step after which all ranks stop; None as long as none of them has got a signal."""
        noted = [f"step/{rank}" for rank in range(self._ranks.size)]
        own = noted[self._ranks.rank]
        store.set(own, str(step))
        if self._came_at is not None and store.compare_set("asked", "", own).decode() == own:
            steps = [int(store.get(key)) for key in noted if store.check([key])]
            store.set("last", str(max(steps) + 1))
        elif not store.check(["asked"]):
            return None
        store.wait(["last"], timedelta(seconds=self._ranks.patience))
        return int(store.get("last"))

    def _failures(self) -> list[CheckpointError]:
        """What failed of the pending saves, and nobody was told yet; waits for them."""
        failures = []
        while True:
            try:
                self._ckpt.wait()
                return failures
            except CheckpointError as failure:  # it raises one at a time
                failures.append(failure)

    def _is_saved(self, step: int) -> bool:
        """Whether it is a complete step, as rank 0 sees it."""
        with self._ranks.agreement("the last save") as agreement:
            return agreement.round("looking for the step", lambda: None, lambda _: step in self._ckpt.steps())


def _handlers(signals: tuple[int, ...]) -> dict[int, Any]:
    """Of the signals that can be handled here the handlers, which will be put back."""
    if threading.current_thread() is not threading.main_thread():
        warnings.warn(
            "save_on_signal must be entered in the main thread, which alone can handle signals; this block "
            "learns of them from other ranks only",
            RuntimeWarning,
            stacklevel=4,
        )
        return {}
    handlers: dict[int, Any] = {number: signal.getsignal(number) for number in signals}
    for number, handler in handlers.items():
        if handler is None:
            warnings.warn(
                f"{signal.Signals(number).name} has a handler that Python did not install and cannot put "
                "back; after the block it has its default effect",
                RuntimeWarning,
                stacklevel=4,
            )
            handlers[number] = signal.SIG_DFL
    return handlers


def _checked(signals: Any) -> tuple[int, ...]:
    is_many = isinstance(signals, Iterable) and not isinstance(signals, str)
    numbers = tuple(signals) if is_many else ()
    if not is_many or not all(isinstance(number, int) for number in numbers):
        raise TypeError(f"signals must be a tuple of signals as (signal.SIGTERM,), got {signals!r}")
    if not numbers or not {*numbers} <= signal.valid_signals() - {signal.SIGKILL, signal.SIGSTOP}:
        raise ValueError(f"signals must be one or more that a process can handle, got {signals!r}")
    return numbers
