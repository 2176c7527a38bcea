import json
from math import prod

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate, Shard, zeros
from torch.testing._internal.distributed.fake_pg import FakeStore

from tests.tensors import DTYPES, bytes_of, random_bits
from veofunc.checkpoint import items
from veofunc.checkpoint.items import ALIGNMENT
from veofunc.checkpoint.manifest import CheckpointError, Entry
from veofunc.checkpoint.plan import DCP_METADATA, Piece, PlannedFile, SlotIndex, plan_files
from veofunc.checkpoint.snapshot import Sections, describe_leaves
from veofunc.checkpoint.staging import Staging
from veofunc.checkpoint.writer import Image


def entries_of(leaves: dict, rank: int = 0, per_rank: tuple[str, ...] = ()) -> list[Entry]:
    return describe_leaves(leaves, Sections({}, frozenset(per_rank)), rank)


def files_of(
    leaves: dict, rank: int = 0, world_size: int = 1, num_files: int = 1, live=()
) -> list[PlannedFile]:
    copied, kept = plan_files(entries_of(leaves), leaves, rank, world_size, num_files, frozenset(live))
    return [*copied, *kept]


def pieces_of(files: list[PlannedFile]) -> list[tuple[str, Piece]]:
    return [pair for file in files for pair in file.pieces]


def index_of(leaves: dict, files: list[PlannedFile]) -> SlotIndex:
    pieces: dict[str, list[Piece]] = {}
    for key, piece in pieces_of(files):
        pieces.setdefault(key, []).append(piece)
    return SlotIndex(tuple(entries_of(leaves)), {key: tuple(found) for key, found in pieces.items()})


def times_covered(shape: tuple[int, ...], pieces: list[Piece]) -> torch.Tensor:
    """How often each value of a tensor is in a piece."""
    count = torch.zeros(shape, dtype=torch.int64)
    for piece in pieces:
        count[tuple(slice(at, at + size) for at, size in zip(piece.offsets, piece.sizes, strict=True))] += 1
    return count


def write(files: list[PlannedFile], leaves: dict, directory) -> None:
    stage = Staging(files, leaves)
    stage.copy(leaves, stage.take(), small=True)
    for number, file in enumerate(files):
        image = Image(*stage.arena.image(number))
        (directory / file.name).write_bytes(b"".join(map(bytes, image.blocks())))


@given(
    sizes=st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), max_size=12),
    world_size=st.integers(1, 4),
    num_files=st.integers(1, 3),
)
def test_each_value_is_written_by_one_rank_and_no_rank_writes_much_more_than_another(
    sizes, world_size, num_files
):
    leaves = {("t", f"{number}"): torch.zeros(shape) for number, shape in enumerate(sizes)}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(items, "PIECE_BYTES", 64)
        plans = [files_of(leaves, rank, world_size, num_files) for rank in range(world_size)]
    pieces = [pair for files in plans for pair in pieces_of(files)]
    for (_, name), leaf in leaves.items():
        mine = [piece for key, piece in pieces if key == f"t.{name}"]
        assert mine
        assert (times_covered(leaf.shape, mine) == 1).all()
    loads = [sum(4 * prod(piece.sizes) for _, piece in pieces_of(files)) for files in plans]
    assert max(loads) - min(loads) <= max((4 * leaf.numel() for leaf in leaves.values()), default=0)
    names = [file.name for files in plans for file in files]
    assert len({*names}) == len(names) <= world_size * num_files


def test_every_rank_writes_its_own_of_what_differs():
    for rank in range(3):
        leaves = {("rng", "torch"): torch.zeros(3), ("w",): torch.zeros(2)}
        entries = entries_of(leaves, rank, per_rank=("rng",))
        copied, _ = plan_files(entries, leaves, rank, 3, 1, frozenset())
        keys = [key for key, _ in pieces_of(copied)]
        assert f"rank_{rank}.rng.torch" in keys
        assert ("w" in keys) is (rank == 0)


