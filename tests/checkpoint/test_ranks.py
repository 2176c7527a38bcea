"""Agreement between ranks that are threads here, over each kind of store."""

import signal
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from tests.checkpoint.support import start
from veofunc.checkpoint import CheckpointError, ranks
from veofunc.checkpoint.ranks import Agreement, Ranks, explain

STORES = {
    "hash": lambda path: dist.HashStore(),
    "file": lambda path: dist.FileStore(str(path / "store"), -1),
    "tcp": lambda path: dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
}
SOON = 8.0  # seconds, far below any patience that is not meant to end; torch may ask a name server meanwhile


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    return STORES[request.param](tmp_path)


def rank_of(rank: int, size: int, store: dist.Store | None, patience: float = 60.0) -> Ranks:
    """As `Ranks` makes itself in a process group."""
    found = Ranks(patience=patience)
    found.rank, found.size = rank, size
    if store is not None:
        found._host, found._name = store, "veofunc/checkpoint/all/1"
        found._main, found._idle = ranks._Store(lambda: store, patience), []
    return found


def together(size: int, store: dist.Store, work: Callable[[int, Agreement], object], patience: float = 60.0):
    """What each rank makes of one agreement: a value, or the text of its failure; and how long it took."""

    def run(rank: int) -> tuple[object, float]:
        start = time.monotonic()
        try:
            with rank_of(rank, size, store, patience).agreement("save", background=True) as agreement:
                return work(rank, agreement), time.monotonic() - start
        except CheckpointError as error:
            return str(error), time.monotonic() - start

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(run, range(size)))
    return [value for value, _ in found], [seconds for _, seconds in found]


def fail(text: str):
    raise ValueError(text)


@pytest.mark.parametrize("size", [1, 2, 5])
def test_all_hear_what_rank_0_makes_of_what_all_say(size, store):
    def work(rank, agreement):
        first = agreement.round("one", lambda: {"rank": rank, "x": [None, 1.5, "ä"]}, lambda parts: parts)
        return first, agreement.round("two", lambda: rank, sum)

    found, _ = together(size, store, work)
    expected = [{"rank": rank, "x": [None, 1.5, "ä"]} for rank in range(size)]
    assert found == [(expected, sum(range(size)))] * size


