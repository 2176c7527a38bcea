"""Copies beside the computation, on a simulated device whose streams run as late and mixed up as they may."""

import gc
import random
import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import veofunc as vf
from tests.offload.layouts import DTYPES, LAYOUTS, bytes_of, numbers
from tests.offload.stores.simulated import Simulation
from veofunc.offload.stores.arena import Arena
from veofunc.offload.stores.ferry import Ferry

NBYTES = 64


@pytest.fixture
def lanes():
    return Simulation(random.Random(0))


def ferry_of(lanes, inflight_bytes=2 * NBYTES, cache_bytes=0):
    return Ferry(lanes, Arena(lanes.host, cache_bytes), inflight_bytes)


def run_program(lanes, num_actions=80):
    """A random program that puts tensors away and brings them back; whether all was seen as it should be."""
    choose, ferry = lanes.random.choice, ferry_of(lanes)
    tensors, slots, seen = [], [], []

    def put():
        value = lanes.random.randrange(200)
        tensors.append(lanes.full(NBYTES, value))
        slots.append((ferry.put(tensors[-1]), value))

    def get():
        slot, value = choose(slots)
        tensors.append(slot.get())
        seen.append((lanes.read(tensors[-1]), value))

    def prefetch():
        choose(slots)[0].prefetch()

    def forget_slot():
        slots.remove(choose(slots))

    def forget_tensor():
        if tensors:
            tensors.pop(lanes.random.randrange(len(tensors)))

    def change_stream():
        lanes.now = choose(lanes.computing)

    for _ in range(num_actions):
        if len(slots) < 2:
            put()
        choose((put, get, prefetch, forget_slot, forget_tensor, forget_tensor, change_stream))()
        lanes.run(choose((0, 0, 1, 8)))
    tensors.clear()
    slots.clear()
    return lanes.finish() and all(read == [value] * NBYTES for read, value in seen)


@pytest.mark.parametrize("seed", range(40))
def test_whatever_runs_when_all_see_the_right_values_and_nobody_writes_to_memory_of_another(seed):
    assert run_program(Simulation(random.Random(seed)))


def test_every_wait_is_needed(lanes):
    """Without any one of them some program goes wrong: so the test above would notice."""
    for seed in range(20):
        lanes.random.seed(seed)
        assert run_program(lanes)
    assert len(lanes.sites) == 8
    for site in lanes.sites:
        right = (run_program(Simulation(random.Random(seed), deaf_to=site)) for seed in range(100))
        assert not all(right), f"nobody misses {site}"


def test_a_host_that_runs_ahead_frees_device_memory_all_the_same(lanes):
    """Nothing has run yet, and no more than `inflight_bytes` wait for their copies."""
    ferry = ferry_of(lanes, inflight_bytes=3 * NBYTES)
    slots = [ferry.put(lanes.full(NBYTES, i)) for i in range(10)]
    assert lanes.num_live == 3
    assert lanes.finish() and lanes.num_copies == 10
    assert [lanes.read(slot.get()) for slot in slots[:7]] == [[]] * 7


def test_without_bytes_in_flight_the_device_waits_for_each_copy(lanes):
    slot = ferry_of(lanes, inflight_bytes=0).put(lanes.full(NBYTES, 7))
    assert lanes.num_live == 0
    read = lanes.read(slot.get())
    assert lanes.finish() and read == [7] * NBYTES


def test_what_was_copied_is_given_up_at_the_next_put(lanes):
    ferry = ferry_of(lanes, inflight_bytes=1 << 20)
    slots = [ferry.put(lanes.full(NBYTES, i)) for i in range(5)]
    assert lanes.num_live == 5
    lanes.finish()
    slots.append(ferry.put(lanes.full(NBYTES, 5)))
    assert lanes.num_live == 1


def test_a_slot_that_dies_takes_its_tensor_with_it(lanes):
    ferry = ferry_of(lanes, inflight_bytes=1 << 20)
    slots = [ferry.put(lanes.full(NBYTES, i)) for i in range(5)]
    slots[2].prefetch()
    del slots
    assert lanes.num_live == 0
    assert lanes.finish()


def test_what_is_wanted_before_it_left_is_not_copied_back(lanes):
    ferry = ferry_of(lanes)
    first, second = ferry.put(lanes.full(NBYTES, 1)), ferry.put(lanes.full(NBYTES, 2))
    second.prefetch()
    reads = [lanes.read(second.get()), lanes.read(first.get())]
    assert lanes.num_copies == 2
    assert lanes.finish() and reads == [[2] * NBYTES, [1] * NBYTES]


def test_what_is_prefetched_is_copied_once_and_then_for_every_get(lanes):
    slot = ferry_of(lanes, inflight_bytes=0).put(lanes.full(NBYTES, 3))
    slot.prefetch()
    slot.prefetch()
    assert lanes.num_copies == 2
    reads = [lanes.read(slot.get())]
    assert lanes.num_copies == 2
    reads += [lanes.read(slot.get()), lanes.read(slot.get())]
    assert lanes.num_copies == 4
    assert lanes.finish() and reads == [[3] * NBYTES] * 3


