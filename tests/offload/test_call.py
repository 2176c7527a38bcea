"""One call: names, what `keep` holds of tensors that are named late, when they move, paths after errors."""

import contextlib
import functools
import threading
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import veofunc as vf
from tests.offload.table import CloneStore
from veofunc import checkpoint_name
from veofunc import policies as p
from veofunc.offload.call import running

KEEP, OFFLOAD = vf.Fate.KEEP, vf.Fate.OFFLOAD


def leaf(*shape):
    return torch.linspace(0.1, 0.9, torch.Size(shape).numel()).view(shape).requires_grad_()


def run(fn, policy, *args, **options):
    """What the policy was asked, with its answers, and the sums."""
    asked = []

    def ask(saved):
        asked.append((saved.op, saved.shape, saved.name, policy(saved)))
        return asked[-1][3]

    offloaded = vf.offload(fn, ask, store=CloneStore(), **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "offload moved nothing")
        out = offloaded(*args)
    return asked, {event: int(n) for event, n in offloaded.stats()["count"].items()}, out


def names_of(fn, *args):
    """The name of each tensor that is saved, as it is known in the end."""
    last = {}

    def note(saved):
        last[saved.index] = saved.name
        return OFFLOAD

    vf.offload(fn, note, store=CloneStore())(*args)
    return list(last.values())


# Names.


def test_gives_back_the_tensor_itself():
    x = leaf(3)
    assert checkpoint_name(x, "x") is x
    vf.offload(lambda x: assert_is(checkpoint_name(x, "x"), x).sum(), p.nothing)(x)


def assert_is(one, other):
    assert one is other
    return one


@pytest.mark.parametrize("x", [None, 3.0, [torch.ones(2)], "x"])
def test_only_tensors_have_names(x):
    with pytest.raises(TypeError, match="x must be a tensor, got"):
        checkpoint_name(x, "x")


@pytest.mark.parametrize("name", ["", None, 3, b"x", ("x",)])
def test_a_name_is_a_string_that_is_not_empty(name):
    with pytest.raises(ValueError, match="name must be a non-empty string, got"):
        checkpoint_name(torch.ones(2), name)


SAME = {
    "itself": lambda y: y,
    "transposed": lambda y: y.t(),
    "in another shape": lambda y: y.view(2, 12),
    "with more dimensions": lambda y: y.view(2, 2, 6)[None].permute(3, 0, 1, 2),
    "flat": lambda y: y.flatten(),
    "as another dtype": lambda y: torch.view_as_complex(y.view(4, 3, 2)),
    "changed in place": lambda y: y.mul_(0.5),
}
OTHERS = {
    "a part": lambda y: y[:2],
    "a column": lambda y: y[:, 1],
    "a clone": lambda y: y.clone(),
    "repeated": lambda y: y[:1].expand(4, 6),
}


@pytest.mark.parametrize("kind", [*SAME, *OTHERS])
def test_the_name_is_seen_on_every_view_of_the_whole_and_on_nothing_else(kind):
    def fn(w):
        y = checkpoint_name(w * 2, "y")
        return {**SAME, **OTHERS}[kind](y).sin()

    assert names_of(fn, leaf(4, 6)) == ["y" if kind in SAME else None]


def test_a_chunk_has_a_name_of_its_own():
    def fn(w):
        q, k, v = (w * 2).chunk(3, dim=-1)
        checkpoint_name(k, "k")
        return q.sin() * 1 + k.sin() * 1 + v.sin() * 1 + k.t().sin().t() * 1

    assert names_of(fn, leaf(4, 6)) == [None, "k", None, "k"]


def test_other_elements_of_the_same_number_from_the_same_place_have_no_name():
    def fn(w):
        y = w * 2
        checkpoint_name(y[:, :3], "left")
        return y[:, :3].sin().sum() + y[:2].sin().sum() + y.flatten()[:12].sin().sum()

    assert names_of(fn, leaf(4, 6)) == ["left", None, None]


def test_a_result_that_was_saved_before_it_was_named_is_decided_again():
    def fn(w):
        return checkpoint_name(w.softmax(-1), "probabilities") * 1

    asked, sums, _ = run(fn, p.names(offload=["probabilities"]), leaf(4, 6))
    assert [(name, fate) for _, _, name, fate in asked] == [(None, KEEP), ("probabilities", OFFLOAD)]
    assert sums["moved"] == 1


