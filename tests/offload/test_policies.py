"""Policies decide by the description alone, print as what one would type, and compare by what they are."""

import itertools
import math
import re
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import veofunc as vf
from tests.offload.table import CASES, CloneStore, batch
from tests.offload.table import make as model_of
from veofunc import policies as p
from veofunc.offload.policies import is_matmul
from veofunc.offload.policy import is_inside

KEEP, OFFLOAD, RECOMPUTE = vf.Fate.KEEP, vf.Fate.OFFLOAD, vf.Fate.RECOMPUTE


def saved(path="", nbytes=100, op="mm", index=0, name=None, recomputable=False):
    shape, device = (nbytes // 4,), torch.device("cpu")
    return vf.SavedTensor(path, op, shape, torch.float32, device, nbytes, index, name, recomputable)


def always(fate):
    return lambda saved: fate


def test_everything_offloads_and_nothing_keeps():
    for description in (saved(), saved("head", 0), saved("layers.0", 1 << 40)):
        assert p.everything(description) is OFFLOAD
        assert p.nothing(description) is KEEP


@pytest.mark.parametrize(
    ("nbytes", "fate"), [(0, KEEP), (99, KEEP), (100, KEEP), (101, OFFLOAD), (1 << 40, OFFLOAD)]
)
def test_larger_than_is_strict(nbytes, fate):
    assert p.larger_than(100)(saved(nbytes=nbytes)) is fate


# path, glob, whether the glob matches the module or one around it
MATCHES = [
    ("layers.0.mlp", "layers.*.mlp", True),
    ("layers.0.mlp.up", "layers.*.mlp", True),
    ("layers.11.mlp", "layers.*.mlp", True),
    ("layers.11.mlp", "layers.1.mlp", False),
    ("layers.1.mlp_norm", "layers.*.mlp", False),
    ("layers.0", "layers.*.mlp", False),
    ("layers.0.attention.mlp", "layers.*.mlp", False),
    ("layers.0.attention.mlp", "layers.*.*.mlp", True),
    ("my.layers.0.mlp", "layers.*.mlp", False),
    ("layers.10", "layers.[01]", False),
    ("layers.1", "layers.[01]", True),
    ("layers.2", "layers.[01]", False),
    ("layers.10", "layers.1?", True),
    ("Head", "head", False),
    ("head", "head", True),
    ("head", "*", True),
    ("", "*", True),
    ("", "head", False),
]


@pytest.mark.parametrize(("path", "glob", "inside"), MATCHES)
def test_globs_match_whole_segments_of_the_path_or_of_one_around_it(path, glob, inside):
    assert is_inside(path, glob) is inside
    assert p.in_modules("elsewhere", glob)(saved(path)) is (OFFLOAD if inside else KEEP)


def free(fate):
    """How much a fate frees on the device, as an order."""
    return {"keep": 0, "recompute": 1, "offload": 2}[fate.value]


@pytest.mark.parametrize("count", [1, 2, 3])
def test_any_of_is_the_most_all_of_the_least_and_first_of_the_first_that_is_not_keep(count):
    for fates in itertools.product(vf.Fate, repeat=count):
        policies = [always(fate) for fate in fates]
        assert p.any_of(*policies)(saved()) is max(fates, key=free)
        assert p.all_of(*policies)(saved()) is min(fates, key=free)
        assert p.first_of(*policies)(saved()) is [*(f for f in fates if f is not KEEP), KEEP][0]


def test_not_offloads_what_is_kept_and_keeps_the_rest():
    assert [p.not_(always(fate))(saved()) for fate in (KEEP, RECOMPUTE, OFFLOAD)] == [OFFLOAD, KEEP, KEEP]


def test_a_policy_that_only_offloads_is_a_condition_in_all_of():
    policy = p.all_of(p.larger_than(50), p.recompute)
    assert policy(saved(nbytes=51, recomputable=True)) is RECOMPUTE
    assert policy(saved(nbytes=50, recomputable=True)) is KEEP
    assert policy(saved(nbytes=51)) is KEEP


def test_first_of_stops_asking_at_the_first_answer():
    def never(saved):
        raise AssertionError("asked")

    assert p.first_of(always(OFFLOAD), never)(saved()) is OFFLOAD


# What names() was given; then, for a tensor's name, what becomes of it if it can be recomputed, and if not.
NAMED = [
    ({"save": ["a"]}, {"a": (KEEP, KEEP), "c": (RECOMPUTE, KEEP), None: (RECOMPUTE, KEEP)}),
    (
        {"save": ["a"], "offload": ["b"]},
        {"a": (KEEP, KEEP), "b": (OFFLOAD, OFFLOAD), "c": (RECOMPUTE, KEEP), None: (RECOMPUTE, KEEP)},
    ),
    ({"offload": ["b"]}, {"b": (OFFLOAD, OFFLOAD), "a": (RECOMPUTE, KEEP), None: (RECOMPUTE, KEEP)}),
    ({"recompute": ["c"]}, {"c": (RECOMPUTE, KEEP), "a": (KEEP, KEEP), None: (KEEP, KEEP)}),
    (
        {"offload": ["b"], "recompute": ["c"]},
        {"b": (OFFLOAD, OFFLOAD), "c": (RECOMPUTE, KEEP), "a": (KEEP, KEEP), None: (KEEP, KEEP)},
    ),
]


@pytest.mark.parametrize(("given", "fates"), NAMED)
def test_names_save_and_offload_these_only_or_recompute_these_only(given, fates):
    policy = p.names(**given)
    for name, expected in fates.items():
        assert (policy(saved(name=name, recomputable=True)), policy(saved(name=name))) == expected


@pytest.mark.parametrize("make_list", [list, tuple, set, iter])
def test_names_take_any_collection(make_list):
    assert p.names(offload=make_list(["a"]))(saved(name="a")) is OFFLOAD


@pytest.mark.parametrize("option", ["save", "offload", "recompute"])
@pytest.mark.parametrize("wrong", ["attention", 3, None])
def test_names_refuse_what_is_no_list(option, wrong):
    with pytest.raises(TypeError, match=f"{option} must be a list of names, got"):
        p.names(**{option: wrong})


@pytest.mark.parametrize(
    "wrong", [{}, {"save": []}, {"save": [""]}, {"offload": ["a", 3]}, {"recompute": [None]}]
)
def test_names_refuse_what_is_no_name(wrong):
    with pytest.raises(ValueError, match="names takes one or more non-empty names, got"):
        p.names(**wrong)


@pytest.mark.parametrize("wrong", [{"save": ["b", "a", "a"]}, {"save": ["a"], "recompute": ["b", "a"]}])
def test_names_refuse_a_name_that_is_given_twice(wrong):
    with pytest.raises(ValueError, match=r"each name must be given once.*got twice: \['a'\]"):
        p.names(**wrong)


def test_recompute_takes_what_can_be_and_matmuls_what_is_no_matmul():
    for op in ("mm", "gelu"):
        assert p.recompute(saved(op=op, recomputable=True)) is RECOMPUTE
        assert p.recompute(saved(op=op)) is KEEP
        assert p.matmuls(saved(op=op)) is KEEP
    assert p.matmuls(saved(op="mm", recomputable=True)) is KEEP
    assert p.matmuls(saved(op="gelu", recomputable=True)) is RECOMPUTE


def heads(x):
    return x.view(1, 2, 2, 8)


# An operation of x [4, 8] and w [8, 8]; whether it multiplies matrices.
OPERATIONS = {
    "mm": (lambda x, w: x @ w, True),
    "linear": (lambda x, w: F.linear(x, w), True),
    "linear with bias": (lambda x, w: F.linear(x, w, w[0]), True),
    "linear of 3 dimensions": (lambda x, w: F.linear(x.view(2, 2, 8), w, w[0]), True),
    "batched": (lambda x, w: x.view(2, 2, 8) @ w.expand(2, 8, 8), True),
    "baddbmm": (lambda x, w: torch.baddbmm(x[0], x.view(2, 2, 8), w.expand(2, 8, 8)), True),
    "einsum": (lambda x, w: torch.einsum("bi,ij->bj", x, w), True),
    "vector": (lambda x, w: w @ x[0], True),
    "dot": (lambda x, w: x[0] @ w[0], True),
    "attention": (lambda x, w: F.scaled_dot_product_attention(heads(x @ w), heads(x), heads(x)), True),
    "causal attention": (
        lambda x, w: F.scaled_dot_product_attention(*[heads(x @ w)] * 3, is_causal=True),
        True,
    ),
    "add": (lambda x, w: x + w[0], False),
    "mul": (lambda x, w: x * w[0], False),
    "gelu": (lambda x, w: F.gelu(x * w[0]), False),
    "softmax": (lambda x, w: (x * w[0]).softmax(-1), False),
    "layer norm": (lambda x, w: F.layer_norm(x, (8,), w[0]), False),
    "outer": (lambda x, w: torch.outer(x[0], w[0]), False),
    "sum": (lambda x, w: (x * w[0]).sum(-1), False),
    "embedding": (lambda x, w: F.embedding(torch.arange(4), w), False),
    "convolution": (lambda x, w: F.conv1d(x[None], w[:, :4, None]), False),
}


@pytest.mark.parametrize("operation", OPERATIONS)
def test_matrix_products_are_known_as_autograd_and_the_tape_call_them(operation):
    run, expected = OPERATIONS[operation]
    seen = {}

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.linspace(-1, 1, 64).view(8, 8))

        def forward(self, x):
            return run(x, self.w).sin()

    def note(saved):
        seen.setdefault(saved.recomputable, []).append(saved.op)
        return OFFLOAD

    model, x = nn.Sequential(Block()), torch.linspace(0, 1, 32).view(4, 8).requires_grad_()
    vf.offload(model, note, store=CloneStore())(x)
    by_autograd = seen[False][-1]  # what the sine has saved
    seen.clear()
    vf.offload(model, note, store=CloneStore(), blocks="0")(x)
    made = [op for op in seen[True] if is_matmul(op)]
    assert (is_matmul(by_autograd), bool(made)) == (expected, expected), (by_autograd, seen)


