import gc
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, zeros
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.tensors import DTYPES, bytes_of, random_bits
from veofunc.checkpoint import items, staging, writer
from veofunc.checkpoint.manifest import CheckpointError
from veofunc.checkpoint.plan import PlannedFile, plan_files
from veofunc.checkpoint.snapshot import SMALL_BYTES, Sections, describe_leaves
from veofunc.checkpoint.staging import LiveFile, LiveTensors, Staging, can_stay_live
from veofunc.checkpoint.writer import Image

COMPLEX = random_bits(torch.complex64, (4, 5))


def planned(leaves: dict, num_files: int = 1) -> list[PlannedFile]:
    """The files of one rank."""
    entries = describe_leaves(leaves, Sections({}, frozenset()), 0)
    return plan_files(entries, leaves, 0, 1, num_files, frozenset())[0]


def staged(leaves: dict, num_files: int = 1) -> Staging:
    return Staging(planned(leaves, num_files), leaves)


def copy(stage: Staging, leaves: dict) -> None:
    turn = stage.take()
    for small in (True, False):
        stage.copy(leaves, turn, small=small)


def values_in(stage: Staging) -> dict[str, list[bytes]]:
    """The values of each piece, read where the plan says."""
    found: dict[str, list[bytes]] = {}
    for file, (start, _, _) in zip(stage.files, stage.arena.images, strict=True):
        for (key, _), (place, nbytes, *_) in zip(file.pieces, file.places, strict=True):
            values = stage.arena.memory[start + place : start + place + nbytes]
            found.setdefault(key, []).append(values.numpy().tobytes())
    return found


def live(**tensors: torch.Tensor) -> LiveTensors:
    return LiveTensors({("model", name): tensor for name, tensor in tensors.items()})


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_of_every_dtype_are_copied_bit_for_bit(dtype):
    matrix = random_bits(dtype, (6, 4))
    leaves = {
        ("whole",): matrix,
        ("empty",): matrix[:0],
        ("0-dim",): matrix[2, 3],
        ("strided",): matrix[::2, 1:],
        ("turned",): matrix.T,
        ("repeated",): matrix[:1].expand(5, 4),
    }
    stage = staged(leaves, num_files=2)
    copy(stage, leaves)
    stage.synchronize()
    assert values_in(stage) == {path[0]: [bytes_of(leaf)] for path, leaf in leaves.items()}


@pytest.mark.parametrize(
    "tensor", [COMPLEX.conj(), COMPLEX.conj().imag, COMPLEX.mH], ids=["conj", "neg", "mH"]
)
def test_values_that_are_only_marked_as_negated_are_copied_negated(tensor):
    assert tensor.is_conj() or tensor.is_neg()
    leaves = {("a",): tensor}
    stage = staged(leaves)
    copy(stage, leaves)
    assert values_in(stage) == {"a": [bytes_of(tensor)]}


def test_of_a_parameter_nothing_is_kept_but_the_copy():
    parameter = torch.nn.Parameter(torch.ones(3))
    stage = staged({("a",): parameter})
    copy(stage, {("a",): parameter})
    assert values_in(stage) == {"a": [bytes_of(torch.ones(3))]}
    source = weakref.ref(parameter)
    del parameter
    gc.collect()
    assert source() is None


def test_a_large_tensor_is_copied_in_pieces(monkeypatch):
    monkeypatch.setattr(items, "PIECE_BYTES", 100)
    whole = random_bits(torch.float32, (9, 7))
    leaves = {("a",): whole, ("b",): whole.T}
    stage = staged(leaves, num_files=3)
    copy(stage, leaves)
    found = values_in(stage)
    assert len(found["a"]) > 2
    assert sorted(found["a"]) == sorted(map(bytes_of, whole.split(3)))
    assert sorted(found["b"]) == sorted(map(bytes_of, whole.T.split(2)))


def test_copying_again_replaces_the_values_and_nothing_else():
    leaves = {("a",): random_bits(torch.int32, (100,), seed=1), ("b",): random_bits(torch.int8, (3,), seed=1)}
    others = {path: random_bits(leaf.dtype, leaf.shape, seed=2) for path, leaf in leaves.items()}
    stage, fresh = staged(leaves), staged(leaves)
    copy(stage, leaves)
    copy(stage, others)
    copy(fresh, others)
    assert torch.equal(stage.arena.memory, fresh.arena.memory)


@pytest.mark.parametrize("made_in_inference", [False, True])
def test_a_state_of_inference_is_copied_whenever_the_memory_was_made(made_in_inference):
    with torch.inference_mode():
        leaves = {("a",): torch.ones(3)}
    with torch.inference_mode(made_in_inference):
        stage = staged(leaves)
    copy(stage, leaves)
    assert values_in(stage) == {"a": [bytes_of(torch.ones(3))]}


def test_what_is_on_the_cpu_is_copied_when_copy_returns():
    leaves = {("a",): torch.ones(3)}
    assert not staged(leaves).overlaps