def test_and_again_with_each_further_name():
    def fn(w):
        y = checkpoint_name(checkpoint_name(w.exp(), "first"), "second")
        return checkpoint_name(checkpoint_name(y, "third"), "fourth") * 1

    asked, sums, _ = run(fn, p.names(save=["first"], offload=["third"]), leaf(4, 6))
    assert [name for _, _, name, _ in asked] == [None, "first", "second", "third"]  # then it is decided
    assert sums["moved"] == 1


def test_what_reads_no_names_is_asked_once():
    def fn(w):
        return checkpoint_name(w.exp(), "late") * 1

    offloaded = vf.offload(fn, p.all_of(p.everything, p.nothing), store=CloneStore())
    with pytest.warns(UserWarning, match="offloads none of the 1 that are no parameters"):
        offloaded(leaf(3))


def test_a_tensor_changed_between_saving_and_naming_is_not_moved():
    def fn(w):
        y = w.exp()
        out = y * 1
        with torch.no_grad():
            y.mul_(2)
        checkpoint_name(y, "late")
        return out.sum()

    _, sums, out = run(fn, p.names(offload=["late"]), leaf(4))
    assert sums["moved"] == 0
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.backward()


def test_parts_of_a_wrapper_are_named_with_it():
    x = TwoTensor(torch.ones(2, 3), torch.full((2, 3), 0.5))

    def fn(w):
        return checkpoint_name((x * w).exp(), "y").t().sin().sum()

    asked, sums, _ = run(fn, p.names(offload=["y"]), leaf(3))
    assert [name for _, _, name, fate in asked if fate is OFFLOAD] == ["y", "y"]
    assert (sums["moved"], sums["deduplicated"]) == (2, 0)


def test_a_name_holds_in_one_call_only():
    held = []

    def fn(w):
        if not held:
            held.append(checkpoint_name(w * 2, "y"))
        return held[0].sin()

    w = leaf(3)
    log = []
    note = vf.offload(fn, lambda saved: log.append(saved.name) or KEEP, store=CloneStore())
    with pytest.warns(UserWarning, match="moved nothing"):
        note(w)
    note(w)
    assert log == ["y", None]


def test_nested_calls_both_know_the_name():
    inner_log, outer_log = [], []

    def part(y):
        return checkpoint_name(y, "y").cos()

    inner = vf.offload(part, lambda saved: inner_log.append(saved.name) or OFFLOAD, store=CloneStore())

    def whole(w):
        y = w * 2
        inner(y)
        return y.sin()

    outer = vf.offload(whole, lambda saved: outer_log.append(saved.name) or OFFLOAD, store=CloneStore())
    outer(leaf(3))
    assert (inner_log, outer_log) == (["y"], ["y"])