@pytest.mark.parametrize("store", ["hash", "tcp"], indirect=True)  # a file cannot count its keys
def test_nothing_is_left_in_the_store(store):
    before = store.num_keys()
    together(3, store, lambda rank, agreement: agreement.round("it", lambda: rank, sum))
    together(3, store, lambda rank, agreement: agreement.round("it", lambda: 1 // (rank - 1), sum))
    assert store.num_keys() == before


@pytest.mark.parametrize("failing", [0, 1, 2])
def test_a_failure_of_one_reaches_all_in_its_words(failing, store):
    def work(rank, agreement):
        return agreement.round("writing", lambda: fail("disk") if rank == failing else 1, sum)

    found, seconds = together(3, store, work)
    assert found == [f"rank {failing}, writing: ValueError: disk"] * 3
    assert max(seconds) < SOON


def test_a_failure_to_decide_reaches_all(store):
    found, _ = together(3, store, lambda _, agreement: agreement.round("it", lambda: 1, lambda _: fail("no")))
    assert found == ["rank 0, it: ValueError: no"] * 3


def test_a_failure_reaches_who_is_busy_at_the_next_sign_of_life(store, monkeypatch):
    monkeypatch.setattr(ranks, "BEAT", 0.01)

    def busy(agreement):
        until = time.monotonic() + 20
        while time.monotonic() < until:
            agreement.tick()
            time.sleep(0.005)

    def work(rank, agreement):
        return agreement.round("it", lambda: busy(agreement) if rank == 1 else fail("disk"), sum)

    found, seconds = together(2, store, work)
    assert found == ["rank 0, it: ValueError: disk"] * 2
    assert max(seconds) < SOON


@pytest.mark.parametrize("late", [0, 1])
def test_a_failure_reaches_who_comes_late(late, store):
    def work(rank, agreement):
        if rank == late:
            time.sleep(0.3)
        return agreement.round("it", lambda: 1 if rank == late else fail("disk"), sum)

    found, _ = together(2, store, work)
    assert found == [f"rank {1 - late}, it: ValueError: disk"] * 2


@pytest.mark.parametrize("leaving", [0, 1])
def test_who_leaves_between_rounds_with_an_exception_ends_it_for_all(leaving, store):
    def work(rank, agreement):
        agreement.round("one", lambda: 1, sum)
        if rank == leaving:
            raise CheckpointError(f"rank {rank} had enough")
        return agreement.round("two", lambda: 1, sum)

    found, seconds = together(3, store, work)
    assert found == [f"rank {leaving} had enough"] * 3
    assert max(seconds) < SOON


@pytest.mark.parametrize("silent", [0, 1])
def test_a_rank_without_a_sign_of_life_is_given_up_and_named_on_all_others(silent, store, monkeypatch):
    monkeypatch.setattr(ranks, "FAREWELL", 0.2)
    monkeypatch.setattr(ranks, "BEAT", 0.05)
    over = threading.Event()

    def work(rank, agreement):
        if rank == silent:
            over.wait(10)
            return agreement.round("it", lambda: 1, sum)
        try:
            return agreement.round("it", lambda: 1, sum)
        finally:
            over.set()

    found, seconds = together(3, store, work, patience=0.5)
    assert all(f"rank {silent} gave no sign of life in 0.5 s" in str(text) for text in found), found
    assert max(seconds) < 0.5 + SOON


def test_a_rank_that_is_busy_but_alive_is_waited_for(store, monkeypatch):
    monkeypatch.setattr(ranks, "BEAT", 0.05)

    def busy(agreement):
        until = time.monotonic() + 1.5
        while time.monotonic() < until:
            agreement.tick()
            time.sleep(0.01)
        return 1

    def work(rank, agreement):
        return agreement.round("it", lambda: busy(agreement) if rank == 1 else 1, sum)

    found, _ = together(3, store, work, patience=0.5)
    assert found == [3, 3, 3]


SERVER = """
import sys, torch.distributed as dist
store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""


def failure_of_a_round(store: dist.Store, patience: float) -> str:
    everyone = rank_of(1, 2, store, patience)
    with pytest.raises(CheckpointError) as caught, everyone.agreement("save") as agreement:
        agreement.round("it", lambda: 1, sum)
    return str(caught.value)


def test_a_store_whose_process_is_killed_is_an_error_at_once():
    with start(SERVER) as server:
        store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        begin = time.monotonic()
        threading.Timer(0.2, server.kill).start()
        assert "rank 1, it: ConnectionError: the process group's store" in failure_of_a_round(store, 60.0)
        assert "rank 1, it: ConnectionError: the process group's store" in failure_of_a_round(store, 60.0)
        assert time.monotonic() - begin < SOON


def test_a_store_whose_process_is_stopped_is_an_error_in_time():
    with start(SERVER) as server:
        store = dist.TCPStore("127.0.0.1", int(server.stdout.readline()), is_master=False)
        threading.Timer(0.2, server.send_signal, [signal.SIGSTOP]).start()
        begin = time.monotonic()
        assert "store did not answer in 1 s" in failure_of_a_round(store, patience=1.0)
        assert time.monotonic() - begin < 1 + SOON
        server.kill()


def test_what_is_no_json_is_refused_on_all(store):
    found, _ = together(
        2, store, lambda rank, agreement: agreement.round("it", lambda: {1, 2} if rank else 1, sum)
    )
    assert [text[:40] for text in found] == ["rank 1, it: TypeError: Object of type se"] * 2
    found, _ = together(
        2, store, lambda rank, agreement: agreement.round("it", lambda: 1, lambda parts: {1, 2})
    )
    assert [text[:40] for text in found] == ["rank 0, it: TypeError: Object of type se"] * 2


def test_several_agreements_at_once_do_not_disturb_each_other(store):
    num_saves = 8
    everyone = [rank_of(rank, 3, store) for rank in range(3)]
    agreements = [[one.agreement("save", background=True) for _ in range(num_saves)] for one in everyone]

    def run(save: int, rank: int) -> object:
        time.sleep((save * 7 + rank * 3) % 5 / 100)
        with agreements[rank][save] as agreement:
            return agreement.round("it", lambda: [save, rank], lambda parts: parts)

    with ThreadPoolExecutor(3 * num_saves) as threads:
        found = {(s, r): threads.submit(run, s, r) for s in range(num_saves) for r in range(3)}
    for (save, _), future in found.items():
        assert future.result() == [[save, 0], [save, 1], [save, 2]]


def test_alone_no_store_is_needed():
    with Ranks().agreement("save") as agreement:
        agreement.tick()
        assert agreement.round("it", lambda: {1}, lambda parts: parts) == [{1}]
        with pytest.raises(CheckpointError, match="rank 0, it: ValueError: disk"):
            agreement.round("it", lambda: fail("disk"), sum)


def test_an_error_is_explained_with_what_came_before():
    try:
        try:
            raise OSError(28, "No space left on device")
        except OSError as error:
            raise RuntimeError("unexpected pos") from error
    except RuntimeError as error:
        text = explain(error)
    assert text == "RuntimeError: unexpected pos (after OSError: [Errno 28] No space left on device)"
    assert explain(CheckpointError("ours")) == "ours"
