import threading
from concurrent.futures import Future
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from veofunc.checkpoint import CheckpointError, Save, async_checkpointer

STATE = TensorDict({"model": TensorDict({"w": torch.ones(20_000)}), "more": torch.ones(5)})


def failed(error: BaseException) -> Future:
    future = Future()
    future.set_exception(error)
    return future


def test_progress_goes_from_nothing_to_the_bytes_of_all_files(tmp_path):
    with async_checkpointer(STATE, tmp_path) as ckpt:
        save = ckpt.save(STATE, 1)
        total = save.progress[1]
        path = save.result()
    assert save.progress == (total, total)
    assert total == sum(file.stat().st_size for file in path.glob("*/*.distcp"))


def test_what_is_still_being_written_is_not_done(tmp_path):
    with async_checkpointer(STATE, tmp_path, bytes_per_second=200_000.0) as ckpt:
        save = ckpt.save(STATE, 1)  # in 0.4 s
        with pytest.raises(TimeoutError):
            save.result(timeout=0.01)
        assert not save.done
        assert save.result(timeout=20) == tmp_path / "step_1"
        assert save.done


def test_bytes_are_counted_by_all_threads():
    save = Save(1, total=40_000)
    threads = [threading.Thread(target=lambda: [save._wrote(1) for _ in range(10_000)]) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert save.progress == (40_000, 40_000)


@pytest.mark.parametrize(("where", "result"), [("/a/step_1", Path("/a/step_1")), ("s3://a/b", "s3://a/b")])
def test_the_result_is_a_path_or_a_url(where, result):
    save = Save(1)
    save._future.set_result(where)
    assert save.result() == result
    assert save.progress == (0, 0)


def test_every_result_tells_why_it_failed():
    save = Save(1)
    save._future.set_exception(CheckpointError("disk full"))
    assert save.done
    for _ in range(2):
        with pytest.raises(CheckpointError, match="disk full"):
            save.result()


def test_waiting_tells_why_it_failed_unless_somebody_was_told():
    save = Save(1)
    save._future.set_exception(CheckpointError("disk full"))
    with pytest.raises(CheckpointError, match="disk full"):
        save._wait()
    save._wait()


def test_a_result_that_is_not_there_in_time_tells_nobody():
    save = Save(1)
    with pytest.raises(TimeoutError):
        save.result(timeout=0)
    save._future.set_exception(CheckpointError("disk full"))
    with pytest.raises(CheckpointError, match="disk full"):
        save._wait()


def test_without_copies_in_the_background_the_state_may_change_at_once():
    Save(1).wait_staged()


def test_the_state_may_change_when_all_copies_are_made():
    save, copies = Save(1), [Future(), Future()]
    save._copies = copies
    waiting = threading.Thread(target=save.wait_staged)
    waiting.start()
    copies[0].set_result(None)
    waiting.join(0.05)
    assert waiting.is_alive()
    copies[1].set_result(None)
    waiting.join(20)
    assert not waiting.is_alive()


def test_waiting_for_copies_raises_what_copying_raised():
    save, error = Save(7), RuntimeError("no memory")
    save._copies = [failed(error)]
    with pytest.raises(CheckpointError, match=r"step 7 is not saved: RuntimeError: no memory") as failure:
        save.wait_staged()
    assert failure.value.__cause__ is error
