"""Handles: they own a tensor or its copy, guard it against changes in place, and report their end."""

import copy
import dataclasses
import pickle
import time
import weakref

import pytest
import torch

import veofunc as vf
from veofunc.offload.ahead import ReadAhead
from veofunc.offload.ledger import Ledger
from veofunc.offload.saved import Handle, Moved


class CloneSlot:
    """Gives its own copy of the tensor, and notes when it dies."""

    def __init__(self, tensor, ended):
        self.content, self.ended = tensor.clone(), ended

    def get(self):
        return self.content.clone()

    def __del__(self):
        self.ended.append(True)


class OneSlot:
    """A store whose `put` returns a given slot."""

    def __init__(self, slot):
        self.slot = slot

    def accepts(self, tensor):
        return True

    def put(self, tensor):
        slot, self.slot = self.slot, None
        return slot


def moved_to(slot, tensor, ledger):
    return Moved(OneSlot(slot), tensor, tensor.nbytes, ledger)


def moved_handle(tensor, ledger, ended=None):
    handle = Handle(tensor, tensor.nbytes, ledger, ReadAhead(0))
    handle.move(moved_to(CloneSlot(tensor, [] if ended is None else ended), tensor, ledger))
    return handle


def counts(ledger):
    return {event: int(n) for event, n in ledger.snapshot()["count"].items() if n}


def test_fate_prints_as_its_name():
    assert [repr(fate) for fate in vf.Fate] == ["KEEP", "OFFLOAD", "RECOMPUTE"]


def test_saved_tensor_is_frozen_hashable_and_a_value():
    make = lambda: vf.SavedTensor("head", "mm", (2, 3), torch.float32, torch.device("cpu"), 24, 0)  # noqa: E731
    assert make() == make()
    assert len({make(), make(), copy.copy(make()), pickle.loads(pickle.dumps(make()))}) == 1
    with pytest.raises(dataclasses.FrozenInstanceError):
        make().nbytes = 1


def test_a_kept_tensor_comes_back_as_it_is():
    tensor = torch.arange(6.0).view(2, 3)
    restored = Handle(tensor, 24, Ledger(), ReadAhead(0)).restore()
    assert torch.equal(restored, tensor)
    assert restored.data_ptr() == tensor.data_ptr()
    assert restored is not tensor


def test_a_moved_tensor_comes_back_from_its_slot_and_the_original_stays_whole():
    ledger, tensor = Ledger(), torch.arange(6.0).view(2, 3)
    handle = moved_handle(tensor, ledger)
    restored = handle.restore()
    assert torch.equal(restored, torch.arange(6.0).view(2, 3))
    assert restored.data_ptr() != tensor.data_ptr()
    assert torch.equal(tensor, torch.arange(6.0).view(2, 3))
    assert tensor.untyped_storage().nbytes() == 24


def test_a_moved_tensor_is_given_up():
    tensor = torch.arange(6.0)
    storage = weakref.ref(tensor.untyped_storage())
    handle = moved_handle(tensor, Ledger())
    assert handle.tensor.untyped_storage().nbytes() == 0
    del tensor
    assert storage() is None


@pytest.mark.parametrize(
    "make", [lambda t: Handle(t, t.nbytes, Ledger(), ReadAhead(0)), lambda t: moved_handle(t, Ledger())]
)
@pytest.mark.parametrize(
    "change",
    [
        lambda t: t.mul_(2),
        lambda t: t[0].zero_(),
        lambda t: t.view(-1).add_(1),
        lambda t: t.detach().add_(1),
        lambda t: t.copy_(torch.ones(2, 3)),
    ],
    ids=["itself", "slice", "view", "detached", "copy_"],
)
def test_refuses_a_tensor_that_was_changed_in_place(make, change):
    tensor = torch.arange(6.0).view(2, 3)
    handle = make(tensor)
    assert not handle.changed
    change(tensor)
    assert handle.changed
    with pytest.raises(
        RuntimeError, match=r"modified by an inplace operation.* version 1; expected version 0"
    ):
        handle.restore()


def test_takes_a_tensor_that_was_changed_before():
    tensor = torch.zeros(3)
    tensor.add_(1)
    assert torch.equal(Handle(tensor, 12, Ledger(), ReadAhead(0)).restore(), torch.ones(3))


def test_counts_the_first_restore_and_those_after_it_apart():
    ledger = Ledger()
    handle = moved_handle(torch.ones(3), ledger)
    for _ in range(3):
        handle.restore()
    assert counts(ledger) == {"restored": 1, "restored_again": 2, "live": 1}
    assert ledger.snapshot()["bytes", "restored_again"] == 24


def test_a_kept_tensor_is_never_counted_as_restored_or_dropped():
    ledger = Ledger()
    handle = Handle(torch.ones(3), 12, ledger, ReadAhead(0))
    handle.restore()
    del handle
    assert counts(ledger) == {}


def test_a_handle_that_dies_unread_counts_as_dropped_and_frees_its_slot():
    ledger, ended = Ledger(), []
    handle = moved_handle(torch.ones(3), ledger, ended)
    del handle
    assert ended == [True]
    assert counts(ledger) == {"dropped": 1}
    assert ledger.snapshot()["bytes", "live"] == 0


def test_handles_of_one_tensor_share_a_slot_until_the_last_dies():
    ledger, ended, tensor = Ledger(), [], torch.ones(3)
    moved = moved_to(CloneSlot(tensor, ended), tensor, ledger)
    first, second = Handle(tensor, 12, ledger, ReadAhead(0)), Handle(tensor, 12, ledger, ReadAhead(0))
    first.move(moved)
    second.move(moved)
    del moved
    first.restore()
    del first
    assert ended == []
    assert counts(ledger) == {"restored": 1, "live": 1}
    assert torch.equal(second.restore(), tensor)
    del second
    assert ended == [True]
    assert counts(ledger) == {"restored": 2}


def test_seconds_in_the_slot_are_counted():
    class SlowSlot:
        def get(self):
            time.sleep(0.05)
            return torch.ones(1)

    ledger = Ledger()
    moved_to(SlowSlot(), torch.ones(1), ledger).get()
    assert ledger.snapshot()["wait_seconds"] >= 0.05


@pytest.mark.parametrize("slot", [None, torch.ones(2), "slot"])
def test_a_store_that_returns_no_slot_is_refused_at_once(slot):
    ledger = Ledger()
    with pytest.raises(TypeError, match="must return a slot with a method get"):
        moved_to(slot, torch.ones(2), ledger)
    assert counts(ledger) == {}


@pytest.mark.parametrize(
    "content", [torch.ones(3), torch.ones(2).double(), None], ids=["shape", "dtype", "none"]
)
def test_a_store_that_gives_back_something_else_is_found_out(content):
    class Slot:
        def get(self):
            return content

    moved = moved_to(Slot(), torch.ones(2), Ledger())
    with pytest.raises(RuntimeError, match=r"the store put away a tensor of .*\(2,\).*, and gave back"):
        moved.get()
