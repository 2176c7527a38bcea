"""What a block may do: each body is a function of a module with all sorts of parts, and of x [4, 8]."""

import contextlib
import ctypes
import random

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import veofunc as vf


class CloneStore:
    """A user's own store: it keeps clones, gaps included."""

    def accepts(self, tensor):
        return True

    def put(self, tensor):
        return CloneSlot(tensor)


class CloneSlot:
    def __init__(self, tensor):
        self.shape, self.stride = tensor.shape, tensor.stride()
        span = 1 + sum((n - 1) * s for n, s in zip(self.shape, self.stride, strict=True))
        self.content = tensor.detach().as_strided((span,), (1,)).resolve_conj().resolve_neg().clone()

    def get(self):
        return self.content.clone().as_strided(self.shape, self.stride)


class Block(nn.Module):
    def __init__(self, body, seed=0):
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.body = body
            self.w, self.v = nn.Parameter(torch.randn(8, 8) * 0.3), nn.Parameter(torch.randn(8))
            self.norm, self.batch_norm = nn.LayerNorm(8), nn.BatchNorm1d(8)
            self.qkv, self.up, self.down = nn.Linear(8, 24), nn.Linear(8, 16), nn.Linear(16, 8)
            self.dropout, self.embed = nn.Dropout(0.25), nn.Embedding(5, 8)
            self.conv, self.batch_norm2d = nn.Conv2d(2, 2, 3, padding=1), nn.BatchNorm2d(2)
            self.lstm, self.gru = nn.LSTM(8, 8, 2, dropout=0.25), nn.GRU(8, 4, bidirectional=True)
            self.register_buffer("average", torch.zeros(8))

    def forward(self, x):
        return self.body(self, x)


class Model(nn.Module):
    """Blocks `layers.*`, between operations of its own."""

    def __init__(self, *bodies):
        super().__init__()
        self.layers = nn.ModuleList(Block(body, seed) for seed, body in enumerate(bodies))

    def forward(self, x):  # [4, 8]
        x = x * 1.5
        for layer in self.layers:
            x = layer(x)
        return x.sin()


INPUT = torch.randn(4, 8, generator=torch.Generator().manual_seed(5))


def step(fn, model, x=INPUT):
    """Everything that one step of training gives and leaves behind, from the same random numbers."""
    model.zero_grad()
    x = x.clone().requires_grad_()
    torch.manual_seed(1)
    out = fn(x)
    after_forward = torch.get_rng_state()
    (out * torch.linspace(0.5, 1.5, out.numel()).view_as(out)).sum().backward()
    gradients = [tensor.grad for tensor in (x, *model.parameters()) if tensor.grad is not None]
    return [out.detach(), after_forward, torch.get_rng_state(), *gradients, *model.buffers()]


def steps(fn, model, num_steps=2):
    """Two steps: the second one finds what the first has left behind."""
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    try:
        return [tensor.clone() for i in range(num_steps) for tensor in step(fn, model, INPUT + i)]
    finally:
        model.load_state_dict(state)


def assert_equal(first, second, what=""):
    assert len(first) == len(second)
    for i, (a, b) in enumerate(zip(first, second, strict=True)):
        assert a.dtype == b.dtype and torch.equal(a, b), f"{what}: entry {i} of {len(first)} differs"


def sums(fn, kind="count"):
    return {event: int(value) for event, value in fn.stats()[kind].items()}


def assert_books_balance(fn):
    """What went in has come out, in tensors and in bytes. All graphs are gone."""
    for kind in ("count", "bytes"):
        s = sums(fn, kind)
        assert all(value >= 0 for value in s.values()), s
        assert s["packed"] == s["kept"] + s["moved"] + s["deduplicated"] + s["recomputed"], s
        assert s["moved"] + s["deduplicated"] == s["restored"] + s["dropped"], s
        assert s["live"] == 0, s


def write_raw(tensor: Tensor, value: float) -> None:
    """Writes to the memory of a float32 tensor as a kernel does that PyTorch knows nothing of."""
    span = tensor.untyped_storage().nbytes() // 4 - tensor.storage_offset()
    floats = (ctypes.c_float * span).from_address(tensor.data_ptr())
    for index in range(tensor.numel()):
        place = 0
        for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
            place, index = place + index % size * stride, index // size
        floats[place] = value