@pytest.mark.parametrize("combine", [p.any_of, p.all_of, p.not_, p.first_of])
@pytest.mark.parametrize("answer", [True, None, "offload"])
def test_combinators_refuse_an_answer_that_is_no_fate(combine, answer):
    def boolean(saved):
        return answer

    with pytest.raises(TypeError, match=r"boolean.* must return a veofunc\.Fate, got"):
        combine(boolean)(saved())


MADE = [
    (lambda: p.everything, "everything"),
    (lambda: p.nothing, "nothing"),
    (lambda: p.larger_than(1 << 20), "larger_than(1048576)"),
    (lambda: p.in_modules("layers.*.mlp"), "in_modules('layers.*.mlp')"),
    (lambda: p.in_modules("a", "b"), "in_modules('a', 'b')"),
    (lambda: p.any_of(p.everything, p.nothing), "any_of(everything, nothing)"),
    (
        lambda: p.all_of(p.larger_than(1), p.not_(p.in_modules("head"))),
        "all_of(larger_than(1), not_(in_modules('head')))",
    ),
    (lambda: p.first_of(p.larger_than(8), p.everything), "first_of(larger_than(8), everything)"),
    (lambda: p.recompute, "recompute"),
    (lambda: p.matmuls, "matmuls"),
    (lambda: p.any_of(p.matmuls, p.not_(p.matmuls)), "any_of(matmuls, not_(matmuls))"),
    (lambda: p.names(save=["q", "k"], offload=["out"]), "names(save=('q', 'k'), offload=('out',))"),
    (lambda: p.names(recompute=("a",)), "names(recompute=('a',))"),
]


