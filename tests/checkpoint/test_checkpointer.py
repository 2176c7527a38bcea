"""What saving and restoring promise as long as nothing fails; see faults/ for the rest."""

import gc
import shutil
import signal
import sys
import threading
import time

import pytest
import torch
import torch.distributed.checkpoint as dcp
from tensordict import NonTensorData, TensorDict

from veofunc.checkpoint import CheckpointError, async_checkpointer
from veofunc.checkpoint.staging import Staging

DTYPES = [
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
    torch.complex64,
    torch.int64,
    torch.int8,
    torch.uint8,
    torch.uint16,
    torch.bool,
]


class Wrapper(torch.Tensor):
    """A tensor without data of its own."""

    @staticmethod
    def __new__(cls, inner):
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner):
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return cls(torch.ones(2))


def state_of(value: float, numel: int = 16, num_tensors: int = 3) -> TensorDict:
    tensors = {f"layers.{i}": torch.full((numel,), float(value)) for i in range(num_tensors)}
    return TensorDict({"model": TensorDict(tensors), "step": NonTensorData(value)})


def values_of(state: TensorDict) -> set[float]:
    return {x for tensor in state["model"].values() for x in tensor.unique().tolist()}


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.contiguous().reshape(-1).view(torch.uint8).tolist()


def names_in(directory) -> list[str]:
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_comes_back_bit_for_bit(dtype, tmp_path):
    raw = torch.randint(0, 2 if dtype is torch.bool else 256, (6, 4, dtype.itemsize)).byte()
    matrix = raw.view(dtype)[..., 0]
    tensors = {"matrix": matrix, "0-dim": matrix[0, 0], "empty": matrix[:0], "strided": matrix.T}
    state = TensorDict({"model": TensorDict(tensors), "extra": TensorDict({"x": matrix[::2]})})
    with async_checkpointer(state, tmp_path) as ckpt:
        ckpt.save(state, 1)
    restored = ckpt.restore(state)
    for key in [("model", name) for name in tensors] + [("extra", "x")]:
        assert restored[key].dtype == dtype
        assert restored[key].shape == state[key].shape
        assert bits(restored[key]) == bits(state[key])


@pytest.mark.parametrize("value", [None, True, 3, 0.1, float("inf"), "ä", [1, [2.5, "x"]], {"a": {}}])
def test_json_values_come_back_as_they_were(value, tmp_path):
    state = TensorDict({"a": {"b": NonTensorData(value)}})
    with async_checkpointer(state, tmp_path) as ckpt:
        ckpt.save(state, 1)
    restored = ckpt.restore(state)["a", "b"]
    assert restored == value
    assert type(restored) is type(value)