LARGE = torch.zeros(SMALL_BYTES // 4 + 8)


@pytest.mark.parametrize(
    ("tensor", "can"),
    [
        (LARGE, True),
        (LARGE[8:], True),
        (LARGE[9:], False),
        (LARGE.view(2, -1).T, False),
        (LARGE.to(torch.complex64), True),
        (LARGE.to(torch.complex64).conj(), False),
        (LARGE.to(torch.complex64).conj().imag.contiguous(), True),
        (LARGE[:1].expand(SMALL_BYTES), False),
        (LARGE.to("meta"), False),
    ],
)
def test_large_contiguous_tensors_on_the_cpu_can_stay_where_they_are(tensor, can):
    assert can_stay_live(tensor) is can


def adamw_step(tensor: torch.Tensor) -> None:
    parameter = torch.nn.Parameter(tensor)  # shares its memory
    parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW([parameter], fused=True).step()


WRITES = {
    "add_": lambda tensor: tensor.add_(1),
    "one element": lambda tensor: tensor.view(-1)[12_345].fill_(5),
    "through a view": lambda tensor: tensor[3:].mul_(2),
    "copy_ of the same": lambda tensor: tensor.copy_(tensor.clone()),
    ".data": lambda tensor: tensor.data.add_(1),
    "numpy": lambda tensor: tensor.numpy().__iadd__(1),
    "fused AdamW": adamw_step,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES.keys())
def test_a_write_to_a_tensor_that_is_saved_as_it_is_is_noticed(write):
    tensors = {"still": torch.ones(50_000), "written": torch.ones(50_000)}
    guard = live(**tensors)
    guard.check_unchanged()
    write(tensors["written"])
    with pytest.raises(CheckpointError, match=r"^model\.written: written to while being saved"):
        guard.check_unchanged()


@pytest.mark.parametrize(
    "written", [lambda tensor: tensor, lambda tensor: tensor.to_local()], ids=["whole", "local"]
)
def test_a_write_to_a_sharded_tensor_or_to_its_shard_is_noticed(written):
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=2)
    try:
        tensor = zeros(8, 5, device_mesh=DeviceMesh("cpu", [0, 1]), placements=[Shard(0)])
        guard = live(a=tensor)
        guard.check_unchanged()
        written(tensor).mul_(2)
        with pytest.raises(CheckpointError, match=r"model\.a"):
            guard.check_unchanged()
    finally:
        dist.destroy_process_group()


def test_a_write_to_a_sampled_byte_is_noticed_whatever_wrote():
    tensor = torch.ones(50_000)
    guard = live(a=tensor)
    tensor.numpy()[0] = 2
    with pytest.raises(CheckpointError, match=r"model\.a"):
        guard.check_unchanged()


def test_a_write_that_moves_no_counter_and_changes_no_sampled_byte_is_not_noticed():
    tensor = torch.ones(50_000)
    guard = live(a=tensor)
    tensor.numpy()[100] = 2
    guard.check_unchanged()


def test_a_tensor_of_inference_has_no_counter_and_is_compared_by_its_sample():
    with torch.inference_mode():
        tensor = torch.ones(50_000)
        guard = live(a=tensor)
        guard.check_unchanged()
        tensor.add_(1)
    with pytest.raises(CheckpointError, match=r"model\.a"):
        guard.check_unchanged()


def test_a_live_file_is_what_an_image_of_a_copy_is(monkeypatch):
    monkeypatch.setattr(items, "PIECE_BYTES", 5000)
    for room in (staging, writer):
        monkeypatch.setattr(room, "BLOCK_BYTES", 4096)
    leaves = {
        ("model", str(dtype)): random_bits(dtype, shape) for dtype in DTYPES for shape in [(100, 30)]
    } | {("model", "empty"): torch.ones(0, 3), ("model", "0-dim"): torch.tensor(1.5)}
    (file,) = planned(leaves)
    stage = Staging([file], leaves)
    copy(stage, leaves)
    image, live_file = Image(*stage.arena.image(0)), LiveFile(file, LiveTensors(leaves))
    expected = b"".join(map(bytes, image.blocks()))
    blocks = [bytes(block) for block in live_file.blocks()]
    assert {len(block) for block in blocks[:-1]} == {4096}
    assert b"".join(blocks) == expected
    assert live_file.size == image.size == len(expected)
    assert live_file.crc32 == image.crc32


def test_a_block_of_a_live_file_is_good_until_the_next_but_one_is_taken(monkeypatch):
    monkeypatch.setattr(staging, "BLOCK_BYTES", 4096)
    leaves = {("a",): random_bits(torch.uint8, (30_000,))}
    (file,) = planned(leaves)
    live_file = LiveFile(file, LiveTensors(leaves))
    expected = b"".join(bytes(block) for block in live_file.blocks())
    blocks = LiveFile(file, LiveTensors(leaves)).blocks()
    found, before = b"", next(blocks)
    for block in blocks:
        found, before = found + bytes(before), block
    assert found + bytes(before) == expected


def test_a_copy_of_an_interrupted_save_is_not_made_when_the_memory_is_another_ones():
    old, new = {("w",): torch.ones(3)}, {("w",): torch.zeros(3)}
    stage = staged(old)
    late = stage.take()
    copy(stage, new)
    with pytest.raises(CheckpointError, match="interrupted"):
        stage.copy(old, late, small=True)
    assert values_in(stage) == {"w": [bytes_of(torch.zeros(3))]}