@pytest.mark.parametrize(("make", "typed"), MADE)
def test_prints_as_what_one_would_type(make, typed):
    assert repr(make()) == typed
    assert eval(typed, vars(p).copy()) == make()


def test_equal_and_equally_hashed_if_made_of_the_same():
    for i, (make, _) in enumerate(MADE):
        assert make() == make()
        assert hash(make()) == hash(make())
        for other, _ in MADE[i + 1 :]:
            assert make() != other()
    assert len({make() for make, _ in MADE for _ in range(2)}) == len(MADE)


def test_combinators_know_every_glob_in_them():
    policy = p.first_of(
        p.any_of(p.in_modules("a", "b.*"), p.larger_than(1)), p.not_(p.all_of(p.in_modules("c")))
    )
    assert policy.globs == ("a", "b.*", "c")


# What a policy says of itself: what it reads and whether it recomputes.
FLAGS = [
    (p.everything, (False, False, False)),
    (p.larger_than(1), (False, False, False)),
    (p.in_modules("a"), (True, False, False)),
    (p.names(offload=["a"]), (False, True, False)),
    (p.names(recompute=["a"]), (False, True, True)),
    (p.recompute, (False, False, True)),
    (p.matmuls, (False, False, True)),
    (p.not_(p.recompute), (False, False, False)),
    (p.not_(p.in_modules("a")), (True, False, False)),
    (p.any_of(p.in_modules("a"), p.names(save=["a"])), (True, True, False)),
    (p.first_of(p.everything, p.all_of(p.nothing, p.recompute)), (False, False, True)),
    (p.any_of(p.everything, always(KEEP)), (True, True, False)),  # a function may read everything
]