def test_a_tied_tensor_is_in_no_file():
    shared = torch.zeros(4)
    leaves = {("embedding",): shared, ("head",): shared, ("part",): shared[:2]}
    assert [key for key, _ in pieces_of(files_of(leaves))] == ["embedding", "part"]


def test_what_is_live_has_files_of_its_own():
    leaves = {(name,): torch.zeros(4) for name in "abcd"}
    copied, kept = plan_files(entries_of(leaves), leaves, 0, 1, 2, frozenset([("b",), ("c",)]))
    assert {key for key, _ in pieces_of(copied)} == {"a", "d"}
    assert {key for key, _ in pieces_of(kept)} == {"b", "c"}
    assert not {file.name for file in copied} & {file.name for file in kept}


def test_files_of_a_rank_are_of_about_one_size():
    leaves = {(f"{number}",): torch.zeros(1000) for number in range(12)}
    sizes = [file.size for file in files_of(leaves, num_files=3)]
    assert len(sizes) == 3
    assert max(sizes) - min(sizes) < 4000


def test_items_follow_each_other_and_values_begin_at_multiples_of_the_alignment():
    leaves = {(str(dtype),): random_bits(dtype, (7,)) for dtype in DTYPES}
    (file,) = files_of(leaves)
    end = 0
    for (_, piece), (values, nbytes, first, second) in zip(file.pieces, file.places, strict=True):
        assert piece.item % ALIGNMENT == piece.values % ALIGNMENT == 0
        assert end <= piece.item < end + ALIGNMENT
        assert piece.item < first < values == piece.values
        end = piece.item + piece.length
        assert values + nbytes < second < end
    assert end == file.size


PLACEMENTS = [
    (Shard(0), Shard(1)),
    (Shard(1), Replicate()),
    (Replicate(), Shard(0)),
    (Replicate(), Replicate()),
    (Shard(0), Shard(0)),
]


@pytest.mark.parametrize("placements", PLACEMENTS, ids=str)
def test_each_value_of_a_sharded_tensor_is_written_by_one_rank(placements):
    count = {name: torch.zeros(7, 5, dtype=torch.int64) for name in "abcdefgh"}
    for rank in range(4):
        dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=4)
        try:
            mesh = DeviceMesh("cpu", [[0, 1], [2, 3]])
            leaves = {(name,): zeros(7, 5, device_mesh=mesh, placements=placements) for name in count}
            pieces = pieces_of(files_of(leaves, rank, 4))
        finally:
            dist.destroy_process_group()
        assert pieces  # those that hold the same take turns
        for name, covered in count.items():
            covered += times_covered((7, 5), [piece for key, piece in pieces if key == name])
    assert all((covered == 1).all() for covered in count.values())


def test_an_index_comes_back_from_its_bytes():
    shared = torch.zeros(4)
    leaves = {
        ("a",): torch.zeros(2, 3),
        ("b",): shared,
        ("c",): shared,
        ("d",): torch.tensor(1),
        ("é",): shared[:0],
    }
    index = index_of(leaves, files_of(leaves, num_files=2))
    again = SlotIndex.from_bytes(index.to_bytes())
    assert again == index
    assert isinstance(json.loads(index.to_bytes()), dict)
    assert [entry.key for entry in again.entries if again.of(entry) == index.pieces["b"]] == ["b", "c"]


def index_with(shape: tuple[int, ...], *boxes: tuple[tuple[int, ...], tuple[int, ...]]) -> SlotIndex:
    """Of one tensor in pieces."""
    pieces = {"w": tuple(Piece(offsets, sizes, "f", 0, 0, 0) for offsets, sizes in boxes)} if boxes else {}
    return SlotIndex((Entry(("w",), "tensor", None, "rest", "w", shape, "float32"),), pieces)


GRID = [((row, column), (2, 3)) for row in (0, 2, 4) for column in (0, 3)]  # of shape [6, 6]

