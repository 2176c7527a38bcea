import gc
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from zlib import crc32

import pytest
import torch

from tests import limits
from veofunc.checkpoint.manifest import CheckpointError, FileRecord
from veofunc.checkpoint.slot import Slot, SlotOptions, Staged, digests_of
from veofunc.checkpoint.snapshot import SMALL_BYTES, Sections, describe_leaves
from veofunc.checkpoint.storage import LocalStorage, UrlStorage

MEMORY = UrlStorage("memory://test_slot")
WEIGHT, BIAS = ("model", "weight"), ("model", "bias")


@pytest.fixture(autouse=True)
def children(monkeypatch):
    """The processes that the test has started, not those that earlier ones have left to live on."""
    gc.collect()
    earlier = limits.children()
    monkeypatch.setitem(globals(), "children", lambda: [p for p in limits.children() if p not in earlier])


def state_of(value: float = 0.0) -> dict:
    """A large tensor, a small one, and the large one by another name."""
    weight = torch.full((SMALL_BYTES // 4, 2), float(value))
    return {WEIGHT: weight, BIAS: torch.full((3,), float(value)), ("model", "head"): weight}


def entries_of(tensors: dict, per_rank: tuple[str, ...] = ()):
    return describe_leaves(tensors, Sections({}, frozenset(per_rank)), 0)


def ignore(*args) -> None:
    pass


@pytest.fixture
def options(tmp_path):
    (tmp_path / "rest").mkdir()
    return SlotOptions(
        0, 1, copy=True, num_buffers=1, num_files=1, patience=30.0, storage=LocalStorage(tmp_path)
    )


@pytest.fixture
def make(options):
    """Makes slots that are prepared for a state."""
    slots = []

    def made(tensors: dict, **changes) -> Slot:
        slots.append(Slot("rest", replace(options, **changes)))
        slots[-1].prepare_(entries_of(tensors), tensors)
        return slots[-1]

    yield made
    for slot in slots:
        slot.close()
    assert not children()


def write(slot: Slot, staged: Staged, wrote=ignore, tick=ignore) -> dict[str, FileRecord]:
    return slot.write(staged, "rest", None, wrote, tick)


def assert_holds(directory, records: dict[str, FileRecord], *tensors: torch.Tensor) -> None:
    """The files are there as recorded, and have the values of these tensors in them."""
    contents = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert {name: FileRecord(len(each), crc32(each)) for name, each in contents.items()} == records
    assert all(any(tensor.numpy().tobytes() in each for each in contents.values()) for tensor in tensors)


@pytest.mark.parametrize("copy", [True, False])
def test_files_are_recorded_as_they_are(copy, make, tmp_path):
    tensors = state_of(3)
    slot = make(tensors, copy=copy)
    written = []
    records = write(slot, staged := slot.stage(tensors, None), written.append)
    assert len(records) == (1 if copy else 2)
    assert_holds(tmp_path / "rest", records, tensors[WEIGHT], tensors[BIAS])
    assert sum(written) == staged.nbytes == sum(record.size for record in records.values())


def test_where_the_process_must_write_itself_it_starts_no_other(make):
    tensors = state_of(3)
    slot = make(tensors, storage=MEMORY)
    assert not children()
    ((name, record),) = write(slot, slot.stage(tensors, None)).items()
    content = MEMORY.open(f"rest/{name}").read()
    assert record == FileRecord(len(content), crc32(content))
    assert tensors[WEIGHT].numpy().tobytes() in content


def test_what_is_staged_may_change(make, tmp_path):
    tensors = state_of(3)
    slot = make(tensors)
    staged = slot.stage(tensors, None)
    for tensor in tensors.values():
        tensor.fill_(4)
    assert_holds(tmp_path / "rest", write(slot, staged), *state_of(3).values())


def test_what_is_staged_in_the_background_may_change_once_it_is_copied(make, tmp_path):
    tensors = state_of(3)
    slot = make(tensors)
    with ThreadPoolExecutor(1) as threads:
        staged = slot.stage(tensors, threads)
        staged.copied.result()
    tensors[WEIGHT].fill_(4)
    assert_holds(tmp_path / "rest", write(slot, staged), *state_of(3).values())


def test_a_change_before_it_is_copied_is_found(make):
    tensors, may_copy = state_of(), threading.Event()
    slot = make(tensors)
    with ThreadPoolExecutor(1) as threads:
        threads.submit(may_copy.wait)
        staged = slot.stage(tensors, threads)
        tensors[BIAS].add_(1)  # is small, and copied already, as are buffers that a forward pass writes to
        tensors[WEIGHT].add_(1)
        may_copy.set()
        with pytest.raises(
            CheckpointError, match=r"^model\.weight: written to while being copied; call wait_staged"
        ):
            staged.copied.result()


def test_a_change_of_what_is_not_copied_is_found_when_it_is_written(make):
    tensors = state_of()
    slot = make(tensors, copy=False)
    staged = slot.stage(tensors, None)
    with pytest.raises(CheckpointError, match=r"^model\.weight, model\.head: written to while being saved"):
        write(slot, staged, tick=lambda: tensors[WEIGHT].add_(1))


def test_small_tensors_are_copied_all_the_same(make, tmp_path):
    tensors = state_of(3)
    slot = make(tensors, copy=False)
    staged = slot.stage(tensors, None)
    tensors[BIAS].fill_(4)
    assert_holds(tmp_path / "rest", write(slot, staged), torch.full((3,), 3.0))


def test_a_failed_write_names_the_file_and_the_next_one_succeeds(make, tmp_path):
    tensors = state_of(3)
    slot = make(tensors)
    (tmp_path / "rest").rename(tmp_path / "away")
    with pytest.raises(OSError, match=r"No such file.*rest/__0_0\.distcp"):
        write(slot, slot.stage(tensors, None))
    (tmp_path / "rest").mkdir()
    assert_holds(tmp_path / "rest", write(slot, slot.stage(tensors, None)), tensors[WEIGHT])


@pytest.mark.parametrize("changes", [{}, {"copy": False}, {"storage": MEMORY}], ids=["copied", "live", "url"])
def test_what_a_tick_raises_ends_the_writing(changes, make):
    def fail():
        raise KeyError("another rank failed")

    tensors = state_of()
    slot = make(tensors, **changes)
    with pytest.raises(KeyError, match="another rank failed"):
        write(slot, slot.stage(tensors, None), tick=fail)
    assert not children()


def test_a_state_of_the_same_structure_fits_whatever_its_memory(make):
    assert make(state_of(0)).fits(state_of(1))


OTHERS = {
    "shape": lambda tensors: tensors | {BIAS: torch.zeros(4)},
    "dtype": lambda tensors: tensors | {BIAS: torch.zeros(3, dtype=torch.float64)},
    "device": lambda tensors: tensors | {BIAS: torch.zeros(3, device="meta")},
    "order": lambda tensors: dict(sorted(tensors.items())),
    "name": lambda tensors: {(*path, "x"): tensor for path, tensor in tensors.items()},
    "one more": lambda tensors: tensors | {("more",): torch.zeros(3)},
    "one less": lambda tensors: {WEIGHT: tensors[WEIGHT], BIAS: tensors[BIAS]},
    "untied": lambda tensors: tensors | {WEIGHT: tensors[WEIGHT].clone()},
    "half of the tie": lambda tensors: tensors | {("model", "head"): tensors[WEIGHT].view(2, -1).T},
}


@pytest.mark.parametrize("change", OTHERS.values(), ids=OTHERS.keys())
def test_a_state_of_another_structure_does_not_fit(change, make):
    assert not make(state_of()).fits(change(state_of()))


@pytest.mark.parametrize("copy", [True, False])
def test_a_tensor_that_lies_otherwise_in_memory_fits_only_if_it_is_copied(copy, make, tmp_path):
    path = ("w",)
    slot = make({path: torch.zeros(SMALL_BYTES // 4, 2)}, copy=copy)
    turned = {path: torch.rand(2, SMALL_BYTES // 4).T}
    assert slot.fits({path: torch.zeros(SMALL_BYTES // 4, 2)})
    assert slot.fits(turned) is copy
    if not copy:
        slot.prepare_(entries_of(turned), turned)
    assert slot.fits(turned)
    assert_holds(tmp_path / "rest", write(slot, slot.stage(turned, None)), turned[path].contiguous())


def test_the_plan_is_that_of_the_structure_alone(make):
    plan, again = make(state_of(0)).plan, make(state_of(1)).plan
    assert plan == again
    assert plan.digest != make(state_of() | {BIAS: torch.zeros(4)}).plan.digest


@pytest.mark.parametrize("num_buffers", [1, 2])
def test_buffers_take_turns(num_buffers, make, tmp_path):
    slot = make(state_of(), num_buffers=num_buffers)
    stages = [slot.stage(state_of(value), None) for value in range(2 * num_buffers)]
    assert len({id(staged.buffer) for staged in stages}) == num_buffers
    assert stages[0].buffer is stages[num_buffers].buffer
    for value, staged in enumerate(stages[num_buffers:], start=num_buffers):
        records = write(slot, staged)
        assert_holds(tmp_path / "rest", records, *state_of(value).values())
        for name in records:
            (tmp_path / "rest" / name).unlink()


def num_arenas() -> int:
    gc.collect()
    with open("/proc/self/maps") as maps:
        return maps.read().count("memfd:veofunc-checkpoint")


def test_closing_frees_the_memory_and_ends_the_process(make):
    before = num_arenas()
    slot = make(state_of(), num_buffers=2)
    write(slot, slot.stage(state_of(), None))
    assert num_arenas() == before + 2
    assert len(children()) == 1
    slot.close()
    assert num_arenas() == before
    assert not children()
    assert not slot.fits(state_of())


def test_preparing_again_frees_what_was_there(make):
    slot = make(state_of())
    before = num_arenas()
    other = state_of() | {BIAS: torch.zeros(4)}
    slot.prepare_(entries_of(other), other)
    assert num_arenas() == before
    assert len(children()) == 1


def test_a_digest_for_each_section_tells_what_ranks_must_have_in_common():
    def digests(**changes):
        leaves = {("a", "x"): torch.zeros(2), ("b",): 1, ("rng", "x"): torch.zeros(2)}
        leaves |= {tuple(name.split("_")): leaf for name, leaf in changes.items()}
        return digests_of(entries_of(leaves, per_rank=("rng",)))

    shared = torch.zeros(2)
    assert digests().keys() == {"a", "b"}
    assert digests() == digests(rng_x=torch.zeros(5)) == digests(a_x=torch.ones(2))
    assert digests(a_x=shared, a_y=shared) == digests(a_x=shared, a_y=shared.clone())
    assert digests()["a"] != digests(a_x=torch.zeros(3))["a"]
    assert digests()["a"] != digests(a_y=torch.zeros(3))["a"]
    assert digests()["b"] != digests(b=2)["b"]
    assert digests()["b"] == digests(a_x=torch.zeros(3))["b"]
