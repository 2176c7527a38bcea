"""Checkpoints: how long training waits, how long a save takes, and what the loop loses meanwhile.

The floor of a wait is one copy of the state into memory that is there already; the floor of a save is one
plain write and fsync. All ways to save run in the same processes, on one disk, one at a time; old files are
removed and the disk is synced outside of the timed part. All keep their buffers: the largest state needs
about 12 times its size of memory.
"""

import ctypes
import gc
import os
import re
import shutil
import socket
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from statistics import mean, median

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from tests.bench import measure
from tests.bench.checkpoint_savers import MEMCPY, ORBAX, OURS, OURS_VALUE, RAW, Save, Saver, Saving, savers

KIB, MIB = 1 << 10, 1 << 20
SIZES = {  # state -> (number of tensors, bytes of each on each rank)
    "large": ((75, 16 * MIB), (75, 4 * MIB), (150, 4 * KIB)),
    "small": ((10_000, 16 * KIB),),
    "ranks": ((36, 16 * MIB), (36, 4 * MIB), (150, 4 * KIB)),
}
NUM_RANKS = {"large": 1, "small": 1, "ranks": 2}
ALONE = "no save"
LOOPS = ("matmul", "dispatch")


def run(rounds: int = 5, scale: float = 1.0, only: str = "large,small,ranks", directory: str = "") -> str:
    texts, verdicts = [], {"goals": ["goal", "seen", "met"]}
    for kind in only.split(","):
        with tempfile.TemporaryDirectory(dir=directory or None) as path:
            with socket.create_server(("127.0.0.1", 0)) as free:
                port = free.getsockname()[1]
            num_ranks = NUM_RANKS[kind]
            torch.multiprocessing.spawn(measure_rank, (port, kind, rounds, scale, path), nprocs=num_ranks)
            title, samples = torch.load(Path(path) / "results")
        texts.append(tables(title, samples))
        if ORBAX not in samples["save"]:
            texts[-1] += f"\nleft out: {ORBAX} ({'not installed' if num_ranks == 1 else 'several ranks'})"
        verdicts |= goals(kind, samples)
    return "\n\n".join((*texts, layout(verdicts)))


# ---- in each rank's process


def measure_rank(rank: int, port: int, kind: str, rounds: int, scale: float, path: str) -> None:
    """Rank 0 leaves the samples of all quantities in `path`/results."""
    warnings.simplefilter("ignore")  # DCP's, about its own use of torch
    torch.set_num_threads(1)
    os.environ |= {"MASTER_ADDR": "127.0.0.1"}  # where DCP's processes meet
    # DCP's process gets the state by name: a descriptor of each tensor is more than a process may have.
    torch.multiprocessing.set_sharing_strategy("file_system")
    dist.init_process_group(
        "gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=NUM_RANKS[kind]
    )
    try:
        state = make_state(kind, scale)
        at_once, behind = savers(NUM_RANKS[kind])
        samples = measure_savers(state, at_once, behind, Path(path), rounds)
        if rank == 0:
            nbytes = sum(t.nbytes for t in state.values())
            title = f"{kind}: {len(state)} tensors, {nbytes / MIB:.1f} MiB, ranks: {NUM_RANKS[kind]}"
            torch.save((title, samples), Path(path) / "results")
        dist.barrier()
    finally:
        dist.destroy_process_group()


def make_state(kind: str, scale: float) -> Mapping[str, torch.Tensor]:
    """Fewer and smaller tensors where `scale` is below 1: by its square root each."""
    sizes = [
        max(1, round(nbytes / 4 * scale**0.5))
        for count, nbytes in SIZES[kind]
        for _ in range(max(1, round(count * scale**0.5)))
    ]
    tensors = {f"{i:05}": torch.randn(size) for i, size in enumerate(sizes)}
    if NUM_RANKS[kind] == 1:
        return tensors
    mesh = init_device_mesh("cpu", (NUM_RANKS[kind],))
    return {name: DTensor.from_local(t, mesh, [Shard(0)]) for name, t in tensors.items()}


