"""`offload` against the same model without it: equal bit for bit, whatever happens to the graph."""

import contextlib
import gc
import itertools
import math
import threading
import weakref

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from tensordict import TensorDict
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import veofunc as vf
from veofunc import policies as p


class ArrayStore:
    """A user's own store: it keeps the bytes of each tensor, gaps included, as a NumPy array."""

    def __init__(self):
        self.num_put = 0

    def accepts(self, tensor):
        return True

    def put(self, tensor):
        self.num_put += 1
        return ArraySlot(tensor)


class ArraySlot:
    def __init__(self, tensor):
        self.dtype, self.shape, self.stride = tensor.dtype, tensor.shape, tensor.stride()
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        flat = tensor.as_strided((span,), (1,)).resolve_conj().resolve_neg()
        self.array = flat.view(torch.uint8).numpy().copy()

    def get(self):
        flat = torch.from_numpy(self.array.copy()).view(self.dtype)
        return flat.as_strided(self.shape, self.stride)


class Attention(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x):  # [B, T, D]
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm1, self.attention = nn.LayerNorm(width), Attention(width)
        self.norm2, self.dropout = nn.LayerNorm(width), nn.Dropout(0.1)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.mlp(self.norm2(x)))


class Transformer(nn.Module):
    """Every kind of saved tensor in small: indices, masks, norms, attention, tied weights."""

    def __init__(self, width=16, num_layers=2, wrap=None):
        super().__init__()
        self.embed = nn.Embedding(20, width)
        self.layers = nn.ModuleList(Block(width) for _ in range(num_layers))
        self.register_buffer("scale", torch.linspace(0.5, 1.5, width))
        self.wrap = wrap

    def forward(self, tokens):  # [B, T]
        x = self.embed(tokens) * self.scale
        for layer in self.layers:
            x = layer(x) if self.wrap is None else self.wrap(layer, x)
        return x @ self.embed.weight.t()


TOKENS = torch.arange(24).view(2, 12) % 20


def loss_of(logits):
    return F.cross_entropy(logits[:, :-1].mT, TOKENS[:, 1:])


def outcome(model, fn, *args, loss=torch.sum):
    """Output, loss and all gradients of one step, from the same random numbers."""
    model.zero_grad()
    torch.manual_seed(1)
    out = fn(*args)
    value = loss(out)
    value.backward()
    return [out.detach(), value.detach(), *[parameter.grad.clone() for parameter in model.parameters()]]


def assert_equal(first, second):
    assert len(first) == len(second)
    assert all(a.dtype == b.dtype and torch.equal(a, b) for a, b in zip(first, second, strict=True))


def sums(fn, kind="count"):
    return {event: int(value) for event, value in fn.stats()[kind].items()}


def assert_books_balance(fn, ended=True):
    """What went in has come out, in tensors and in bytes; all of it, if all graphs are gone."""
    for kind in ("count", "bytes"):
        s = sums(fn, kind)
        assert s["packed"] == s["kept"] + s["deduplicated"] + s["moved"]
        assert all(value >= 0 for value in s.values())
        if ended:
            assert s["live"] == 0
            assert s["moved"] + s["deduplicated"] == s["restored"] + s["dropped"]


def mlp(width=8):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh())


def everything_moved(fn, **options):
    return vf.offload(fn, p.everything, store=ArrayStore(), **options)


POLICIES = {
    "everything": p.everything,
    "nothing": p.nothing,
    "larger_than": p.larger_than(1000),
    "in_modules": p.in_modules("layers.*.mlp", "layers.1"),
    "any_of": p.any_of(p.larger_than(4000), p.in_modules("layers.0.attention")),
    "all_of": p.all_of(p.larger_than(1000), p.in_modules("layers.1")),
    "not_": p.not_(p.in_modules("layers.*.attention")),
    "first_of": p.first_of(p.in_modules("layers.0"), p.larger_than(3000)),
    "own": lambda saved: vf.Fate.OFFLOAD if saved.index % 2 else vf.Fate.KEEP,
}
STORES = {
    "disk": vf.DiskStore,
    "own": lambda directory: ArrayStore(),
    "host": lambda directory: vf.HostStore(),
}


@pytest.mark.parametrize("keep", [0, 5000])
@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("policy", POLICIES)
def test_output_loss_and_gradients_are_bit_equal(policy, store, keep, tmp_path):
    torch.manual_seed(0)
    model = Transformer()
    fn = vf.offload(model, POLICIES[policy], store=STORES[store](tmp_path), keep=keep)
    idle = store == "host" and policy != "nothing"
    with pytest.warns(UserWarning, match="moved nothing") if idle else contextlib.nullcontext():
        with_offload = outcome(model, fn, TOKENS, loss=loss_of)
    assert_equal(outcome(model, model, TOKENS, loss=loss_of), with_offload)
    assert_books_balance(fn)
    assert (sums(fn)["moved"] > 0) is (store != "host" and policy != "nothing")


def test_every_saved_tensor_is_seen():
    torch.manual_seed(0)
    model, saved = Transformer(), []

    def note(tensor):
        saved.append(tensor.detach())
        return tensor

    with saved_tensors_hooks(note, lambda tensor: tensor):
        model(TOKENS)
    fn = everything_moved(model)
    torch.manual_seed(0)
    fn(TOKENS)
    assert sums(fn)["packed"] == len(saved)
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    movable = [t for t in saved if t.numel() and t.untyped_storage().data_ptr() not in owned]
    assert sums(fn)["moved"] + sums(fn)["deduplicated"] == len(movable)


def test_autocast_is_bit_equal(tmp_path):
    torch.manual_seed(0)
    model = Transformer()
    fn = vf.offload(model, p.everything, store=vf.DiskStore(tmp_path))

    def autocast(fn):
        def call(tokens):
            with torch.autocast("cpu", torch.bfloat16):
                return fn(tokens)

        return call

    def loss(logits):
        return loss_of(logits.float())

    plain = outcome(model, autocast(model), TOKENS, loss=loss)
    assert plain[0].dtype == torch.bfloat16
    assert_equal(plain, outcome(model, autocast(fn), TOKENS, loss=loss))
    assert_equal(
        plain,
        outcome(
            model,
            vf.offload(autocast(model), p.everything, model=model, store=ArrayStore()),
            TOKENS,
            loss=loss,
        ),
    )
    assert_books_balance(fn)


def test_double_precision_and_complex_are_bit_equal():
    w = torch.randn(4, 4, dtype=torch.complex128, requires_grad=True)

    def fn(w):
        z = w @ w.conj()
        return (z.conj() * z.imag * z.mT.conj().imag).abs().sum() + (z.real * w.imag).sum()

    offloaded = everything_moved(fn)
    (plain,), (moved,) = torch.autograd.grad(fn(w), w), torch.autograd.grad(offloaded(w), w)
    assert torch.equal(plain, moved)
    assert_books_balance(offloaded)


