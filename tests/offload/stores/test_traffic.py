"""The disk store between memory and file: writes and reads that are late, buffers that are all in use, and
slots that die at the wrong time.
"""

import gc
import mmap
import os
import random
import threading
import weakref

import pytest
import torch

import veofunc as vf
from tests.offload.stores.disk import counted, crowd_out, held, settle, until_somebody_waits

KIB, MIB = 1 << 10, 1 << 20


def numbered(i, nbytes=64 * KIB):
    return torch.full((nbytes // 4,), float(i))


def is_numbered(tensor, i):
    return bool(tensor.eq(float(i)).all())


def make_store(directory, inflight_bytes=MIB):
    return vf.DiskStore(directory, inflight_bytes=inflight_bytes, direct=False)  # the tests count its I/O


@pytest.fixture
def store(tmp_path):
    return make_store(tmp_path)


def in_use(store):
    """Bytes of buffers in use."""
    buffers = store._traffic._buffers
    with store._traffic:
        return buffers._space.end - sum(end - start for start, end in buffers._space._holes)


class TestWrites:
    def test_a_tensor_is_got_and_its_source_used_again_before_anything_is_written(self, store, monkeypatch):
        with held(monkeypatch, "pwrite") as gate:
            source = numbered(1)
            slots = [store.put(source)]
            gate.reached.wait()
            for i in range(2, 8):
                source.fill_(i)
                slots.append(store.put(source))
            del source
            torch.full((16 * KIB,), -1.0)  # likely where the source was
            for i, slot in reversed(list(enumerate(slots, start=1))):
                assert is_numbered(slot.get(), i)
                assert is_numbered(slot.get(), i)
        crowd_out(store)
        assert all(is_numbered(slot.get(), i) for i, slot in enumerate(slots, start=1))

    def test_put_blocks_when_the_buffers_are_full_and_not_before(self, store, monkeypatch):
        slots = []

        def put_all():
            for i in range(20):
                slots.append(store.put(numbered(i)))

        with held(monkeypatch, "pwrite"):
            thread = threading.Thread(target=put_all)
            thread.start()
            until_somebody_waits(store)
            assert len(slots) == 16
        thread.join()
        assert all(is_numbered(slot.get(), i) for i, slot in enumerate(slots))

    def test_put_goes_on_when_a_tensor_that_waits_for_its_write_dies(self, store, monkeypatch):
        slots, late = [store.put(numbered(-1))], []
        settle(store)
        with held(monkeypatch, "pwrite") as gate:
            slots = [store.put(numbered(i)) for i in range(16)]
            gate.reached.wait()
            thread = threading.Thread(target=lambda: late.append(store.put(numbered(16))))
            thread.start()
            until_somebody_waits(store)
            del slots[5]
            thread.join()
            assert is_numbered(late[0].get(), 16)
        assert all(
            is_numbered(slot.get(), i) for i, slot in zip([*range(5), *range(6, 16)], slots, strict=True)
        )

    def test_what_dies_before_it_is_written_is_never_written(self, store, monkeypatch):
        with counted(monkeypatch, "pwrite") as writes, held(monkeypatch, "pwrite") as gate:
            first = store.put(numbered(0))
            gate.reached.wait()
            for i in range(10):
                store.put(numbered(i))
            gate.open()
            settle(store)
        assert writes == [64 * KIB]
        assert is_numbered(first.get(), 0)

    def test_what_dies_while_it_is_written_gives_its_place_to_others_only_afterwards(
        self, store, monkeypatch
    ):
        with held(monkeypatch, "pwrite") as gate:
            dying = store.put(numbered(1))
            gate.reached.wait()
            del dying
            slots = [store.put(numbered(i)) for i in range(2, 10)]
        settle(store)
        crowd_out(store)
        assert all(is_numbered(slot.get(), i) for i, slot in enumerate(slots, start=2))

    @pytest.mark.parametrize("size", [MIB + 4, 3 * MIB])
    def test_a_tensor_larger_than_all_buffers_passes_alone(self, size, store, monkeypatch):
        with held(monkeypatch, "pwrite") as gate:
            slots = [store.put(numbered(0))]
            gate.reached.wait()
            thread = threading.Thread(target=lambda: slots.append(store.put(numbered(1, size))))
            thread.start()
            until_somebody_waits(store)
        thread.join()
        assert is_numbered(slots[1].get(), 1)
        settle(store)
        with counted(monkeypatch, "preadv") as reads:
            slots[1].prefetch()
            assert is_numbered(slots[1].get(), 1)
        assert len(reads) == 1

    def test_without_buffers_each_tensor_passes_alone(self, tmp_path):
        store = make_store(tmp_path, inflight_bytes=0)
        slots = [store.put(numbered(i)) for i in range(20)]
        assert all(is_numbered(slot.get(), i) for i, slot in enumerate(slots))


class TestReads:
    def test_the_newest_tensors_come_back_without_the_disk(self, store, monkeypatch):
        slots = [store.put(numbered(i)) for i in range(40)]
        settle(store)
        with counted(monkeypatch, "preadv") as reads:
            assert all(is_numbered(slots[i].get(), i) for i in range(39, 23, -1))
            assert reads == []
            assert is_numbered(slots[23].get(), 23)
            assert reads == [64 * KIB]

    def test_read_ahead_is_one_read_and_get_does_none(self, store, monkeypatch):
        slots = [store.put(numbered(i)) for i in range(4)]
        crowd_out(store)
        with counted(monkeypatch, "preadv") as reads:
            for slot in slots:
                slot.prefetch()
                slot.prefetch()
            settle(store)
            assert len(reads) == 4
            assert all(is_numbered(slot.get(), i) for i, slot in enumerate(slots))
        assert len(reads) == 4

    def test_read_ahead_takes_no_buffer_of_what_is_wanted_sooner(self, store, monkeypatch):
        slots = [store.put(numbered(i)) for i in range(20)]
        settle(store)
        with counted(monkeypatch, "preadv") as reads:
            for slot in reversed(slots):
                slot.prefetch()
            settle(store)
            assert all(is_numbered(slots[i].get(), i) for i in range(19, 3, -1))
            settle(store)
            assert len(reads) == 4
            assert all(is_numbered(slots[i].get(), i) for i in range(4))
        assert len(reads) == 4

    def test_get_waits_for_the_read_that_is_under_way(self, store, monkeypatch):
        slot, got = store.put(numbered(3)), []
        crowd_out(store)
        with counted(monkeypatch, "preadv") as reads, held(monkeypatch, "preadv") as gate:
            slot.prefetch()
            gate.reached.wait()
            threads = [threading.Thread(target=lambda: got.append(slot.get())) for _ in range(2)]
            for thread in threads:
                thread.start()
            until_somebody_waits(store, number=2)
            assert got == []
            gate.open()
            for thread in threads:
                thread.join()
        assert len(reads) == 1
        assert all(is_numbered(tensor, 3) for tensor in got)
        assert got[0].data_ptr() != got[1].data_ptr()

    def test_get_does_not_queue_behind_the_reads_of_others(self, store, monkeypatch):
        slots = [store.put(numbered(i)) for i in range(4)]
        crowd_out(store)
        preadv, gate, first = os.preadv, threading.Event(), threading.Event()

        def first_is_held(*args):
            if not first.is_set():
                first.set()
                gate.wait()
            return preadv(*args)

        monkeypatch.setattr(os, "preadv", first_is_held)
        for slot in slots:
            slot.prefetch()
        first.wait()
        assert is_numbered(slots[3].get(), 3)
        gate.set()
        assert all(is_numbered(slot.get(), i) for i, slot in enumerate(slots))

    def test_what_is_asked_for_early_is_read_when_there_is_room(self, store, monkeypatch):
        slots = [store.put(numbered(i)) for i in range(40)]
        crowd_out(store)
        with counted(monkeypatch, "preadv") as reads:
            for slot in slots:
                slot.prefetch()
            settle(store)
            assert len(reads) == 16
            for i, slot in enumerate(slots):
                assert is_numbered(slot.get(), i)
            assert len(reads) == 40

    def test_what_is_asked_for_early_is_read_when_something_dies(self, store, monkeypatch):
        slots = [store.put(numbered(i)) for i in range(18)]
        crowd_out(store)
        with counted(monkeypatch, "preadv") as reads:
            restored = slots[17].get()
            for slot in slots:
                slot.prefetch()
            settle(store)
            assert len(reads) == 1 + 15
            del restored
            settle(store)
            assert len(reads) == 1 + 16
            del slots[3]
            settle(store)
            assert len(reads) == 1 + 17

    def test_a_buffer_that_was_copied_from_is_free_for_others_again(self, store, monkeypatch):
        monkeypatch.delattr(type(store._traffic._buffers), "extra")
        slots = [store.put(numbered(i, 128 * KIB)[::2]) for i in range(17)]  # those have gaps: must be copied
        crowd_out(store)
        with counted(monkeypatch, "preadv") as reads:
            for slot in slots:
                slot.prefetch()
            settle(store)
            assert len(reads) == 16
            assert is_numbered(slots[0].get(), 0)
            settle(store)
            assert len(reads) == 17
            assert all(is_numbered(slots[i].get(), i) for i in range(1, 17))
        more = [store.put(numbered(i)) for i in range(20, 36)]
        assert all(is_numbered(slot.get(), i) for i, slot in enumerate(more, start=20))

    def test_get_never_waits_for_room_that_read_ahead_has_taken(self, store):
        slots = [store.put(numbered(i)) for i in range(40)]
        crowd_out(store)
        for slot in slots[:16]:
            slot.prefetch()
        settle(store)
        held_tensors = [slot.get() for slot in slots[16:]]
        assert all(is_numbered(tensor, i) for i, tensor in enumerate(held_tensors, start=16))
        assert all(is_numbered(slot.get(), i) for i, slot in enumerate(slots))

    def test_put_takes_the_room_of_what_was_read_ahead_and_never_got(self, store, monkeypatch):
        slots = [store.put(numbered(i)) for i in range(16)]
        crowd_out(store)
        for slot in slots:
            slot.prefetch()
        with monkeypatch.context() as patch:
            patch.delattr(type(store._traffic._buffers), "extra")
            more = [store.put(numbered(i)) for i in range(16, 50)]
        assert all(is_numbered(slot.get(), i) for i, slot in enumerate(slots + more))

    def test_tensors_that_are_held_stop_neither_put_nor_get(self, store):
        slots = [store.put(numbered(i)) for i in range(40)]
        restored = [slot.get() for slot in slots]
        slots += [store.put(numbered(i)) for i in range(40, 60)]
        restored += [slot.get() for slot in slots[40:]]
        assert all(is_numbered(tensor, i) for i, tensor in enumerate(restored))

    @pytest.mark.parametrize("when", ["queued", "being read", "read"])
    def test_what_dies_while_it_is_read_ahead_gives_its_buffer_back_once(self, when, store, monkeypatch):
        slots = [store.put(numbered(i)) for i in range(4)]
        crowd_out(store)
        with held(monkeypatch, "preadv") as gate:
            for slot in slots:
                slot.prefetch()
            gate.reached.wait()
            if when == "read":
                gate.open()
                settle(store)
            del slot
            dying = weakref.ref(slots[0 if when == "being read" else 2])
            del slots[0 if when == "being read" else 2]
            assert dying() is None
            new = [store.put(numbered(i)) for i in range(10, 14)]
            gate.open()
            settle(store)
        left = [1, 2, 3] if when == "being read" else [0, 1, 3]
        assert all(is_numbered(slot.get(), i) for i, slot in zip(left, slots, strict=True))
        assert all(is_numbered(slot.get(), i) for i, slot in enumerate(new, start=10))
        del slots, new
        settle(store)
        assert in_use(store) == 0


class TestMemory:
    def test_no_step_after_the_first_maps_memory_or_makes_the_file_larger(self, tmp_path, monkeypatch):
        sizes = []

        class Counted(mmap.mmap):
            def __new__(cls, fileno, length, **kwargs):
                sizes.append(length)
                return super().__new__(cls, fileno, length, **kwargs)

        monkeypatch.setattr(mmap, "mmap", Counted)
        store = make_store(tmp_path, inflight_bytes=4 * MIB)
        assert sizes == [4 * MIB]
        numels = [100_000, 3, 300_000, 50_000, 7_000, 150_000] * 8
        for step in range(3):
            slots = [store.put(torch.full((n,), float(step + i))) for i, n in enumerate(numels)]
            for i in range(len(slots) - 1, -1, -1):
                for ahead in slots[max(i - 2, 0) : i]:
                    ahead.prefetch()
                assert slots.pop().get()[-1] == step + i
        assert sizes == [4 * MIB]

    def test_buffers_in_use_never_exceed_inflight_bytes(self, store, monkeypatch):
        peak, extra = [], store._traffic._buffers.extra
        monkeypatch.setattr(store._traffic._buffers, "extra", lambda n: peak.append(MIB + n) or extra(n))
        slots = []
        for i in range(60):
            slots.append(store.put(numbered(i, 100 * KIB)))
            peak.append(in_use(store))
        for i in range(59, -1, -1):
            for slot in slots[max(i - 4, 0) : i]:
                slot.prefetch()
            assert is_numbered(slots.pop().get(), i)
            peak.append(in_use(store))
        assert MIB - 100 * KIB < max(peak) <= MIB

    def test_a_restored_tensor_gives_its_memory_back_when_it_dies(self, store):
        slot = store.put(numbered(1))
        for _ in range(100):
            settle(store)
            restored = slot.get()
            assert is_numbered(restored, 1)
            del restored
        del slot
        assert in_use(store) == 0

    def test_nothing_is_in_use_when_everything_is_dead(self, store, monkeypatch):
        slots = [store.put(numbered(i)) for i in range(40)]
        restored = [slot.get() for slot in slots[::3]]
        for slot in slots:
            slot.prefetch()
        del slots, slot
        settle(store)
        del restored
        assert in_use(store) == 0
        assert store._traffic._file._space.end == 0


@pytest.mark.parametrize("seed", range(3))
def test_any_order_of_events_in_any_threads_gives_right_values(seed, tmp_path):
    """Puts, reads, deaths, also by the garbage collector in the middle of everything."""
    store, wrong, start = make_store(tmp_path, inflight_bytes=256 * KIB), [], threading.Barrier(3)

    class Cycle:  # whatever it holds dies when the collector runs
        def __init__(self, *held):
            self.held, self.itself = held, self

    def work(number):
        choose, slots = random.Random(f"{seed} {number}"), []
        start.wait()
        for step in range(300):
            act = choose.choice(["put", "put", "get", "get", "prefetch", "die", "die in a cycle", "keep"])
            if act == "put":
                value, numel = 1000 * number + step, choose.choice([1, 1000, 5000, 20_000])
                slots.append((value, store.put(torch.full((numel,), float(value)))))
            elif slots:
                value, slot = slots[choose.randrange(len(slots))]
                if act == "prefetch":
                    slot.prefetch()
                elif act.startswith("die"):
                    slots.remove((value, slot))
                    if act == "die in a cycle":
                        Cycle(slot)
                elif not is_numbered(restored := slot.get(), value):
                    wrong.append((number, step, value))
                elif act == "keep":
                    Cycle(restored, slot)
        if not all(is_numbered(slot.get(), value) for value, slot in slots):
            wrong.append((number, "end"))

    before = gc.get_threshold()
    gc.set_threshold(20)
    try:
        threads = [threading.Thread(target=work, args=(number,)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        gc.set_threshold(*before)
    assert wrong == []
    gc.collect()
    settle(store)
    assert in_use(store) == 0
    assert store._traffic._file._space.end == 0