def measure_savers(
    state: Mapping[str, torch.Tensor],
    at_once: Mapping[str, Saver],
    behind: Mapping[str, Saver],
    path: Path,
    rounds: int,
) -> dict[str, measure.Samples]:
    """By what was measured: "first", "save", and each of LOOPS."""
    all_savers = {**at_once, **behind}
    places = {name: path / f"{i}" for i, name in enumerate((*all_savers, ALONE))}
    for place in places.values():
        place.mkdir(exist_ok=True)
    # Opened anew in each round, one at a time.
    fresh = {name: partial(first_save, saver, state, places[name]) for name, saver in behind.items()}
    samples = {"first": measure.interleaved(fresh, max(1, rounds - 2))}
    with ExitStack() as stack:
        saves = {name: stack.enter_context(saver(state, places[name])) for name, saver in all_savers.items()}
        alone = {name: partial(one_save, saves[name], places[name]) for name in saves}
        samples["save"] = measure.interleaved(alone, rounds)
        for loop, step in zip(LOOPS, (matmul(), dispatch()), strict=True):
            during = {ALONE: no_save(min(1.0, middle(samples, "save", RAW, "durable")))}
            during |= {name: saves[name] for name in behind}
            variants = {name: partial(steps_during, step, during[name], places[name]) for name in during}
            samples[loop] = measure.interleaved(variants, rounds)
    return samples


def one_save(save: Save, directory: Path) -> dict[str, float]:
    """Seconds until the call returns, until the state may change, and until the save is on disk."""
    with quiet_disk(directory):
        start = time.perf_counter()
        saving = save()
        blocking = time.perf_counter() - start
        saving.wait_staged()
        staged = time.perf_counter() - start
        saving.wait()
        durable = time.perf_counter() - start
    return slowest({"blocking": blocking, "staged": staged, "durable": durable})


def first_save(saver: Saver, state: Mapping[str, torch.Tensor], directory: Path) -> dict[str, float]:
    """Blocking seconds of a new saver's first save over those of later ones, and the memory that it holds."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # else the memory is that of the last round, and warm
    before = mebibytes_of_all_processes()
    with saver(state, directory) as save:
        first, *later = (one_save(save, directory)["blocking"] for _ in range(4))
        held = mebibytes_of_all_processes() - before
    return slowest({"first / later": first / median(later), "host MiB": held})


def steps_during(step: Callable[[], object], save: Save, directory: Path) -> dict[str, float]:
    """Seconds per step until the save is over: of this thread's CPU time, on the clock, and of the worst."""
    with quiet_disk(directory):
        saving = save()
        ends, cpu = [time.perf_counter()], time.thread_time()
        while len(ends) == 1 or not saving.done():
            step()
            ends.append(time.perf_counter())
        cpu = time.thread_time() - cpu
        saving.wait()
    seconds = [end - start for start, end in pairwise(ends)]
    return slowest({"CPU s": cpu / len(seconds), "clock s": mean(seconds), "worst s": max(seconds)})


def no_save(seconds: float) -> Save:
    """For as long as a save might take."""

    def save() -> Saving:
        end = time.perf_counter() + seconds
        return Saving(done=lambda: time.perf_counter() >= end)

    return save


def matmul(width: int = 512) -> Callable[[], object]:
    a, b, out = torch.randn(width, width), torch.randn(width, width), torch.empty(width, width)
    return lambda: torch.mm(a, b, out=out)


def dispatch(num_calls: int = 500) -> Callable[[], object]:
    """Many operations on next to nothing, as the Python of a training step is."""
    x = torch.zeros(8)

    def step() -> None:
        for _ in range(num_calls):
            x.add_(1)

    return step


@contextmanager
def quiet_disk(directory: Path) -> Iterator[None]:
    """Nothing is left to write when the block begins, on all ranks; what is in `directory` then goes."""
    os.sync()
    dist.barrier()
    yield
    dist.barrier()
    if dist.get_rank() == 0:
        for saved in directory.glob("[!.]*"):  # a lock's name begins with a dot
            shutil.rmtree(saved) if saved.is_dir() else saved.unlink()


def slowest(quantities: Mapping[str, float]) -> dict[str, float]:
    """The largest of all ranks, each."""
    values = torch.tensor(list(quantities.values()), dtype=torch.float64)
    dist.all_reduce(values, dist.ReduceOp.MAX)
    return dict(zip(quantities, values.tolist(), strict=True))