@pytest.mark.parametrize(("policy", "flags"), FLAGS, ids=repr)
def test_policies_say_what_they_read_and_whether_they_recompute(policy, flags):
    assert (policy.reads_path, policy.reads_name, policy.recomputes) == flags


def test_combinators_know_every_name_in_them():
    policy = p.first_of(
        p.names(save=["a"], recompute=["b"]), p.not_(p.any_of(p.names(offload=["c"]), p.nothing))
    )
    assert policy.names == ("a", "b", "c")


def test_recomputation_without_blocks_is_refused_at_once_or_of_a_function_when_it_asks_for_it():
    model, x = nn.Sequential(nn.Linear(3, 3)), torch.ones(2, 3)
    for policy in (p.recompute, p.matmuls, p.names(recompute=["a"]), p.any_of(p.everything, p.matmuls)):
        with pytest.raises(ValueError, match=r"returns RECOMPUTE, for which offload needs blocks="):
            vf.offload(model, policy)
    wrapped = vf.offload(model, always(RECOMPUTE))
    with pytest.raises(ValueError, match="returned RECOMPUTE, but offload was made without blocks="):
        wrapped(x)
    vf.offload(model, p.not_(p.recompute), store=CloneStore())(x)


@pytest.mark.parametrize("nbytes", [-1, 1.0, 1.5, math.nan, math.inf, True, "1", None])
def test_larger_than_refuses_what_is_no_number_of_bytes(nbytes):
    with pytest.raises(ValueError, match="nbytes must be an int >= 0"):
        p.larger_than(nbytes)


@pytest.mark.parametrize("globs", [(), ("",), ("a", ""), (3,), (["a"],), (None,)])
def test_in_modules_refuses_what_is_no_glob(globs):
    with pytest.raises(ValueError, match="one or more non-empty module globs"):
        p.in_modules(*globs)


@pytest.mark.parametrize("combine", [p.any_of, p.all_of, p.first_of])
def test_combinators_refuse_to_combine_nothing(combine):
    with pytest.raises(ValueError, match=f"{combine.__name__} takes one or more policies"):
        combine()


@pytest.mark.parametrize("combine", [p.any_of, p.all_of, p.not_, p.first_of])
@pytest.mark.parametrize("wrong", ["everything", 1024, None, OFFLOAD])
def test_combinators_refuse_what_is_no_policy(combine, wrong):
    with pytest.raises(TypeError, match="takes policies"):
        combine(wrong)


@pytest.mark.parametrize("combine", [p.any_of, p.all_of, p.not_, p.first_of])
@pytest.mark.parametrize("maker", [p.larger_than, p.in_modules, p.names, p.budget, p.any_of, p.not_])
def test_combinators_refuse_what_makes_a_policy(combine, maker):
    others = [] if combine is p.not_ else [p.everything]
    match = rf"must be made by calling {maker.__name__}\(\.\.\.\), got the function itself"
    with pytest.raises(TypeError, match=match):
        combine(*others, maker)


@pytest.mark.parametrize("policy", [p.everything, p.recompute, p.larger_than(3), p.any_of(p.nothing)])
def test_a_policy_that_is_called_like_a_function_that_makes_one_says_so(policy):
    said = f"{policy!r} is a policy already and is asked about a SavedTensor: pass it as it is, without ()"
    with pytest.raises(TypeError, match=re.escape(said)):
        policy()


