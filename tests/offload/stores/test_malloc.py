"""What is moved leaves the memory of the process: looked at in a process of its own."""

import json
import os
import subprocess
import sys

import pytest

MEASURE = """
import json, os, sys, torch, veofunc as vf
from tests.offload.stores.disk import settle

torch.set_num_threads(1)
MIB = 1 << 20

def resident():
    with open("/proc/self/smaps_rollup") as rollup:
        return next(int(line.split()[1]) for line in rollup if line.startswith("Anonymous:")) / 1024

def tensor(mib):
    return torch.ones(int(mib * MIB) // 4)

def make(number, mib):
    tensors = []
    for _ in range(number):
        tensors.append(tensor(mib))
        kept.append(tensor(0.5))  # lies above it, so that malloc cannot just shrink its heap
    return tensors

def a_store():
    return vf.DiskStore(sys.argv[1], inflight_bytes=16 * MIB, direct=False)

def fall_of_freed(mib):
    a_store().put(torch.ones(1))
    tensors = make(10, mib)
    before = resident()
    tensors.clear()
    return (before - resident()) / (10 * mib)

for size in (1, 2, 4, 8, 16, 24, 31):  # teaches malloc to keep blocks of these sizes
    tensor(size)
kept, falls = [], {}
old = make(40, 8)
for name, value in (("MALLOC_MMAP_THRESHOLD_", "1"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=1")):
    os.environ[name] = value  # malloc read it when the process started, so that only we see this
    falls[name] = fall_of_freed(4)
    del os.environ[name]
falls["freed"] = fall_of_freed(12)

store, slots, before = a_store(), [], resident()
while old:
    slots.append(store.put(old.pop(0)))
slots.append(store.put(tensor(1)))
settle(store)
falls["moved"] = (before - resident()) / (40 * 8)
print(json.dumps(falls))
"""


@pytest.mark.skipif(
    "CS_GNU_LIBC_VERSION" not in os.confstr_names, reason="other C libraries have their own ways"
)
def test_memory_falls_by_what_is_moved_and_from_then_on_by_what_is_freed(tmp_path):
    """Except for the latter if the user has chosen a threshold."""
    falls = json.loads(
        subprocess.run(
            [sys.executable, "-c", MEASURE, tmp_path],
            stdout=subprocess.PIPE,
            text=True,
            check=True,
            timeout=300,
        ).stdout
    )
    assert falls["moved"] > 0.9
    assert falls["freed"] > 0.7  # some find room that was free before
    assert falls["MALLOC_MMAP_THRESHOLD_"] < 0.1
    assert falls["GLIBC_TUNABLES"] < 0.1