# Transformers.


def transformer(m, x):
    q, k, v = (t.view(4, 2, 4).transpose(0, 1) for t in m.qkv(m.norm(x)).chunk(3, dim=-1))
    mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, dropout_p=0.25).transpose(0, 1)
    x = x + vf.checkpoint_name(mixed.reshape(4, 8) @ m.w, "mixed")
    return x + m.dropout(m.down(F.gelu(vf.checkpoint_name(m.up(m.norm(x)), "up"))))


def attention_by_hand(m, x):
    q, k, v = m.qkv(x).view(4, 3, 2, 4).permute(1, 2, 0, 3)
    scores = torch.einsum("hqd,hkd->hqk", q, k) / 2
    mask = torch.ones(4, 4, dtype=torch.bool).tril()
    probabilities = m.dropout(scores.masked_fill(~mask, -torch.inf).softmax(-1))
    return (probabilities @ v).transpose(0, 1).flatten(1) + x


def fused_attention(m, x):
    q, k, v = m.qkv(x).view(1, 4, 3, 2, 4).permute(2, 0, 3, 1, 4)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(4, 8) + x


def mixture_of_experts(m, x):
    weights, experts = (x @ m.w[:, :3]).softmax(-1).topk(2)
    out = torch.zeros_like(x)
    for expert in range(3):
        token, place = torch.where(experts == expert)
        hidden = F.silu(x[token] @ m.w + expert) * weights[token, place, None]
        out.index_add_(0, token, hidden)
    counts = F.one_hot(experts, 3).sum((0, 1))
    return out + x + (weights.mean() * counts.float().mean())


def tied_weights_used_twice(m, x):
    for _ in range(3):
        x = torch.tanh(x @ m.w) @ m.w.t()
    return x


# Other models.


def batch_norm(m, x):
    return F.relu(m.batch_norm(x @ m.w)) @ m.w


def batch_norm_in_evaluation(m, x):
    m.batch_norm.eval()
    return m.batch_norm(m.batch_norm(x @ m.w).sin()).cos()


def convolutions(m, x):
    image = x.view(1, 2, 4, 4).contiguous(memory_format=torch.channels_last)
    image = F.relu(m.batch_norm2d(m.conv(image)), inplace=True)
    pooled = F.max_pool2d(m.conv(image), 2)
    return F.interpolate(F.group_norm(pooled, 2), scale_factor=2).sigmoid().reshape(4, 8)


def lstm(m, x):
    out, (h, _) = m.lstm(x.view(2, 2, 8))
    return (out * h.sum()).reshape(4, 8)


def gru(m, x):
    return m.gru(x.view(2, 2, 8))[0].reshape(4, 8)


def embedding(m, x):
    ids = (x.detach() * 2).long().clamp(0, 4)  # [4, 8]
    return m.embed(ids).sin().mean(1) + x


# Views, and changes in place.


def relu_in_place(m, x):
    return F.relu_(x @ m.w) @ m.w


def residual_in_place(m, x):
    h = (x @ m.w).sin()
    h += x
    return h.mul_(2).add_(1).sigmoid_()


def chunks_changed_in_place(m, x):
    qkv = m.qkv(x)
    a, b, c = qkv[:, :8], qkv[:, 8:16], qkv[:, 16:]
    a.mul_(2)
    b[:2].add_(c[2:])
    return (a.sin() * b.cos() * c).sin()


def view_changed_through_its_base(m, x):
    h = x @ m.w
    row = h[1]
    before = row + 1
    h.mul_(2)
    return (h.sin() + row * before.cos()).sin()


def argument_changed_in_place(m, x):
    before = (x + 1).sin()
    x = x.clone() if x.requires_grad and x.is_leaf else x
    x.add_(1)
    return (before * x).sin()


def dropout_in_place(m, x):
    return F.dropout(F.dropout((x @ m.w).cos(), 0.5, inplace=True) + 1, 0.5, inplace=True)


