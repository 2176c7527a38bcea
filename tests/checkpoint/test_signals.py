"""A last save after a signal; this file is also the script of the processes that get one."""

import functools
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict

from tests.distributed.pair import run_checks, run_on_two_ranks, what_failed
from tests.limits import largest_file
from veofunc.checkpoint import CheckpointError, async_checkpointer
from veofunc.checkpoint.signals import ECHO, save_on_signal

NUM_STEPS = 1000


def state_of(step: int, numel: int = 16) -> TensorDict:
    return TensorDict({"model": {"w": torch.full((numel,), float(step))}, "step": NonTensorData(step)})


@pytest.fixture
def ckpt(tmp_path):
    with async_checkpointer(state_of(0), tmp_path / "steps") as ckpt:
        yield ckpt


@pytest.fixture(autouse=True)
def handlers_stay_as_they_were():
    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    after = {number: signal.getsignal(number) for number in before}
    for number, handler in before.items():
        signal.signal(number, handler)
    assert after == before


def never():
    raise AssertionError("nothing had to be saved")


def test_without_a_signal_nothing_is_saved(ckpt):
    with save_on_signal(ckpt, never) as last_save:
        assert not any(last_save(step) for step in range(3))
    assert ckpt.steps() == ()


def test_after_a_signal_the_step_is_saved_at_its_end_and_not_before(ckpt):
    with save_on_signal(ckpt, lambda: state_of(5)) as last_save:
        assert last_save(4) is False
        signal.raise_signal(signal.SIGTERM)
        assert ckpt.steps() == ()
        assert last_save(5) is True
        assert ckpt.steps() == (5,)  # durable already
    assert ckpt.restore(state_of(0))["step"] == 5


def test_a_step_that_is_saved_or_being_saved_is_not_saved_again(ckpt):
    with save_on_signal(ckpt, never) as last_save:
        ckpt.save(state_of(1), 1).result()
        save = ckpt.save(state_of(2), 2)
        signal.raise_signal(signal.SIGTERM)
        assert last_save(2)
        assert save.done
        assert last_save(1)
    assert ckpt.steps() == (1, 2)


def test_a_signal_inside_save_lets_it_finish(ckpt, monkeypatch):
    with save_on_signal(ckpt, lambda: state_of(2)) as last_save:
        begin = ckpt._begin

        def begin_and_raise(*args):
            begin(*args)
            signal.raise_signal(signal.SIGTERM)

        monkeypatch.setattr(ckpt, "_begin", begin_and_raise)
        ckpt.save(state_of(1), 1)
        monkeypatch.undo()
        assert last_save(2)
    assert ckpt.steps() == (1, 2)


def test_a_save_that_failed_before_does_not_keep_the_last_one_from_being_made(tmp_path):
    big = 1 << 18
    with (
        async_checkpointer(state_of(0, big), tmp_path) as ckpt,
        save_on_signal(ckpt, lambda: state_of(2, big)) as last_save,
    ):
        with largest_file(1 << 16):
            save = ckpt.save(state_of(1, big), 1)
            while not save.done:
                time.sleep(0.001)
        signal.raise_signal(signal.SIGTERM)
        said = r"step 1 .*not saved: .*; step 2, the last one, is saved"
        with pytest.warns(RuntimeWarning, match=said):
            assert last_save(2)
    assert ckpt.steps() == (2,)


def test_a_last_save_that_fails_raises(tmp_path):
    big = 1 << 18
    with (
        async_checkpointer(state_of(0, big), tmp_path) as ckpt,
        save_on_signal(ckpt, lambda: state_of(1, big)) as last_save,
    ):
        signal.raise_signal(signal.SIGTERM)
        with largest_file(1 << 16), pytest.raises(CheckpointError, match=r"step 1 .* was not saved"):
            last_save(1)


def test_leaving_after_a_signal_waits_for_pending_saves(ckpt):
    with save_on_signal(ckpt, never):
        save = ckpt.save(state_of(1), 1)
        signal.raise_signal(signal.SIGTERM)
    assert save.done


def test_an_exception_leaves_the_block_with_what_failed_as_a_note(tmp_path):
    big = 1 << 18
    ckpt = async_checkpointer(state_of(0, big), tmp_path)
    with largest_file(1 << 16), pytest.raises(KeyError, match="why") as caught, save_on_signal(ckpt, never):
        ckpt.save(state_of(1, big), 1)
        signal.raise_signal(signal.SIGTERM)
        raise KeyError("why")
    assert "step 1" in caught.value.__notes__[0]
    ckpt.close()


@pytest.mark.parametrize("handler", [signal.SIG_DFL, signal.SIG_IGN, signal.default_int_handler, print])
def test_handlers_from_before_are_put_back(handler, ckpt):
    before = signal.signal(signal.SIGUSR1, handler)
    try:
        with pytest.raises(KeyError), save_on_signal(ckpt, never, signals=[signal.SIGUSR1]):
            assert signal.getsignal(signal.SIGUSR1) != handler
            raise KeyError
        assert signal.getsignal(signal.SIGUSR1) == handler
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_handler_that_python_did_not_install_becomes_the_default_with_a_warning(ckpt, monkeypatch):
    monkeypatch.setattr(signal, "getsignal", lambda number: None)
    with (
        pytest.warns(RuntimeWarning, match="SIGUSR1 has a handler that Python did not install") as caught,
        save_on_signal(ckpt, never, signals=[signal.SIGUSR1]),
    ):
        pass
    assert caught[0].filename == __file__
    monkeypatch.undo()
    assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