# A budget.


def plan_of(model, policy=p.everything, **options):
    return vf.plan_offload(model, policy, store=CloneStore(), **options)(batch())


def chosen(plan, bytes_per_second, flops_per_second, nbytes):
    """Slow and plain: one clock for the computation, one for the link."""
    moved, link_is_free_at, left = [], 0.0, nbytes
    seconds = plan.flops / flops_per_second
    for i, tensor in enumerate(plan.tensors):
        if tensor.fate is OFFLOAD and tensor.same_as is None:
            begins = max(link_is_free_at, tensor.flops / flops_per_second)
            ends = begins + tensor.saved.nbytes / bytes_per_second
            if ends <= seconds and (left is None or tensor.saved.nbytes <= left):
                moved.append(i)
                link_is_free_at = ends
                left = left and left - tensor.saved.nbytes
    return [
        i
        for i, tensor in enumerate(plan.tensors)
        if i in moved or (tensor.same_as is not None and tensor.same_as in moved)
    ]


@pytest.mark.parametrize("nbytes", [None, 2000])
@pytest.mark.parametrize("rate", [0.05, 0.5, 1e9])
@pytest.mark.parametrize("name", ["blocks", "tied"])
@pytest.mark.filterwarnings("ignore:offload moved nothing")
def test_a_budget_takes_the_oldest_that_the_link_copies_in_time(name, rate, nbytes):
    model = model_of(name)
    plan = plan_of(model)
    policy = p.budget(
        plan, bytes_per_second=rate * plan.bytes["moved"], flops_per_second=plan.flops, nbytes=nbytes
    )
    expected = chosen(plan, rate * plan.bytes["moved"], plan.flops, nbytes)
    within = plan_of(model, policy)
    assert [i for i, tensor in enumerate(within.tensors) if tensor.fate is OFFLOAD] == expected
    assert within.bytes["moved"] <= (plan.bytes["moved"] if nbytes is None else nbytes)
    offloaded = vf.offload(model, policy, store=CloneStore())
    offloaded(batch())
    assert {
        event: int(n) for event, n in offloaded.stats()["bytes"].items() if event in plan.bytes
    } == within.bytes


def test_a_budget_that_keeps_a_tensor_keeps_it_wherever_it_was_saved():
    """Else the second of two would be moved, which the plan had not counted, and nothing would be freed."""

    def fn(w):
        y = w * 2
        return (y.sin() + y.cos() + (w @ w).exp()).sum()

    w = torch.ones(8, 8, requires_grad=True)
    plan = vf.plan_offload(fn, p.everything, store=CloneStore())(w)
    assert (plan.count["deduplicated"], plan.count["moved"]) == (1, 2)
    policy = p.budget(plan, bytes_per_second=1e9, flops_per_second=1.0, nbytes=0)
    assert vf.plan_offload(fn, policy, store=CloneStore())(w).count["moved"] == 0


@pytest.mark.parametrize("case", ["matmuls", "recompute, offload the rest", "names in blocks"])
@pytest.mark.parametrize("name", ["blocks", "tied", "experts", "in place"])
@pytest.mark.filterwarnings("ignore:offload moved nothing")
def test_a_budget_over_a_plan_with_blocks_recomputes_what_the_plan_does(name, case):
    model, case = model_of(name), CASES[case]
    plan = plan_of(model, case.policy, **case.options)
    policy = p.budget(plan, bytes_per_second=1e30, flops_per_second=1e-9)
    again = plan_of(model, policy, blocks="layers.*")
    assert [(t.saved.index, t.saved.op, t.fate) for t in again.tensors] == [
        (t.saved.index, t.saved.op, t.fate) for t in plan.tensors
    ]
    offloaded = vf.offload(model, policy, store=CloneStore(), blocks="layers.*")
    offloaded(batch()).sum().backward()
    assert {
        event: int(n) for event, n in offloaded.stats()["count"].items() if event in plan.count
    } == plan.count


def test_a_budget_that_recomputes_needs_blocks():
    policy = p.budget(
        plan_of(model_of("mlp"), p.recompute, blocks="layers.*"), bytes_per_second=1, flops_per_second=1
    )
    assert policy.recomputes
    with pytest.raises(ValueError, match="for which offload needs blocks="):
        vf.offload(model_of("mlp"), policy)
    assert not p.budget(plan_of(model_of("mlp")), bytes_per_second=1, flops_per_second=1).recomputes