def indexing_in_place(m, x):
    h = (x @ m.w).sin()
    h[:, 2] = x[:, 3].cos()
    h[h > 0.5] = 0.25
    h.masked_fill_(x < -1, 2)
    h.scatter_(1, torch.tensor([[0], [1], [2], [3]]), x[:, :1])
    return h.cos()


def expanded(m, x):
    wide = m.v.expand(4, 8)
    column = (x @ m.w)[:, :1].expand(4, 8)
    return (column.sin() * wide.cos() * column).sin() + torch.broadcast_to(x.sum(), (4, 8)).sin()


def transposed(m, x):
    h = (x @ m.w).t().sin()
    return torch.as_strided(h, (4, 8), (8, 1)).cos() * h.mT.flip(0).roll(1, 0)


def concatenated(m, x):
    a, b = (x @ m.w).split(4, dim=1)
    stacked = torch.stack([a.sin(), b.cos()]).unbind()
    return torch.cat(stacked, dim=1).cumsum(0).exp().log1p() + torch.cat([a, b], 1).logsumexp(1, True)


def viewed_as_another_dtype(m, x):
    bits = (x @ m.w).detach().view(torch.int32)
    return x * (bits % 7).float().sin() + (bits.view(torch.float32) * x).sin()


def given_other_memory(m, x):
    h = torch.full((4, 8), 2.0).cos()
    other = torch.full((4, 8), 3.0).sin()
    h.set_(other)
    return (x @ m.w * h).sin()


def results_written_to_a_given_tensor(m, x):
    mask = torch.empty(0)
    with_shape = torch.empty(4, 8)
    torch.gt(x.detach(), 0.2, out=with_shape)
    torch.add(with_shape, 1, out=mask)
    return (x @ m.w * mask.sin()).sin() * with_shape


def returns_its_argument(m, x):
    (x @ m.w).sin().sum()
    return x


# Numbers of all kinds.


def complex_numbers(m, x):
    z = torch.view_as_complex((x @ m.w).view(4, 4, 2))
    z = z.conj() * z.sin() + torch.fft.fft(z).conj().imag
    return torch.view_as_real((z.conj() * z).resolve_conj()).reshape(4, 8).sin()


def double_and_half_precision(m, x):
    h = (x.double() @ m.w.double()).sin().bfloat16()
    return (h * 0.5).float().exp().double().cos().float()


def truth_values_and_indices(m, x):
    h = x @ m.w
    order = h.argsort(dim=1)
    h = torch.where(h > 0, h.sin(), h.cos()).gather(1, order)
    return h.clamp(-0.5, 0.5) * h.max(dim=1, keepdim=True).values + h.index_select(0, order[0, :4] % 4)


def no_elements_and_no_dimensions(m, x):
    nothing, number = x[:0] @ m.w, (x @ m.w).mean()
    return x * number.sin().exp() + torch.cat([nothing.sin(), x]).cos() + nothing.sum()


def autocast(m, x):
    with torch.autocast("cpu", torch.bfloat16):
        h = F.gelu(m.up(x)).float()
        with torch.autocast("cpu", enabled=False):
            h = torch.tanh(m.down(h))
        return (m.down(m.up(h).relu()) @ m.w).float()


def subclass(m, x):
    h = (x @ m.w).sin()
    mask = TwoTensor((x > 0).float(), (x < 1).float())
    before = mask.a.cos()
    mask.mul_(2)
    return h * mask.a.sin() * mask.b.exp() + (h * before).cos()


def sparse(m, x):
    h = (x @ m.w).sin()
    return torch.sparse.mm(torch.eye(4).to_sparse(), h).cos() @ m.w


# Random numbers.


def random_numbers(m, x):
    h = x @ m.w + torch.rand_like(x) * torch.randn(4, 8)
    h = h * torch.bernoulli(torch.full((4, 8), 0.5)) + torch.empty_like(h).normal_()
    h = F.rrelu(h, training=True) + torch.empty(8).exponential_()
    return F.alpha_dropout(h.sin(), 0.25, training=True)[torch.randperm(4)].cos()


def random_numbers_of_a_generator(m, x):
    generator = torch.Generator().manual_seed(3)
    h = x @ m.w * torch.rand(4, 8, generator=generator)
    h = h.sin() * torch.empty(4, 8).bernoulli_(0.5, generator=generator)
    return (h + torch.randn(4, 8, generator=generator)).cos()