@pytest.mark.parametrize("handler", [signal.SIG_IGN, "a function"])
def test_a_second_signal_goes_to_the_handler_from_before(handler, ckpt):
    heard = []
    is_function = handler == "a function"
    before = signal.signal(
        signal.SIGUSR1, (lambda number, frame: heard.append(number)) if is_function else handler
    )
    try:
        with save_on_signal(ckpt, never, signals=[signal.SIGUSR1]):
            signal.raise_signal(signal.SIGUSR1)
            signal.raise_signal(signal.SIGUSR1)  # the launcher's echo
            assert heard == []
            time.sleep(ECHO)
            signal.raise_signal(signal.SIGUSR1)
            assert heard == ([signal.SIGUSR1] if is_function else [])
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_signal_is_for_all_blocks_around(ckpt):
    with save_on_signal(ckpt, never) as outer:
        with save_on_signal(ckpt, lambda: state_of(1)) as inner:
            signal.raise_signal(signal.SIGTERM)
            assert inner(1)
        assert outer(1)


def test_each_block_starts_without_a_signal(ckpt):
    with save_on_signal(ckpt, never):
        signal.raise_signal(signal.SIGTERM)
    with save_on_signal(ckpt, never) as last_save:
        assert not last_save(1)


def test_outside_of_the_main_thread_it_says_so_and_the_rest_works(ckpt):
    found = []

    def work():
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            with save_on_signal(ckpt, never) as last_save:
                found.append(last_save(1))
        found.extend(caught)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert found[0] is False
    assert "must be entered in the main thread" in str(found[1].message)
    assert (found[1].category, found[1].filename) == (RuntimeWarning, __file__)


@pytest.mark.parametrize(
    ("arguments", "kind", "text"),
    [
        ({"ckpt": "runs"}, TypeError, "ckpt must be what async_checkpointer gives"),
        ({"make_state": state_of(0)}, TypeError, "make_state must be a function without arguments"),
        ({"signals": signal.SIGTERM}, TypeError, "signals must be a tuple of signals"),
        ({"signals": "SIGTERM"}, TypeError, "signals must be a tuple of signals"),
        ({"signals": ["SIGTERM"]}, TypeError, "signals must be a tuple of signals"),
        ({"signals": []}, ValueError, "signals must be one or more"),
        ({"signals": [signal.SIGTERM, signal.SIGKILL]}, ValueError, "that a process can handle"),
        ({"signals": [1000]}, ValueError, "that a process can handle"),
    ],
)
def test_wrong_arguments_are_refused_before_the_block(arguments, kind, text, ckpt):
    with pytest.raises(kind, match=text):
        save_on_signal(**{"ckpt": ckpt, "make_state": never, **arguments})


@pytest.mark.parametrize(
    ("step", "kind"), [(1.0, TypeError), (True, TypeError), (None, TypeError), (-1, ValueError)]
)
def test_a_step_that_is_none_is_refused_even_without_a_signal(step, kind, ckpt):
    with save_on_signal(ckpt, never) as last_save, pytest.raises(kind, match="step must be"):
        last_save(step)


# One process that another one sends signals to.


def train(directory: Path, save_every: int, seconds_of_last_save: float) -> None:
    """Trains and saves, until a signal ends it."""
    at = 0

    def make_state():
        print("saving", flush=True)
        time.sleep(seconds_of_last_save)
        return state_of(at)

    with (
        async_checkpointer(state_of(0), directory) as ckpt,
        save_on_signal(ckpt, make_state, signals=[signal.SIGTERM, signal.SIGINT]) as last_save,
    ):
        for at in range(1, NUM_STEPS):
            time.sleep(0.01)
            if at % save_every == 0:
                ckpt.save(state_of(at), at)
            print(at, flush=True)
            if last_save(at):
                break
    print("stopped at", at, flush=True)


@pytest.fixture
def start():
    """Starts a process that runs `train`, and gives it at its fifth step."""
    processes = []

    def start(*arguments: object) -> subprocess.Popen:
        command = [sys.executable, "-W", "error", __file__, "train", *map(str, arguments)]
        environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
        processes.append(subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True))
        until(processes[-1], "5\n")
        return processes[-1]

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def until(process: subprocess.Popen, line: str) -> None:
    assert process.stdout is not None
    assert any(found == line for found in process.stdout), f"it ended before {line!r}"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_process_that_gets_a_signal_saves_its_step_and_ends_well(number, start, tmp_path):
    process = start(tmp_path, 3, 0)
    process.send_signal(number)
    lines = process.communicate(timeout=60)[0].splitlines()
    last = int(lines[-1].removeprefix("stopped at "))
    assert process.returncode == 0
    ckpt = async_checkpointer(state_of(0), tmp_path)
    assert ckpt.latest() == last < NUM_STEPS - 1
    assert ckpt.steps() == tuple(sorted({*range(3, last, 3), last}))
    assert ckpt.restore(state_of(0))["step"] == last


