"""Policies decide by the description alone, print as what one would type, and compare by what they are."""

import math

import pytest
import torch

import veofunc as vf
from veofunc import policies as p
from veofunc.offload.policies import is_inside

KEEP, OFFLOAD, RECOMPUTE = vf.Fate.KEEP, vf.Fate.OFFLOAD, vf.Fate.RECOMPUTE


def saved(path="", nbytes=100, op="MmBackward0", index=0):
    return vf.SavedTensor(path, op, (nbytes // 4,), torch.float32, torch.device("cpu"), nbytes, index)


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


def test_combinators_follow_their_truth_tables():
    for first in (KEEP, OFFLOAD):
        assert p.not_(always(first))(saved()) is (OFFLOAD if first is KEEP else KEEP)
        for second in (KEEP, OFFLOAD):
            both = always(first), always(second)
            assert p.any_of(*both)(saved()) is (OFFLOAD if OFFLOAD in (first, second) else KEEP)
            assert p.all_of(*both)(saved()) is (OFFLOAD if (first, second) == (OFFLOAD, OFFLOAD) else KEEP)


def test_first_of_gives_the_first_answer_that_is_not_keep():
    assert p.first_of(always(KEEP), always(RECOMPUTE), always(OFFLOAD))(saved()) is RECOMPUTE
    assert p.first_of(always(OFFLOAD), always(RECOMPUTE))(saved()) is OFFLOAD
    assert p.first_of(always(KEEP), always(KEEP))(saved()) is KEEP


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
