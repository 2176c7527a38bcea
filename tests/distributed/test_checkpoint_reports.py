"""What users of other checkpoint libraries reported of several ranks, tried on ours: each test cites it.

`checkpoint/test_reports.py` tries what takes one process; `ELSEWHERE` says which other tests show the rest.

This file is also the script that starts the ranks: forks of one process that has imported everything. They
run in worlds, each a process group of its own over a TCP store, as what ends one rank ends its world.
"""

import contextlib
import functools
import gc
import json
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch
import torch.distributed as dist
from tensordict import NonTensorData, TensorDict
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tests.distributed.pair import run_checks, what_failed
from tests.faults.processes import join
from tests.limits import children, largest_file, small_disk
from veofunc.checkpoint import CheckpointError, async_checkpointer

FILES = Path(__file__).parents[1]
MIB = 1 << 20
TIMEOUT = 3.0  # seconds after which a rank must notice that another one is gone
SOON = 2 * TIMEOUT + 4  # seconds in which who waits must be told: on a machine that is busy, a bit more
LONGEST = 3 * SOON  # and in which it must have ended, after one more save that nobody hears of
WHOLE = torch.arange(35.0).view(7, 5)  # neither side is even

ELSEWHERE = {
    "distributed/test_checkpoint_ranks.py": {
        "DCP: DTensors, and another placement": "def check_shards_come_back_in_any_placement",
        "DCP: plain dcp.load": "def check_plain_dcp_load_reads_all_shards",
        "Megatron-LM #6858, miles #3187, RLinf #1570: random states of another rank; statement 20": (
            "def check_every_rank_gets_its_own_random_state_and_window"
        ),
        "pytorch #120356: values that differ where they must not": (
            "def check_ranks_that_save_different_things_are_told"
        ),
        "statement 35: a leaf that one rank cannot save": (
            "def check_a_leaf_that_one_rank_cannot_stage_fails_on_all"
        ),
        "statement 33: resumed exactly": "def check_fsdp_training_resumes_bit_equal",
        "DCP: from two ranks to one": "def test_one_process_restores_what_two_have_saved",
    },
    "faults/test_checkpoint_kills.py": {
        "Lightning #688, #19970: killed at any moment": (
            "def test_killed_at_any_moment_nothing_is_torn_or_lost"
        ),
    },
}


@pytest.mark.parametrize("file", ELSEWHERE)
def test_what_is_tried_elsewhere_still_is(file):
    source = (FILES / file).read_text()
    assert [name for name in ELSEWHERE[file].values() if f"\n{name}(" not in source] == []


def sharded(mesh, placement, whole=WHOLE) -> DTensor:
    return distribute_tensor(whole.clone(), mesh, [placement], src_data_rank=None)


def section(mesh, value: float, numel: int = 8) -> TensorDict:
    """Each rank has a row of `numel`."""
    rows = torch.full((mesh.size(), numel), float(value))
    return TensorDict({"w": sharded(mesh, Shard(0), rows)})


def state_of(mesh, value: float, numel: int = 8) -> TensorDict:
    return TensorDict({"model": section(mesh, value, numel), "step": NonTensorData(value)})


def values_of(state: TensorDict) -> set[float]:
    tensors = state.values(include_nested=True, leaves_only=True)
    return {x for tensor in tensors for x in tensor.full_tensor().unique().tolist()}


def failure_of(work: Callable[[], object]) -> str:
    with pytest.raises(CheckpointError) as caught:
        work()
    return str(caught.value)


def until(condition: Callable[[], object], seconds: float = 30.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.005)


def names_in(directory: Path) -> list[str]:
    """What there is besides the lock; rank 0 has removed by then what it removes."""
    dist.barrier()
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock")


# ---- checks of two ranks that live on