def test_a_second_signal_ends_a_process_whose_last_save_takes_too_long(start, tmp_path):
    process = start(tmp_path, NUM_STEPS, 60)
    process.terminate()
    until(process, "saving\n")
    process.terminate()  # at once: taken for the first
    time.sleep(1.5 * ECHO)
    assert process.poll() is None
    process.terminate()
    process.communicate(timeout=60)
    assert process.returncode == -signal.SIGTERM


# Two ranks. Each check returns the step after which it stopped; all must be the same, and saved.


def run(ckpt, rank, work, raise_at=None) -> int:
    with save_on_signal(ckpt, lambda: state_of(step)) as last_save:
        for step in range(0, 10 * NUM_STEPS, 10):
            work(step)
            if step == raise_at:
                os.kill(os.getpid(), signal.SIGTERM)
            if last_save(step):
                return step
    return -1


def in_step(step: int) -> None:
    dist.all_reduce(torch.ones(1))


def check_only_one_rank_gets_the_signal(ckpt, rank):
    stopped = run(ckpt, rank, in_step, raise_at=50 if rank == 1 else None)
    assert stopped == 60


def check_only_the_rank_that_hosts_the_store_gets_the_signal(ckpt, rank):
    assert run(ckpt, rank, in_step, raise_at=50 if rank == 0 else None) == 60


def check_both_get_it_in_the_same_step(ckpt, rank):
    assert run(ckpt, rank, in_step, raise_at=50) == 60


def check_each_gets_it_in_another_step(ckpt, rank):
    assert run(ckpt, rank, in_step, raise_at=50 + 10 * rank) == 60


def check_a_rank_far_behind_gets_it(ckpt, rank):
    """No collective: rank 0 is ahead, as hosts are that do not wait for their accelerators."""
    stopped = run(
        ckpt, rank, lambda step: time.sleep(0.02 * rank + 0.001), raise_at=50 if rank == 1 else None
    )
    assert stopped > 100


def check_a_rank_far_ahead_gets_it(ckpt, rank):
    stopped = run(
        ckpt, rank, lambda step: time.sleep(0.02 * rank + 0.001), raise_at=500 if rank == 0 else None
    )
    assert stopped == 510


def check_no_rank_gets_it(ckpt, rank):
    with save_on_signal(ckpt, never) as last_save:
        for step in range(20):
            in_step(step)
            assert not last_save(step)


def check_a_thread_learns_of_it_from_the_other_rank(ckpt, rank):
    stopped = []

    def work():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            stopped.append(run(ckpt, rank, in_step))

    if rank == 0:
        assert run(ckpt, rank, in_step, raise_at=50) == 60
        return
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert stopped == [60]


def check_a_step_in_flight_is_not_saved_again(ckpt, rank):
    def work(step):
        in_step(step)
        if step == 60:
            ckpt.save(state_of(step), step)

    assert run(ckpt, rank, work, raise_at=50) == 60


CHECKS = {name[6:]: check for name, check in list(globals().items()) if name.startswith("check_")}


def run_check(check, rank: int, directory: Path) -> None:
    with async_checkpointer(state_of(0), directory) as ckpt:
        check(ckpt, rank)
        steps = ckpt.steps()
    found = [None, None]
    dist.all_gather_object(found, steps)
    assert found[0] == found[1], found
    assert len(steps) == (check is not check_no_rank_gets_it)
    if steps:
        assert ckpt.restore(state_of(0))["step"] == steps[0]


def store_in(directory: Path, rank: int) -> dist.Store:
    """A store as training has it, at a free port."""
    note = directory / "port"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False)
        (directory / "unfinished").write_text(str(store.port))
        (directory / "unfinished").rename(note)
        return store
    while not note.exists():
        time.sleep(0.01)
    return dist.TCPStore("127.0.0.1", int(note.read_text()), 2, is_master=False)


def main(rank: int, directory: Path) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    dist.init_process_group("gloo", store=store_in(directory, rank), rank=rank, world_size=2)
    run_checks(
        {name: functools.partial(run_check, check, rank, directory / name) for name, check in CHECKS.items()},
        rank,
        directory,
    )
    dist.barrier()  # the store ends with its process
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where two processes have run all checks."""
    directory = tmp_path_factory.mktemp("ranks")
    run_on_two_ranks(__file__, directory)
    return directory


@pytest.mark.distributed
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("rank", [0, 1])
def test_two_ranks_stop_after_the_same_step(name, rank, directory):
    failure = what_failed(name, rank, directory)
    assert not failure, failure


if __name__ == "__main__":
    if sys.argv[1] == "train":
        train(Path(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
    else:
        main(int(sys.argv[1]), Path(sys.argv[2]))
