"""Read-ahead: what backward needs next is asked for in time, never more than allowed, and never wrongly."""

import gc
import math
import random
import threading
import weakref

import pytest
import torch
from torch import nn

import veofunc as vf
from veofunc import policies as p
from veofunc.offload.ahead import ReadAhead


class LoggingStore:
    """Notes in what order its slots are put, asked for, and taken, and what is on its way at most.

    The one that is wanted next may be on its way still when others are asked for.
    """

    def __init__(self):
        self.log, self.num_put = [], 0
        self.on_its_way, self.most, self.largest = {}, 0, 0

    def accepts(self, tensor):
        return True

    def put(self, tensor):
        self.num_put += 1
        self.largest = max(self.largest, tensor.nbytes)
        return LoggingSlot(self, self.num_put - 1, tensor)

    def events(self, kind):
        return [number for event, number in self.log if event == kind]


class LoggingSlot:
    def __init__(self, store, number, tensor):
        self.store, self.number, self.content = store, number, tensor.clone()

    def prefetch(self):
        assert self.number not in self.store.on_its_way
        self.store.log.append(("prefetch", self.number))
        self.store.on_its_way[self.number] = self.content.nbytes
        self.store.most = max(self.store.most, sum(self.store.on_its_way.values()))

    def get(self):
        self.store.log.append(("get", self.number))
        self.store.on_its_way.pop(self.number, None)
        return self.content.clone()

    def __del__(self):
        self.store.on_its_way.pop(self.number, None)


def chain(w, num_steps=8):
    """Saves one tensor of 40 bytes at each step."""
    for _ in range(num_steps):
        w = w.sin()
    return w


def leaf():
    return torch.linspace(0.1, 0.9, 10, requires_grad=True)


def offloaded(fn, prefetch, store=None):
    return vf.offload(fn, p.everything, store=LoggingStore() if store is None else store, prefetch=prefetch)


@pytest.mark.parametrize("prefetch", [1, 40, 41, 100, 1 << 30])
def test_asks_in_reverse_order_for_each_once_and_before_it_is_taken(prefetch):
    store, w = LoggingStore(), leaf()
    offloaded(chain, prefetch, store)(w).sum().backward()
    assert store.num_put == 7  # the first saves w, a parameter
    assert store.events("get") == [6, 5, 4, 3, 2, 1, 0]
    assert store.events("prefetch") == [5, 4, 3, 2, 1, 0]  # the first is wanted at once
    for number in range(6):
        assert store.log.index(("prefetch", number)) < store.log.index(("get", number))


@pytest.mark.parametrize(
    ("prefetch", "ahead"), [(0, 0), (1, 1), (40, 1), (41, 2), (80, 2), (81, 3), (1 << 30, 6)]
)
def test_asks_for_as_many_bytes_as_allowed_and_at_most_one_tensor_more(prefetch, ahead):
    store = LoggingStore()
    offloaded(chain, prefetch, store)(leaf()).sum().backward()
    assert store.most == 40 * min(ahead + 1, 6) * (prefetch > 0)
    first = store.log[: 1 + ahead]
    assert first == [*(("prefetch", 5 - i) for i in range(ahead)), ("get", 6)]


def test_without_prefetch_nothing_is_asked_for():
    store = LoggingStore()
    offloaded(chain, 0, store)(leaf()).sum().backward()
    assert store.events("prefetch") == []
    assert len(store.events("get")) == 7


def test_a_slot_need_not_have_prefetch():
    class Store(LoggingStore):
        def put(self, tensor):
            slot = super().put(tensor)
            return type("Slot", (), {"get": lambda _: slot.get()})()

    store, w, other = Store(), leaf(), leaf()
    offloaded(chain, 100, store)(w).sum().backward()
    chain(other).sum().backward()
    assert torch.equal(w.grad, other.grad)
    assert len(store.events("get")) == 7


def test_a_second_pass_asks_again():
    store, w = LoggingStore(), leaf()
    out = offloaded(chain, 100, store)(w).sum()
    out.backward(retain_graph=True)
    first, store.log = store.log, []
    out.backward()
    assert store.log == first


def test_a_pass_that_begins_in_the_middle_asks_from_there():
    store, w = LoggingStore(), leaf()
    middle = []

    def body(w):
        middle.append(chain(w, 5))
        return chain(middle[0], 5)

    out = offloaded(body, 1 << 30, store)(w)
    torch.autograd.grad(middle[0].sum(), w, retain_graph=True)
    assert store.events("get") == [3, 2, 1, 0]
    assert store.events("prefetch") == [2, 1, 0]
    out.sum().backward()
    assert store.events("get")[4:] == [8, 7, 6, 5, 4, 3, 2, 1, 0]
    assert store.events("prefetch")[3:7] == [7, 6, 5, 4]


class SaveThree(torch.autograd.Function):
    """Saves three tensors, which backward takes in the order in which they were saved."""

    @staticmethod
    def forward(ctx, w):
        ctx.save_for_backward(w + 1, w + 2, w + 3)
        return w.sin()

    @staticmethod
    def backward(ctx, grad):
        one, two, three = ctx.saved_tensors
        return grad * (one - 1).cos() * (two - one) * (three - two)


@pytest.mark.parametrize("prefetch", [1, 60, 600, 1 << 30])
def test_a_step_back_within_an_operation_asks_for_nothing_twice(prefetch):
    def body(w):
        for _ in range(5):
            w = SaveThree.apply(w)
        return w

    store, w, other = LoggingStore(), leaf(), leaf()
    offloaded(body, prefetch, store)(w).sum().backward()
    body(other).sum().backward()
    assert torch.equal(w.grad, other.grad)
    assert store.events("get") == [3 * i + j for i in (4, 3, 2, 1, 0) for j in range(3)]
    asked = store.events("prefetch")
    assert len(asked) == len(set(asked))
    assert set(asked) == set(range(12)) or prefetch < 600
    assert store.most < prefetch + 2 * store.largest