def test_prefetch_waits_for_nothing_on_the_stream_that_computes(lanes):
    slot = ferry_of(lanes, inflight_bytes=0).put(lanes.full(NBYTES, 3))
    lanes.now = lanes.computing[1]
    slot.prefetch()
    lanes.run(100, [lanes.now])
    assert not lanes.now.steps


def test_the_second_step_takes_no_new_host_memory(lanes):
    sizes = []
    arena = Arena(lambda nbytes: (sizes.append(nbytes), lanes.host(nbytes))[1], cache_bytes=1 << 30)
    ferry = Ferry(lanes, arena, inflight_bytes=100_000)

    def step():
        slots = [ferry.put(lanes.full(nbytes, 1)) for nbytes in (100, 70_000, 900_000, 33_000) * 3]
        for slot in reversed(slots):
            slot.prefetch()
            slot.get()

    step()
    first_step = list(sizes)
    step()
    assert sizes == first_step != []


def test_slots_may_die_where_locks_are_held():
    """As they do when the garbage collector runs: in the middle of another tensor's `put`."""
    slots = []

    class Collecting(Simulation):
        def is_over(self, event):
            slots.clear()
            return super().is_over(event)

        def host(self, nbytes):
            slots.clear()
            return super().host(nbytes)

    lanes = Collecting(random.Random(0))
    ferry = ferry_of(lanes, inflight_bytes=1 << 20)

    def work():
        for nbytes in (NBYTES, 2 << 20, NBYTES, 4 << 20):
            slots.append(ferry.put(lanes.full(nbytes, 1)))
            slots[0].prefetch()
            slots.append(ferry.put(lanes.full(nbytes, 1)))

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    thread.join(timeout=60)
    assert not thread.is_alive(), "a lock was taken twice"
    slots.clear()
    assert lanes.num_live == 0 and lanes.finish()


def test_threads_share_a_slot(lanes):
    """Backward of two graphs may ask for one tensor at once: each gets its own, and all are right."""
    slot, start, tensors = (
        ferry_of(lanes, inflight_bytes=0).put(lanes.full(NBYTES, 9)),
        threading.Barrier(4),
        [],
    )

    def work():
        start.wait()
        slot.prefetch()
        tensors.append(slot.get())

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    reads = [lanes.read(tensor) for tensor in tensors]
    assert lanes.finish() and reads == [[9] * NBYTES] * 4
    assert len({tensor.data_ptr() for tensor in tensors}) == 4


class HereStore:
    """Takes tensors in host memory for tensors of the simulated device."""

    def __init__(self, lanes, inflight_bytes=2000):
        self.put = ferry_of(lanes, inflight_bytes).put

    def accepts(self, tensor):
        return True


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layout", LAYOUTS)
def test_gives_back_every_layout_and_dtype(layout, dtype):
    lanes = Simulation(random.Random(0), eager=0)
    tensor = LAYOUTS[layout](numbers(dtype))
    slot = HereStore(lanes, inflight_bytes=0).put(tensor)
    for _ in range(2):
        restored = slot.get()
        assert (restored.shape, restored.stride()) == (tensor.shape, tensor.stride())
        assert restored.dtype == dtype and bytes_of(restored) == bytes_of(tensor)


class Model(nn.Module):
    """Saves tensors that lie in memory in many ways."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 24) for _ in range(4))

    def forward(self, x):  # [B, T, D]
        for layer in self.layers:
            q, k, v = layer(x).unflatten(-1, (3, 2, 4)).permute(2, 0, 3, 1, 4)  # [B, H, T, D/H]
            attended = F.scaled_dot_product_attention(q, k[:, :1].expand_as(k), v.sin() * v[..., :1])
            x = x + F.layer_norm(attended.transpose(1, 2).flatten(-2), (8,)).exp()
        return x


def trains_right(lanes):
    """Whether a model has the same gradients, in two steps with two backward passes each, with offload."""
    torch.manual_seed(0)
    model, x = Model(), torch.randn(2, 5, 8)
    fn = vf.offload(model, vf.policies.everything, store=HereStore(lanes))

    def gradients(forward):
        loss = forward(x).square().sum()
        parameters = tuple(model.parameters())
        return torch.autograd.grad(loss, parameters, retain_graph=True) + torch.autograd.grad(
            loss, parameters
        )

    right = all(all(map(torch.equal, gradients(fn), gradients(model))) for _ in range(2))
    assert fn.stats()["count", "moved"] > 40
    gc.collect()
    return lanes.finish() and right


@pytest.mark.parametrize("steps", [0, 1, 2, 1000])
def test_gradients_are_the_same_however_late_the_copies_are(steps):
    assert trains_right(Simulation(random.Random(0), eager=steps))


def test_gradients_are_not_the_same_without_a_wait():
    """So the test above would notice."""
    lanes = Simulation(random.Random(0), eager=0)
    assert trains_right(lanes)
    for function in ("_Departure.let_go", "_Arrival.take"):
        (site,) = {site for site in lanes.sites if site.startswith(function)}
        assert not trains_right(Simulation(random.Random(0), eager=0, deaf_to=site))
