"""One save: what it writes, that it is whole or not there, and what it waits for."""

import json
import pickle
import random
import threading
import time

import pytest
import torch
from tensordict import NonTensorData, TensorDict

from tests.checkpoint.support import names_in, start, state_of, until, values_of
from veofunc.checkpoint import CheckpointError, async_checkpointer, slot
from veofunc.checkpoint.storage import LocalStorage

SLOTS = {"a": ["a"], "b": ["b"]}
NUMEL = 1 << 18  # 1 MiB
SLOW = 2 << 20  # bytes per second: half a second for one of them


def part(name: str, value: float) -> TensorDict:
    """A state of one slot."""
    return TensorDict({name: TensorDict({"w": torch.full((NUMEL,), float(value))})})


def both(value: float) -> TensorDict:
    return part("a", value).update(part("b", value))


def test_two_saves_of_the_same_structure_differ_in_values_alone(tmp_path):
    def state(value: float) -> TensorDict:
        return state_of(value, optimizer=TensorDict({"m": torch.full((3, 5), value, dtype=torch.float64)}))

    with async_checkpointer(state(1), tmp_path) as ckpt:
        one, same, other = (ckpt.save(state(v), step).result() for step, v in enumerate((1.0, 1.0, 2.0)))
    names = sorted(str(file.relative_to(one)) for file in one.rglob("*") if file.is_file())
    assert {"model/__0_0.distcp", "optimizer/index.json", "optimizer/.metadata"} < {*names}
    for name in names:
        if name == "manifest.json":
            bodies = [json.loads((path / name).read_text()) for path in (one, same)]
            differing = {key for key in bodies[0] if bodies[0][key] != bodies[1][key]}
            assert differing <= {"step", "time", "crc32"}
            continue
        content = [(path / name).read_bytes() for path in (one, same, other)]
        assert content[0] == content[1]
        assert (content[0] == content[2]) == (not name.endswith(".distcp"))
        assert len(content[0]) == len(content[2])


def test_the_manifest_lists_every_file_and_what_wrote_them(tmp_path):
    before = time.time()
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        rest = TensorDict({"x": torch.ones(1)})
        path = ckpt.save(state_of(1, rest=rest), 4, metrics={"loss": 0.5}).result()
    body = json.loads((path / "manifest.json").read_text())
    found = {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}
    assert found == {*body["files"], "manifest.json"}
    assert (body["step"], body["world_size"], body["slots"]) == (4, 1, ["model", "rest"])
    assert body["versions"]["torch"] == torch.__version__ and "veofunc" in body["versions"]
    assert before <= body["time"] <= time.time()
    assert body["metrics"] == {"loss": 0.5}


