"""Which steps are removed, against rules applied one step at a time."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from veofunc.checkpoint.retention import Retention

NAN = float("nan")
LOSSES = {1: 0.5, 2: 0.3, 3: NAN, 4: 0.3, 5: 0.9, 6: None, 7: 0.7}  # None: not measured
METRICS = {step: {} if loss is None else {"loss": loss} for step, loss in LOSSES.items()}

# keep_last, keep_every, keep_best; the step just saved; what is left of 1 to 7
CASES = {
    "all, if nothing is said": ((None, None, None), 7, {1, 2, 3, 4, 5, 6, 7}),
    "the newest": ((1, None, None), 7, {7}),
    "the newest three": ((3, None, None), 7, {5, 6, 7}),
    "more than there are": ((9, None, None), 7, {1, 2, 3, 4, 5, 6, 7}),
    "multiples": ((None, 3, None), 7, {3, 6, 7}),
    "the newest and multiples": ((2, 4, None), 7, {4, 6, 7}),
    "the best, of equals the newer": ((None, None, ("loss", 1)), 7, {4, 7}),
    "the best two": ((None, None, ("loss", 2)), 7, {2, 4, 7}),
    "the best four, neither NaN nor unmeasured": ((None, None, ("loss", 4)), 7, {1, 2, 4, 7}),
    "no more than were measured": ((None, None, ("loss", 9)), 7, {1, 2, 4, 5, 7}),
    "the highest": ((None, None, ("loss", 1, "max")), 7, {5, 7}),
    "a metric that nobody measured": ((None, None, ("accuracy", 2, "max")), 7, {7}),
    "everything at once": ((2, 3, ("loss", 1)), 7, {3, 4, 6, 7}),
    "the one just saved, though it is old": ((1, None, None), 2, {2, 7}),
    "the one just saved, though it is bad": ((None, None, ("loss", 1)), 5, {4, 5, 7}),
}


@pytest.mark.parametrize(("options", "saved", "kept"), CASES.values(), ids=CASES)
def test_what_is_kept(options, saved, kept):
    doomed = Retention.of(*options).doomed(METRICS, saved)
    assert doomed == sorted({*METRICS} - kept)


def is_kept(step, metrics, saved, last, every, best):
    """One step, by the rules in words."""
    if (last, every, best) == (None, None, None) or step in (saved, max(metrics)):
        return True
    num_newer = len([other for other in metrics if other > step])
    if last is not None and num_newer < last:
        return True
    if every is not None and step % every == 0:
        return True
    if best is None or math.isnan(value := metrics[step].get(best[0], NAN)):
        return False
    num_better = 0
    for other, measured in metrics.items():
        theirs = measured.get(best[0], NAN)
        is_better = theirs > value if best[2:] == ("max",) else theirs < value
        num_better += is_better or (theirs == value and other > step)
    return num_better < best[1]


few = st.integers(1, 5)
values = st.sampled_from([0.0, 1.0, 2.0, -1.0, NAN, math.inf, -math.inf])
rated = st.dictionaries(st.just("loss"), values)
best = st.one_of(
    st.tuples(st.just("loss"), few), st.tuples(st.just("loss"), few, st.sampled_from(["min", "max"]))
)


@given(
    st.dictionaries(st.integers(0, 30), rated, min_size=1),
    st.data(),
    st.none() | few,
    st.none() | few,
    st.none() | best,
)
def test_every_step_is_kept_or_removed_by_the_rules(metrics, data, last, every, best):
    saved = data.draw(st.sampled_from(sorted(metrics)))
    doomed = Retention.of(last, every, best).doomed(metrics, saved)
    assert doomed == [s for s in sorted(metrics) if not is_kept(s, metrics, saved, last, every, best)]
    assert not {saved, max(metrics)} & {*doomed}


WRONG = [
    ((0, None, None), ValueError, "keep_last must be at least 1, or None, got 0"),
    ((True, None, None), TypeError, "keep_last must be an int or None, got True"),
    ((2.0, None, None), TypeError, "keep_last must be an int or None, got 2.0"),
    ((None, -1, None), ValueError, "keep_every must be at least 1, or None, got -1"),
    ((None, "2", None), TypeError, "keep_every must be an int or None, got '2'"),
    ((None, None, "loss"), TypeError, r'keep_best must be as \("loss", 2\).*got \'loss\''),
    ((None, None, ("loss",)), TypeError, r"keep_best must be as .*got \('loss',\)"),
    ((None, None, (2, "loss")), TypeError, "keep_best must be as"),
    ((None, None, ["loss", 2]), TypeError, "keep_best must be as"),
    ((None, None, ("loss", 0)), ValueError, "the number in keep_best must be at least 1.*got 0"),
    ((None, None, ("loss", 1.5)), TypeError, "the number in keep_best must be an int.*got 1.5"),
    ((None, None, ("loss", None)), TypeError, "keep_best must be as"),
    ((None, None, ("loss", 2, "high")), ValueError, 'keep_best must end in "min" or "max", got \'high\''),
]


@pytest.mark.parametrize(("options", "kind", "text"), WRONG)
def test_a_wrong_option_is_named_with_its_value(options, kind, text):
    with pytest.raises(kind, match=text):
        Retention.of(*options)
