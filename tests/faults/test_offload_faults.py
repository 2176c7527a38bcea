"""What activation offload promises when the disk fails or fills up, or the process ends in the middle."""

import contextlib
import errno
import gc
import os
import signal
import subprocess
import sys

import pytest
import torch
from torch import nn

import veofunc as vf
from tests.limits import largest_file
from tests.offload.stores.disk import crowd_out, failing, held, open_files, settle

# The temporary directory may be on a file system without direct I/O.
pytestmark = pytest.mark.filterwarnings("ignore:no direct I/O:UserWarning")


class TestTraining:
    """A step that the disk spoils raises where it is taken, and the next one is as if nothing had been."""

    @pytest.fixture
    def model(self):
        torch.manual_seed(0)
        return nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(64, 64), nn.Tanh())))

    @pytest.fixture
    def x(self):
        return torch.randn(256, 64, generator=torch.Generator().manual_seed(1))

    def gradients(self, fn, model, x):
        model.zero_grad()
        fn(x).square().sum().backward()
        return [parameter.grad.clone() for parameter in model.parameters()]

    def test_a_full_disk_raises_in_the_forward_pass(self, model, x, tmp_path):
        expected = self.gradients(model, model, x)
        fn = vf.offload(model, vf.policies.everything, store=vf.DiskStore(tmp_path))
        model.zero_grad()
        with (
            largest_file(256 << 10),
            pytest.raises(OSError, match=f"cannot offload 65536 bytes .*{tmp_path}: File too large"),
        ):
            fn(x)
        assert all(parameter.grad is None for parameter in model.parameters())
        assert all(map(torch.equal, self.gradients(fn, model, x), expected))

    def test_a_failed_write_raises_in_the_training_thread(self, model, x, tmp_path, monkeypatch):
        expected = self.gradients(model, model, x)
        store = vf.DiskStore(tmp_path)
        fn = vf.offload(model, vf.policies.everything, store=store)
        with failing(monkeypatch, "pwrite", errno.EIO):
            with pytest.raises(OSError, match=f"{tmp_path}: Input/output error") as raised:
                fn(x)
                settle(store)
                fn(x)
            assert raised.value.errno == errno.EIO
            del raised
            gc.collect()
            settle(store)  # what was put before it raised is dead, and nobody will hear of it
        assert all(map(torch.equal, self.gradients(fn, model, x), expected))

    def test_a_failed_read_raises_in_backward_which_can_be_repeated(self, model, x, tmp_path, monkeypatch):
        expected = self.gradients(model, model, x)
        store = vf.DiskStore(tmp_path, inflight_bytes=128 << 10)
        fn = vf.offload(model, vf.policies.everything, store=store)
        model.zero_grad()
        loss = fn(x).square().sum()
        crowd_out(store)
        with failing(monkeypatch, "preadv", errno.EIO), pytest.raises(OSError, match=f"{tmp_path}: Input"):
            loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        assert all(map(torch.equal, [p.grad for p in model.parameters()], expected))


class TestEnd:
    """Nothing is left of the file, and nothing keeps the process, however it ends."""

    @pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning")  # Python 3.12
    @pytest.mark.parametrize("when", ["written", "being written"])
    def test_a_killed_process_leaves_no_file_and_no_disk_space(self, when, tmp_path, monkeypatch):
        child = os.fork()
        if child == 0:
            with contextlib.suppress(BaseException), held(monkeypatch, "pwrite") as gate:
                store = vf.DiskStore(tmp_path, direct=False)
                slots = [store.put(torch.ones(1 << 20)) for _ in range(3)]
                gate.reached.wait()
                if when == "written":
                    gate.open()
                    settle(store)
                assert len(slots) == 3 and len(open_files(tmp_path)) == 1
                os.kill(os.getpid(), signal.SIGKILL)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == -signal.SIGKILL
        assert list(tmp_path.iterdir()) == []

    def test_a_process_ends_in_order_though_reads_and_writes_never_do(self, tmp_path):
        code = """
import os, sys, threading, torch, veofunc as vf

begun = threading.Semaphore(0)

def never(*args):
    begun.release()
    threading.Event().wait()

store = vf.DiskStore(sys.argv[1], inflight_bytes=1 << 20, direct=False)
slots = [store.put(torch.full((1 << 15,), float(i))) for i in range(20)]
restored = [slot.get() for slot in slots[:3]]
os.preadv = never
slots[5].prefetch()
begun.acquire()
os.pwrite = never
slots.append(store.put(torch.ones(3)))
begun.acquire()
slots.append(store.put(torch.ones(3)))
itself = [slots]
itself.append(itself)
print(sum(int(tensor[0]) for tensor in restored))
"""
        process = subprocess.run(
            [sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120
        )
        assert (process.returncode, process.stdout, process.stderr) == (0, "3\n", "")
        assert list(tmp_path.iterdir()) == []
