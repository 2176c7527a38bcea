"""Where steps are: directories of this machine, and URLs."""

import gc
import logging
import os
import shutil
import signal
import tempfile
import uuid
from pathlib import Path

import pytest
import torch
from tensordict import TensorDict

from tests.checkpoint.support import forked, names_in, start, state_of, until, values_of
from veofunc.checkpoint import CheckpointError, async_checkpointer
from veofunc.checkpoint.storage import LocalStorage, UrlStorage, open_storage

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")

WRITER = """
import sys
from tests.checkpoint.support import state_of
from veofunc.checkpoint import async_checkpointer
ckpt = async_checkpointer(state_of(0), sys.argv[1])
ckpt.save(state_of(1), 1).result()
print("saved", flush=True)
if sys.stdin.readline() == "close\\n":
    ckpt.close()
print("closed", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def other(tmp_path):
    """Another process, which has saved step 1 and keeps its checkpointer."""
    with start(WRITER, tmp_path) as process:
        assert process.stdout.readline() == "saved\n"
        yield process
        process.kill()


def check_refused(ckpt, owner: int) -> None:
    with pytest.raises(
        CheckpointError, match=f"is written to by process {owner} on .*: one directory is for one run"
    ):
        ckpt.save(state_of(2), 2)


def test_a_second_process_may_read_and_is_told_who_writes_until_that_one_closes(other, tmp_path):
    with pytest.warns(RuntimeWarning, match=f"written to by process {other.pid} on"):
        ckpt = async_checkpointer(state_of(0), tmp_path)
    assert values_of(ckpt.restore(state_of(0))) == {1}
    check_refused(ckpt, other.pid)
    other.stdin.write("close\n")
    other.stdin.flush()
    assert other.stdout.readline() == "closed\n"
    with ckpt:
        ckpt.save(state_of(2), 2)
    assert ckpt.steps() == (1, 2)


def test_who_only_reads_is_not_in_the_way_of_who_writes(tmp_path):
    reader = async_checkpointer(state_of(0), tmp_path)
    with async_checkpointer(state_of(0), tmp_path) as writer:
        writer.save(state_of(1), 1).result()
        assert reader.latest() == 1
        with pytest.raises(CheckpointError, match=r"by another checkpointer of this process.*close"):
            reader.save(state_of(2), 2)
    reader.save(state_of(2), 2).result()
    reader.close()


def test_a_killed_writer_holds_nothing_and_what_it_left_is_removed(other, tmp_path, caplog):
    with pytest.warns(RuntimeWarning):
        ckpt = async_checkpointer(state_of(0), tmp_path)
    other.kill()
    other.wait()
    left = tmp_path / ".unfinished-step_2-abc"
    (left / "model").mkdir(parents=True)
    (left / "model" / "__0_0.distcp").write_bytes(b"half")
    with ckpt:
        ckpt.save(state_of(2), 2)
    assert names_in(tmp_path) == ["step_1", "step_2"]
    assert f"removed {left}, which a save left unfinished" in caplog.text


def test_a_fork_of_the_writer_cannot_save_and_does_not_hold_the_directory(tmp_path):
    ckpt = async_checkpointer(state_of(0), tmp_path)
    ckpt.save(state_of(1), 1).result()

    def save_and_end() -> str:
        signal.alarm(20)
        try:
            ckpt.save(state_of(2), 2).result()
        except CheckpointError as error:
            return str(error)
        return "saved"

    _, text = forked(save_and_end)
    assert f"written to by process {os.getpid()}, of which this one is a fork" in text
    ckpt.save(state_of(2), 2).result()  # the end of the fork has taken nothing away
    assert forked(lambda: LocalStorage(tmp_path).claim())[1].startswith(f"process {os.getpid()} on")
    child = os.fork()  # as a worker of a DataLoader, which may live on for a while
    if not child:
        signal.pause()
        os._exit(0)
    try:
        ckpt.close()
        assert forked(lambda: LocalStorage(tmp_path).claim())[1] == ""
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def test_a_notebook_cell_run_again_saves_once_the_old_checkpointer_is_gone(tmp_path):
    ckpt = async_checkpointer(state_of(0), tmp_path)
    ckpt.save(state_of(1), 1).result()
    again = async_checkpointer(state_of(0), tmp_path)  # without a warning
    with pytest.raises(CheckpointError, match=r"written to by another checkpointer of this process"):
        again.save(state_of(2), 2)
    ckpt = again
    gc.collect()
    ckpt.save(state_of(2), 2).result()
    assert ckpt.steps() == (1, 2)


def test_a_step_comes_back_whose_replacement_was_not_finished(tmp_path, caplog):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        ckpt.save(state_of(1), 1)
        ckpt.save(state_of(2), 2)
    (tmp_path / "step_1").rename(tmp_path / ".replaced-step_1-abc")
    shutil.copytree(tmp_path / "step_2", tmp_path / ".replaced-step_2-abc")  # its replacement was finished
    again = async_checkpointer(state_of(0), tmp_path)
    assert again.steps() == (1, 2)
    assert names_in(tmp_path) == ["step_1", "step_2"]
    assert values_of(again.restore(state_of(0), 1)) == {1}
    assert f"{tmp_path}/step_1: brought back" in caplog.text


def test_a_step_is_replaced_on_demand_and_stays_if_that_fails(tmp_path):
    with async_checkpointer(state_of(0), tmp_path) as ckpt:
        ckpt.save(state_of(1), 1)
        ckpt.save(state_of(2), 1, overwrite=True)
        assert values_of(ckpt.restore(state_of(0), 1)) == {2}
        storage = ckpt._storage
        storage.write = lambda *args: 1 / 0
        with pytest.raises(CheckpointError, match="ZeroDivisionError"):
            ckpt.save(state_of(3), 1, overwrite=True).result()
        assert values_of(ckpt.restore(state_of(0), 1)) == {2}
    assert names_in(tmp_path) == ["step_1"]


@pytest.fixture
def read_only():
    """A directory with step 1 that only root may write to."""
    with tempfile.TemporaryDirectory() as name:
        with async_checkpointer(state_of(0), name) as ckpt:
            ckpt.save(state_of(1), 1)
        Path(name).chmod(0o755)
        yield Path(name)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user")
def test_who_may_not_write_can_read_and_is_told_at_once(read_only):
    def work() -> str:
        os.setgid(65534)
        os.setuid(65534)
        with pytest.warns(RuntimeWarning, match="Permission denied.*can read, and not save"):
            ckpt = async_checkpointer(state_of(0), read_only)
        assert values_of(ckpt.restore(state_of(0))) == {1}
        with pytest.raises(CheckpointError, match="Permission denied"):
            ckpt.save(state_of(2), 2)
        with pytest.raises(CheckpointError, match="Permission denied"):
            async_checkpointer(state_of(0), read_only / "new")
        return "as it must be"

    assert forked(work)[1] == "as it must be"
    assert names_in(read_only) == ["step_1"]


def test_names_that_only_look_like_steps_are_neither_taken_for_steps_nor_removed(tmp_path):
    with async_checkpointer(state_of(0), tmp_path, keep_last=1) as ckpt:
        ckpt.save(state_of(3), 3).result()
        names = ["step_09", "step_9.tmp", "step_-1", "xstep_9", "step_9-backup", "step_"]
        for name in names:
            shutil.copytree(tmp_path / "step_3", tmp_path / name)
        assert (ckpt.steps(), ckpt.latest()) == ((3,), 3)
        ckpt.save(state_of(4), 4)
    assert names_in(tmp_path) == sorted([*names, "step_4"])


def test_a_directory_may_be_moved_but_a_step_not_renamed(tmp_path):
    with async_checkpointer(state_of(0), tmp_path / "a") as ckpt:
        ckpt.save(state_of(3), 3)
    shutil.move(tmp_path / "a", tmp_path / "b")
    moved = async_checkpointer(state_of(0), tmp_path / "b")
    assert values_of(moved.restore(state_of(0))) == {3}
    shutil.move(tmp_path / "b" / "step_3", tmp_path / "b" / "step_4")
    with pytest.raises(CheckpointError, match="is of step 3"):
        moved.verify(4)


def test_a_file_url_is_the_path(tmp_path):
    with async_checkpointer(state_of(0), f"file://{tmp_path}/run") as ckpt:
        assert ckpt.save(state_of(1), 1).result() == tmp_path / "run" / "step_1"
    assert values_of(async_checkpointer(state_of(0), tmp_path / "run").restore(state_of(0))) == {1}


@pytest.fixture(scope="module")
def s3():
    """A bucket of an S3 server on this machine."""
    server = pytest.importorskip("moto.server").ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    fs = pytest.importorskip("s3fs").S3FileSystem
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server.start()
    host, port = server.get_host_and_port()
    names = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "any",
        "AWS_SECRET_ACCESS_KEY": "any",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in names.items():
            patch.setenv(name, value)
        fs.clear_instance_cache()
        fs().mkdir("runs")
        yield "s3://runs"
        fs.clear_instance_cache()
    server.stop()


@pytest.fixture(params=["memory", "s3"])
def url(request):
    """A new place."""
    root = request.getfixturevalue("s3") if request.param == "s3" else "memory:/"
    return f"{root}/{uuid.uuid4().hex}"


def has(url: str, name: str = "") -> bool:
    storage = UrlStorage(url)
    storage._fs.invalidate_cache()
    return storage._fs.exists(storage._full(name).rstrip("/"))


def test_what_is_saved_at_a_url_comes_back_and_is_verified(url):
    state = state_of(0, numel=1 << 16)
    with async_checkpointer(state, url, files_per_rank=2) as ckpt:
        assert (ckpt.latest(), ckpt.steps()) == (None, ())
        save = ckpt.save(state_of(1, numel=1 << 16), 1)
        assert save.result() == f"{url}/step_1"
        assert save.progress[0] == save.progress[1] > 3 << 18
        ckpt.save(state_of(2, numel=1 << 16), 2)
    again = async_checkpointer(state, url)
    assert (again.latest(), again.steps()) == (2, (1, 2))
    for step in (1, 2):
        again.verify(step)
        restored = again.restore(state, step)
        assert (values_of(restored), restored["step"]) == ({step}, step)
    with pytest.raises(CheckpointError, match=f"there is no {url}/step_3"):
        again.verify(3)


def test_a_url_is_saved_to_while_the_state_changes(url):
    state = state_of(0, numel=1 << 16)
    with async_checkpointer(state, url, double_buffer=True) as ckpt:
        for step in range(4):
            for tensor in state["model"].values():
                tensor.fill_(step)
            ckpt.save(state, step, block=False).wait_staged()
    for step in range(4):
        assert values_of(ckpt.restore(state, step)) == {step}


def test_a_url_is_saved_to_without_a_copy(url):
    state = state_of(1, numel=1 << 16)
    with async_checkpointer(state, url, copy=False, bytes_per_second=2 << 20) as ckpt:
        ckpt.save(state, 1).result()
        save = ckpt.save(state, 2)
        state["model", "layers.0"].add_(1)
        with pytest.raises(CheckpointError, match=r"layers.0: written to while being saved"):
            save.result()
    assert values_of(ckpt.restore(state)) == {1}
    assert not has(url, "step_2")


def test_old_steps_at_a_url_are_removed(url):
    with async_checkpointer(state_of(0), url, keep_last=1, keep_best=("loss", 1)) as ckpt:
        for step, loss in enumerate([3.0, 1.0, 2.0, 4.0]):
            ckpt.save(state_of(step), step, metrics={"loss": loss}).result()
    assert ckpt.steps() == (1, 3)
    assert not has(url, "step_0") and not has(url, "step_2")


def test_a_step_without_a_manifest_is_none_and_removed_by_the_next_to_save(url, caplog):
    with async_checkpointer(state_of(0), url) as ckpt:
        ckpt.save(state_of(1), 1)
        ckpt.save(state_of(2), 2)
    storage = UrlStorage(url)
    storage._fs.rm(storage._full("step_2/manifest.json"))
    storage._fs.pipe_file(storage._full("step_09/mine"), b"1")
    assert ckpt.steps() == (1,)
    with pytest.warns(RuntimeWarning, match="step 2 is skipped.*the save was not finished"):
        assert ckpt.latest() == 1
    with async_checkpointer(state_of(0), url) as again:
        again.save(state_of(3), 3)
    assert again.steps() == (1, 3)
    assert not has(url, "step_2")
    assert has(url, "step_09")
    assert f"removed {url}/step_2, which a save left unfinished" in caplog.text


def test_who_only_reads_at_a_url_leaves_what_is_being_saved(url):
    state = state_of(1, numel=1 << 16)
    with async_checkpointer(state, url, bytes_per_second=1 << 20) as ckpt:
        save = ckpt.save(state, 1)
        until(lambda: save.progress[0] or save.done)
        assert not save.done
        async_checkpointer(state, url)
        save.result()
        ckpt.verify(1)


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_complete_step_at_a_url_is_not_replaced(overwrite, url):
    with async_checkpointer(state_of(0), url) as ckpt:
        ckpt.save(state_of(1), 1).result()
        with pytest.raises((FileExistsError, CheckpointError), match=f"{url}/step_1 exists"):
            ckpt.save(state_of(2), 1, overwrite=overwrite).result()
        ckpt.verify(1)
        assert values_of(ckpt.restore(state_of(0))) == {1}


def test_a_write_to_a_url_that_fails_midway_leaves_nothing(url, monkeypatch):
    with async_checkpointer(state_of(0), url) as ckpt:
        ckpt.save(state_of(1), 1).result()
        write = UrlStorage.write

        def broken(self, name, content, pace):
            if name.endswith("index.json"):
                raise OSError(5, "the network is gone")
            write(self, name, content, pace)

        monkeypatch.setattr(UrlStorage, "write", broken)
        with pytest.raises(CheckpointError, match=r"rank 0, writing .*the network is gone"):
            ckpt.save(state_of(2), 2).result()
        monkeypatch.undo()
        assert ckpt.steps() == (1,)
        assert not has(url, "step_2")
        ckpt.save(state_of(3), 3)
    assert ckpt.steps() == (1, 3)


def test_a_large_file_at_a_url_is_read_by_several_threads_at_once(url, monkeypatch):
    from veofunc.checkpoint import restore

    monkeypatch.setattr(restore, "CHUNK_BYTES", 1 << 12)
    state = TensorDict({"model": {f"w{i}": torch.randn(1 << 12) for i in range(60)}})
    with async_checkpointer(state, url) as ckpt:
        ckpt.save(state, 1)
    for _ in range(3):
        restored = ckpt.restore(state, 1)
        assert all(torch.equal(restored["model", f"w{i}"], state["model", f"w{i}"]) for i in range(60))


@pytest.mark.parametrize("place", ["step_1/model/__0_0.distcp", "step_1/manifest.json"])
def test_a_changed_byte_at_a_url_is_found(place, url):
    with async_checkpointer(state_of(0), url) as ckpt:
        ckpt.save(state_of(1), 1)
    fs, name = ckpt._storage._fs, ckpt._storage._full(place)
    content = bytearray(fs.cat_file(name))
    content[len(content) // 2] ^= 1
    fs.pipe_file(name, bytes(content))
    with pytest.raises(CheckpointError, match=place):
        ckpt.verify(1)


TWO_RANKS = """
import sys, pytest, torch.distributed as dist
from tests.checkpoint.support import state_of
from veofunc.checkpoint import CheckpointError, async_checkpointer
rank = int(sys.argv[2])
dist.init_process_group("gloo", store=dist.FileStore(sys.argv[1], 2), rank=rank, world_size=2)
with pytest.raises(CheckpointError, match="memory://run/step_1/model/__1_0.distcp: is not there"):
    with async_checkpointer(state_of(0), "memory://run") as ckpt:
        ckpt.save(state_of(1), 1).result()
"""


@pytest.mark.distributed
def test_memory_that_two_ranks_do_not_share_is_no_place_for_steps(tmp_path):
    processes = [start(TWO_RANKS, tmp_path / "store", rank) for rank in range(2)]
    for process in processes:
        process.communicate(timeout=60)
    assert [process.returncode for process in processes] == [0, 0]


def test_a_storage_is_a_directory_or_a_url(tmp_path):
    assert isinstance(open_storage(tmp_path), LocalStorage)
    assert isinstance(open_storage(str(tmp_path)), LocalStorage)
    assert isinstance(open_storage("memory://x"), UrlStorage)
