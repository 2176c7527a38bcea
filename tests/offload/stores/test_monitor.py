"""Whatever dies, and wherever, is seen to once, and nobody waits for himself."""

import gc
import threading

from veofunc.offload.stores.monitor import Monitor


class Undertaker(Monitor):
    def __init__(self):
        super().__init__()
        self.undone = []

    def _undo(self, dead):
        assert self._condition.acquire(blocking=False) is False  # the lock is held
        self.undone.append(dead)


class Mortal:
    """Dies in a cycle, so that the garbage collector finds it."""

    def __init__(self, monitor, name):
        self.monitor, self.name, self.itself = monitor, name, self

    def __del__(self):
        self.monitor.bury(self.name)


def in_time(work):
    """Runs `work` in a thread; whether it came to an end."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(10)
    return not thread.is_alive()


def test_a_death_is_seen_to_at_once_if_the_lock_is_free():
    monitor = Undertaker()
    monitor.bury("a")
    assert monitor.undone == ["a"]


def test_a_death_in_the_thread_that_holds_the_lock_is_seen_to_when_that_leaves():
    monitor = Undertaker()

    def work():
        with monitor:
            Mortal(monitor, "a")
            gc.collect(0)
            assert monitor.undone == []
        assert monitor.undone == ["a"]

    assert in_time(work)
    assert monitor.undone == ["a"]


def test_a_death_while_another_is_seen_to_is_seen_to_as_well():
    class Chain(Undertaker):
        def _undo(self, dead):
            super()._undo(dead)
            if dead < 5:
                Mortal(self, dead + 1)
                gc.collect(0)

    monitor = Chain()
    assert in_time(lambda: monitor.bury(0))
    assert monitor.undone == [0, 1, 2, 3, 4, 5]


def test_a_death_in_another_thread_does_not_wait_for_the_lock():
    monitor = Undertaker()
    with monitor:
        assert in_time(lambda: monitor.bury("a"))
        assert monitor.undone == []
    assert monitor.undone == ["a"]


def test_a_death_while_the_lock_is_being_given_up_is_not_forgotten():
    monitor = Undertaker()
    undo_all = monitor._undo_all

    def late():  # after the holder has looked for the last time
        undo_all()
        if not monitor.undone:
            monitor.bury("a")

    with monitor:
        monitor._undo_all = late
    assert monitor.undone == ["a"]


def test_who_waits_is_woken_and_sees_to_what_died_meanwhile():
    monitor = Undertaker()
    waits = threading.Event()

    def work():
        with monitor:
            waits.set()
            monitor._wait()
            assert monitor.undone == ["a"]

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    waits.wait()
    with monitor:  # not before the other waits
        monitor._notify()
        monitor.bury("a")
    thread.join(10)
    assert not thread.is_alive()


def test_every_death_of_many_threads_is_seen_to_exactly_once():
    monitor, start = Undertaker(), threading.Barrier(4)

    def work(number):
        start.wait()
        for i in range(500):
            if i % 3:
                monitor.bury((number, i))
            else:
                with monitor:
                    monitor.bury((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(monitor.undone) == [(number, i) for number in range(4) for i in range(500)]