# What one graph can do to another.


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
def test_graphs_alive_at_once_go_backward_in_any_order(order):
    model = mlp()
    fn = everything_moved(model)
    batches = [torch.randn(5, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]
    plain = [outcome(model, model, batch)[2:] for batch in batches]
    alive = [fn(batch) for batch in batches]
    for i in order:
        grads = torch.autograd.grad(alive[i].sum(), list(model.parameters()))
        assert_equal(plain[i], grads)
    del alive
    assert_books_balance(fn)
    assert sums(fn)["dropped"] == 0


def test_gradients_accumulate_as_without():
    model = mlp()
    fn = everything_moved(model)
    batches = torch.randn(3, 5, 8)

    def accumulate(fn):
        model.zero_grad()
        sum(fn(batch).sum() for batch in batches).backward()
        fn(batches[0]).sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    assert_equal(accumulate(model), accumulate(fn))
    assert_books_balance(fn)


def test_a_part_that_is_never_differentiated_is_dropped():
    model = mlp()
    fn = everything_moved(lambda x: (model(x), model(x)))
    for _ in range(20):
        used, unused = fn(torch.ones(5, 8))
        used.sum().backward()
        del used, unused
        assert sums(fn)["live"] == sums(fn, "bytes")["live"] == 0
    assert sums(fn)["dropped"] == sums(fn)["restored"] > 0
    assert_books_balance(fn)


def test_live_counts_what_the_store_holds_and_nothing_stays_without_backward():
    fn = everything_moved(mlp())
    outs = [fn(torch.full((5, 8), float(i))) for i in range(4)]
    per_graph = sums(fn)["live"] // 4
    assert per_graph > 0
    assert sums(fn)["live"] == sums(fn)["moved"] == 4 * per_graph
    assert sums(fn, "bytes")["live"] == sums(fn, "bytes")["moved"]
    for i in range(1, 5):
        outs.pop()
        assert sums(fn)["live"] == (4 - i) * per_graph
    assert_books_balance(fn)
    assert sums(fn)["restored"] == 0


def test_retained_graphs_go_backward_again_and_again():
    model = mlp()
    fn = everything_moved(model)
    x = torch.randn(5, 8)
    plain = outcome(model, model, x)[2:]
    out = fn(x)
    parameters = list(model.parameters())
    for _ in range(3):
        assert_equal(plain, torch.autograd.grad(out.sum(), parameters, retain_graph=True))
    s = sums(fn)
    assert s["restored"] == s["moved"] + s["deduplicated"]
    assert s["restored_again"] == 2 * s["restored"]
    assert s["live"] == s["moved"] > 0
    del out
    assert_books_balance(fn)


def test_second_derivatives_are_bit_equal():
    model = mlp()
    fn = everything_moved(model)
    x = torch.randn(5, 8)

    def penalty(fn):
        parameters = list(model.parameters())
        grads = torch.autograd.grad(fn(x).pow(2).sum(), parameters, create_graph=True)
        return torch.autograd.grad(sum(g.pow(2).sum() for g in grads), parameters)

    assert_equal(penalty(model), penalty(fn))
    assert_books_balance(fn)


def test_a_gradient_taken_inside_is_bit_equal():
    """As in a gradient penalty: backward runs, and saves, while the hooks are active."""
    model = mlp()
    x = torch.randn(5, 8)

    def penalised(x):
        x = x.clone().requires_grad_()
        out = model(x)
        (grad,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        return out.sum() + grad.pow(2).sum()

    fn = everything_moved(penalised, model=model)
    assert_equal(outcome(model, penalised, x), outcome(model, fn, x))
    gc.collect()
    assert_books_balance(fn)


def test_saved_tensors_may_be_read_twice_in_one_backward():
    class Square(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        def backward(ctx, grad):
            return ctx.saved_tensors[0] * grad + ctx.saved_tensors[0] * grad

    w = torch.arange(4.0, requires_grad=True)
    fn = everything_moved(lambda: Square.apply(w * 1))
    fn().sum().backward()
    assert w.grad.tolist() == [0, 2, 4, 6]
    assert sums(fn)["restored"] == sums(fn)["restored_again"] == 1
    assert_books_balance(fn)


def test_saved_tensors_may_be_inspected_before_backward():
    w = torch.arange(4.0, requires_grad=True)
    fn = everything_moved(lambda: (w * 1).exp())
    out = fn()
    assert torch.equal(out.grad_fn._saved_result, out)
    out.sum().backward()
    assert torch.equal(w.grad, torch.arange(4.0).exp())


# Where things go wrong.


def test_an_exception_in_forward_leaves_no_hook_and_nothing_in_the_store():
    model = mlp()

    def fails(x):
        model(x)
        raise KeyError("mine")

    fn = everything_moved(fails, model=model)
    with pytest.raises(KeyError, match="mine"):
        fn(torch.ones(5, 8))
    gc.collect()
    assert sums(fn)["moved"] > 0
    assert_books_balance(fn)
    assert_no_hook(model)


def test_an_exception_in_backward_passes_and_nothing_stays():
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise KeyError(float(ctx.saved_tensors[0].sum()))

    model = mlp()
    fn = everything_moved(lambda x: model(Fails.apply(model(x) * 0)), model=model)
    out = fn(torch.ones(5, 8))
    with pytest.raises(KeyError, match=r"0\.0"):
        out.sum().backward()
    del out
    gc.collect()
    assert_books_balance(fn)
    assert sums(fn)["dropped"] > 0
    outcome(model, model, torch.ones(5, 8))


def assert_no_hook(model):
    assert torch._C._autograd._top_saved_tensors_default_hooks(False) is None
    for module in model.modules():
        assert not module._forward_hooks and not module._forward_pre_hooks
        assert not module._backward_hooks and not module._backward_pre_hooks


def test_nothing_is_left_on_the_model_after_a_call():
    model = mlp()
    before = {name: dict(vars(module)) for name, module in model.named_modules()}
    fn = everything_moved(model)
    out = fn(torch.ones(5, 8))
    assert_no_hook(model)
    out.sum().backward()
    assert_no_hook(model)
    assert {name: dict(vars(module)) for name, module in model.named_modules()} == before


class FailingStore(ArrayStore):
    """Takes two tensors and no more."""

    def put(self, tensor):
        if self.num_put == 2:
            raise OSError("the store is full")
        return super().put(tensor)


def test_a_store_that_fails_raises_in_forward_and_the_books_balance():
    model = mlp()
    fn = vf.offload(model, p.everything, store=FailingStore())
    with pytest.raises(OSError, match="the store is full"):
        fn(torch.ones(5, 8))
    gc.collect()
    assert_no_hook(model)
    assert_books_balance(fn)


def test_a_store_that_cannot_give_back_raises_in_backward():
    class LosingStore(ArrayStore):
        def put(self, tensor):
            return self

        def get(self):
            raise OSError("it is lost")

    fn = vf.offload(mlp(), p.everything, store=LosingStore())
    out = fn(torch.ones(5, 8))
    with pytest.raises(OSError, match="it is lost"):
        out.sum().backward()


# Several calls at once, and calls in calls.


def in_threads(works):
    errors = []

    def run(work):
        try:
            work()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@pytest.mark.parametrize("one_model", [True, False])
def test_two_calls_at_once_do_not_mix(one_model):
    """Each thread waits for the other in the middle of each forward pass."""
    barrier = threading.Barrier(2, timeout=20)
    models = [mlp()] * 2 if one_model else [mlp(), mlp()]
    paths = [[], []]
    batches = torch.randn(2, 5, 8)

    def between(model, x):
        x = model[1](model[0](x))
        barrier.wait()
        return model[3](model[2](x))

    def note(i):
        def policy(saved):
            paths[i].append((threading.get_ident(), saved.path, saved.index))
            return vf.Fate.OFFLOAD

        return policy

    plain = [outcome(model, model, batch)[2:] for model, batch in zip(models, batches, strict=True)]
    fns = [
        vf.offload(lambda x, model=model: between(model, x), note(i), model=model, store=ArrayStore())
        for i, model in enumerate(models)
    ]

    def work(i):
        for _ in range(5):
            paths[i].clear()
            grads = torch.autograd.grad(fns[i](batches[i]).sum(), list(models[i].parameters()))
            assert_equal(plain[i], grads)

    in_threads([lambda: work(0), lambda: work(1)])
    assert paths[0][0][0] != paths[1][0][0]
    for noted in paths:
        assert len({thread for thread, _, _ in noted}) == 1
        assert [path for _, path, _ in noted] == ["0", "1", "2", "3"]
    for fn in fns:
        assert_books_balance(fn)


def test_one_wrapped_function_may_run_in_two_threads():
    model = mlp()
    fn = everything_moved(model)
    batches = torch.randn(2, 5, 8)
    plain = [outcome(model, model, batch)[2:] for batch in batches]

    def work(i):
        for _ in range(20):
            assert_equal(plain[i], torch.autograd.grad(fn(batches[i]).sum(), list(model.parameters())))

    in_threads([lambda: work(0), lambda: work(1)])
    assert_books_balance(fn)
    assert sums(fn)["packed"] % 40 == 0


def test_nested_each_governs_its_own_part():
    model = mlp()
    inner = vf.offload(model[2:], p.everything, store=ArrayStore())
    outer = vf.offload(lambda x: inner(model[:2](x)), p.everything, model=model, store=ArrayStore())
    x = torch.randn(5, 8)
    assert_equal(outcome(model, model, x), outcome(model, outer, x))
    assert sums(inner)["moved"] == 2  # the input of the second Linear, the output of the second Tanh
    assert sums(outer)["moved"] == 2
    assert_books_balance(inner)
    assert_books_balance(outer)


def test_nested_directly_the_inner_one_governs():
    model = mlp()
    inner = everything_moved(model)
    outer = vf.offload(inner, p.nothing)
    x = torch.randn(5, 8)
    assert_equal(outcome(model, model, x), outcome(model, outer, x))
    assert sums(inner)["moved"] > 0
    assert_books_balance(inner)


def test_stays_out_of_other_saved_tensor_hooks():
    """A user's hooks inside `fn` govern what is saved under them, and those around it nothing in it."""
    w, packed = torch.ones(3, requires_grad=True), []

    def pack(tensor):
        packed.append(tensor.shape)
        return tensor.detach()

    def body():
        h = (w * 1).exp()
        with saved_tensors_hooks(pack, lambda tensor: tensor):
            return h.sin()

    fn = everything_moved(body)
    with saved_tensors_hooks(pack, lambda tensor: tensor):
        out = fn()
    assert (len(packed), sums(fn)["moved"]) == (1, 1)
    out.sum().backward()
    e = torch.ones(3).exp()
    assert torch.equal(w.grad, e.cos() * e)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_packs_nothing_and_warns_of_nothing_without_gradients(mode):
    model = mlp()
    fn = vf.offload(model, p.everything)
    with mode():
        out = fn(torch.ones(5, 8))
        assert torch.equal(out, model(torch.ones(5, 8)))
    assert sums(fn)["packed"] == 0


def test_trains_after_a_first_use_in_inference_mode(tmp_path):
    model = mlp()
    with torch.inference_mode():
        fn = vf.offload(model, p.everything, store=vf.DiskStore(tmp_path))
        fn(torch.ones(5, 8))
    x = torch.randn(5, 8)
    assert_equal(outcome(model, model, x), outcome(model, fn, x))


def test_an_inference_tensor_is_refused_as_without():
    w = torch.ones(3, requires_grad=True)
    with torch.inference_mode():
        x = torch.ones(3)
    fn = everything_moved(lambda: w * x)
    with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
        fn()


def test_vmap_over_parameters_is_bit_equal():
    w = torch.randn(3, 4, 4, requires_grad=True)
    x = torch.randn(5, 4)

    def body(w):
        return torch.vmap(lambda one: (x @ one).tanh().pow(2).sum())(w)

    fn = everything_moved(body)
    (plain,), (moved,) = torch.autograd.grad(body(w).sum(), w), torch.autograd.grad(fn(w).sum(), w)
    assert torch.equal(plain, moved)
    assert sums(fn)["moved"] > 0
    assert_books_balance(fn)


def test_inside_vmap_is_bit_equal():
    w = torch.randn(3, 4, 4, requires_grad=True)
    x = torch.randn(5, 4)
    fn = everything_moved(lambda one: (x @ one).tanh().pow(2).sum())
    out = torch.vmap(fn)(w)
    plain = torch.vmap(lambda one: (x @ one).tanh().pow(2).sum())(w)
    (moved,) = torch.autograd.grad(out.sum(), w)
    assert torch.equal(moved, torch.autograd.grad(plain.sum(), w)[0])
    del out
    assert_books_balance(fn)


# Changes in place.


def test_a_saved_tensor_changed_in_place_raises_kept_or_moved():
    for policy in (p.everything, p.nothing):
        for change in (lambda t: t.mul_(10), lambda t: t.view(-1)[0].zero_(), lambda t: t.detach().zero_()):
            w = torch.ones(3, requires_grad=True)
            held = []

            def body(w, held=held):
                held.append(w.clone())
                return (held[0] ** 2).sum()

            out = vf.offload(body, policy, store=ArrayStore())(w)
            change(held[0])
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                out.backward()


def test_a_tensor_changed_within_keep_raises_and_is_not_moved():
    w = torch.ones(100, requires_grad=True)

    def body():
        h = w * 1
        out = h.exp().sum() + (h**2).sum()
        h.detach().zero_()
        return out + sum((w * i).exp().sum() for i in range(4))

    fn = vf.offload(body, p.everything, store=ArrayStore(), keep=800)
    out = fn()
    assert (sums(fn)["moved"], sums(fn)["kept"]) == (3, 3)  # `h`, and the two newest
    with pytest.raises(
        RuntimeError,
        match=r"modified by an inplace operation: the output of mul of shape \[100\], which module '' saved",
    ):
        out.backward()
    del out
    torch.ones(1, requires_grad=True).sum().backward()  # until the next one, torch holds on to a failed one
    assert_books_balance(fn)


def test_a_parameter_changed_by_the_optimizer_between_forward_and_backward_raises_as_without():
    for wrap in (lambda model: model, everything_moved, lambda model: vf.offload(model, p.nothing)):
        model = mlp()
        x = torch.randn(5, 8, requires_grad=True)  # so that weights are needed in backward
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        fn = wrap(model)
        late = fn(x).sum()
        fn(x).sum().backward()
        optimizer.step()
        match = r"modified by an inplace operation: (a tensor of shape|\[torch.FloatTensor) \[8, 8\]"
        with pytest.raises(RuntimeError, match=match):
            late.backward()


def test_changes_that_autograd_allows_are_allowed():
    """Before it is saved, and to what backward does not need."""
    w = torch.ones(3, requires_grad=True)

    def body():
        h = (w * 2).add_(1)
        out = h.exp()
        total = h.add_(5).sum()  # `exp` saved its output
        return out.sum() + total

    fn = everything_moved(body)
    (plain,), (moved,) = torch.autograd.grad(body(), w), torch.autograd.grad(fn(), w)
    assert torch.equal(plain, moved)


def test_batch_norm_may_run_twice_before_backward():
    torch.manual_seed(0)

    def make():
        return nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.Dropout(0.5))

    model, other = make(), make()
    other.load_state_dict(model.state_dict())
    x = torch.randn(2, 3, 6, 6).contiguous(memory_format=torch.channels_last)
    fn = everything_moved(other)
    plain = outcome(model, lambda x: model(x) + model(2 * x), x)
    assert_equal(plain, outcome(other, lambda x: fn(x) + fn(2 * x), x))
    assert_equal(list(model.buffers()), list(other.buffers()))


# What is moved, how often, and what never is.


def test_parameters_buffers_and_their_views_are_never_moved():
    class Module(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 6))
            self.frozen = nn.Parameter(torch.randn(6, 6), requires_grad=False)
            self.register_buffer("buffer", torch.randn(6, 6))

        def forward(self, x):
            for matrix in (self.weight, self.frozen, self.buffer):
                for view in (
                    matrix,
                    matrix.t(),
                    matrix[:, :],
                    matrix.detach(),
                    matrix.detach().t(),
                    matrix.data,
                ):
                    x = F.linear(x * view.sum(), view)
                    x = x * matrix[0].expand_as(x) * matrix.view(-1)[6:12]
            return x

    module = Module()
    x = torch.randn(2, 6, requires_grad=True)
    owned = [t.untyped_storage().data_ptr() for t in (module.weight, module.frozen, module.buffer)]
    seen = []

    class Watching(ArrayStore):
        def put(self, tensor):
            seen.append(tensor.untyped_storage().data_ptr())
            return super().put(tensor)

    for fn in (
        vf.offload(module, p.everything, store=Watching()),
        vf.offload(lambda x: module(x), p.everything, model=module, store=Watching()),
    ):
        assert_equal(torch.autograd.grad(module(x).sum(), x), torch.autograd.grad(fn(x).sum(), x))
        assert sums(fn)["moved"] > 0
    assert not set(seen) & set(owned)


def test_parameters_passed_as_arguments_are_never_moved():
    model = mlp()
    params = TensorDict(dict(model.named_parameters())).detach()
    store = ArrayStore()

    def loss_fn(params, x):
        return torch.func.functional_call(model, dict(params.items()), x).pow(2).sum()

    for options in ({}, {"model": model}):
        shapes = []

        def note(saved, shapes=shapes):
            shapes.append(saved.shape)
            return vf.Fate.OFFLOAD

        fn = vf.offload(loss_fn, note, store=store, **options)
        grads, value = vf.grad_and_value(fn)(params, torch.ones(5, 8))
        expected, expected_value = torch.func.grad_and_value(loss_fn)(dict(params.items()), torch.ones(5, 8))
        assert torch.equal(value, expected_value)
        assert all(torch.equal(grads[name], g) for name, g in expected.items())
        assert set(shapes) == {(5, 8)}  # no weight is [5, 8]
        assert_books_balance(fn)


class Save(torch.autograd.Function):
    """Saves any tensors; `seen` are those that came back."""

    seen = ()

    @staticmethod
    def forward(ctx, w, *tensors):
        ctx.save_for_backward(*tensors)
        return w.clone()

    @staticmethod
    def backward(ctx, grad):
        Save.seen = ctx.saved_tensors
        return (grad, *[None] * len(Save.seen))


def save_and_restore(*tensors, **options):
    """Sends tensors through the graph; the function and what came back."""
    w = torch.ones(1, requires_grad=True)
    fn = everything_moved(lambda: Save.apply(w, *tensors), **options)
    fn().backward()
    assert_books_balance(fn)
    return fn, Save.seen


def test_a_tensor_saved_by_several_operations_is_moved_once():
    w = torch.ones(1, 5, requires_grad=True)

    def body():
        h = w * 1
        return (h.sin() + h.cos() + h.view_as(h).sinh() + h.detach() * h).sum()

    fn = everything_moved(body)
    (plain,), (moved,) = torch.autograd.grad(body(), w), torch.autograd.grad(fn(), w)
    assert torch.equal(plain, moved)
    assert (sums(fn)["moved"], sums(fn)["deduplicated"]) == (1, 3)
    assert (sums(fn, "bytes")["moved"], sums(fn, "bytes")["deduplicated"]) == (20, 60)
    assert_books_balance(fn)


def test_several_saved_views_of_one_tensor_stay_apart():
    """Same storage, and some of the same address, shape or strides."""
    h = torch.arange(36.0).view(6, 6)
    pieces = h.chunk(3, dim=-1)
    views = [
        h,
        h.t(),
        h[:3],
        h[3:],
        h[:, :3],
        h[::2],
        *pieces,
        h[:1].expand(6, 6),
        h.view(4, 9),
        h.view(torch.int32),
    ]
    _, restored = save_and_restore(*views)
    for before, after in zip(views, restored, strict=True):
        assert torch.equal(before, after)
        assert before.stride() == after.stride()
        assert before.dtype == after.dtype


@pytest.mark.parametrize(
    "body",
    [
        lambda h: h @ h.t(),
        lambda h: h.t() @ h * (h @ h.t()),
        lambda h: torch.stack([x.sin() for x in h.chunk(3, dim=-1)]) * h[:, 2:4],
        lambda h: math.prod(h.chunk(3, dim=-1)),
        lambda h: h[:3] * h[3:] * h[:3].t().mean() * h[::2],
        lambda h: h[:, :1].expand(6, 6) * h * h[0].expand(6, 6),
        lambda h: h * h.flip(0) * h.roll(1).t(),
    ],
)
def test_views_of_one_tensor_give_bit_equal_gradients(body):
    w = torch.randn(6, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0), requires_grad=True)

    def fn(w):
        h = w.tanh()
        return body(h).pow(2).sum()

    offloaded = everything_moved(fn)
    (plain,), (moved,) = torch.autograd.grad(fn(w), w), torch.autograd.grad(offloaded(w), w)
    assert torch.equal(plain, moved)
    assert_books_balance(offloaded)