@torch.library.custom_op("veofunc_tests::noise", mutates_args=())
def noise(x: Tensor) -> Tensor:
    return torch.rand(x.shape)


@torch.library.custom_op("veofunc_tests::fill_with_noise", mutates_args=("x",))
def fill_with_noise(x: Tensor) -> None:
    x.copy_(torch.rand(x.shape))


def random_numbers_of_somebodys_operation(m, x):
    filled = (x.detach() > 0).float()
    before = filled.cos()
    fill_with_noise(filled)
    return (x @ m.w * noise(x.detach()) * filled * before).sin()


@torch.library.custom_op("veofunc_tests::new_like", mutates_args=())
def new_like(x: Tensor) -> Tensor:
    return x * 2


@torch.library.custom_op("veofunc_tests::native_batch_norm", mutates_args=())
def native_batch_norm(x: Tensor) -> Tensor:
    return x.cos()


for operation in (new_like, native_batch_norm):
    operation.register_fake(torch.empty_like)


torch.library.define("veofunc_tests::copy_", "(Tensor(a!) x) -> ()")


@torch.library.impl("veofunc_tests::copy_", "CompositeExplicitAutograd")
def double_(x: Tensor) -> None:
    x.mul_(2)


def somebodys_operations_with_names_of_pytorchs(m, x):
    return (x @ m.w * native_batch_norm(new_like((x > 0).float()))).sin()


# What the tape does not see, or cannot repeat.


class Twice(torch.autograd.Function):
    """Saves what it reads and what it gives, and reads it twice."""

    @staticmethod
    def forward(ctx, x):
        out = x * x
        ctx.save_for_backward(x, out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0] + gradient * ctx.saved_tensors[0] + 0 * ctx.saved_tensors[1]


class SortedWithOrder(torch.autograd.Function):
    """Has a result that is not differentiable."""

    @staticmethod
    def forward(ctx, x):
        values, order = x.sort(dim=1)
        ctx.save_for_backward(order)
        ctx.mark_non_differentiable(order)
        return values, order

    @staticmethod
    def backward(ctx, gradient, _):
        (order,) = ctx.saved_tensors
        return torch.zeros_like(gradient).scatter(1, order, gradient)


class DoubledInPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class FilledByKernel(torch.autograd.Function):
    """Writes to its argument out of sight, and says so."""

    @staticmethod
    def forward(ctx, x):
        write_raw(x, 0.5)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 0 + 3


class FilledBySloppyKernel(FilledByKernel):
    """Does not say so, as some fused rotary embeddings."""

    @staticmethod
    def forward(ctx, x):
        write_raw(x, 0.5)
        return x[:]


class Same(torch.autograd.Function):
    """Gives its argument, as the sum of gradients in tensor parallelism."""

    @staticmethod
    def forward(ctx, x):
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


def custom_functions(m, x):
    h = Twice.apply((x @ m.w).sin()).cos()
    values, order = SortedWithOrder.apply(h)
    return Same.apply(values.sin()).cos() * order.float().cos() * h


def custom_function_in_place(m, x):
    h = (x @ m.w).sin()
    before = h + 1
    h = DoubledInPlace.apply(h.view(-1)).view(4, 8)
    return (h.sin() * before.cos()).cos()


def custom_functions_result_changed_through_its_argument(m, x):
    total = x
    for h in ((x @ m.w).add(1), SortedWithOrder.apply(x @ m.w)[0]):
        same = Same.apply(h)
        h.mul_(2)  # from now on autograd refuses to look at `same`
        total = total + (x * same.detach()).sin() * h.cos()
    return total


def kernel_in_place(m, x):
    h = (x @ m.w).add(1)
    before = h + 1
    h = FilledByKernel.apply(h)
    return (h * m.v).sin() * before.cos()


def kernel_in_place_on_a_view(m, x):
    qkv = m.qkv(x)
    a, b, c = qkv[:, :8], qkv[:, 8:16], qkv[:, 16:]
    before = a + b
    FilledByKernel.apply(b)
    return ((a + b) * m.v).sin() * (c + before.cos())