def test_what_has_died_is_passed_over():
    parts = []

    def body(w):
        parts.append(chain(w, 4))
        out = chain(w, 4)
        parts.append(chain(w, 4))
        return out

    store = LoggingStore()
    out = offloaded(body, 1 << 30, store)(leaf())
    parts.clear()
    out.sum().backward()
    assert store.events("get") == [5, 4, 3]
    assert store.events("prefetch") == [4, 3]


def test_what_was_asked_for_and_dies_makes_room_for_others():
    """Else half of the budget would be lost with the part of the graph that is not needed."""

    def body(w):
        first = chain(w, 6)
        part = chain(w.detach().requires_grad_(), 4)
        return first, part, chain(w, 6)

    store = LoggingStore()
    first, part, last = offloaded(body, 80, store)(leaf())
    last.sum().backward()  # asks for two of the part, too
    assert len(store.on_its_way) == 2
    del part
    assert store.on_its_way == {}
    store.log = []
    first.sum().backward()
    assert store.log[:3] == [("prefetch", 3), ("prefetch", 2), ("get", 4)]


def test_keeps_what_is_asked_for_within_the_limit_of_each_call():
    store = LoggingStore()
    fn = offloaded(chain, 41, store)
    outs = [fn(leaf()).sum() for _ in range(3)]
    for out in outs:
        out.backward()
    assert store.most == 120
    assert store.on_its_way == {}


def random_program(seed):
    """A function that saves tensors of many sizes and shares, drops and reuses some."""
    choose = random.Random(seed)
    steps = [(choose.randrange(5), choose.random(), choose.random()) for _ in range(30)]

    def run(w):
        values = [w * 1.5]
        for kind, a, b in steps:
            x, y = (values[int(r * len(values))] for r in (a, b))
            if kind == 0:
                values.append(x.sin())
            elif kind == 1:
                values.append(x * y[: len(x)].mean())
            elif kind == 2:
                values.append(torch.cat([x, y])[: 1 + int(40 * a)].exp().tanh())
            elif kind == 3:
                values.append(SaveThree.apply(x[: 1 + len(x) // 2]))
            elif len(values) > 3:
                del values[int(a * len(values))]
        return sum(value.square().sum() for value in values)

    return run


@pytest.mark.parametrize("seed", range(5))
def test_whatever_runs_gradients_are_the_same_bit_for_bit_and_the_limit_holds(seed):
    fn, plain, w = random_program(seed), leaf(), leaf()
    expected = torch.autograd.grad(fn(plain), plain)[0]
    assert expected.isfinite().all()
    for prefetch in (0, 1, 100, 1 << 30):
        store = LoggingStore()
        loss = offloaded(fn, prefetch, store)(w)
        for i in range(2):
            assert torch.equal(torch.autograd.grad(loss, w, retain_graph=i == 0)[0], expected)
        assert store.most < prefetch + 2 * store.largest and (store.most > 0) == (prefetch > 0)
        del loss
        gc.collect()
        assert store.on_its_way == {}


def test_backward_may_run_on_another_thread():
    store, w, failed = LoggingStore(), leaf(), []
    loss = offloaded(chain, 100, store)(w).sum()

    def work():
        try:
            loss.backward()
        except BaseException as error:
            failed.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert failed == []
    assert store.events("prefetch") == [5, 4, 3, 2, 1, 0]


def test_graphs_may_go_backward_in_threads_at_once():
    model = nn.Sequential(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(8)))
    fn = vf.offload(model, p.everything, store=PlainStore(), prefetch=3000)
    x, start, results = torch.linspace(-1, 1, 64).view(4, 16), threading.Barrier(4), [None] * 4

    def work(number):
        start.wait()
        grads = []
        for i in range(5):
            loss = fn(x * (number + 1) + i).sum()
            grads.append(torch.autograd.grad(loss, list(model.parameters()), retain_graph=True))
            grads.append(torch.autograd.grad(loss, list(model.parameters())))
        results[number] = grads

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number, grads in enumerate(results):
        for i in range(5):
            loss = model(x * (number + 1) + i).sum()
            expected = torch.autograd.grad(loss, list(model.parameters()))
            for got in grads[2 * i : 2 * i + 2]:
                assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True))


class PlainStore(LoggingStore):
    """Without the log, which is for one thread."""

    def put(self, tensor):
        content = tensor.clone()
        return type("Slot", (), {"get": lambda _: content.clone(), "prefetch": lambda _: None})()


def test_an_order_of_many_dead_tensors_does_not_keep_them():
    ahead = ReadAhead(100)

    class Moved:
        gets = 0

        def prefetch(self):
            raise AssertionError("dead")

    kept = [Moved() for _ in range(50)]
    refs = [weakref.ref(moved) for moved in kept]
    for moved in kept:
        ahead.add(moved)
    assert ahead.position == 50
    del moved
    kept.clear()
    assert all(ref() is None for ref in refs)
    ahead.reached(50, 0)


@pytest.mark.parametrize("prefetch", [-1, 1.5, math.nan, math.inf, True, "64", None])
def test_prefetch_must_be_a_number_of_bytes(prefetch):
    with pytest.raises(ValueError, match=r"prefetch must be an int >= 0 \(bytes\), got"):
        offloaded(chain, prefetch)
