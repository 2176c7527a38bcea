"""Host memory in pieces: never shared, used again, and let go."""

import random
import threading

import pytest
import torch

from veofunc.offload.stores.arena import Arena

MIB = 1 << 20


class Allocator:
    """Makes memory without any bytes behind it, and knows how much of it lives."""

    def __init__(self, device="meta"):
        self.device, self.sizes = device, []

    def __call__(self, nbytes):
        self.sizes.append(nbytes)
        return torch.empty(nbytes, dtype=torch.uint8, device=self.device)


def test_regions_never_overlap_and_have_the_size_that_was_asked_for():
    """Random takes and deaths; each region keeps what was written to it."""
    rng, arena, alive = random.Random(0), Arena(Allocator("cpu"), cache_bytes=0), []
    for i in range(1500):
        region = arena.take(rng.choice((0, 1, 511, 512, 513, 5000, 300_000, 2 * MIB)))
        region.memory.fill_(i % 251)
        alive.append((region, region.memory.numel(), i % 251))
        if rng.random() < 0.9 and len(alive) > 3:
            region, nbytes, value = alive.pop(rng.randrange(len(alive)))
            assert region.memory.numel() == nbytes
            assert (region.memory == value).all()
    assert all((region.memory == value).all() for region, _, value in alive)
    del region
    alive.clear()
    assert arena.nbytes == 0


@pytest.mark.parametrize("dtype", [torch.float64, torch.complex128, torch.float8_e5m2, torch.bool], ids=str)
def test_every_region_can_be_viewed_as_any_dtype(dtype):
    arena = Arena(Allocator(), cache_bytes=0)
    regions = [arena.take(16 * n) for n in (1, 3, 7)]
    assert [region.memory.view(dtype).numel() * dtype.itemsize for region in regions] == [16, 48, 112]


def test_only_powers_of_two_are_asked_for():
    """PyTorch rounds page-locked memory up to them: nothing is lost."""
    allocator = Allocator()
    arena = Arena(allocator, cache_bytes=0)
    regions = [arena.take(33 * MIB) for _ in range(100)]
    assert all(size & (size - 1) == 0 for size in allocator.sizes)
    assert sum(allocator.sizes) == arena.nbytes
    assert len(regions) == 100


@pytest.mark.parametrize("mebibytes", [0.1, 1, 17, 33, 65, 1000])
def test_what_is_held_is_little_more_than_what_is_needed(mebibytes):
    arena, nbytes = Arena(Allocator(), cache_bytes=0), int(mebibytes * MIB)
    regions = [arena.take(nbytes) for _ in range(200)]
    assert len(regions) * nbytes <= arena.nbytes <= 1.4 * len(regions) * nbytes


def test_what_was_free_before_is_taken_first():
    allocator = Allocator()
    arena = Arena(allocator, cache_bytes=1 << 40)
    for i in range(5):
        regions = [arena.take(n * MIB) for n in (3, 1, 7, 2, 2, 30)]
        if i == 0:
            first = list(allocator.sizes)
        regions.pop(2)
        regions.append(arena.take(7 * MIB))
        del regions
    assert allocator.sizes == first


def test_sizes_that_never_come_again_take_no_memory_for_ever():
    """As when every batch has another length."""
    arena = Arena(Allocator(), cache_bytes=1 << 40)
    for num_tokens in range(1000, 1300):
        regions = [arena.take(num_tokens * 1024) for _ in range(10)]
        assert len(regions) == 10
        del regions
    assert arena.nbytes <= 2 * 10 * 1300 * 1024


def test_at_most_cache_bytes_of_free_memory_are_kept():
    allocator = Allocator()
    arena = Arena(allocator, cache_bytes=5 * MIB)
    regions = [arena.take(2 * MIB) for _ in range(10)]
    held = regions.pop(0)
    del regions
    assert arena.nbytes <= 5 * MIB + 2 * MIB
    del held
    assert 0 < arena.nbytes <= 5 * MIB
    num_asked = len(allocator.sizes)
    again = [arena.take(2 * MIB), arena.take(2 * MIB)]
    assert len(allocator.sizes) == num_asked
    assert [region.memory.numel() for region in again] == [2 * MIB, 2 * MIB]


def test_what_is_let_go_is_asked_for_again_in_the_same_sizes():
    """So PyTorch, which keeps page-locked memory by its size, need not lock any more."""
    allocator = Allocator()
    arena, asked = Arena(allocator, cache_bytes=40 * MIB), []
    for _ in range(4):
        allocator.sizes.clear()
        regions = [arena.take(3 * MIB // 2) for _ in range(30)]
        asked.append(list(allocator.sizes))
        del regions
    assert asked[1] == asked[2] == asked[3] != []
    assert asked[0][-len(asked[1]) :] == asked[1]


def test_without_a_cache_all_is_let_go_at_once():
    arena = Arena(Allocator(), cache_bytes=0)
    region = arena.take(5 * MIB)
    assert arena.nbytes == 8 * MIB
    del region
    assert arena.nbytes == 0


def test_memory_that_was_first_used_in_inference_mode_can_be_written_to_later():
    arena = Arena(Allocator("cpu"), cache_bytes=MIB)
    with torch.inference_mode():
        region = arena.take(64)
        region.memory.fill_(1)
    assert not region.memory.is_inference()
    region.memory.fill_(2)
    del region
    again = arena.take(64).memory.view(torch.float32)
    again.copy_(torch.ones(16, requires_grad=True).detach())
    assert again.sum() == 16


def test_memory_is_the_hosts_whatever_the_default_device():
    arena = Arena(lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, device="cpu"), cache_bytes=MIB)
    with torch.device("meta"):
        assert arena.take(8).memory.device.type == "cpu"


def test_a_region_may_die_while_another_is_made():
    """As it does when the garbage collector runs there: a lock that is taken twice would stop the thread."""
    regions = []

    def allocate(nbytes):
        regions.clear()
        return torch.empty(nbytes, dtype=torch.uint8)

    arena = Arena(allocate, cache_bytes=0)

    def work():
        for n in (1, 2, 4, 8):
            regions.append(arena.take(n * MIB))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive()
    assert arena.nbytes == 8 * MIB


def test_an_allocation_that_fails_leaves_the_arena_as_it_was():
    def allocate(nbytes):
        if nbytes > MIB:
            raise MemoryError
        return torch.empty(nbytes, dtype=torch.uint8)

    arena = Arena(allocate, cache_bytes=0)
    first = arena.take(100)
    with pytest.raises(MemoryError):
        arena.take(2 * MIB)
    second = arena.take(100)
    assert first.memory.data_ptr() != second.memory.data_ptr()
    assert arena.nbytes == MIB


def test_threads_share_an_arena():
    arena, start, wrong = Arena(Allocator("cpu"), cache_bytes=0), threading.Barrier(4), []

    def work(number):
        start.wait()
        for i in range(200):
            regions = [arena.take(nbytes) for nbytes in (700, 5000, 700)]
            for j, region in enumerate(regions):
                region.memory.fill_(50 * number + j)
            if not all((region.memory == 50 * number + j).all() for j, region in enumerate(regions)):
                wrong.append((number, i))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    arena.take(1)
    assert arena.nbytes == 0
