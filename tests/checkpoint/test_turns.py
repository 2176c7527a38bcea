import signal
import threading
import time

import pytest

from veofunc.checkpoint.turns import Turns


def test_threads_wait_for_each_other():
    turns = Turns()
    inside, most = [], []

    def work() -> None:
        for _ in range(20):
            with turns.one():
                inside.append(1)
                time.sleep(1e-4)
                most.append(len(inside))
                inside.pop()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert most == [1] * 80


def test_a_thread_that_would_wait_for_itself_is_told_and_may_take_the_next_turn():
    turns = Turns()
    with turns.one(), pytest.raises(RuntimeError, match="inside a save of the same thread"), turns.one():
        raise AssertionError("it must not come here")
    with turns.one():
        pass


def test_a_signal_handler_is_told_also_while_its_thread_waits():
    turns, held, leave = Turns(), threading.Event(), threading.Event()
    told = []

    def hold() -> None:
        with turns.one():
            held.set()
            leave.wait(10)

    def handler(*_) -> None:
        with pytest.raises(RuntimeError), turns.one():
            raise AssertionError("it must not come here")
        told.append(1)
        leave.set()

    thread = threading.Thread(target=hold)
    before = signal.signal(signal.SIGALRM, handler)
    try:
        thread.start()
        held.wait(10)
        signal.setitimer(signal.ITIMER_REAL, 0.05)
        with turns.one():
            assert told == [1]
    finally:
        signal.signal(signal.SIGALRM, before)
        thread.join()