def check_each_rank_gets_its_own_under_one_key(rank, mesh, directory):
    """pytorch #120356, DCP: both ranks get what one of them has saved, tensors and objects."""
    own = {"x": torch.full((3,), rank + 1), "at": NonTensorData({"file": f"{rank}.txt"})}
    state = TensorDict({"model": section(mesh, 1), "loader": TensorDict(own), "seed": torch.tensor(rank)})
    with async_checkpointer(state, directory, per_rank=["loader", "seed"]) as ckpt:
        ckpt.save(state, 1)
    for like in (state, TensorDict({"model": section(mesh, 0)})):
        restored = ckpt.restore(like)
        assert restored["loader", "x"].tolist() == [rank + 1] * 3
        assert restored["loader", "at"] == {"file": f"{rank}.txt"}
        assert restored["seed"].item() == rank


def check_a_replicated_tensor_is_written_once_and_each_shard_by_its_rank(rank, mesh, directory):
    """Statement 16: what several ranks hold is written by one; unique shards stay."""
    tensors = {"same": torch.ones(MIB // 4), "shard": torch.arange(MIB / 2).view(2, -1)}
    placements = {"same": Replicate(), "shard": Shard(0)}
    model = {name: sharded(mesh, placements[name], tensor) for name, tensor in tensors.items()}
    state = TensorDict({"model": TensorDict({**model, "plain": torch.ones(MIB // 4)})})
    with async_checkpointer(state, directory) as ckpt:
        path = ckpt.save(state, 1).result()
    sizes = [sum(file.stat().st_size for file in path.glob(f"model/__{r}_*.distcp")) for r in range(2)]
    assert all(size > MIB for size in sizes)  # the shard of each
    assert 4 * MIB < sum(sizes) < 4.1 * MIB  # two shards, and of the others one each
    restored = ckpt.restore(state)["model"]
    assert torch.equal(restored["shard"].full_tensor(), tensors["shard"])
    assert torch.equal(restored["same"].full_tensor(), tensors["same"])


def check_two_slots_saved_at_once_never_hang_or_mix(rank, mesh, directory):
    """VeOmni #102, #107: two concurrent saves, of model and optimizer, on one group hang."""
    rng, own = Random(0), Random(rank + 1)
    state = TensorDict({name: section(mesh, 0) for name in ("model", "optimizer")})
    with async_checkpointer(state, directory) as ckpt:
        for step in range(0, 100, 2):
            for offset, name in enumerate(rng.sample(["model", "optimizer"], 2)):
                save = ckpt.save(
                    TensorDict({name: section(mesh, step + offset)}), step + offset, block=rng.random() < 0.5
                )
                save.wait_staged()
                time.sleep(own.choice([0, 0, 0.001, 0.02]))
            if rng.random() < 0.2:
                ckpt.wait()
    assert ckpt.steps() == (*range(100),)
    for step in (0, 1, 49, 50, 98, 99):
        restored = ckpt.restore(TensorDict(), step)
        assert {x for part in restored.values() for x in part["w"].unique().tolist()} == {step}


def check_collectives_of_the_main_thread_go_on_while_steps_are_saved(rank, mesh, directory):
    """KempnerForge #104: background collectives and a barrier of the main thread deadlocked."""
    own, state = Random(rank), state_of(mesh, 0)
    with async_checkpointer(state, directory, keep_last=3) as ckpt:
        for step in range(50):
            state["model", "w"].to_local().fill_(step)
            ckpt.save(TensorDict({"model": state["model"], "step": NonTensorData(step)}), step)
            for _ in range(own.randrange(3)):
                time.sleep(own.choice([0, 0.001, 0.01]))
            total = torch.tensor(step)
            dist.all_reduce(total)
            assert total == 2 * step
            dist.barrier()
    dist.barrier()  # rank 0 has removed the older ones
    assert ckpt.steps() == (47, 48, 49)
    assert values_of(TensorDict({"model": ckpt.restore(state)["model"]})) == {49}


def check_a_disk_that_is_full_for_all_is_named_on_all(rank, mesh, directory):
    """DCP: "unexpected pos 704 vs 598" hid it; with threads a save that could not be read was good."""
    with disk(rank, directory, 6 * MIB) as is_there:
        if not is_there:
            return
        if rank == 0:
            (directory / "other").write_bytes(bytes(4 * MIB))
        like = state_of(mesh, 0, MIB // 2)
        with async_checkpointer(like, directory / "steps", files_per_rank=2) as ckpt:
            text = failure_of(ckpt.save(state_of(mesh, 2, MIB // 2), 2).result)
            assert "rank " in text and "step_2" in text and ".distcp: No space left on device" in text
            needs, free = numbers_in(text)
            assert needs > MIB and free < 2 * MIB
            assert names_in(directory / "steps") == []
            if rank == 0:
                (directory / "other").unlink()
            ckpt.save(state_of(mesh, 3, MIB // 2), 3).result()
            assert values_of(ckpt.restore(like).select("model")) == {3}


def check_a_disk_that_is_full_for_one_is_named_on_all(rank, mesh, directory):
    """DCP: ENOSPC on one rank of two."""
    with disk(rank, directory, 12 * MIB) as is_there:
        if not is_there:
            return

        def state(value, numel):
            own = TensorDict({"x": torch.full((numel if rank else 8,), float(value))})
            return TensorDict({"model": section(mesh, value), "loader": own})

        # A block of eight MiB of rank 1 fits, and takes a while: by then rank 0 has written all of its own.
        options = {"per_rank": ["loader"], "bytes_per_second": 16 * MIB}
        with async_checkpointer(state(0, 4 * MIB), directory / "steps", **options) as ckpt:
            text = failure_of(ckpt.save(state(1, 4 * MIB), 1).result)
            assert "rank 1, writing" in text and "rank 0" not in text
            assert "/rest/__1_0.distcp: No space left on device" in text
            needs, free = numbers_in(text)
            assert 16 * MIB < needs < 17 * MIB and free < 12 * MIB
            assert names_in(directory / "steps") == []
            ckpt.save(state(2, MIB), 2).result()
            assert ckpt.restore(state(0, MIB))["loader", "x"][0] == 2


def check_one_of_several_files_that_one_rank_cannot_write_fails_on_all(rank, mesh, directory):
    """pytorch #191391, statement 11: an error of one of several writers was lost."""

    def state(value):
        shapes = {f"w{i}": (2, MIB if i == 2 else 1024) for i in range(4)}
        tensors = {name: sharded(mesh, Shard(0), torch.full(s, float(value))) for name, s in shapes.items()}
        return TensorDict({"model": TensorDict(tensors)})

    with async_checkpointer(state(0), directory, files_per_rank=4) as ckpt:
        ckpt.save(state(1), 1).result()
        with largest_file(2 * MIB) if rank == 1 else contextlib.nullcontext():
            save = ckpt.save(state(2), 2)
            until(lambda: save.done)
        text = failure_of(save.result)
        assert "rank 1, writing" in text and "File too large" in text and "/model/__1_" in text
        assert ckpt.latest() == 1
        assert names_in(directory) == ["step_1"]
        path = ckpt.save(state(3), 3).result()
        assert len([*path.glob("model/__*.distcp")]) == 8
        assert values_of(ckpt.restore(state(0))) == {3}


def check_each_of_two_saves_at_once_gets_its_own_result_on_all(rank, mesh, directory):
    """new B: results of two saves at once were mistaken for each other."""
    parts = {"model": section(mesh, 1, MIB), "optimizer": section(mesh, 2)}
    with async_checkpointer(TensorDict(parts), directory) as ckpt:
        for trial in range(6):
            with largest_file(2 * MIB) if rank == trial % 2 else contextlib.nullcontext():
                saves = {
                    name: ckpt.save(TensorDict({name: part}), 2 * trial + (name == "optimizer"))
                    for name, part in (parts.items() if trial < 3 else reversed(parts.items()))
                }
                until(lambda saves=saves: all(save.done for save in saves.values()))
            text = failure_of(saves["model"].result)
            assert f"step {2 * trial} of" in text and f"rank {trial % 2}, writing" in text
            assert saves["optimizer"].result() == directory / f"step_{2 * trial + 1}"
    assert ckpt.steps() == (*range(1, 12, 2),)


def check_a_writer_that_is_killed_fails_the_save_on_all_and_not_the_next(rank, mesh, directory):
    """DCP: after the daemon process died every later save was a BrokenPipeError."""
    gc.collect()
    for victim in (1, 0):
        before = {*children()}
        with async_checkpointer(
            state_of(mesh, 0, MIB), directory / f"{victim}", bytes_per_second=2 * MIB
        ) as ckpt:
            until(lambda before=before: {*children()} - before)
            (writer,) = {*children()} - before
            save = ckpt.save(state_of(mesh, 1, MIB), 1)
            if rank == victim:
                file = f"{victim}/.unfinished-*/model/__{victim}_0.distcp"
                until(lambda file=file: [*directory.glob(file)])
                os.kill(writer, signal.SIGKILL)
            text = failure_of(save.result)
            assert f"rank {victim}, writing" in text and "the writer process was killed by SIGKILL" in text
            assert names_in(directory / f"{victim}") == []
            ckpt.save(state_of(mesh, 2), 2).result()
            assert values_of(ckpt.restore(state_of(mesh, 0)).select("model")) == {2}


def check_a_commit_that_fails_fails_on_all(rank, mesh, directory):
    """Statement 11: if anything failed on any rank, every rank raises; also what rank 0 does last."""
    with async_checkpointer(state_of(mesh, 0, MIB), directory, bytes_per_second=8 * MIB) as ckpt:
        save = ckpt.save(state_of(mesh, 1, MIB), 5)
        until(lambda: [*directory.glob(".unfinished-step_5-*/model")])
        if rank == 0:
            (unfinished,) = directory.glob(".unfinished-step_5-*")
            (unfinished / "manifest.json").mkdir()
        text = failure_of(save.result)
        assert "rank 0, writing" in text and "Is a directory" in text
        assert names_in(directory) == []
        assert ckpt.latest() is None
        ckpt.save(state_of(mesh, 1), 4).result()
    assert ckpt.steps() == (4,)


def check_what_one_rank_has_saved_of_its_own_is_not_given_to_two_in_silence(rank, mesh, directory):
    """torchtitan #816, #811: another number of ranks, and states of loaders were missing in silence."""
    like = TensorDict({"model": TensorDict({"w": torch.ones(3)}), "loader": NonTensorData({"at": 5})})
    if rank == 0:
        alone = subprocess.run([sys.executable, "-c", ALONE, directory], capture_output=True, text=True)
        assert alone.returncode == 0, alone.stderr
    dist.barrier()
    ckpt = async_checkpointer(like, directory)
    with pytest.warns(RuntimeWarning, match="saved by 1 ranks and is restored on 2: loader come"):
        assert ckpt.restore(like)["loader"] == {"at": 5 if rank else 7}
    assert ckpt.restore(like, ranks="drop")["loader"] == {"at": 5}
    assert ckpt.restore(like, ranks="all")["loader"].to_dict() == {"rank_0": {"at": 7}}
    ckpt.close()


ALONE = """
import sys, torch
from tensordict import NonTensorData, TensorDict
from veofunc.checkpoint import async_checkpointer
state = TensorDict({"model": TensorDict({"w": torch.zeros(3)}), "loader": NonTensorData({"at": 7})})
with async_checkpointer(state, sys.argv[1]) as ckpt:
    ckpt.save(state, 1)
"""


def check_shards_for_another_number_of_ranks_are_saved(rank, mesh, directory):
    """DCP: from two ranks along the first axis to three along the second; the other half is below."""
    state = TensorDict({"model": TensorDict({"w": sharded(mesh, Shard(0))}), "loader": NonTensorData(rank)})
    with async_checkpointer(state, directory) as ckpt:
        ckpt.save(state, 1)


@contextlib.contextmanager
def disk(rank: int, directory: Path, nbytes: int):
    """A small disk that all ranks see; false if it cannot be."""
    with contextlib.ExitStack() as stack:
        if rank == 0:
            directory.mkdir()
            try:
                stack.enter_context(small_disk(directory, nbytes))
            except pytest.skip.Exception as reason:
                directory.with_name(f"{directory.name}.skipped").write_text(f"{reason}")
        dist.barrier()
        yield not directory.with_name(f"{directory.name}.skipped").exists()
        dist.barrier()


def numbers_in(text: str) -> tuple[int, int]:
    """Bytes that are needed, and those that are free."""
    return int(text.split("needs ")[1].split()[0]), int(text.split("bytes, ")[1].split()[0])


CHECKS = {name[6:]: check for name, check in list(globals().items()) if name.startswith("check_")}
SHARDS = "shards_for_another_number_of_ranks_are_saved"


# ---- worlds: what each rank does, and gives for the test to look at


def world_of_checks(rank: int, directory: Path) -> None:
    mesh = join(rank, 2, directory / "port")
    checks = {name: functools.partial(check, rank, mesh, directory / name) for name, check in CHECKS.items()}
    run_checks(checks, rank, directory)


def world_of_three(rank: int, directory: Path) -> dict:
    mesh = join(rank, 3, directory / "port")
    like = TensorDict({"model": TensorDict({"w": sharded(mesh, Shard(1), -WHOLE)})})
    ckpt = async_checkpointer(like, directory.with_name("of_checks") / SHARDS)
    restored = ckpt.restore(like, ranks="all")
    whole = restored["model", "w"].full_tensor()
    dist.barrier()
    return {"same": torch.equal(whole, WHOLE), "loader": restored["loader"].to_dict()}


def world_of_groups_destroyed(rank: int, directory: Path) -> list[bool]:
    """Of several saves during which the group is destroyed, at another moment by each rank, who succeeded."""
    results, own = [], Random(rank)
    for trial in range(6):
        mesh = join(rank, 2, directory / f"port_{trial}")
        pace = None if trial < 2 else 4 * MIB
        ckpt = async_checkpointer(state_of(mesh, 0, MIB // 4), directory / f"{trial}", bytes_per_second=pace)
        save = ckpt.save(state_of(mesh, trial, MIB // 4), trial, block=trial % 2 == 0)
        save.wait_staged()
        time.sleep(own.choice([0, 0, 0.01, 0.2]))
        dist.destroy_process_group()
        with contextlib.suppress(CheckpointError):
            save.result()
        results.append(save._future.exception() is None)
        ckpt.close()
    return results


def world_that_exits_right_after_a_save(rank: int, directory: Path) -> None:
    mesh = join(rank, 2, directory / "port")
    ckpt = async_checkpointer(state_of(mesh, 0, MIB), directory / "steps", bytes_per_second=8 * MIB)
    ckpt.save(state_of(mesh, 1, MIB), 1)
    dist.destroy_process_group()


def world_that_loses_rank_1_before_a_save(rank: int, directory: Path) -> str:
    return lose(1, rank, directory, lambda: None, before=True)


def world_that_loses_rank_0_before_a_save(rank: int, directory: Path) -> str:
    return lose(0, rank, directory, lambda: None, before=True)


def world_that_loses_rank_1_while_it_writes(rank: int, directory: Path) -> str:
    return lose(1, rank, directory, lambda: os.kill(os.getpid(), signal.SIGKILL), before=False)


def world_that_loses_rank_0_while_it_writes(rank: int, directory: Path) -> str:
    return lose(0, rank, directory, lambda: os.kill(os.getpid(), signal.SIGKILL), before=False)


def world_whose_rank_1_stops_before_a_save(rank: int, directory: Path) -> str:
    return lose(1, rank, directory, lambda: os.kill(os.getpid(), signal.SIGSTOP), before=True)


def world_whose_rank_0_stops_before_a_save(rank: int, directory: Path) -> str:
    return lose(0, rank, directory, lambda: os.kill(os.getpid(), signal.SIGSTOP), before=True)


def world_whose_rank_1_stops_while_it_writes(rank: int, directory: Path) -> str:
    return lose(1, rank, directory, lambda: os.kill(os.getpid(), signal.SIGSTOP), before=False)


def lose(lost: int, rank: int, directory: Path, end: Callable[[], None], *, before: bool):
    """Step 1 is good. Rank `lost` ends, or stops, before or in the save of step 2: what the other is told.

    It then begins one more save, which it does not wait for.
    """
    mesh = join(rank, 2, directory / "port")
    options = {"timeout": TIMEOUT, "bytes_per_second": 4 * MIB}
    ckpt = async_checkpointer(state_of(mesh, 0, MIB), directory / "steps", **options)
    ckpt.save(state_of(mesh, 1), 1).result()
    dist.barrier()
    started = time.monotonic()
    if rank == lost and before:
        return end()
    save = ckpt.save(state_of(mesh, 2, MIB), 2)
    if rank == lost:
        until(lambda: [*directory.glob("steps/.unfinished-step_2-*/model/*.distcp")])
        return end()
    text = failure_of(save.result)
    seconds = time.monotonic() - started
    with contextlib.suppress(CheckpointError):
        ckpt.save(state_of(mesh, 3), 3)
    return {"text": text, "seconds": seconds}


WORLDS = {name[6:]: world for name, world in list(globals().items()) if name.startswith("world_")}
LOSSES = [name for name in WORLDS if "rank" in name]


def run_worlds(directory: Path) -> None:
    """Those that only wait for each other side by side."""
    gc.freeze()  # what is imported is not looked through again at each of so many ends
    for worlds in (["of_checks"], [name for name in WORLDS if name != "of_checks"]):
        pids = {}
        for name in worlds:
            (directory / name).mkdir()
            for rank in range(3 if name == "of_three" else 2):
                pid = os.fork()
                if not pid:
                    run_rank(WORLDS[name], rank, directory / name)
                    return  # and end as any script does
                pids[pid] = (name, rank)
            time.sleep(0.4)  # the starts of all at once would take some longer than `TIMEOUT`
        _wait(pids, directory)


def run_rank(world: Callable[[int, Path], object], rank: int, directory: Path) -> None:
    output = os.open(directory / f"{rank}.log", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    try:
        (directory / f"{rank}.json").write_text(json.dumps(world(rank, directory)))
    except BaseException:
        traceback.print_exc()
        raise


def _wait(pids: dict[int, tuple[str, int]], directory: Path) -> None:
    """Note how they end; kill who is stopped and the last of its world, and who does not end in time."""
    stopped, ended_at, started = set(), {}, time.monotonic()
    while pids:
        pid, status = os.waitpid(-1, os.WNOHANG | os.WUNTRACED)
        now = time.monotonic()
        if pid and os.WIFSTOPPED(status):
            stopped.add(pid)
        elif pid:
            name, rank = pids.pop(pid)
            ended_at[name] = now
            (directory / name / f"{rank}.code").write_text(str(os.waitstatus_to_exitcode(status)))
        for pid, (name, _) in pids.items():
            is_alone = [other for other, _ in pids.values()].count(name) == 1
            if (pid in stopped and is_alone) or now - ended_at.get(name, started + 60) > LONGEST:
                os.kill(pid, signal.SIGKILL)
        time.sleep(0.01)


# ---- the tests


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    """Where the worlds were, each in a directory of its name."""
    directory = tmp_path_factory.mktemp("worlds")
    environment = {**os.environ, "PYTHONPATH": str(FILES.parent)}
    command = [sys.executable, "-W", "error", __file__, str(directory)]
    subprocess.run(command, env=environment, check=True, timeout=300)
    return directory


def end_of(directory: Path, rank: int):
    """Exit code, output, and what was given."""
    given = directory / f"{rank}.json"
    code, log = int((directory / f"{rank}.code").read_text()), (directory / f"{rank}.log").read_text()
    return code, log, given.exists() and json.loads(given.read_text())


@pytest.mark.distributed
@pytest.mark.parametrize("name", CHECKS)
@pytest.mark.parametrize("rank", [0, 1])
def test_on_two_ranks(name, rank, directory):
    skipped = directory / "of_checks" / f"{name}.skipped"
    if skipped.exists():
        pytest.skip(skipped.read_text())
    failure = what_failed(name, rank, directory / "of_checks")
    assert not failure, failure


@pytest.mark.distributed
@pytest.mark.parametrize("rank", [0, 1, 2])
def test_three_ranks_restore_what_two_have_saved_along_another_axis(rank, directory):
    """DCP: exact. torchtitan #816, #811: states of loaders were missing in silence."""
    code, log, given = end_of(directory / "of_three", rank)
    assert (code, log) == (0, "")
    assert given == {"same": True, "loader": {"rank_0": 0, "rank_1": 1}}


@pytest.mark.distributed
def test_of_a_group_that_is_destroyed_while_a_save_is_pending_no_half_step_is_left(directory):
    """new A, DCP: half a checkpoint was published; in 3 of 8 both ranks were told that it was good."""
    where = directory / "of_groups_destroyed"
    ends = [end_of(where, rank) for rank in range(2)]
    assert [(code, log) for code, log, _ in ends] == [(0, "")] * 2
    first, second = (given for *_, given in ends)
    assert first == second == [True] * 6
    for trial, is_good in enumerate(first):
        ckpt = async_checkpointer(TensorDict(), where / f"{trial}")
        assert ckpt.steps() == ((trial,) if is_good else ())
        if is_good:
            assert ckpt.restore(TensorDict())["model", "w"].unique().tolist() == [trial]


@pytest.mark.distributed
def test_ranks_that_end_right_after_a_save_have_saved(directory):
    """verl #7952, DCP: the process ends when the write is complete, also if the group is destroyed."""
    where = directory / "that_exits_right_after_a_save"
    for rank in range(2):
        code, log, _ = end_of(where, rank)
        assert (code, log) == (0, "")
    ckpt = async_checkpointer(TensorDict(), where / "steps")
    ckpt.verify(1)
    assert ckpt.restore(TensorDict())["model", "w"].unique().tolist() == [1]


@pytest.mark.distributed
@pytest.mark.parametrize("name", LOSSES)
def test_who_loses_another_rank_is_told_in_time_and_ends(name, directory):
    """DCP: a peer that left was no error (code 0, no files), and one that was stopped blocked the exit.

    Statement 35: nobody is left waiting.
    """
    where = directory / name
    lost = int(name.split("rank_")[1][0])
    code, log, given = end_of(where, 1 - lost)
    assert given, log
    assert given["seconds"] < SOON
    assert code == 0  # it was not killed
    assert "step 2 of" in given["text"]
    if lost == 1:
        assert "rank 1 gave no sign of life in 3 s" in given["text"]
    else:  # whose process hosts the store
        causes = ("store did not answer in 3 s", "store, which lives with rank 0 or its launcher, is gone")
        assert any(cause in given["text"] for cause in causes)
    assert given["text"] in log  # and also on standard error
    assert "step 3 of" in log
    ckpt = async_checkpointer(TensorDict(), where / "steps")
    assert ckpt.steps() == (1,)
    ckpt.verify(1)


if __name__ == "__main__":
    run_worlds(Path(sys.argv[1]))