def sloppy_kernel_in_place(m, x):
    h = (x @ m.w).add(1)
    before = h + 1
    h = FilledBySloppyKernel.apply(h)
    h = FilledBySloppyKernel.apply(h * m.v) + h
    return (h * m.v).sin() * before.cos()


def filled_by_a_kernel(m, x):
    empty, zeros, half = torch.empty(4, 8), torch.zeros(4, 8), torch.empty(4, 8)
    write_raw(empty, 2.0)
    write_raw(zeros, 3.0)
    write_raw(half, 4.0)
    half[:2].copy_(x.detach()[:2])
    half.mul_(2)
    torch.ops.veofunc_tests.copy_(empty)
    return (x @ m.w * empty).sin() * zeros.cos() * half.sin() * (x * zeros).sin()


def filled_by_operations(m, x):
    rows, zeros = torch.empty(4, 8), torch.zeros(4, 8)
    for i in range(4):
        rows[i].copy_(x.detach()[i].cos())
    zeros.index_add_(0, torch.tensor([1, 1, 3]), rows[:3].sin())
    return (x @ m.w * rows).sin() * zeros.cos()


def without_gradient(m, x):
    with torch.no_grad():
        mask = (x @ m.w).sin()
        mask[0] = 0
        with torch.enable_grad():
            h = (x @ m.w * mask).sin()
        m.average.mul_(0.5).add_(x.mean(0), alpha=0.5)
    return (h.cos() * mask + m.average).sin() - (h.detach() * x).sin()


def changed_out_of_autograds_sight(m, x):
    kept = x @ m.w
    h = (kept + x + 1).sin()
    kept.data.mul_(2)
    return h.cos() @ m.w


def argument_changed_out_of_autograds_sight(m, x):
    h = (x + 1).sin()
    x.data.mul_(2)  # no operation has saved it
    return h.cos()


def parameters_exchanged(m, x):
    own = m.v.data
    with torch.no_grad():
        m.v.data = own * 2
    h = (x + m.v).sin()
    m.v.data = own
    return (h + m.v).cos()


def made_in_inference_mode(m, x):
    with torch.inference_mode():
        fixed = torch.ones(4, 8).sin()
    return vf.checkpoint_name((x @ m.w + vf.checkpoint_name(fixed, "mixed")).sin(), "up").cos()


def checkpointed_inside(m, x):
    for use_reentrant in (False, True):
        x = checkpoint(lambda x: m.dropout(F.gelu(x @ m.w)), x.sin(), use_reentrant=use_reentrant)
    return x.cos()


def gradient_taken_inside(m, x):
    h = (x @ m.w).sin()
    (gradient,) = torch.autograd.grad(h.pow(2).sum(), h, create_graph=True)
    (other,) = torch.autograd.grad((x @ m.w).cos().sum(), x)
    return (h * gradient.cos() * other).sin()


def exception_inside(m, x):
    h = (x @ m.w).sin()
    with contextlib.suppress(IndexError):
        h = h.cos()
        m.embed(torch.tensor([99]))
    return h.exp().sin()


@torch.compile(backend="aot_eager")
def compiled(h, mask):
    mask.add_(1)
    h.mul_(2)
    return h.sin() * mask


def compiled_function_inside(m, x):
    mask = (x > 0).float()
    h = x @ m.w
    return (compiled(h, mask).cos() + h.sin() * mask).sin()


# Anything.


def program(seed, num_operations=14):
    """A body made of random operations. Many programs are wrong; then autograd says so."""

    def body(m, x):
        chance = random.Random(seed)
        pool = [x + 0, x @ m.w]
        for _ in range(num_operations):
            a, b = chance.choice(pool), chance.choice(pool)
            with contextlib.suppress(_Refused):
                made = chance.choice(OPERATIONS)(m, a, b, pool)
                pool += [made] if isinstance(made, Tensor) else []
        return sum(whole(tensor).sin() for tensor in pool[-3:])

    return body


class _Refused(RuntimeError):
    """By autograd, as it is called."""


def whole(tensor):
    return tensor if tensor.shape == (4, 8) else tensor.reshape(-1).repeat(32)[:32].view(4, 8)