def test_threads_know_their_own_names_only():
    ready, results = threading.Barrier(2), {}

    def fn(w, name, other):
        y = w * 2
        ready.wait()
        checkpoint_name(y if name == "mine" else shared, name)
        ready.wait()
        return y.sin() * shared.sin()

    shared = leaf(3) * 1

    def work(name, other):
        log = []
        offloaded = vf.offload(fn, lambda saved: log.append(saved.name) or OFFLOAD, store=CloneStore())
        offloaded(leaf(3), name, other)
        results[name] = log[:2]

    threads = [threading.Thread(target=work, args=args) for args in (("mine", "yours"), ("yours", "mine"))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {"mine": ["mine", None], "yours": [None, "yours"]}


@pytest.mark.parametrize("fails", [False, True])
def test_a_call_that_is_over_is_told_no_names(fails):
    calls = []

    def fn(w):
        calls.extend(running.get())
        if fails:
            raise KeyError
        return w.exp() * 1

    with contextlib.suppress(KeyError):
        vf.offload(fn, p.everything, store=CloneStore())(leaf(3))
    assert len(calls) == 1
    assert running.get() == ()


def test_outside_of_a_call_in_another_thread_and_in_backward_it_does_nothing():
    class Names(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return checkpoint_name(grad, "gradient") * 2

    out = vf.offload(lambda w: Names.apply(w).exp().sum(), p.everything, store=CloneStore())(leaf(3))
    out.backward()
    checkpoint_name(torch.ones(3), "nobody")


@pytest.mark.parametrize("missing", [("other",), ("other", "another")])
def test_names_that_were_not_given_are_reported_once(missing):
    def fn(w):
        return checkpoint_name(w * 2, "y").sin()

    offloaded = vf.offload(fn, p.names(offload=["y", *missing]), store=CloneStore())
    with pytest.warns(UserWarning, match=f"names that were not given: {', '.join(sorted(missing))}; name"):
        offloaded(leaf(3))
    offloaded(leaf(3))


def test_no_name_is_missed_where_nothing_is_saved():
    with torch.no_grad():
        vf.offload(lambda w: w * 2, p.names(offload=["y"]), store=CloneStore())(leaf(3))


def test_compiles_without_a_break():
    def fn(x):
        return checkpoint_name(x.sin(), "y").cos()

    compiled = torch.compile(fn, backend="eager", fullgraph=True)
    assert torch.equal(compiled(torch.ones(3)), fn(torch.ones(3)))
    offloaded = vf.offload(compiled, p.everything, store=CloneStore())
    w, plain = leaf(3), leaf(3)
    offloaded(w).sum().backward()
    fn(plain).sum().backward()
    assert torch.equal(w.grad, plain.grad)


def test_passes_through_the_transforms_of_torch_func():
    def fn(x):
        return checkpoint_name(x.sin(), "y").cos().sum()

    x = torch.linspace(0, 1, 6).view(2, 3)
    expected = torch.stack([-(row.sin().sin()) * row.cos() for row in x])
    assert torch.allclose(torch.func.grad(fn)(x), expected)
    assert torch.allclose(torch.vmap(torch.func.grad(fn))(x), expected)
    assert set(names_of(torch.vmap(fn), leaf(2, 3))) == {None}  # of all rows at once, which nobody has named


# Keep, with names.


def named_steps(w, order):
    """Saves tensors 0 to 5 of 40 bytes, which are named in another order, after all were saved."""
    values = [(w + i).exp() for i in range(6)]
    for i in order:
        checkpoint_name(values[i], f"step {i}")
    return sum(value.mean() for value in values)


@pytest.mark.parametrize(("keep", "moved"), [(0, 6), (39, 6), (40, 5), (120, 3), (240, 0), (1 << 30, 0)])
@pytest.mark.parametrize("order", [range(6), (3, 1, 5, 0, 2, 4)])
@pytest.mark.filterwarnings("ignore:offload moved nothing")
def test_keep_holds_its_bytes_of_those_that_were_named_last(keep, moved, order):
    policy = p.names(offload=[f"step {i}" for i in range(6)])
    moves = []

    class Store(CloneStore):
        def put(self, tensor):
            moves.append(tensor.clone())
            return super().put(tensor)

    w = leaf(10)
    out = vf.offload(named_steps, policy, store=Store(), keep=keep)(w, order)
    assert len(moves) == moved
    assert all(torch.equal(tensor, (w + i).exp()) for tensor, i in zip(moves, order, strict=False))
    out.backward()
    plain = leaf(10)
    named_steps(plain, order).backward()
    assert torch.equal(w.grad, plain.grad)


def test_keep_counts_a_wrapper_once_however_many_parts_have_the_name():
    x = TwoTensor(torch.ones(5), torch.ones(5))

    def fn(w):
        first = checkpoint_name((x * w).exp(), "y")
        return (first.sum() + checkpoint_name((x * w).exp(), "y").sum()).sum()

    _, sums, out = run(fn, p.names(offload=["y"]), leaf(5), keep=80)
    assert sums["moved"] == 0
    _, sums, out = run(fn, p.names(offload=["y"]), leaf(5), keep=79)
    assert sums["moved"] == 1
    out.backward()


# Tensors that an operation fills after autograd has saved them, and that it changes without saying so.


@pytest.fixture
def unfilled_memory_is_nan():
    before = torch.are_deterministic_algorithms_enabled()
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(before)


def noisy(x, **options):
    return F.rrelu(x, training=True, **options)


def noisy_part(w):
    y = w * 1
    noisy(y[1], inplace=True)
    return y.sin()


def noisy_gradient(w):
    y = noisy(w - 0.5).exp()
    (gradient,) = torch.autograd.grad(y.sum(), w, create_graph=True)
    return noisy(gradient - 1) * y


FILLED_LATE = {
    "last": lambda w: noisy(w - 0.5),
    "twice": lambda w: noisy(noisy(w - 0.5).sin() - 0.1).exp(),
    "before operations that save nothing": lambda w: noisy(w - 0.5) + w.sum() + 1,
    "before another that saves a parameter only": lambda w: noisy(w - 0.5) * w,
    "in place": lambda w: noisy(w - 0.5, inplace=True).exp(),
    "in place on a part": noisy_part,
    "named": lambda w: checkpoint_name(noisy(checkpoint_name(w - 0.5, "x")).exp(), "y") * 1,
    "differentiated inside": noisy_gradient,
}
CALLS = {
    "moved": lambda fn: vf.offload(fn, p.everything, store=CloneStore()),
    "named policy": lambda fn: vf.offload(fn, lambda saved: OFFLOAD, store=CloneStore()),
    "some kept": lambda fn: vf.offload(fn, p.everything, store=CloneStore(), keep=30),
    "nested": lambda fn: vf.offload(CALLS["moved"](fn), p.everything, store=CloneStore()),
    "checkpoint around": lambda fn: functools.partial(checkpoint, CALLS["moved"](fn), use_reentrant=False),
    "checkpoint inside": lambda fn: CALLS["moved"](lambda w: checkpoint(fn, w * 1, use_reentrant=False)),
}


@pytest.mark.parametrize("way", CALLS)
@pytest.mark.parametrize("kind", FILLED_LATE)
@pytest.mark.filterwarnings("ignore:offload moved nothing")
def test_what_an_operation_fills_after_it_was_saved_is_moved_when_it_is_full(
    kind, way, unfilled_memory_is_nan
):
    def gradient(fn):
        w = leaf(2, 6)
        torch.manual_seed(3)
        with set_checkpoint_early_stop(False):  # else it stops before the noise is there, without offload too
            out = fn(w)
        out.sum().backward()
        return [out.detach(), w.grad]

    fn = FILLED_LATE[kind]
    moved, plain = gradient(CALLS[way](fn)), gradient(fn)
    assert all(torch.equal(a, b) for a, b in zip(moved, plain, strict=True))


def test_all_of_it_is_moved_when_the_call_is_over():
    fn = vf.offload(FILLED_LATE["twice"], p.everything, store=CloneStore())
    out = fn(leaf(6))
    sums = fn.stats()["count"]
    assert sums["packed"] == sums["moved"] == 6  # of each rrelu its noise too
    out.sum().backward()
    assert fn.stats()["count", "restored"] == 6


def test_it_waits_for_its_own_operation_only():
    moves, x, y = [], torch.ones(3), torch.ones(4)

    class Store(CloneStore):
        def put(self, tensor):
            moves.append(tuple(tensor.shape))
            return super().put(tensor)

    def fn(w):
        first = w * x
        assert moves == []
        second = w.sum() * y
        assert moves == [(3,)]
        return first.sum() + checkpoint_name(second, "any").sum(), moves.copy()

    vf.offload(fn, p.everything, store=Store())(leaf(3))
    assert moves == [(3,), (4,)]
    del moves[:]
    _, before_the_end = vf.offload(fn, lambda saved: OFFLOAD, store=Store())(leaf(3))
    assert before_the_end == [(3,), (4,)]  # whoever gives a name is between two operations


def test_what_waits_is_known_again():
    x = torch.ones(2, 3)

    def fn(w):
        return (w * x).sum() + (w * x).sum()

    offloaded = vf.offload(fn, p.everything, store=CloneStore())
    offloaded(leaf(3)).backward()
    sums = offloaded.stats()["count"]
    assert (sums["moved"], sums["deduplicated"], sums["restored"]) == (1, 1, 2)


@pytest.mark.filterwarnings("ignore:offload moved nothing")
def test_a_backward_pass_inside_finds_what_waits():
    x = torch.linspace(0, 1, 6).view(2, 3)

    def fn(w):
        return torch.autograd.grad((w * x).sum(), w)[0]

    offloaded = vf.offload(fn, p.everything, store=CloneStore())
    assert torch.equal(offloaded(leaf(3)), fn(leaf(3)))
    sums = offloaded.stats()["count"]
    assert (sums["kept"], sums["moved"], sums["live"]) == (1, 0, 0)


def statistics_changed_by(norm):
    """Batch norm in evaluation, on statistics that it has changed in training since they were saved."""

    def fn(x, weight, mean, variance):
        trained = norm(x * 2, mean, variance, weight, training=True)
        return trained.exp().sum() + norm(x, mean, variance, weight, training=False).exp().sum()

    return fn


def batch_norm(x, mean, variance, weight, training):
    return F.batch_norm(x, mean, variance, weight, None, training, 0.5)


STATISTICS = {
    "function": batch_norm,
    "view": lambda x, mean, variance, weight, training: batch_norm(
        x, mean.view(-1), variance.view(2, 3).flatten(), weight, training
    ),
    "module": lambda x, mean, variance, weight, training: torch.func.functional_call(
        nn.BatchNorm1d(6, momentum=0.5).train(training),
        {"running_mean": mean, "running_var": variance, "weight": weight},
        (x,),
    ),
}


@pytest.mark.parametrize("kind", STATISTICS)
def test_statistics_that_are_no_buffers_are_moved_as_they_are_each_time(kind):
    def gradients(fn):
        weight, x = torch.ones(6, requires_grad=True), leaf(4, 6)
        fn(x, weight, torch.zeros(6), torch.ones(6)).backward()
        return weight.grad, x.grad

    fn = statistics_changed_by(STATISTICS[kind])
    moved = gradients(vf.offload(fn, p.everything, store=CloneStore()))
    assert all(torch.equal(a, b) for a, b in zip(moved, gradients(fn), strict=True))


@pytest.mark.parametrize("keep", [0, 24, 100, 1 << 20])
@pytest.mark.filterwarnings("ignore:offload moved nothing")
def test_a_plan_knows_when_these_are_moved(keep):
    def fn(x, weight, mean, variance):
        return statistics_changed_by(batch_norm)(noisy(x - 0.5), weight, mean, variance)

    args = leaf(4, 6), torch.ones(6, requires_grad=True), torch.zeros(6), torch.ones(6)
    plan = vf.plan_offload(fn, p.everything, store=CloneStore(), keep=keep)(*args)
    offloaded = vf.offload(fn, p.everything, store=CloneStore(), keep=keep)
    out = offloaded(*args)
    for kind, sums in (("count", plan.count), ("bytes", plan.bytes)):
        assert sums == {event: offloaded.stats()[kind, event] for event in sums}
    out.backward()


def test_other_tensors_without_history_are_still_moved_once():
    x, ids = torch.ones(4, 3), torch.tensor([0, 1, 1])

    def fn(w):
        return ((w * x)[ids] * (w * x)[ids]).sum()

    offloaded = vf.offload(fn, p.everything, store=CloneStore())
    offloaded(leaf(3))
    sums = offloaded.stats()["count"]
    assert (sums["moved"], sums["deduplicated"]) == (4, 2)


# Paths.


class Raises(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.linear, self.where = nn.Linear(4, 4), where

    def forward(self, x):
        if self.where == "before":
            raise KeyError(self.where)
        x = self.linear(x).exp()
        if self.where == "after":
            raise KeyError(self.where)
        return x


class Catches(nn.Module):
    def __init__(self, where):
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Sequential(Raises(where)), nn.Linear(4, 4)

    def forward(self, x):
        x = self.first(x).sin()
        try:
            x = self.inner(x)
        except KeyError:
            x = x.cos()
        return self.last(x).tanh()


@pytest.mark.parametrize("blocks", [None, "inner", "inner.0", "*"])
@pytest.mark.parametrize("where", ["before", "after", "nowhere"])
@pytest.mark.filterwarnings("ignore:offload moved nothing")
def test_paths_are_right_after_an_exception_that_a_module_around_has_caught(where, blocks):
    model, paths = nn.Sequential(Catches(where)), {}

    def note(saved):
        paths.setdefault(saved.op, saved.path)
        return OFFLOAD

    out = vf.offload(model, note, store=CloneStore(), blocks=blocks and f"0.{blocks}")(leaf(2, 4))
    assert paths["sin"] == ("0.inner.0.linear" if where != "before" else "0")
    assert paths["cos" if where != "nowhere" else "exp"] == "0.last" if where != "nowhere" else "0.inner.0"
    assert paths["tanh"] == "0"
    grads = torch.autograd.grad(out.sum(), list(model[0].last.parameters()))
    expected = torch.autograd.grad(model(leaf(2, 4)).sum(), list(model[0].last.parameters()))
    assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_paths_are_right_after_a_hook_that_raised_before_the_module_was_entered():
    model, paths = nn.Sequential(Catches("nowhere")), {}

    def raises(module, args):
        raise KeyError("hook")

    model[0].inner.register_forward_pre_hook(raises)

    def note(saved):
        paths[saved.op] = saved.path
        return OFFLOAD

    vf.offload(model, note, store=CloneStore())(leaf(2, 4))
    assert (paths["sin"], paths["cos"], paths["tanh"]) == ("0", "0.last", "0")


def test_what_an_operation_makes_has_the_number_of_tensors_saved_before_as_its_index():
    asked = []

    class Block(nn.Module):
        def forward(self, x):
            return (x * 2 + 1).sin().exp() + 3

    def note(saved):
        asked.append((saved.op, saved.index))
        return OFFLOAD

    vf.offload(nn.Sequential(Block()), note, store=CloneStore(), blocks="0")(leaf(3) * 1)
    made, known_at_the_end = asked[:5], asked[5:]
    assert made == [("mul", 0), ("add", 0), ("sin", 1), ("exp", 1), ("add", 2)]
    assert known_at_the_end == [("add", 0), ("exp", 1)]