COMPLETE = [
    ((), [((), ())]),
    ((0,), [((0,), (0,))]),
    ((0, 3), [((0, 0), (0, 3)), ((0, 0), (0, 3))]),
    ((5,), [((0,), (5,))]),
    ((5,), [((3,), (2,)), ((0,), (3,))]),
    ((6, 6), GRID),
    ((6, 6), GRID[::-1]),
    ((4, 4), [((0, 0), (3, 1)), ((0, 1), (1, 3)), ((3, 0), (1, 3)), ((1, 3), (3, 1)), ((1, 1), (2, 2))]),
]


@pytest.mark.parametrize(("shape", "boxes"), COMPLETE)
def test_pieces_that_cover_a_tensor_once_are_complete(shape, boxes):
    index_with(shape, *boxes).check_complete()


INCOMPLETE = [
    ((), [], "0 of 1 values"),
    ((0,), [], "0 of 0 values"),
    ((), [((), ()), ((), ())], "some values twice"),
    ((5,), [((0,), (2,)), ((3,), (2,))], "4 of 5 values"),
    ((5,), [((0,), (3,)), ((2,), (3,))], "some values twice"),
    ((5,), [((0,), (3,)), ((1,), (2,))], "some values twice"),
    ((6, 6), GRID[1:], "30 of 36 values"),
    ((6, 6), [*GRID, GRID[3]], "some values twice"),
    ((6, 6), [*GRID[1:], GRID[3]], "some values twice"),
    ((4, 4), [((0, 0), (4, 2)), ((0, 1), (4, 2))], "some values twice"),
]


@pytest.mark.parametrize(("shape", "boxes", "text"), INCOMPLETE)
def test_a_gap_or_an_overlap_is_found(shape, boxes, text):
    with pytest.raises(CheckpointError, match=f"w: {text}"):
        index_with(shape, *boxes).check_complete()


@pytest.mark.parametrize("missing", range(3))
def test_a_rank_that_does_not_save_is_found(missing):
    leaves = {(f"{number}",): torch.zeros(5) for number in range(6)}
    plans = [files_of(leaves, rank, 3) for rank in range(3)]
    index_of(leaves, [file for files in plans for file in files]).check_complete()
    index = index_of(leaves, [file for rank, files in enumerate(plans) if rank != missing for file in files])
    with pytest.raises(CheckpointError, match=f"{missing}: 0 of 5 values; {missing + 3}: 0 of 5 values"):
        index.check_complete()


def test_tensors_that_are_one_on_rank_0_alone_are_found():
    shared = torch.zeros(4)
    leaves = {("a",): shared, ("b",): shared}
    index = index_of(leaves, files_of(leaves))
    index.check_complete()
    apart = index_of({("b",): shared}, files_of({("b",): shared}))
    with pytest.raises(CheckpointError, match="b: the same as a on rank 0, and not on all ranks"):
        SlotIndex(index.entries, index.pieces | apart.pieces).check_complete()


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_torch_reads_what_two_ranks_wrote(tmp_path, monkeypatch):
    monkeypatch.setattr(items, "PIECE_BYTES", 100)
    shared = random_bits(torch.int64, (40,))
    leaves = {
        **{("t", str(dtype)): random_bits(dtype, (8, 5)) for dtype in DTYPES},
        ("0-dim",): torch.tensor(1.5),
        ("empty",): torch.zeros(0, 2),
        ("embedding",): shared,
        ("head",): shared,
    }
    files = [file for rank in range(2) for file in files_of(leaves, rank, 2, num_files=2)]
    write(files, leaves, tmp_path)
    (tmp_path / DCP_METADATA).write_bytes(index_of(leaves, files).dcp_metadata())
    targets = {".".join(path): torch.zeros_like(leaf) for path, leaf in leaves.items()}
    dcp.load(targets, storage_reader=FileSystemReader(tmp_path), no_dist=True)
    for path, leaf in leaves.items():
        assert bytes_of(targets[".".join(path)]) == bytes_of(leaf)