@pytest.mark.parametrize("blocks", [None, "layers.*"])
@pytest.mark.filterwarnings("ignore:offload moved nothing")
def test_a_budget_is_of_no_harm_to_other_shapes_and_models(blocks):
    plan = plan_of(model_of("blocks"), p.first_of(p.recompute, p.everything), blocks="layers.*")
    if blocks is None:
        plan = plan_of(model_of("blocks"))
    policy = p.budget(plan, bytes_per_second=1e30, flops_per_second=1e-9)
    for model, x in (
        (model_of("blocks"), batch()[:1, :4]),
        (model_of("tied"), batch()),
        (model_of("mlp"), batch().double()),
    ):
        model = model.to(x.dtype)
        torch.manual_seed(3)
        expected = torch.autograd.grad(model(x).sum(), [w for w in model.parameters() if w.requires_grad])
        torch.manual_seed(3)
        out = vf.offload(model, policy, store=CloneStore(), blocks=blocks)(x)
        grads = torch.autograd.grad(out.sum(), [w for w in model.parameters() if w.requires_grad])
        assert all(torch.equal(a, b) for a, b in zip(grads, expected, strict=True))


def test_a_budget_prints_and_compares_by_what_it_decides():
    plan, other = plan_of(model_of("mlp")), plan_of(model_of("tied"))

    def budget(plan=plan, **options):
        return p.budget(plan, **{"bytes_per_second": 1e9, "flops_per_second": 2e9, **options})

    assert repr(budget()) == "budget(plan, bytes_per_second=1000000000.0, flops_per_second=2000000000.0)"
    assert repr(budget(nbytes=5)).endswith("flops_per_second=2000000000.0, nbytes=5)")
    assert budget() == budget(plan_of(model_of("mlp")))
    assert hash(budget()) == hash(budget(plan_of(model_of("mlp"))))
    assert budget() != budget(bytes_per_second=2e9)
    assert budget(bytes_per_second=1e30, flops_per_second=1) != budget(
        other, bytes_per_second=1e30, flops_per_second=1
    )


@pytest.mark.parametrize("option", ["bytes_per_second", "flops_per_second"])
@pytest.mark.parametrize("rate", [0, -1.0, math.nan, math.inf, True, "1e9", None, 1j])
def test_a_budget_refuses_what_is_no_rate(option, rate):
    rates = {"bytes_per_second": 1.0, "flops_per_second": 1.0, option: rate}
    with pytest.raises(ValueError, match=f"{option} must be a finite number > 0, got"):
        p.budget(plan_of(model_of("mlp")), **rates)


@pytest.mark.parametrize("nbytes", [-1, 1.5, math.nan, math.inf, True, "1"])
def test_a_budget_refuses_what_is_no_number_of_bytes(nbytes):
    with pytest.raises(ValueError, match=r"nbytes must be an int >= 0 \(bytes\) or None, got"):
        p.budget(plan_of(model_of("mlp")), bytes_per_second=1.0, flops_per_second=1.0, nbytes=nbytes)


@pytest.mark.parametrize("wrong", [None, p.everything, {"tensors": ()}, vf.plan_offload])
def test_a_budget_needs_a_plan(wrong):
    with pytest.raises(TypeError, match=r"plan must come from veofunc.plan_offload\(...\)\(...\), got"):
        p.budget(wrong, bytes_per_second=1.0, flops_per_second=1.0)


def test_a_budget_knows_tensors_by_index_and_operation():
    plan = plan_of(model_of("mlp"))
    policy = p.budget(plan, bytes_per_second=1e30, flops_per_second=1e-9)
    moved = next(tensor.saved for tensor in plan.tensors if tensor.fate is OFFLOAD)
    assert policy(moved) is policy(replace(moved, path="elsewhere", shape=(1,), nbytes=4)) is OFFLOAD
    assert policy(replace(moved, index=1000)) is policy(replace(moved, op="other")) is KEEP
    assert policy(replace(moved, index=1000, recomputable=True)) is RECOMPUTE