def test_metadata_says_what_torch_would_say(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        path = ckpt.save(state_of(1), 1).result()
    metadata = pickle.loads((path / "model" / ".metadata").read_bytes())
    assert {name: (*tensor.size,) for name, tensor in metadata.state_dict_metadata.items()} == {
        f"layers.{i}": (16,) for i in range(3)
    }
    content = (path / "model" / "__0_0.distcp").read_bytes()
    for place in metadata.storage_data.values():
        assert content[place.offset :][:4] == b"PK\3\4"
        assert content[: place.offset + place.length][-22:][:4] == b"PK\5\6"


@pytest.mark.parametrize("fails", ["begin", "write", "publish"])
def test_a_save_that_fails_leaves_no_files_and_the_next_is_made(fails, tmp_path, monkeypatch):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        ckpt.save(state_of(1), 1).result()

        def broken(*args):
            raise OSError(28, "No space left on device")

        monkeypatch.setattr(LocalStorage, fails, broken)
        with pytest.raises(CheckpointError, match=r"step 2 .* not saved: rank 0, .*No space left on device"):
            ckpt.save(state_of(2), 2).result()
        monkeypatch.undo()
        assert names_in(tmp_path) == ["step_1"]
        ckpt.save(state_of(2), 2)
    assert values_of(ckpt.restore(state_of(0))) == {2}


def test_a_failure_is_raised_by_the_next_save_of_its_slot_but_not_of_others(tmp_path, monkeypatch):
    ckpt = async_checkpointer(both(0), tmp_path, slots=SLOTS)
    with monkeypatch.context() as patch:
        patch.setattr(LocalStorage, "publish", lambda *args: 1 / 0)
        save = ckpt.save(part("a", 1), 1)
        until(lambda: save.done)
    ckpt.save(part("b", 2), 2).result()
    with pytest.raises(CheckpointError, match=r"step 1 .*ZeroDivisionError"):
        ckpt.save(part("a", 3), 3)
    ckpt.save(part("a", 4), 4)
    ckpt.close()
    assert ckpt.steps() == (2, 4)


def test_a_slow_save_of_one_slot_holds_up_no_other_slot_but_the_next_of_its_own(tmp_path):
    with async_checkpointer(both(0), tmp_path, slots=SLOTS, bytes_per_second=SLOW) as ckpt:
        slow = ckpt.save(part("a", 1), 1)
        small = TensorDict({"b": TensorDict({"w": torch.ones(4)})})
        assert ckpt.save(small, 2).result() == tmp_path / "step_2"
        assert not slow.done
        second = ckpt.save(part("a", 3), 3)
        assert slow.done and not second.done
    assert ckpt.steps() == (1, 2, 3)
    for step in (1, 3):
        assert ckpt.restore(part("a", 0), step)["a", "w"].unique().tolist() == [step]


def test_with_two_buffers_a_save_is_staged_while_the_one_before_is_written(tmp_path):
    options = {"slots": SLOTS, "bytes_per_second": SLOW, "double_buffer": True}
    with async_checkpointer(both(0), tmp_path, **options) as ckpt:
        first, second = ckpt.save(part("a", 1), 1), ckpt.save(part("a", 2), 2)
        assert not first.done
        third = ckpt.save(part("a", 3), 3)
        assert first.done and not second.done and not third.done
    assert ckpt.steps() == (1, 2, 3)
    for step in (1, 2, 3):
        assert ckpt.restore(part("a", 0), step)["a", "w"].unique().tolist() == [step]


def test_a_save_that_breaks_off_while_staging_takes_no_buffer_that_is_being_written(tmp_path, monkeypatch):
    """With two buffers the next but one must not get the memory of one that is still being written."""
    options = {"slots": SLOTS, "bytes_per_second": SLOW, "double_buffer": True}
    with async_checkpointer(both(0), tmp_path, **options) as ckpt:
        slow = ckpt.save(both(1), 1)
        stage = slot.Slot.stage

        def interrupted(self, *args):
            if self.name == "b":
                raise KeyboardInterrupt
            return stage(self, *args)

        with monkeypatch.context() as patch:
            patch.setattr(slot.Slot, "stage", interrupted)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(both(2), 2)
        assert not slow.done
        ckpt.save(both(3), 3)
    assert ckpt.steps() == (1, 3)
    for step in (1, 3):
        restored = ckpt.restore(both(0), step)
        assert [restored[name, "w"].unique().tolist() for name in "ab"] == [[step], [step]]


TWO_RANKS = """
import random, sys, threading, time, torch, torch.distributed as dist
from pathlib import Path
from tensordict import TensorDict
from veofunc.checkpoint import async_checkpointer
directory, rank = Path(sys.argv[1]), int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(str(directory / "store"), 2), rank=rank, world_size=2)
delay = random.Random(rank)
state = TensorDict({name: {"w": torch.zeros(1000), f"own{i}": torch.zeros(9)} for i, name in enumerate("ab")})
num_saves = 50
options = {"slots": {"a": ["a"], "b": ["b"]}, "keep_last": 3, "timeout": 60}
with async_checkpointer(state, directory / "steps", **options) as ckpt:
    for step in range(num_saves):
        part = state.select("ab"[step % 2])
        part.apply_(lambda tensor: tensor.fill_(step))
        ckpt.save(part, step)
        time.sleep(delay.choice([0, 0, 0.002, 0.01]))
        if step % 5 == 0:
            dist.all_reduce(torch.ones(1))  # training goes on
assert num_saves - 1 in ckpt.steps()
for step in ckpt.steps():
    name = "ab"[step % 2]
    assert ckpt.restore(state.select(name), step)[name, "w"].unique().tolist() == [step]
print("passed")
dist.barrier()
"""


@pytest.mark.distributed
def test_two_slots_that_two_ranks_save_at_once_fifty_times_never_wait_for_each_other_forever(tmp_path):
    processes = [start(TWO_RANKS, tmp_path, rank) for rank in range(2)]
    try:
        assert [process.communicate(timeout=100)[0] for process in processes] == ["passed\n"] * 2
    finally:
        for process in processes:
            process.kill()


def test_threads_that_save_different_slots_at_once_save_what_they_were_given(tmp_path):
    def work(name: str) -> None:
        for step in range("ab".index(name), 20, 2):
            time.sleep(random.random() / 200)
            ckpt.save(part(name, step), step)

    with async_checkpointer(both(0), tmp_path, slots=SLOTS) as ckpt:
        threads = [threading.Thread(target=work, args=(name,)) for name in "ab"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert ckpt.steps() == tuple(range(20))
    for step in range(20):
        name = "ab"[step % 2]
        assert ckpt.restore(part(name, 0), step)[name, "w"].unique().tolist() == [step]


def test_a_step_without_tensors_is_a_step(tmp_path):
    state = TensorDict({"step": NonTensorData(1), "empty": TensorDict()})
    with async_checkpointer(state, tmp_path) as ckpt:
        path = ckpt.save(state, 1).result()
    assert names_in(path) == ["manifest.json"]
    ckpt.verify(1)
    restored = ckpt.restore(state)
    assert restored["step"] == 1 and list(restored["empty"].keys()) == []