@pytest.mark.parametrize(
    ("tensor", "nbytes"),
    [
        (torch.randn(1, 64).expand(1000, 64), 256),
        (torch.randn(1000, 1).expand(1000, 64), 4000),
        (torch.randn(()).expand(1000, 64), 4),
        (torch.randn(8, 9).t(), 288),
        (torch.randn(2, 3, 4, 5).contiguous(memory_format=torch.channels_last), 480),
        (torch.randn(10, 10)[:, 3], 40),
    ],
)
def test_moves_no_repetition_and_gives_back_the_strides(tensor, nbytes):
    fn, (restored,) = save_and_restore(tensor)
    assert sums(fn, "bytes")["moved"] == nbytes <= tensor.untyped_storage().nbytes()
    assert restored.stride() == tensor.stride()
    assert torch.equal(restored, tensor)


FLOAT8 = [getattr(torch, name) for name in dir(torch) if name.startswith("float8_")]
DTYPES = [
    torch.float16,
    torch.bfloat16,
    torch.float64,
    torch.bool,
    torch.int64,
    torch.uint8,
    torch.complex64,
    *FLOAT8,
]


@pytest.mark.parametrize("disk", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_moved_and_comes_back(dtype, disk, tmp_path):
    tensor = torch.arange(6).float().view(2, 3).to(dtype)
    w = torch.ones(1, requires_grad=True)
    fn = vf.offload(
        lambda: Save.apply(w, tensor), p.everything, store=vf.DiskStore(tmp_path) if disk else ArrayStore()
    )
    fn().backward()
    (restored,) = Save.seen
    assert sums(fn)["moved"] == 1
    assert restored.dtype == dtype
    assert restored.view(torch.uint8).tolist() == tensor.view(torch.uint8).tolist()


def test_scalars_are_moved_and_empty_tensors_kept():
    fn, (scalar, empty) = save_and_restore(torch.tensor(3.5), torch.ones(0, 4))
    assert (scalar.item(), scalar.shape, empty.shape) == (3.5, (), (0, 4))
    assert (sums(fn)["moved"], sums(fn)["kept"]) == (1, 1)


class Tagged(torch.Tensor):
    pass


STRANGE = {
    "sparse": lambda: torch.eye(3).to_sparse(),
    "subclass": lambda: torch.ones(3).as_subclass(Tagged),
    "mkldnn": lambda: torch.ones(4).to_mkldnn(),
    "meta": lambda: torch.ones(3, device="meta"),
    "more than its storage": lambda: torch.arange(10.0).unfold(0, 5, 1),
}


@pytest.mark.parametrize("kind", STRANGE)
def test_what_is_no_plain_strided_tensor_is_kept_as_it_is(kind):
    tensor = STRANGE[kind]()
    fn, (restored, _) = save_and_restore(tensor, torch.ones(3))
    assert (sums(fn)["moved"], sums(fn)["kept"]) == (1, 1)
    assert type(restored) is type(tensor)
    assert restored.layout == tensor.layout
    assert restored.device == tensor.device
    if kind != "meta":
        assert torch.equal(
            restored.to_dense() if tensor.layout != torch.strided else restored, tensor.to_dense()
        )


def test_the_values_of_a_jagged_tensor_are_moved():
    rows = [torch.rand(2, 3), torch.rand(3, 3)]
    fn, (restored, _) = save_and_restore(torch.nested.nested_tensor(rows, layout=torch.jagged), torch.ones(3))
    assert sums(fn)["moved"] == 2
    assert restored.layout == torch.jagged
    assert all(map(torch.equal, restored.unbind(), rows))


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_nested_tensors_are_kept():
    def body(w):
        nested = torch.nested.as_nested_tensor([w[:1], w[1:] * 2])
        return torch.nested.to_padded_tensor(nested.relu() * 3, 0.0).sum() + w.exp().sum()

    w = torch.tensor([[1.0, -2.0], [-3.0, 4.0], [5.0, 6.0]], requires_grad=True)
    operations = []

    def note(saved):
        operations.append(saved.op)
        return vf.Fate.OFFLOAD

    fn = vf.offload(body, note, store=ArrayStore())
    (plain,), (moved,) = torch.autograd.grad(body(w), w), torch.autograd.grad(fn(w), w)
    assert torch.equal(plain, moved)
    assert "exp" in operations and "relu" not in operations


def test_a_recycled_address_is_not_taken_for_the_tensor_that_was_there():
    w = torch.ones(4, 1 << 6, requires_grad=True)
    memory = np.empty((2, 4, 1 << 6), dtype=np.float32)

    def body():
        total = 0
        for i in range(100):
            memory[i % 2] = i
            factor = torch.from_numpy(memory[i % 2])  # a new storage where one was that is given up by now
            total = total + (w * factor).sum()
            del factor
        return total

    fn = everything_moved(body)
    fn().backward()
    assert w.grad.tolist() == [[sum(range(100))] * (1 << 6)] * 4
    assert sums(fn, "bytes")["moved"] == 100 * 4 * (1 << 8)
    assert_books_balance(fn)


def test_tensors_that_the_user_holds_are_never_emptied():
    model, held = mlp(), []

    def body(x):
        for layer in model:
            x = layer(x)
            held.append((x, x.detach().clone()))
        return x

    fn = everything_moved(body, model=model)
    x = torch.randn(5, 8)
    held.append((x, x.clone()))
    out = fn(x)
    assert sums(fn)["moved"] == 3  # x, and the results of both Tanh
    assert all(torch.equal(tensor, value) for tensor, value in held)
    out.sum().backward()
    assert all(torch.equal(tensor, value) for tensor, value in held)
    assert all(tensor.untyped_storage().nbytes() == 160 for tensor, _ in held)


def test_memory_of_moved_tensors_is_freed_during_forward():
    model, alive = mlp(), []

    def body(x):
        for layer in model:
            x = layer(x)
            alive.append(weakref.ref(x.untyped_storage()))
        return x

    out = everything_moved(body, model=model)(torch.ones(5, 8))
    assert [ref() is not None for ref in alive] == [False, False, False, True]  # `out` itself
    assert out.untyped_storage() is alive[-1]()


@pytest.mark.parametrize("policy", [p.everything, p.nothing])
@pytest.mark.parametrize("keep", [0, 1 << 20])
def test_an_output_that_nobody_differentiates_dies_at_once(policy, keep):
    """`exp` saves its output: held as it is, it would hold itself."""
    w = torch.ones(5, requires_grad=True)
    fn = vf.offload(lambda: (w * 1).exp(), policy, store=ArrayStore(), keep=keep)
    with contextlib.nullcontext() if keep == 0 or policy is p.nothing else pytest.warns(UserWarning):
        out = fn()
    gc.collect()
    gc.disable()
    try:
        storage = weakref.ref(out.untyped_storage())
        node = weakref.ref(out)
        del out
        assert node() is None and storage() is None
        assert sums(fn, "bytes")["live"] == 0
    finally:
        gc.enable()


def test_a_call_leaves_no_reference_cycle():
    model = mlp()
    fn = vf.offload(model, p.everything, store=ArrayStore(), keep=300)
    x = torch.ones(5, 8)
    fn(x).sum().backward()
    gc.collect()
    gc.disable()
    try:
        gc.set_debug(gc.DEBUG_SAVEALL)
        fn(x).sum().backward()
        gc.collect()
        assert [type(o).__name__ for o in gc.garbage if "veofunc" in type(o).__module__] == []
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


# keep=


def chain(w, num_steps=6):
    """Saves `num_steps` results of exp, 400 bytes each, oldest first: their sums tell them apart."""
    results = [(w * (i / 10)).exp() for i in range(num_steps)]
    return sum(result.sum() for result in results)


class Recording(ArrayStore):
    """Notes the first element of each tensor it is given."""

    def __init__(self):
        super().__init__()
        self.first = []

    def put(self, tensor):
        self.first.append(round(math.log(float(tensor.reshape(-1)[0])) * 10))
        return super().put(tensor)


@pytest.mark.parametrize(
    ("keep", "moved"),
    [(0, 6), (399, 6), (400, 5), (799, 5), (800, 4), (2000, 1), (2399, 1), (2400, 0)],
)
def test_keep_holds_the_newest_bytes_and_moves_the_oldest(keep, moved):
    w, store = torch.ones(100, requires_grad=True), Recording()
    fn = vf.offload(chain, p.everything, store=store, keep=keep)
    for call in range(3):  # each call has the whole budget
        store.first.clear()
        idle = call == 0 and not moved
        with pytest.warns(UserWarning, match="fit into keep=2400") if idle else contextlib.nullcontext():
            out = fn(w)
        assert store.first == list(range(moved))
        assert torch.equal(*[torch.autograd.grad(value, w)[0] for value in (out, chain(w))])
        del out
    assert sums(fn)["moved"] == 3 * moved
    assert_books_balance(fn)


def test_keep_is_the_same_for_each_of_several_graphs_alive():
    w, store = torch.ones(100, requires_grad=True), Recording()
    fn = vf.offload(chain, p.everything, store=store, keep=800)
    outs = [fn(w) for _ in range(3)]
    assert store.first == [0, 1, 2, 3] * 3
    outs[1].backward(retain_graph=True)
    outs[1].backward()
    fn(w)
    assert store.first == [0, 1, 2, 3] * 4


def test_keep_is_not_used_up_by_graphs_that_died_within_the_call():
    w, store = torch.ones(100, requires_grad=True), Recording()

    def body():
        for i in range(20, 27):
            (w * (i / 10)).exp()  # saved, and gone at once
        return chain(w, 3)

    fn = vf.offload(body, p.everything, store=store, keep=800)
    out = fn()
    assert store.first == [0]
    out.backward()
    assert_books_balance(fn)


def test_keep_does_not_move_older_tensors_for_those_that_died():
    w, store = torch.ones(100, requires_grad=True), Recording()

    def body():
        total = (w * 0.1).exp().sum()
        (w * 2.0).exp()
        return total + (w * 0.2).exp().sum()

    fn = vf.offload(body, p.everything, store=store, keep=800)
    with pytest.warns(UserWarning, match="keep=800"):
        fn().backward()
    assert store.first == []


def test_keep_counts_only_what_the_policy_offloads():
    w, store = torch.ones(100, requires_grad=True), Recording()
    fn = vf.offload(lambda: chain(w) + w[:10].mul(1).exp().sum(), p.larger_than(100), store=store, keep=800)
    fn().backward()
    assert store.first == [0, 1, 2, 3]


# What a policy is told.


def test_the_policy_is_told_path_operation_shape_dtype_bytes_and_index():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.layers = nn.Embedding(10, 4), nn.ModuleList([nn.Linear(4, 6), nn.Tanh()])

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return x.double().exp()

    model, told = Net(), []

    def note(saved):
        told.append(saved)
        return vf.Fate.OFFLOAD

    fn = vf.offload(model, note, store=ArrayStore())
    fn(torch.arange(3))
    cpu, f32 = torch.device("cpu"), torch.float32
    assert told[0] == vf.SavedTensor("embed", "", (3,), torch.int64, cpu, 24, 0)
    assert told[1] == vf.SavedTensor("layers.0", "embedding", (3, 4), f32, cpu, 48, told[1].index)
    assert told[2] == vf.SavedTensor("layers.1", "tanh", (3, 6), f32, cpu, 72, told[2].index)
    assert told[3] == vf.SavedTensor("", "exp", (3, 6), torch.float64, cpu, 144, told[3].index)
    assert len(told) == 4
    indices = [saved.index for saved in told]
    assert indices == sorted(indices) and indices[-1] == sums(fn)["packed"] - 1  # the weight counts too
    told.clear()
    fn(torch.arange(3))
    assert [saved.index for saved in told] == indices


def test_bytes_do_not_count_repetition():
    told = []

    def note(saved):
        told.append((saved.shape, saved.nbytes))
        return vf.Fate.OFFLOAD

    w = torch.ones(1, requires_grad=True)
    vf.offload(lambda: Save.apply(w, torch.ones(1, 5).expand(100, 5)), note, store=ArrayStore())()
    assert told == [((100, 5), 20)]


@pytest.mark.parametrize(
    ("globs", "expected"),
    [
        (
            ("layers.*.mlp",),
            {
                "layers.0.mlp.0",
                "layers.0.mlp.1",
                "layers.0.mlp.2",
                "layers.1.mlp.0",
                "layers.1.mlp.1",
                "layers.1.mlp.2",
            },
        ),
        (("layers.1.mlp.1",), {"layers.1.mlp.1"}),
        (("layers.[1-9].dropout", "embed"), {"layers.1.dropout", "embed"}),
        (("*.0.norm?",), {"layers.0.norm1", "layers.0.norm2"}),
    ],
)
def test_in_modules_moves_what_these_modules_save(globs, expected):
    torch.manual_seed(0)
    model, moved = Transformer(), set()
    inside = p.in_modules(*globs)

    def note(saved):
        if inside(saved) is vf.Fate.OFFLOAD:
            moved.add(saved.path)
        return inside(saved)

    fn = vf.offload(model, note, store=ArrayStore())
    fn(TOKENS)
    assert moved == expected
    other = vf.offload(lambda tokens: model(tokens), inside, model=model, store=ArrayStore())
    other(TOKENS)
    assert sums(other)["moved"] == sums(fn)["moved"] > 0


def test_a_module_that_raised_and_was_caught_is_left_by_the_time_its_parent_is():
    class Fails(nn.Module):
        def forward(self, x):
            raise ValueError

    class Parent(nn.Module):
        def __init__(self):
            super().__init__()
            self.fails = Fails()

        def forward(self, x):
            with contextlib.suppress(ValueError):
                self.fails(x)
            return x * 1

    model, paths = nn.Sequential(Parent(), nn.Tanh()), []

    def note(saved):
        paths.append(saved.path)
        return vf.Fate.OFFLOAD

    vf.offload(model, note, store=ArrayStore())(torch.ones(3, requires_grad=True))
    assert paths == ["1"]


# Options.


@pytest.mark.parametrize("keep", [-1, 1.0, 0.5, math.nan, math.inf, True, False, "1", None])
def test_keep_must_be_a_number_of_bytes(keep):
    with pytest.raises(ValueError, match=r"keep must be an int >= 0 \(bytes\), got"):
        vf.offload(mlp(), p.everything, keep=keep)


@pytest.mark.parametrize("policy", [None, "everything", 1024, vf.Fate.OFFLOAD, p])
def test_policy_must_be_a_function(policy):
    with pytest.raises(TypeError, match="policy must be a function SavedTensor -> Fate"):
        vf.offload(mlp(), policy)


@pytest.mark.parametrize("store", ["disk", 3, object(), vf.HostStore, p.everything])
def test_store_must_be_a_store(store):
    with pytest.raises(TypeError, match="store must have the methods of"):
        vf.offload(mlp(), p.everything, store=store)


def test_fn_must_be_callable_and_model_a_module():
    with pytest.raises(TypeError, match="fn must be callable"):
        vf.offload(torch.ones(3), p.everything)
    for policy in (p.everything, p.larger_than(3)):
        for transform in (vf.offload, vf.plan_offload):
            with pytest.raises(TypeError, match=r"fn comes first.*; got fn=\w+(\(3\))?, policy=Sequential"):
                transform(policy, mlp())
    with pytest.raises(TypeError, match="fn comes first"):
        vf.offload(lambda saved: vf.Fate.KEEP, mlp())
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module"):
        vf.offload(mlp(), p.everything, model="mlp")


@pytest.mark.parametrize(
    "policy",
    [
        p.in_modules("layer.*"),
        p.in_modules("layers.*.mlp", "head"),
        p.any_of(p.everything, p.in_modules("layers.7")),
        p.not_(p.first_of(p.in_modules("mlp"))),
    ],
)
def test_a_glob_that_matches_no_module_is_refused_with_the_paths_there_are(policy):
    glob = policy.globs[-1].replace("*", r"\*")
    with pytest.raises(
        ValueError, match=rf"glob '{glob}' .* matches no module of Transformer; its paths are embed, layers,"
    ):
        vf.offload(Transformer(), policy)


def test_globs_need_a_model():
    model = Transformer()
    with pytest.raises(ValueError, match="needs the modules that fn runs: pass model="):
        vf.offload(lambda x: model(x), p.in_modules("layers.*"))


def test_recompute_is_refused_with_what_to_do():
    def recompute(saved):
        return vf.Fate.RECOMPUTE

    model = mlp()
    for policy in (recompute, p.first_of(p.nothing, recompute)):
        with pytest.raises(ValueError, match=r"returned RECOMPUTE.*blocks="):
            vf.offload(model, policy)(torch.ones(5, 8))
    assert_no_hook(model)


def test_a_policy_that_was_not_made_is_refused():
    for uncalled in (p.larger_than, p.in_modules, p.budget):
        with pytest.raises(TypeError, match=rf"calling {uncalled.__name__}\(\.\.\.\), got the function"):
            vf.offload(mlp(), uncalled)


@pytest.mark.parametrize("answer", [True, None, "offload", 1])
def test_an_answer_that_is_no_fate_is_refused(answer):
    with pytest.raises(TypeError, match=r"must return a veofunc\.Fate, got"):
        vf.offload(mlp(), lambda saved: answer)(torch.ones(5, 8))


def test_an_exception_of_the_policy_passes():
    def policy(saved):
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        vf.offload(mlp(), policy, store=ArrayStore())(torch.ones(5, 8))


IDLE = [
    (
        {"policy": p.larger_than(1 << 30)},
        r"policy larger_than\(1073741824\) offloads none of the 4 that are no parameters",
    ),
    (
        {"policy": p.everything, "store": vf.HostStore()},
        r"HostStore takes none of the 4 that the policy offloads",
    ),
    (
        {"policy": p.everything, "keep": 1 << 30},
        r"all 4 that the policy offloads fit into keep=1073741824 bytes",
    ),
]


@pytest.mark.parametrize(("options", "why"), IDLE)
def test_says_once_why_nothing_was_moved_and_where(options, why):
    model = mlp()
    fn = vf.offload(model, **{"store": ArrayStore(), **options})
    with pytest.warns(UserWarning, match=rf"offload moved nothing: \d+ tensors were saved.* {why}") as warned:
        fn(torch.ones(5, 8))
    assert [warning.filename for warning in warned] == [__file__]
    fn(torch.ones(5, 8))  # a second warning would be an error
    with pytest.warns(UserWarning, match="moved nothing"):
        vf.offload(model, **{"store": ArrayStore(), **options})(torch.ones(5, 8))


def test_does_not_warn_if_asked_for_nothing_or_if_nothing_was_saved():
    vf.offload(mlp(), p.nothing)(torch.ones(5, 8))
    vf.offload(lambda x: x + 1, p.everything)(torch.ones(5, requires_grad=True))


# torch.func and checkpointing.


@pytest.mark.parametrize("transform", [torch.func.grad, torch.func.vjp, torch.func.jacrev])
def test_refuses_torch_func_with_the_name_of_what_works(transform):
    fn = everything_moved(lambda x: x.exp().sum())
    with pytest.raises(RuntimeError, match=r"veofunc\.grad_and_value"):
        transform(fn, torch.ones(3)) if transform is torch.func.vjp else transform(fn)(torch.ones(3))


def test_torch_func_grad_inside_is_refused_by_torch_and_leaves_no_hook():
    model = mlp()
    fn = everything_moved(lambda x: torch.func.grad(lambda x: model(x).sum())(x), model=model)
    with pytest.raises(RuntimeError, match="saved tensor hooks"):
        fn(torch.ones(5, 8))
    assert_no_hook(model)


def test_works_inside_and_around_veofunc_grad():
    def loss(x):
        return (x.exp() * x.sin()).sum()

    x = torch.randn(5)
    expected = torch.func.grad(loss)(x)
    fn = everything_moved(loss)
    assert torch.equal(vf.grad(fn)(x), expected)
    assert torch.equal(everything_moved(vf.grad(loss))(x), expected)
    second = vf.grad(lambda x: vf.grad(fn)(x).sum())(x)
    assert torch.equal(second, vf.grad(lambda x: vf.grad(loss)(x).sum())(x))
    gc.collect()
    assert_books_balance(fn)


def selective():
    def matmuls(ctx, op, *args, **kwargs):
        wanted = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if wanted else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(matmuls)


def nested_checkpoint(layer, x):
    def inside(x):
        return checkpoint(layer, x, use_reentrant=False)

    return checkpoint(inside, x, use_reentrant=False)


CHECKPOINTS = {
    "reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=True),
    "non-reentrant": lambda layer, x: checkpoint(layer, x, use_reentrant=False),
    "selective": lambda layer, x: checkpoint(layer, x, use_reentrant=False, context_fn=selective),
    "nested": nested_checkpoint,
    "mixed": lambda layer, x: checkpoint(
        lambda x: checkpoint(layer, x, use_reentrant=True), x, use_reentrant=False
    ),
}


@pytest.mark.parametrize("disk", [True, False])
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_checkpointing_inside_is_bit_equal(kind, disk, tmp_path):
    torch.manual_seed(0)
    model = Transformer(wrap=CHECKPOINTS[kind])
    plain = outcome(model, model, TOKENS, loss=loss_of)
    model.wrap = None
    assert_equal(plain, outcome(model, model, TOKENS, loss=loss_of))
    model.wrap = CHECKPOINTS[kind]
    fn = vf.offload(model, p.everything, store=vf.DiskStore(tmp_path) if disk else ArrayStore())
    assert_equal(plain, outcome(model, fn, TOKENS, loss=loss_of))
    gc.collect()
    assert_books_balance(fn)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_the_inputs_of_a_checkpointed_region_are_governed_and_its_inside_is_not(use_reentrant):
    model = mlp()
    told = []

    def note(saved):
        told.append(saved.shape)
        return vf.Fate.OFFLOAD

    def body(x):
        return checkpoint(model, x * model[0].bias, use_reentrant=use_reentrant)

    fn = vf.offload(body, note, model=model, store=ArrayStore())
    x = torch.randn(5, 8)
    assert_equal(outcome(model, body, x), outcome(model, fn, x))
    assert told == [(5, 8), (5, 8)]  # x, and the input of the region
    assert_books_balance(fn)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_offload_inside_a_checkpointed_region_is_bit_equal(use_reentrant):
    """What the region saves is moved, in both passes if the region's own hooks do not come first."""
    model = mlp()
    fn = everything_moved(model)

    def body(x):
        return checkpoint(fn, x * model[0].bias, use_reentrant=use_reentrant)

    x = torch.randn(5, 8)
    plain = outcome(model, lambda x: model(x * model[0].bias), x)
    assert_equal(plain, outcome(model, body, x))
    gc.collect()
    assert_books_balance(fn)


@pytest.mark.parametrize("inside", [lambda model: model, vf.monitor_router], ids=["alone", "monitored"])
def test_a_compiled_function_inside_is_compiled_once(inside):
    graphs = []

    def backend(graph, example_inputs):
        graphs.append(graph)
        return graph.forward

    class Gate(torch.nn.Linear):
        def forward(self, x):
            logits = super().forward(x)
            weights, ids = logits.softmax(-1).topk(2)
            return logits, weights, ids

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.out = Gate(8, 4), torch.nn.Linear(8, 8)

        def forward(self, x):
            return self.out(x) * self.gate(x)[1].sum(-1, keepdim=True)

    torch.compiler.reset()
    fn = vf.offload(torch.compile(inside(Model()), backend=backend), vf.policies.nothing)
    fn(torch.ones(3, 8))
    num_graphs = len(graphs)
    for _ in range(12):  # more than torch compiles one function anew before it gives up
        fn(torch.ones(3, 8))
    assert len(graphs) - num_graphs <= 1  # the first call of a monitor looks at every module


def test_says_that_there_were_only_parameters():
    weight = torch.ones(4, requires_grad=True)
    fn = vf.offload(lambda x: (x * weight).sum(), vf.policies.everything, store=ArrayStore())
    with pytest.warns(UserWarning, match="2 tensors were saved, and all of them are parameters, buffers"):
        fn(torch.ones(4, requires_grad=True))


def test_follows_the_modules_only_for_policies_that_read_paths():
    model = mlp()
    hooks_seen = []

    class Watch(torch.nn.Module):
        def forward(self, x):
            hooks_seen.append(len(self._forward_pre_hooks))
            return x * 2

    model.append(Watch())
    p = vf.policies
    for policy in (p.everything, p.any_of(p.larger_than(8), p.not_(p.nothing))):
        vf.offload(model, policy, store=ArrayStore())(torch.ones(5, 8))
    assert hooks_seen == [0, 0]
    for policy in (p.in_modules("0"), p.first_of(p.in_modules("0")), lambda saved: vf.Fate.OFFLOAD):
        vf.offload(model, policy, store=ArrayStore())(torch.ones(5, 8))
    assert hooks_seen[2:] == [1, 1, 1]
