"""The ledger adds up, from any number of threads."""

import threading

import torch

from veofunc.offload.ledger import EVENTS, Ledger


def as_dict(snapshot):
    return {kind: {event: int(snapshot[kind, event]) for event in EVENTS} for kind in ("count", "bytes")}


def test_starts_with_zero_for_every_event():
    names = {"packed", "kept", "deduplicated", "moved", "recomputed", "restored"}
    names |= {"restored_again", "dropped", "live"}
    snapshot = Ledger().snapshot()
    assert set(snapshot["count"].keys()) == set(snapshot["bytes"].keys()) == names
    assert set(snapshot.keys()) == {"count", "bytes", "wait_seconds"}
    assert all(value == 0 for value in snapshot.values(include_nested=True, leaves_only=True))


def test_sums_are_int64_and_seconds_float64():
    snapshot = Ledger().snapshot()
    for kind in ("count", "bytes"):
        assert all(value.dtype == torch.int64 and value.shape == () for value in snapshot[kind].values())
    assert snapshot["wait_seconds"].dtype == torch.float64


def test_counts_and_bytes_are_the_sums_of_what_was_added():
    ledger = Ledger()
    for nbytes in (3, 5, 1 << 40):
        ledger.add("moved", nbytes)
    ledger.add("live", 7)
    ledger.add("live", -7, count=-1)
    ledger.waited(0.25)
    ledger.waited(0.5)
    snapshot = ledger.snapshot()
    assert as_dict(snapshot)["count"] == {**dict.fromkeys(EVENTS, 0), "moved": 3}
    assert as_dict(snapshot)["bytes"] == {**dict.fromkeys(EVENTS, 0), "moved": 8 + (1 << 40)}
    assert snapshot["wait_seconds"] == 0.75


def test_a_snapshot_does_not_change_later():
    ledger = Ledger()
    before = ledger.snapshot()
    ledger.add("packed", 1)
    assert before["count", "packed"] == 0
    assert ledger.snapshot()["count", "packed"] == 1


def test_snapshots_add():
    first, second, both = Ledger(), Ledger(), Ledger()
    for ledger, nbytes in ((first, 3), (second, 4)):
        for target in (ledger, both):
            target.add("restored", nbytes)
            target.waited(nbytes / 8)
    total = first.snapshot() + second.snapshot()
    assert (total == both.snapshot()).all()


def test_a_snapshot_stays_in_host_memory_under_another_default_device():
    ledger = Ledger()
    ledger.add("packed", 5)
    with torch.device("meta"):
        assert as_dict(ledger.snapshot())["bytes"]["packed"] == 5


def test_threads_lose_nothing():
    ledger, start = Ledger(), threading.Barrier(len(EVENTS))

    def work(number):
        start.wait()
        for _ in range(500):
            ledger.add(EVENTS[number], number)
            ledger.add("live", 1)
            ledger.add("live", -1, count=-1)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(len(EVENTS))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = {event: 500 * number for number, event in enumerate(EVENTS)}
    assert as_dict(ledger.snapshot())["bytes"] == expected
    assert as_dict(ledger.snapshot())["count"] == {**dict.fromkeys(EVENTS, 500)}


def test_can_be_told_something_by_the_thread_that_is_inside():
    """The garbage collector may end a handle while its thread reports something."""
    ledger = Ledger()

    def inside():
        with ledger._lock:
            ledger.add("dropped", 1)

    thread = threading.Thread(target=inside, daemon=True)
    thread.start()
    thread.join(timeout=10)
    assert not thread.is_alive()
    assert ledger.snapshot()["count", "dropped"] == 1
