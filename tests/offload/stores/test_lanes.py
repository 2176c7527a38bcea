"""The side streams speak PyTorch's words for streams of any accelerator, on one that does nothing.

What their order means is a matter for `test_ferry.py`; a real accelerator is checked by `tests.gpu.offload`.
"""

import subprocess
import sys

from veofunc.offload.stores import lanes

PRETEND = """
import sys
import warnings

import torch
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend


class Module:
    def is_available(self): return True
    def is_initialized(self): return True
    def device_count(self): return 1
    def current_device(self): return 0


with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    _setup_privateuseone_for_python_backend("pretended", backend_module=Module())
device = torch.device("pretended:0")
library = torch.library.Library("aten", "IMPL")


def empty(size, *, dtype=None, layout=None, device=None, pin_memory=None, memory_format=None):
    return torch._C._acc.create_empty_tensor(list(size), dtype)


def copy(source, destination, non_blocking):
    log.append((source.device, destination.device, non_blocking))


log = []
library.impl("empty.memory_format", empty, "PrivateUse1")
library.impl("_copy_from", copy, "PrivateUse1")
library.impl("record_stream", lambda tensor, stream: log.append(("share", stream.device)), "PrivateUse1")
"""

USE = """
import runpy

lanes = runpy.run_path(sys.argv[1])["Lanes"](device)
assert isinstance(lanes.out, torch.Stream) and isinstance(lanes.back, torch.Stream)
now = lanes.current()
assert now == torch.accelerator.current_stream()
memory, host = lanes.empty(8), torch.empty(8, dtype=torch.uint8)
assert memory.device == device and memory.dtype == torch.uint8
lanes.wait(lanes.out, lanes.record(now))
lanes.copy(host, memory, lanes.out)
event = lanes.record(lanes.out)
lanes.wait(lanes.back, event)
lanes.copy(memory, host, lanes.back)
lanes.wait(now, lanes.record(lanes.back))
lanes.share(memory, now)
assert lanes.is_over(event)
assert torch.accelerator.current_stream() == now and torch.accelerator.current_device_index() == 0
cpu = torch.device("cpu")
assert log == [(device, cpu, True), (cpu, device, True), ("share", device)], log
"""


def test_streams_and_events_are_those_of_any_accelerator():
    command = [sys.executable, "-W", "error", "-c", PRETEND + USE, lanes.__file__]
    subprocess.run(command, check=True)