def mebibytes_of_all_processes() -> float:
    """MiB of RAM of this process and all below it; what several share counts once."""
    total, pids = 0.0, [os.getpid()]
    for pid in pids:
        process = Path("/proc") / str(pid)
        try:
            children = [path.read_text() for path in process.glob("task/*/children")]
            (kibibytes,) = re.findall(
                r"^Pss: +(\d+) kB", (process / "smaps_rollup").read_text(), re.MULTILINE
            )
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended
        pids += [int(child) for line in children for child in line.split()]
        total += int(kibibytes) / KIB
    return total


# ---- what it says


def tables(title: str, samples: Mapping[str, measure.Samples]) -> str:
    """One of saves, and one of steps while a save is under way."""
    memcpy, raw = middle(samples, "save", MEMCPY, "blocking"), middle(samples, "save", RAW, "durable")
    saves = {title: ["waits s", "/ memcpy", "staged s", "durable s", "/ raw", "first/later", "host MiB"]}
    for name in samples["save"]:
        blocking, staged, durable = (
            middle(samples, "save", name, quantity) for quantity in ("blocking", "staged", "durable")
        )
        saves[name] = [f"{blocking:.4f}", f"{blocking / memcpy:.3f}x", f"{staged:.4f}"]
        if name != MEMCPY:
            saves[name] += [f"{durable:.3f}", f"{durable / raw:.3f}x"]
        if name in samples["first"]:
            saves[name] += [f"{middle(samples, 'first', name, 'first / later'):.2f}"]
            saves[name] += [f"{middle(samples, 'first', name, 'host MiB'):.0f}"]
    steps = {f"steps: {', '.join(LOOPS)}": ["per CPU s", "per clock s", "worst ms"] * len(LOOPS)}
    for name in samples[LOOPS[0]]:
        steps[name] = []
        for loop in LOOPS:
            steps[name] += [f"{speed(samples, loop, name, unit):.3f}x" for unit in ("CPU s", "clock s")]
            steps[name] += [f"{1000 * middle(samples, loop, name, 'worst s'):.1f}"]
    return f"{layout(saves)}\n\n{layout(steps)}"


def middle(samples: Mapping[str, measure.Samples], part: str, name: str, quantity: str) -> float:
    return median(quantities[quantity] for quantities in samples[part][name])


def speed(samples: Mapping[str, measure.Samples], loop: str, name: str, unit: str) -> float:
    """Steps per second while a save is under way, over those without one."""
    return middle(samples, loop, ALONE, unit) / middle(samples, loop, name, unit)


def goals(kind: str, samples: Mapping[str, measure.Samples]) -> dict[str, list[str]]:
    """What was aimed at, what was seen, and whether it is met."""

    def steps(name: str) -> float:
        return min(speed(samples, loop, name, "CPU s") for loop in LOOPS)

    def over(floor: str, quantity: str) -> float:
        return middle(samples, "save", OURS, quantity) / middle(samples, "save", floor, quantity)

    seen = {
        "waits / memcpy": (over(MEMCPY, "blocking"), "at most", 1.2),
        "copy=False: waits, ms": (1000 * middle(samples, "save", OURS_VALUE, "blocking"), "at most", 10),
        "durable / raw write + fsync": (over(RAW, "durable"), "at most", 1.2),
        "steps per CPU s / without a save": (steps(OURS), "at least", 0.97),
        "copy=False: steps per CPU s / without": (steps(OURS_VALUE), "at least", 0.97),
        "first wait / later ones": (middle(samples, "first", OURS, "first / later"), "at most", 2),
    }
    rows = {}
    for what, (value, sign, bound) in seen.items():
        met = value <= bound if sign == "at most" else value >= bound
        rows[f"{kind}: {what}"] = [f"{sign} {bound}", f"{value:.3f}", "yes" if met else "no"]
    return rows


def layout(rows: Mapping[str, list[str]]) -> str:
    width = max(map(len, rows))
    return "\n".join(
        "  ".join([f"{name:<{width}}", *(f"{cell:>13}" for cell in cells)]).rstrip()
        for name, cells in rows.items()
    )