def in_place(change):
    """`change` of something new most of the time, of which a part was read already."""

    def operation(m, a, b, pool):
        if a.data_ptr() != pool[-1].data_ptr():
            a = a + 0.25
            pool += [a, (a * 0.5)[:2]]
        try:
            return change(m, a, b)
        except RuntimeError as error:
            raise _Refused from error

    return operation


def without_gradient_and_changed(m, a, b):
    with torch.no_grad():
        made = a * 2
        made[0] = 1
    return made


OPERATIONS = [
    *(lambda m, a, b, pool, f=f: f(a) for f in (torch.sin, torch.sigmoid, torch.relu, torch.clone)),
    *(lambda m, a, b, pool: whole(a) * whole(b),) * 2,
    *(lambda m, a, b, pool: whole(a) + whole(b) * 0.5,) * 2,
    *(lambda m, a, b, pool: whole(a) @ m.w,) * 2,
    lambda m, a, b, pool: F.layer_norm(whole(a), (8,), m.v),
    lambda m, a, b, pool: whole(a).softmax(-1),
    lambda m, a, b, pool: F.dropout(a, 0.25),
    lambda m, a, b, pool: a * torch.rand_like(a),
    lambda m, a, b, pool: torch.cat([whole(a), whole(b)])[2:6],
    lambda m, a, b, pool: torch.zeros_like(whole(a)).index_add_(0, torch.tensor([1, 3]), whole(b)[:2]),
    lambda m, a, b, pool: torch.empty(4, 8).copy_(whole(b).detach()),
    lambda m, a, b, pool: a[:2],
    lambda m, a, b, pool: a[..., ::2],
    lambda m, a, b, pool: a.mT if a.dim() == 2 else a.reshape(-1),
    lambda m, a, b, pool: torch.unsafe_chunk(whole(a), 2, -1)[1],
    lambda m, a, b, pool: a.expand(2, *a.shape)[0],
    lambda m, a, b, pool: a.detach(),
    lambda m, a, b, pool: Twice.apply(a),
    lambda m, a, b, pool: Same.apply(a),
    lambda m, a, b, pool: without_gradient_and_changed(m, a, b),
    in_place(lambda m, a, b: a.mul_(2)),
    in_place(lambda m, a, b: a.add_(whole(b) if a.shape == (4, 8) else 1)),
    in_place(lambda m, a, b: F.relu_(a)),
    in_place(lambda m, a, b: a.clamp_(-1, 1)),
    in_place(lambda m, a, b: a.detach().mul_(1.5)),
    in_place(lambda m, a, b: DoubledInPlace.apply(a)),
    in_place(lambda m, a, b: FilledByKernel.apply(a)),
]
BODIES = {
    body.__name__: body
    for body in (
        transformer,
        attention_by_hand,
        fused_attention,
        mixture_of_experts,
        tied_weights_used_twice,
        batch_norm,
        batch_norm_in_evaluation,
        convolutions,
        lstm,
        gru,
        embedding,
        relu_in_place,
        residual_in_place,
        chunks_changed_in_place,
        view_changed_through_its_base,
        argument_changed_in_place,
        dropout_in_place,
        indexing_in_place,
        expanded,
        transposed,
        concatenated,
        viewed_as_another_dtype,
        given_other_memory,
        results_written_to_a_given_tensor,
        returns_its_argument,
        complex_numbers,
        double_and_half_precision,
        truth_values_and_indices,
        no_elements_and_no_dimensions,
        autocast,
        subclass,
        sparse,
        random_numbers,
        random_numbers_of_a_generator,
        random_numbers_of_somebodys_operation,
        somebodys_operations_with_names_of_pytorchs,
        custom_functions,
        custom_function_in_place,
        custom_functions_result_changed_through_its_argument,
        kernel_in_place,
        kernel_in_place_on_a_view,
        sloppy_kernel_in_place,
        filled_by_a_kernel,
        filled_by_operations,
        without_gradient,
        changed_out_of_autograds_sight,
        argument_changed_out_of_autograds_sight,
        parameters_exchanged,
        made_in_inference_mode,
        checkpointed_inside,
        gradient_taken_inside,
        exception_inside,
        compiled_function_inside,
    )
}
