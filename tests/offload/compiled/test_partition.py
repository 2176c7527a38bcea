"""`blocks=` in compiled regions: what the compiler saves and computes, against what it does by itself."""

import contextlib
import functools
import threading
import warnings
from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from functorch.compile import make_boxed_func, min_cut_rematerialization_partition
from torch import nn
from torch._decomp import core_aten_decompositions
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.testing import CompileCounterWithBackend
from torch._functorch import config
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import veofunc as vf
from veofunc import Fate
from veofunc import policies as p
from veofunc.offload.compiled.partition import NAME, CompiledBlocks
from veofunc.offload.compiled.regions import saving_region

pytestmark = [  # PyTorch's compiler hears them from PyTorch itself
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated"),
]

WIDTH = 8
X = torch.linspace(-1, 1, 2 * 60 * WIDTH).view(2, 60, WIDTH)  # [B, T, D]


def named(x, name):
    """What `checkpoint_name` does where it is compiled."""
    with torch.fx.traceback.annotate({NAME: name}):
        return x.view_as(x)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        return self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        x = x + self.attention(F.dropout(self.norm(x), 0.25))
        return x + self.down(named(F.gelu(self.up(x)), "activation"))


class Gate(nn.Module):
    """A block in small: of what it makes, backward needs two thirds."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x * self.linear(x).sigmoid() + x


class Model(nn.Module):
    def __init__(self, *layers):
        super().__init__()
        self.layers, self.head = nn.ModuleList(layers), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).tanh()


def transformer():
    torch.manual_seed(0)
    return Model(Block(), Block())


@pytest.fixture
def gates():
    torch.manual_seed(0)
    return Model(Gate(), Gate())


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch.compiler.reset()


def whole(model, backend="aot_eager"):
    return torch.compile(model, backend=backend)


def one_by_one(model, backend="aot_eager"):
    for layer in model.layers:
        layer.compile(backend=backend)
    return model


def within_blocks(model, backend="aot_eager"):
    for layer in model.layers:
        layer.attention.compile(backend=backend)
    return model


def within_mlps(model, backend="aot_eager"):
    for layer in model.layers:
        layer.up.compile(backend=backend)
        layer.compile(backend=backend)
    return model


def in_a_function(model, backend="aot_eager"):
    return torch.compile(lambda x: model(x) * 2, backend=backend)


def blocks_of(model, policy, blocks=None):
    paths = {module: path for path, module in model.named_modules()}
    return CompiledBlocks(policy, paths, frozenset(model.layers if blocks is None else blocks))


def outcome(model, fn, x=X, blocks=None, found=None):
    """Loss and gradients of one step, and the bytes that are saved and are no parameters."""
    x = x.detach().requires_grad_()
    owned = {t.untyped_storage()._cdata for t in (*model.parameters(), x)}
    saved, counts = {}, Counter()

    @torch.compiler.disable
    def pack(tensor):
        region = saving_region()
        if blocks is not None and region is not None:
            made = blocks.saw(region, counts[region.number])
            counts[region.number] += 1
            if found is not None and not isinstance(tensor, nn.Parameter) and tensor._base is None:
                found.append((made, tensor.detach().clone()))
        storage = tensor.untyped_storage()
        if storage._cdata not in owned:
            saved[storage._cdata] = storage.nbytes()
        return tensor.detach()

    model.zero_grad()
    torch.manual_seed(1)
    active = contextlib.nullcontext() if blocks is None else blocks.active()
    with active, saved_tensors_hooks(pack, lambda packed: packed):
        loss = fn(x).square().sum()
    loss.backward()
    return [loss.detach(), x.grad, *(q.grad.clone() for q in model.parameters())], sum(saved.values())


def assert_equal(first, second):
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def recompute(saved):
    return Fate.RECOMPUTE


def counting(ops):
    """A backend that splits as inductor does, and counts the operations of each backward."""

    def forward(graph, inputs):
        return make_boxed_func(graph.forward)

    def backward(graph, inputs):
        targets = (node.target for node in graph.graph.nodes)
        ops.update(t.overloadpacket.__name__ for t in targets if isinstance(t, torch._ops.OpOverload))
        return make_boxed_func(graph.forward)

    return aot_autograd(
        fw_compiler=forward,
        bw_compiler=backward,
        partition_fn=min_cut_rematerialization_partition,
        decompositions=core_aten_decompositions(),
    )


# What is saved, and what comes of it.


@pytest.mark.parametrize(
    ("compiled", "backend", "share"),
    [
        (whole, "aot_eager", 0.5),
        (whole, "aot_eager_decomp_partition", 0.5),
        (one_by_one, "aot_eager", 0.5),
        (in_a_function, "aot_eager", 0.5),
        (within_blocks, "aot_eager", 0.95),
    ],
)
def test_recomputation_saves_less_and_changes_nothing(compiled, backend, share):
    model = transformer()
    plain, plain_bytes = outcome(model, compiled(model, backend))
    torch.compiler.reset()
    blocks = blocks_of(model, recompute)
    ours, our_bytes = outcome(model, compiled(model, backend), blocks=blocks)
    assert_equal(plain, ours)
    assert our_bytes < share * plain_bytes
    assert blocks.num_recomputed > 0
    assert blocks.complaints == []


@pytest.mark.slow
def test_inductor_obeys_and_its_cache_on_disk_is_passed_by():
    model = transformer()
    plain, plain_bytes = outcome(model, whole(model, "inductor"))
    torch.compiler.reset()
    ours, our_bytes = outcome(model, whole(model, "inductor"), blocks=blocks_of(model, recompute))
    assert_equal(plain, ours)
    assert our_bytes < 0.5 * plain_bytes
    torch.compiler.reset()
    again, again_bytes = outcome(model, whole(model, "inductor"))
    assert_equal(plain, again)
    assert again_bytes == plain_bytes


def test_a_policy_that_keeps_or_offloads_leaves_the_split_to_the_compiler(gates):
    """Hooks find what shall be offloaded among what the region saves."""
    plain, plain_bytes = outcome(gates, whole(gates, "aot_eager_decomp_partition"))
    for policy in (p.nothing, p.everything):
        torch.compiler.reset()
        blocks = blocks_of(gates, policy)
        ours, our_bytes = outcome(gates, whole(gates, "aot_eager_decomp_partition"), blocks=blocks)
        assert_equal(plain, ours)
        assert (our_bytes, blocks.num_recomputed) == (plain_bytes, 0)


@pytest.mark.parametrize(
    ("policy", "expected"),
    [
        (p.nothing, {"sigmoid": 2}),
        (recompute, {"addmm": 2, "sigmoid": 2}),
        (lambda saved: Fate.KEEP if saved.op == "addmm" else Fate.RECOMPUTE, {"sigmoid": 2}),
        (lambda saved: Fate.KEEP if saved.op == "sigmoid" else Fate.RECOMPUTE, {}),
        (lambda saved: Fate.RECOMPUTE if saved.path == "layers.1.linear" else Fate.KEEP, {"sigmoid": 1}),
        (lambda saved: Fate.RECOMPUTE if "layers.1" in saved.path else Fate.KEEP, {"addmm": 1, "sigmoid": 2}),
    ],
    ids=["nothing", "all", "all but products", "all but what is needed", "what is not needed", "one block"],
)
def test_the_policy_decides_what_backward_computes(gates, policy, expected):
    """Of a gate it needs the sigmoid, and for that the product; not the sum.

    Sigmoids are cheap: where nothing forces the compiler it computes them again by itself.
    """
    ops = Counter()
    outcome(gates, whole(gates, counting(ops)), blocks=blocks_of(gates, policy))
    assert {op: ops[op] for op in ("addmm", "sigmoid") if ops[op]} == expected


@pytest.mark.parametrize(("recomputed", "expected"), [(("sigmoid",), (1, 0)), (("sigmoid", "tanh"), (1, 1))])
def test_what_is_kept_is_not_computed_again_with_what_it_is_made_of(recomputed, expected):
    """The compiler would do so, as it is cheap."""

    class Chain(nn.Module):
        def forward(self, x):
            return x.sigmoid().tanh().square()

    def policy(saved):
        return Fate.RECOMPUTE if saved.op in recomputed else Fate.KEEP

    model, ops = nn.ModuleDict({"layers": nn.ModuleList([Chain()])}), Counter()
    fn = torch.compile(lambda x: model.layers[0](x), backend=counting(ops))
    outcome(model, fn, blocks=blocks_of(model, policy))
    assert (ops["sigmoid"], ops["tanh"]) == expected


def test_a_block_that_runs_twice_is_two_blocks(gates):
    gates.layers[1] = gates.layers[0]
    plain, _ = outcome(gates, whole(gates))
    torch.compiler.reset()
    asked, policy = noted(Fate.RECOMPUTE)
    ours, _ = outcome(gates, whole(gates), blocks=blocks_of(gates, policy))
    assert_equal(plain, ours)
    assert sum(not saved.recomputable for saved in asked) == 2  # what leaves it, each time


def test_the_users_own_checkpoint_stays(gates):
    class Checkpointed(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return checkpoint(self.inner, x, use_reentrant=False)

    gates.layers[1] = Checkpointed(gates.layers[1])
    plain, plain_bytes = outcome(gates, whole(gates))
    torch.compiler.reset()
    asked, policy = noted(Fate.KEEP)
    ours, our_bytes = outcome(gates, whole(gates), blocks=blocks_of(gates, policy))
    assert_equal(plain, ours)
    assert our_bytes == plain_bytes
    assert {saved.path.split(".")[1] for saved in asked} == {"0"}


# What the policy is told.


def noted(fate):
    asked = []

    def policy(saved):
        asked.append(saved)
        return fate

    policy.reads_path = False  # one question for each output
    return asked, policy


@functools.cache
def asked_in_a_transformer(backend):
    asked, policy = noted(Fate.KEEP)
    model = transformer()
    outcome(model, whole(model, backend), blocks=blocks_of(model, policy))
    return asked


def test_the_policy_is_told_where_and_what_and_how_large():
    asked = asked_in_a_transformer("aot_eager")
    assert [saved.index for saved in asked] == list(range(len(asked)))
    up = next(saved for saved in asked if saved.path == "layers.1.up")
    assert up == vf.SavedTensor(
        path="layers.1.up",
        op="addmm",
        shape=(120, 2 * WIDTH),
        dtype=torch.float32,
        device=torch.device("cpu"),
        nbytes=120 * 2 * WIDTH * 4,
        index=up.index,
        name=None,
        recomputable=True,
    )
    assert {saved.path.split(".")[1] for saved in asked} == {"0", "1"}
    assert {saved.op for saved in asked if saved.path == "layers.0.norm"} == {"native_layer_norm"}
    assert [saved.name for saved in asked if saved.op == "gelu"] == ["activation", "activation"]


def test_what_leaves_a_block_is_not_recomputable():
    leaving = [saved for saved in asked_in_a_transformer("aot_eager") if not saved.recomputable]
    assert [(saved.path, saved.op, saved.shape) for saved in leaving] == [
        ("layers.0", "add", (2, 60, WIDTH)),
        ("layers.1", "add", (2, 60, WIDTH)),
    ]


def test_operations_that_the_compiler_takes_apart_are_asked_about_as_one():
    def facts(asked):
        return Counter((saved.path, saved.op, saved.shape, saved.name, saved.recomputable) for saved in asked)

    together = asked_in_a_transformer("aot_eager")
    torch.compiler.reset()
    assert facts(asked_in_a_transformer("aot_eager_decomp_partition")) == facts(together)


def test_blocks_compiled_one_by_one_are_asked_about_once(gates):
    asked, policy = noted(Fate.KEEP)
    outcome(gates, one_by_one(gates), blocks=blocks_of(gates, policy))
    assert {saved.path for saved in asked} == {"layers.0", "layers.0.linear"}


@pytest.mark.parametrize(
    ("path", "asked_about"), [("layers.1", {"layers.1", "layers.1.linear"}), ("head", {"head"}), ("", None)]
)
def test_only_blocks_are_asked_about(gates, path, asked_about):
    asked, policy = noted(Fate.KEEP)
    outcome(gates, whole(gates), blocks=blocks_of(gates, policy, [gates.get_submodule(path)]))
    everything = {"", "layers.0", "layers.0.linear", "layers.1", "layers.1.linear", "head"}
    assert {saved.path for saved in asked} == (asked_about or everything)


def test_a_name_is_of_the_whole_value(gates):
    class Halves(nn.Module):
        def forward(self, x):
            first, second = (x.sin() * 2).chunk(2)
            return (named(first, "half").exp() * second).repeat(2, 1, 1)

    gates.layers[1] = Halves()
    asked, policy = noted(Fate.KEEP)
    blocks = blocks_of(gates, policy)
    outcome(gates, whole(gates), blocks=blocks)
    assert {saved.name for saved in asked} == {None}
    assert blocks.names_given == {"half"}


def test_what_is_no_fate_is_refused(gates):
    with pytest.raises(Exception, match=r"must return a veofunc\.Fate, got 'keep'"):
        outcome(gates, whole(gates), blocks=blocks_of(gates, lambda saved: "keep"))


# What hooks are told of what a region saves.


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(vf.checkpoint_name(self.up(self.norm(x)), "hidden")))


def mlps():
    torch.manual_seed(0)
    return Model(Mlp(), Mlp(), Mlp())


def made_by(model, x=X):
    """What modules give, by path, when nothing is compiled."""
    made, handles = {}, []
    for path, module in model.named_modules():
        hook = functools.partial(lambda path, module, args, out: made.__setitem__(path, out.detach()), path)
        handles.append(module.register_forward_hook(hook))
    model(x)
    for handle in handles:
        handle.remove()
    return made


BACKENDS = ("aot_eager", "aot_eager_decomp_partition")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("compiled", [whole, one_by_one, in_a_function])
@pytest.mark.parametrize("policy", [p.nothing, p.names(offload=["hidden"])])
def test_what_a_region_saves_is_told_apart(compiled, backend, policy):
    model, found = mlps(), []
    made = made_by(model)
    fn, blocks = compiled(model, backend), blocks_of(model, policy)
    for _ in range(2):
        found.clear()
        outcome(model, fn, blocks=blocks, found=found)
        products = [(made, tensor) for made, tensor in found if made is not None and made.op == "addmm"]
        assert {saved.path for saved, _ in products} >= {f"layers.{i}.up" for i in range(3)}
        for saved, tensor in products:
            if saved.path.startswith("layers"):
                torch.testing.assert_close(tensor.view(-1), made[saved.path].view(-1), rtol=0, atol=1e-4)
                assert saved.name == ("hidden" if saved.path.endswith("up") else None)
    assert blocks.complaints == []


@pytest.mark.parametrize(
    "policy",
    [
        p.names(offload=["hidden"]),
        lambda saved: Fate.OFFLOAD if saved.op == "addmm" else Fate.RECOMPUTE,
        lambda saved: Fate.OFFLOAD if saved.path.endswith(".up") else Fate.KEEP,
        lambda saved: Fate.OFFLOAD if saved.name == "hidden" and "1" in saved.path else Fate.KEEP,
    ],
    ids=["name", "operation", "module", "name in one block"],
)
@pytest.mark.parametrize("compiled", [whole, one_by_one, within_mlps])
@pytest.mark.filterwarnings("ignore:little is gained")
def test_what_the_policy_offloads_in_a_region_is_moved(compiled, policy, tmp_path):
    num_blocks = 3 if policy(hidden("layers.2.up")) is Fate.OFFLOAD else 1
    model = mlps()
    plain, _ = outcome(model, compiled(model))
    torch.compiler.reset()
    fn = vf.offload(compiled(model), policy, model=model, store=vf.DiskStore(tmp_path), blocks="layers.*")
    for calls in (1, 2):
        assert_equal(plain, outcome(model, fn)[0])
        stats = fn.stats()
        assert stats["bytes", "moved"] == calls * num_blocks * 120 * 4 * WIDTH * 4
        assert stats["count", "moved"] == stats["count", "restored"] == calls * num_blocks
        assert stats["count", "packed"] == stats["count", "moved"] + stats["count", "kept"]
    assert stats["count", "live"] == 0


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:little is gained")
def test_inductor_says_what_it_saves(tmp_path):
    model = mlps()
    plain, _ = outcome(model, whole(model, "inductor"))
    torch.compiler.reset()
    fn = vf.offload(
        whole(model, "inductor"),
        p.names(offload=["hidden"]),
        store=vf.DiskStore(tmp_path),
        blocks="layers.*",
    )
    assert_equal(plain, outcome(model, fn)[0])
    assert fn.stats()["bytes", "moved"] == 3 * 480 * WIDTH * 4


def hidden(path):
    """What the hidden layer at `path` is to a policy."""
    return vf.SavedTensor(
        path, "addmm", (120, 4 * WIDTH), torch.float32, X.device, 480 * WIDTH * 4, 0, "hidden", True
    )


@pytest.mark.filterwarnings("ignore:little is gained")
def test_a_name_outside_of_the_blocks_of_a_region_is_seen(tmp_path):
    def fn(x):
        return vf.checkpoint_name(model(x).exp(), "end").sin()

    model = mlps()
    policy, store = p.names(offload=["end"]), vf.DiskStore(tmp_path)
    compiled = torch.compile(fn, backend="aot_eager")
    offloaded = vf.offload(compiled, policy, model=model, store=store, blocks="layers.*")
    offloaded(X).sum().backward()
    assert offloaded.stats()["bytes", "moved"] == X.nbytes


def test_a_name_that_a_region_does_not_save_is_complained_of(tmp_path):
    class Sum(nn.Module):
        def forward(self, x):
            return x.exp() + vf.checkpoint_name(x + 1, "unused")

    model = nn.ModuleDict({"layers": nn.ModuleList([Sum()])})
    policy, store = p.names(save=["unused"]), vf.DiskStore(tmp_path)
    compiled = torch.compile(lambda x: model.layers[0](x), backend="aot_eager")
    fn = vf.offload(compiled, policy, model=model, store=store, blocks="layers.*")
    with pytest.warns(UserWarning, match="names that nothing saves: unused"):
        fn(X.clone().requires_grad_())


def said_by(fn):
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        fn(X)
    return [str(warning.message) for warning in heard if ".grad" not in str(warning.message)]


def test_names_that_are_not_seen_without_blocks_are_not_said_to_be_missing(tmp_path):
    fn = vf.offload(whole(mlps()), p.names(offload=["hidden"]), store=vf.DiskStore(tmp_path))
    said = [warning for warning in said_by(fn) if "hidden" in warning]
    assert len(said) == 2
    assert "cannot see: hidden; in a compiled region they are seen only with blocks" in said[0]
    assert "sees `name` and `op` only with blocks=" in said[1]


def test_names_in_a_region_compiled_before_are_not_said_to_be_missing(tmp_path):
    compiled = whole(mlps())
    compiled(X)
    fn = vf.offload(compiled, p.names(offload=["hidden"]), store=vf.DiskStore(tmp_path), blocks="layers.*")
    said = said_by(fn)
    assert any("blocks= has no effect" in warning for warning in said)
    assert not any("not given" in warning for warning in said)


# How often it is compiled, and what is left.


@pytest.mark.parametrize("compiled", [whole, one_by_one])
def test_each_region_is_compiled_once(gates, compiled):
    counter = CompileCounterWithBackend("aot_eager")
    fn, blocks = compiled(gates, counter), blocks_of(gates, recompute)
    for _ in range(3):
        outcome(gates, fn, blocks=blocks)
    assert counter.frame_count == 1


def test_sizes_may_change():
    model = Model(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)))
    xs = [X[:, :num_tokens].clone() for num_tokens in (60, 50, 40)]
    asked, policy = noted(Fate.RECOMPUTE)
    outcomes, counts = [], []
    for blocks in (None, blocks_of(model, policy)):
        torch.compiler.reset()
        counter = CompileCounterWithBackend(counting(Counter()))
        fn = torch.compile(model, backend=counter, dynamic=True)
        outcomes.append([outcome(model, fn, x, blocks=blocks)[0] for x in xs])
        counts.append(counter.frame_count)
    for plain, ours in zip(*outcomes, strict=True):
        assert_equal(plain, ours)
    assert counts[0] == counts[1] < len(xs)
    assert next(saved.shape for saved in asked if saved.op == "addmm") == (120, WIDTH)


def settings():
    return config.joint_custom_pass, config.enable_autograd_cache


def test_no_setting_is_left_behind(gates):
    before = settings()
    blocks = blocks_of(gates, recompute)
    with blocks.active():
        assert settings() != before
    assert settings() == before
    with pytest.raises(ZeroDivisionError), blocks.active():
        raise ZeroDivisionError
    assert settings() == before


def test_the_users_own_pass_runs_too(gates):
    tags = []

    def note(graph, inputs):
        tags.extend(node.meta["recompute"] for node in graph.graph.nodes if "recompute" in node.meta)
        return graph

    with config.patch(joint_custom_pass=note):
        outcome(gates, whole(gates), blocks=blocks_of(gates, recompute))
        assert settings()[0] is note
    assert len(tags) > 0


@pytest.mark.parametrize(("outer", "inner"), [(recompute, p.nothing), (p.nothing, recompute)])
def test_the_innermost_of_several_policies_is_obeyed(gates, outer, inner):
    outer, inner = blocks_of(gates, outer), blocks_of(gates, inner)
    with outer.active():
        outcome(gates, whole(gates), blocks=inner)
    assert outer.num_recomputed == 0
    assert (inner.num_recomputed > 0) == (inner.policy is recompute)


def test_other_threads_compile_as_ever(gates):
    blocks = blocks_of(gates, recompute)
    done = []
    with blocks.active():
        thread = threading.Thread(target=lambda: done.append(outcome(gates, whole(gates))))
        thread.start()
        thread.join()
    assert len(done) == 1
    assert blocks.num_recomputed == 0


def test_a_setting_that_another_thread_put_back_does_nothing(gates):
    """As it can happen before PyTorch 2.13, where all threads have one configuration."""
    blocks = blocks_of(gates, recompute)
    with blocks.active():
        stale = config.joint_custom_pass
    with config.patch(joint_custom_pass=stale):
        outcome(gates, whole(gates))
    assert blocks.num_recomputed == 0


# What cannot be had is said.


def test_a_region_that_was_compiled_before_is_complained_of(gates):
    fn, blocks = whole(gates), blocks_of(gates, recompute)
    plain, plain_bytes = outcome(gates, fn)
    for _ in range(2):
        ours, our_bytes = outcome(gates, fn, blocks=blocks)
        assert_equal(plain, ours)
        assert our_bytes == plain_bytes
    [complaint] = blocks.complaints
    assert complaint.startswith("blocks= has no effect in a region that was compiled before")
    assert "torch.compiler.reset()" in complaint


def test_the_second_policy_for_a_model_is_complained_of(gates):
    fn, first, second = whole(gates), blocks_of(gates, recompute), blocks_of(gates, p.nothing)
    for blocks in (first, second, first):
        outcome(gates, fn, blocks=blocks)
    assert (len(first.complaints), len(second.complaints)) == (0, 1)


def test_a_region_outside_of_the_blocks_may_be_compiled_before(gates):
    gates.head.forward = torch.compile(gates.head.forward, backend="aot_eager")
    blocks = blocks_of(gates, recompute)
    outcome(gates, gates)
    outcome(gates, gates, blocks=blocks)
    assert blocks.complaints == []


def test_blocks_compiled_one_by_one_that_differ_are_complained_of(gates):
    blocks = blocks_of(gates, p.all_of(p.in_modules("layers.1"), p.recompute))
    outcome(gates, one_by_one(gates), blocks=blocks)
    [complaint] = blocks.complaints
    assert "does not recompute the same in 'layers.0' and 'layers.1'" in complaint


@pytest.mark.parametrize(
    ("compiled", "policy"),
    [
        (one_by_one, p.in_modules("layers.*.linear")),
        (one_by_one, p.in_modules("layers.1")),  # hooks move what shall be
        (one_by_one, recompute),
        (whole, p.in_modules("layers.1")),
    ],
)
def test_blocks_that_agree_or_are_compiled_together_are_not(gates, compiled, policy):
    blocks = blocks_of(gates, policy)
    outcome(gates, compiled(gates), blocks=blocks)
    assert blocks.complaints == []
