"""Parts of a space never overlap, and no room is lost."""

import random

import pytest

from veofunc.offload.stores.space import PAGE, Space, whole_pages


@pytest.mark.parametrize(
    ("nbytes", "pages"), [(0, 1), (1, 1), (PAGE, 1), (PAGE + 1, 2), (10 * PAGE - 1, 10), (1 << 40, 1 << 28)]
)
def test_bytes_are_rounded_up_to_whole_pages_and_to_at_least_one(nbytes, pages):
    assert whole_pages(nbytes) == pages * PAGE


def test_parts_follow_each_other():
    space = Space()
    assert [space.take(nbytes) for nbytes in (1, PAGE + 1, 0, 5)] == [0, PAGE, 3 * PAGE, 4 * PAGE]
    assert space.end == 5 * PAGE


def test_the_lowest_hole_that_is_large_enough_is_used_first():
    space = Space()
    starts = [space.take(pages * PAGE) for pages in (1, 1, 3, 1, 2, 1)]
    for i, pages in ((0, 1), (2, 3), (4, 2)):
        space.give(starts[i], pages * PAGE)
    assert space.take(2 * PAGE) == starts[2]
    assert space.take(PAGE) == starts[0]
    assert space.take(PAGE) == starts[2] + 2 * PAGE
    assert space.take(3 * PAGE) == 9 * PAGE


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0), (0, 2, 1), (1, 0, 2)])
def test_neighbours_that_come_back_are_joined(order):
    space = Space(4 * PAGE)
    starts = [space.take(PAGE) for _ in range(4)]
    for i in order:
        space.give(starts[i], PAGE)
    assert space.take(3 * PAGE) == 0


def test_a_space_of_which_nothing_is_used_starts_anew():
    space = Space()
    starts = [space.take(PAGE) for _ in range(3)]
    for start in (starts[1], starts[0], starts[2]):
        space.give(start, PAGE)
    assert space.end == 0


def test_there_is_nothing_beyond_the_capacity():
    space = Space(2 * PAGE + 100)
    assert space.take(3 * PAGE) is None
    assert space.take(PAGE) == 0
    assert space.take(PAGE + 1) is None
    assert space.take(PAGE) == PAGE
    assert space.take(1) is None
    assert Space(0).take(0) is None


@pytest.mark.parametrize("seed", range(5))
def test_agrees_with_a_list_of_pages(seed):
    choose = random.Random(seed)
    num_pages = 64
    space, used, parts = Space(num_pages * PAGE), [False] * num_pages, []
    for _ in range(2000):
        if parts and choose.random() < 0.5:
            first, pages = parts.pop(choose.randrange(len(parts)))
            space.give(first * PAGE, pages * PAGE)
            used[first : first + pages] = [False] * pages
            continue
        pages = choose.randint(1, 9)
        fits = (i for i in range(num_pages - pages + 1) if not any(used[i : i + pages]))
        first = next(fits, None)
        assert space.take(pages * PAGE) == (None if first is None else first * PAGE)
        if first is not None:
            used[first : first + pages] = [True] * pages
            parts.append((first, pages))
        assert space.end == PAGE * max((i + 1 for i in range(num_pages) if used[i]), default=0)