def test_step_zero_is_a_step(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        assert ckpt.latest() is None
        assert ckpt.save(state_of(0), 0).result() == tmp_path / "step_0"
        assert ckpt.latest() == 0
        assert ckpt.restore(state_of(1), 0)["step"] == 0


def test_steps_are_ordered_by_number(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        for step in (10, 9, 100):
            ckpt.save(state_of(step), step)
    assert ckpt.steps() == (9, 10, 100)
    assert ckpt.latest() == 100


def test_names_that_only_look_like_steps_are_ignored(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        ckpt.save(state_of(3), 3)
    for name in ("step_09", "step_9.tmp", "step_-1", "xstep_9", "step_9-backup", "step_"):
        shutil.copytree(tmp_path / "step_3", tmp_path / name)
    assert ckpt.steps() == (3,)
    assert ckpt.latest() == 3


def test_plain_dcp_load_reads_the_model_by_its_names(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        path = ckpt.save(state_of(5), 5).result()
    target = {name: torch.zeros(16) for name in ("layers.0", "layers.1", "layers.2")}
    with pytest.warns(UserWarning, match="single process"):  # torch says so without a process group
        dcp.load(target, checkpoint_id=path / "model")
    assert {x for tensor in target.values() for x in tensor.tolist()} == {5}
    assert not (path / "optimizer").exists()


def test_saves_that_overlap_with_changes_hold_one_step_each(tmp_path):
    state = state_of(0, numel=1 << 18, num_tensors=8)
    with async_checkpointer(state, tmp_path) as ckpt:
        for step in range(12):
            for tensor in state["model"].values():
                tensor.fill_(step)
            ckpt.save(state, step).wait_staged()
            for tensor in state["model"].values():
                tensor.fill_(-1)
    for step in range(12):
        assert values_of(ckpt.restore(state, step)) == {step}


def test_json_may_change_right_after_save(tmp_path):
    history = [1]
    state = TensorDict({"history": NonTensorData(history)})
    with async_checkpointer(state, tmp_path) as ckpt:
        ckpt.save(state, 1)
        history.append(2)
    assert ckpt.restore(state)["history"] == [1]


def test_leaves_that_the_template_lacked_or_had_in_other_shapes_are_saved(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        ckpt.save(state_of(1, numel=5, num_tensors=6), 1)
        ckpt.save(state_of(2), 2)
    assert ckpt.restore(state_of(0, numel=5, num_tensors=6), 1)["model", "layers.5"].tolist() == [1] * 5
    assert values_of(ckpt.restore(state_of(0), 2)) == {2}


def test_the_state_and_the_one_to_restore_are_never_changed_or_aliased(tmp_path):
    state, like = state_of(1), state_of(7)
    with async_checkpointer(state, tmp_path) as ckpt:
        ckpt.save(state, 1)
        restored = ckpt.restore(like)
        again = ckpt.restore(like)
    restored["model", "layers.0"].fill_(9)
    assert values_of(state) == {1}
    assert values_of(like) == {7}
    assert values_of(again) == {1}


def test_restore_waits_for_the_pending_save(tmp_path):
    big = state_of(1, numel=1 << 20)
    with async_checkpointer(big, tmp_path) as ckpt:
        ckpt.save(big, 1)
        assert ckpt.restore(big)["step"] == 1


def test_what_the_state_lacks_as_a_whole_comes_as_it_was_saved(tmp_path):
    saved = state_of(1)
    saved["optimizer"] = TensorDict({"state": {"w": {"m": torch.ones(2)}}, "empty": TensorDict()})
    with async_checkpointer(saved, tmp_path) as ckpt:
        ckpt.save(saved, 1)
    like = TensorDict({"model": state_of(0)["model"]})
    assert torch.equal(ckpt.restore(like)["optimizer", "state", "w", "m"], torch.ones(2))
    like["optimizer"] = TensorDict({"state": TensorDict(), "empty": TensorDict()})
    restored = ckpt.restore(like)
    assert torch.equal(restored["optimizer", "state", "w", "m"], torch.ones(2))
    assert list(restored["optimizer", "empty"].keys()) == []


def test_all_differences_are_listed_at_once_before_anything_is_read(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        path = ckpt.save(state_of(1), 1).result()
    (path / "model" / ".metadata").chmod(0)
    model = {"layers.0": torch.zeros(3), "layers.1": torch.zeros(16).int(), "new": torch.zeros(1)}
    like = TensorDict({"model": TensorDict(model), "step": torch.zeros(())})
    with pytest.raises(CheckpointError) as caught:
        ckpt.restore(like)
    for text in (
        "model.layers.0: saved as float32[16], in the state float32[3]",
        "model.layers.1: saved as float32[16], in the state int32[16]",
        "model.layers.2: unexpected",
        "model.new: missing",
        "step: saved as JSON, in the state float32[]",
    ):
        assert text in str(caught.value)


def test_not_strict_keeps_what_was_not_saved_and_leaves_out_what_is_not_wanted(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        ckpt.save(state_of(1), 1)
    like = TensorDict({"model": TensorDict({"layers.0": torch.zeros(16), "new": torch.ones(2)})})
    restored = ckpt.restore(like, strict=False)
    assert sorted(restored["model"].keys()) == ["layers.0", "new"]
    assert values_of(restored) == {1}
    restored["model", "new"].zero_()
    assert like["model", "new"].tolist() == [1, 1]


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (torch.eye(2).to_sparse(), "model.x must be dense"),
        (torch.empty(2, device="meta"), "model.x must be dense"),
        (Wrapper(torch.ones(2)), "model.x must be a plain tensor or a DTensor, got Wrapper"),
        (NonTensorData({1, 2}), "model.x must be a tensor"),
        (NonTensorData([{"a": (1,)}]), "model.x.0.a must be a tensor"),
        (NonTensorData({1: "a"}), "model.x must be a tensor"),
    ],
    ids=["sparse", "meta", "wrapper", "set", "tuple", "int key"],
)
def test_a_leaf_that_cannot_be_saved_is_named_before_anything_is_written(leaf, text, tmp_path):
    bad = state_of(1)
    bad["model", "x"] = leaf
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        with pytest.raises(TypeError, match=text):
            ckpt.save(bad, 1)
        assert names_in(tmp_path) == []
        ckpt.save(state_of(1), 1)
    with pytest.raises(TypeError, match=text):
        async_checkpointer(bad, tmp_path)


def test_two_leaves_of_the_same_name_on_disk_are_refused(tmp_path):
    one = TensorDict({"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}})
    with pytest.raises(ValueError, match=r"both be saved as 'a\.b'"):
        async_checkpointer(TensorDict({"model": one}), tmp_path)


def test_names_that_become_the_same_are_refused_and_what_is_different_again_is_saved(tmp_path):
    def state(*tensors: str) -> TensorDict:
        values = {name: torch.ones(1) if name in tensors else NonTensorData(1) for name in ("a.b", "b")}
        return TensorDict({"x": TensorDict({"a.b": values["a.b"], "a": {"b": values["b"]}})})

    with async_checkpointer(state("b"), tmp_path) as ckpt:
        ckpt.save(state("b"), 1)
        for _ in range(2):  # the same paths hold other kinds of values
            with pytest.raises(ValueError, match=r"both be saved as 'x\.a\.b'"):
                ckpt.save(state("a.b", "b"), 2)
        ckpt.save(state("a.b"), 2)
    assert ckpt.steps() == (1, 2)


CALLS = {
    "save": lambda ckpt, step: ckpt.save(state_of(0), step),
    "restore": lambda ckpt, step: ckpt.restore(state_of(0), step),
    "verify": lambda ckpt, step: ckpt.verify(step),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize("step", [True, 1.0, "1"])
def test_a_step_that_is_no_int_is_refused(step, call, tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        ckpt.save(state_of(0), 1)
        with pytest.raises(TypeError, match="step must be an int"):
            call(ckpt, step)


@pytest.mark.parametrize("call", [CALLS["save"], CALLS["verify"]], ids=["save", "verify"])
def test_a_step_that_is_none_is_refused_unless_the_newest_is_meant(call, tmp_path):
    with (
        async_checkpointer(state_of(0), tmp_path) as ckpt,
        pytest.raises(TypeError, match="step must be an int, got None"),
    ):
        call(ckpt, None)


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
@pytest.mark.parametrize(
    ("step", "text"),
    [(-1, "at least 0, got -1"), (2**63, r"below 2\*\*63"), (10**300, "below"), (10**5000, "below")],
    ids=["-1", "2**63", "10**300", "10**5000"],
)
def test_a_step_that_is_negative_or_absurd_is_refused(step, text, call, tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt, pytest.raises(ValueError, match=text):
        call(ckpt, step)


def test_the_largest_step_is_saved(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        ckpt.save(state_of(0), 2**63 - 1)
    assert ckpt.latest() == 2**63 - 1


def test_a_step_that_exists_is_not_saved_again(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        ckpt.save(state_of(1), 1)
        with pytest.raises(FileExistsError, match="step_1 exists"):
            ckpt.save(state_of(2), 1)
    assert values_of(ckpt.restore(state_of(0))) == {1}


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"keep_last": 0}, ValueError, "keep_last must be at least 1"),
        ({"keep_last": True}, TypeError, "keep_last must be an int"),
        ({"keep_last": 2.0}, TypeError, "keep_last must be an int"),
        ({"directory": __file__}, NotADirectoryError, "is a file"),
        ({"state": {"model": torch.ones(1)}}, TypeError, "state must be a TensorDict"),
    ],
)
def test_wrong_options_are_refused_at_construction(options, kind, text, tmp_path):
    with pytest.raises(kind, match=text):
        async_checkpointer(**{"state": state_of(0), "directory": tmp_path, **options})


def test_keep_last_removes_the_oldest_but_never_the_one_just_saved(tmp_path):
    with async_checkpointer(state_of(0), tmp_path, keep_last=2) as ckpt:
        for step in (10, 20, 30):
            ckpt.save(state_of(step), step)
        ckpt.wait()
        assert ckpt.steps() == (20, 30)
        ckpt.save(state_of(5), 5).result()
        assert ckpt.steps() == (5, 20, 30)
        ckpt.save(state_of(40), 40)
    assert names_in(tmp_path) == ["step_30", "step_40"]


def test_keep_last_does_not_count_damaged_steps(tmp_path):
    with async_checkpointer(state_of(0), tmp_path, keep_last=1) as ckpt:
        ckpt.save(state_of(1), 1).result()
        (tmp_path / "step_9").mkdir()
        ckpt.save(state_of(2), 2)
    assert ckpt.steps() == (2,)
    assert names_in(tmp_path) == ["step_2", "step_9"]


def test_leaves_no_thread_behind(tmp_path):
    before = set(threading.enumerate())
    ckpt = async_checkpointer(state_of(0), tmp_path)
    ckpt.save(state_of(1), 1).result()
    started = set(threading.enumerate()) - before
    assert started
    del ckpt
    gc.collect()
    for thread in started:
        thread.join(timeout=10)
        assert not thread.is_alive()


def test_threads_that_save_at_once_save_what_they_were_given(tmp_path):
    like = state_of(0, numel=1 << 14, num_tensors=16)
    num_threads, num_saves = 4, 5
    failures = []

    def work(thread: int) -> None:
        try:
            for step in range(thread, num_threads * num_saves, num_threads):
                ckpt.save(state_of(step, numel=1 << 14, num_tensors=16), step)
        except Exception as error:
            failures.append(error)

    with async_checkpointer(like, tmp_path) as ckpt:
        threads = [threading.Thread(target=work, args=(thread,)) for thread in range(num_threads)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert failures == []
    for step in range(num_threads * num_saves):
        restored = ckpt.restore(like, step)
        assert (values_of(restored), restored["step"]) == ({step}, step)


class Signalling(TensorDict):
    """A state that raises a signal when it is read, as it may reach a job while it saves."""

    def items(self, *args, **kwargs):
        if self.batch_size == ():
            signal.raise_signal(signal.SIGUSR1)
        return super().items(*args, **kwargs)


def test_a_save_inside_a_save_is_refused_and_the_outer_one_is_whole(tmp_path):
    told = []

    def handler(*_):
        try:
            ckpt.save(state_of(9), 9)
        except RuntimeError as error:
            told.append(str(error))

    state = Signalling({"model": state_of(1)["model"], "step": NonTensorData(1)})
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with async_checkpointer(state_of(0), tmp_path) as ckpt:
            ckpt.save(state, 1)
            ckpt.save(state_of(2), 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert len(told) == 1
    assert "save was called inside a save" in told[0]
    assert ckpt.steps() == (1, 2)
    assert values_of(ckpt.restore(state_of(0), 1)) == {1}


def test_a_save_whose_signal_handler_raises_is_made_whole_or_not_at_all(tmp_path):
    state = Signalling({"model": state_of(1)["model"], "step": NonTensorData(1)})
    before = signal.signal(signal.SIGUSR1, lambda *_: ckpt.save(state_of(9), 9))
    try:
        with async_checkpointer(state_of(0), tmp_path) as ckpt:
            with pytest.raises(RuntimeError, match="inside a save"):
                ckpt.save(state, 1)
            ckpt.save(state_of(2), 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert 2 in ckpt.steps()
    for step in ckpt.steps():
        assert values_of(ckpt.restore(state_of(0), step)) == {step}


class Held(TensorDict):
    """A state whose reading waits, and that counts those who read such states at once."""

    inside, most = [], []
    read, go_on = threading.Event(), threading.Event()

    def items(self, *args, **kwargs):
        if self.batch_size == () and "step" in self.keys():
            Held.inside.append(1)
            Held.most.append(len(Held.inside))
            Held.read.set()
            Held.go_on.wait(10)
            Held.inside.pop()
        return super().items(*args, **kwargs)


def held_state(value: float) -> Held:
    return Held({"model": state_of(value)["model"], "step": NonTensorData(value)})


@pytest.fixture
def held():
    Held.most.clear()
    Held.read.clear()
    Held.go_on.clear()
    yield
    Held.go_on.set()


def test_a_thread_waits_until_another_has_copied_its_state(held, tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        threads = [threading.Thread(target=ckpt.save, args=(held_state(step), step)) for step in range(4)]
        for thread in threads:
            thread.start()
        assert Held.read.wait(10)
        time.sleep(0.05)
        Held.go_on.set()
        for thread in threads:
            thread.join()
    assert Held.most == [1] * 4
    assert ckpt.steps() == (0, 1, 2, 3)


def test_a_signal_handler_saves_in_its_turn_while_its_thread_waits(held, tmp_path):
    before = signal.signal(signal.SIGALRM, lambda *_: ckpt.save(state_of(9), 9))
    try:
        with async_checkpointer(state_of(0), tmp_path) as ckpt:
            thread = threading.Thread(target=ckpt.save, args=(held_state(1), 1))
            thread.start()
            assert Held.read.wait(10)
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            threading.Timer(0.3, Held.go_on.set).start()
            ckpt.save(state_of(2), 2)
            thread.join()
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ckpt.steps() == (1, 2, 9)


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_save_that_is_interrupted_is_made_whole_or_not_at_all(when, tmp_path, monkeypatch):
    numel = 1 << 22  # long enough to write
    with async_checkpointer(state_of(0, numel), tmp_path) as ckpt:
        submit = ckpt._threads.submit

        def interrupted(*args):
            if when == "after":
                submit(*args)
            raise KeyboardInterrupt

        monkeypatch.setattr(ckpt._threads, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            ckpt.save(state_of(1, numel), 1)
        monkeypatch.undo()
        ckpt.save(state_of(2, numel), 2)
        ckpt.wait()
    assert 2 in ckpt.steps()
    for step in ckpt.steps():
        assert values_of(ckpt.restore(state_of(0, numel), step)) == {step}


def test_waiting_in_one_thread_forgets_no_save_of_another(tmp_path, monkeypatch):
    switch = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    stop = threading.Event()

    def wait(ckpt):
        while not stop.is_set():
            ckpt.wait()

    try:
        with async_checkpointer(state_of(0), tmp_path, keep_last=50) as ckpt:
            threads = [threading.Thread(target=wait, args=(ckpt,)) for _ in range(4)]
            for thread in threads:
                thread.start()
            for step in range(25):
                ckpt.save(state_of(step), step)
            stop.set()
            for thread in threads:
                thread.join()
    finally:
        sys.setswitchinterval(switch)
    for step in range(25):
        assert values_of(ckpt.restore(state_of(0), step)) == {step}


def test_a_save_that_is_interrupted_before_it_copies_is_not_made(held, tmp_path):
    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with async_checkpointer(state_of(0), tmp_path, double_buffer=True) as ckpt:
            ckpt.save(state_of(1), 1)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(held_state(2), 2)
            Held.go_on.set()
            ckpt.save(state_of(3), 3)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ckpt.steps() == (1, 3)
    for step in (1, 3):
        assert values_of(ckpt.restore(state_of(0), step)) == {step}


def test_a_save_that_is_interrupted_while_it_copies_is_made_before_the_state_can_change(
    tmp_path, monkeypatch
):
    def interrupt(*_):
        raise KeyboardInterrupt

    copy, state = Staging.copy, state_of(2)
    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with async_checkpointer(state_of(0), tmp_path, double_buffer=True) as ckpt:
            ckpt.save(state_of(1), 1)

            def slow(*args, **options):
                time.sleep(0.3)
                copy(*args, **options)

            monkeypatch.setattr(Staging, "copy", slow)
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            with pytest.raises(KeyboardInterrupt):
                ckpt.save(state, 2)
            for tensor in state["model"].values():
                tensor.fill_(9)
            monkeypatch.undo()
            ckpt.save(state_of(3), 3)
    finally:
        signal.signal(signal.SIGALRM, before)
    assert ckpt.steps() == (1, 2, 3)
    for step in (1, 2, 3):
        assert values_of(ckpt.restore(state_of(0), step)) == {step}


class Sub(torch.Tensor):
    """A subclass that holds data as every tensor does."""


def test_a_plain_subclass_is_saved_as_the_tensor_that_it_is(tmp_path):
    state = TensorDict({"model": TensorDict({"w": torch.arange(3.0).as_subclass(Sub)})})
    with async_checkpointer(state, tmp_path) as ckpt:
        ckpt.save(state, 1)
        state["model", "w"].zero_()
    restored = async_checkpointer(state, tmp_path).restore(state)["model", "w"]
    assert type(restored) is torch.Tensor
    assert restored.tolist() == [0, 1, 2]


def test_json_values_below_a_batch_size_come_back_as_they_were(tmp_path):
    data = TensorDict({"pos": torch.zeros(2), "name": "x", "list": NonTensorData([1])}, batch_size=[2])
    state = TensorDict({"data": data})
    with async_checkpointer(state, tmp_path) as ckpt:
        ckpt.save(state, 1)
    restored = ckpt.restore(state)["data"]
    assert restored["name"] == "x"
    assert restored["list"] == [1]
    assert restored.batch_size == ()


@pytest.fixture
def meta_device():
    torch.set_default_device("meta")
    yield
    torch.set_default_device(None)


def test_what_the_state_lacks_comes_on_the_cpu_whatever_the_default_device_is(meta_device, tmp_path):
    weight = torch.arange(3.0, device="cpu")
    state = TensorDict({"model": TensorDict({"w": weight}), "ema": TensorDict({"w": weight})})
    with async_checkpointer(state, tmp_path) as ckpt:
        ckpt.save(state, 1)
    restored = ckpt.restore(TensorDict({"model": TensorDict({"w": weight})}))
    for section in ("model", "ema"):
        assert restored[section, "w"].device.type == "cpu"
        assert restored[section, "w"].tolist() == [0, 1, 2]


def test_a_checkpointer_made_in_inference_mode_saves_outside_and_restores_ordinary_tensors(tmp_path):
    with torch.inference_mode():
        ckpt = async_checkpointer(state_of(0), tmp_path)
        ckpt.save(state_of(1), 1)
    with ckpt:
        ckpt.save(state_of(2), 2)
    with torch.inference_mode():
        like = state_of(0)
        like["model", "new"] = torch.ones(1)
        restored = ckpt.restore(like, 1, strict=False)
        restored["more"] = ckpt.restore(TensorDict())["model"]
    assert values_of(ckpt.restore(state_of(0))) == {2}
    for tensor in restored.values(include_nested=True, leaves_only=True):
        assert not tensor.is_inference()


def test_a_damaged_newest_step_is_skipped_and_named_an_error_that_says_what_to_do(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        for step in (1, 3, 4, 5):
            ckpt.save(state_of(step), step)
    (tmp_path / "step_4" / "manifest.json").unlink()
    file = tmp_path / "step_5" / "model" / "__0_0.distcp"
    file.write_bytes(bytes(len(file.read_bytes())))
    with pytest.warns(RuntimeWarning, match="step [45] is skipped") as warned:
        assert values_of(ckpt.restore(state_of(0))) == {3}
    assert "CRC-32" in str(warned[0].message)
    with pytest.raises(CheckpointError, match="CRC-32") as caught:
        ckpt.restore(state_of(0), 5)
    assert f"restore(like, step=3), or remove {tmp_path / 'step_5'}" in str(caught.value)
    (tmp_path / "step_1" / "model" / "__0_0.distcp").write_bytes(bytes(10))
    with pytest.raises(CheckpointError, match=r"no older one is complete.* remove .*step_1"):
        ckpt.restore(state_of(0), step=1)


def test_a_manifest_nested_without_end_is_skipped_as_damaged(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        for step in (1, 2):
            ckpt.save(state_of(step), step)
    (tmp_path / "step_2" / "manifest.json").write_text("[" * 100_000)
    with pytest.warns(RuntimeWarning, match="step 2 is skipped.*checksum"):
        assert ckpt.latest() == 1
