"""Real text from four sources that every installation has: nothing is downloaded.

A batch is a pure function of (corpus, seed, step), so a training run resumes exactly without any
state of a data loader. Shapes: B rows, T tokens per row.
"""

import contextlib
import sysconfig
import zlib
from collections.abc import Iterable, Iterator, Mapping
from importlib import metadata
from pathlib import Path
from pydoc_data.topics import topics

import numpy as np
import torch
from tensordict import TensorDict

import veofunc as vf

CHANNELS = ("python", "cpp", "manual", "legal")
IGNORE_INDEX = -100
MIN_BYTES, MAX_BYTES = 32, 512  # of one piece of a document
PACKAGES = ("torch", "tensordict", "numpy", "matplotlib", "pillow", "fonttools", "sympy", "tqdm", "wandb")

Corpus = Mapping[str, list[bytes]]  # the documents of every channel


def load_corpus(*, max_bytes: int = 2_000_000) -> Corpus:
    """About `max_bytes` of each channel: always the same documents on the same installation."""
    texts = {
        "python": read(python_sources(), max_bytes),
        "cpp": read(cpp_headers(), max_bytes),
        "manual": take((topics[name].encode() for name in sorted(topics)), max_bytes),
        "legal": read(licence_texts(), max_bytes),
    }
    empty = [name for name in CHANNELS if not texts[name]]
    if empty:
        raise ValueError(f"every channel needs at least one document, found none for {', '.join(empty)}")
    return texts


def python_sources() -> Iterator[Path]:
    """The standard library, without its tests."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    left_out = {"site-packages", "dist-packages", "test", "tests", "idle_test"}
    return (path for path in stdlib.rglob("*.py") if not left_out & set(path.relative_to(stdlib).parts))


def cpp_headers() -> Iterator[Path]:
    """The C++ headers that torch ships, without the generated ones."""
    include = Path(torch.__file__).parent / "include"
    return (
        path
        for folder in ("c10", "torch", "ATen/core", "ATen/native")
        for path in (include / folder).rglob("*.h")
    )


def licence_texts() -> Iterator[Path]:
    """The licences of the packages that veofunc brings along, and Python's own.

    Those of all installed packages would be another text whenever a package is installed.
    """
    names = ("license", "licence", "copying", "notice")
    for package in PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            for file in metadata.distribution(package).files or ():
                if file.name.lower().startswith(names) and file.suffix not in {".py", ".pyc"}:
                    yield Path(str(file.locate()))
    yield Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"


def read(paths: Iterable[Path], max_bytes: int) -> list[bytes]:
    """Contents of the files that exist, in an order that depends on their paths only."""
    ordered = sorted(path for path in set(paths) if path.is_file())
    np.random.default_rng(0).shuffle(ordered)  # a limited share of a folder is then a sample of it
    return take((path.read_bytes() for path in ordered), max_bytes)


def take(texts: Iterable[bytes], max_bytes: int) -> list[bytes]:
    """Distinct documents of a useful length until `max_bytes` are reached."""
    documents: dict[bytes, None] = {}
    num_bytes = 0
    for text in texts:
        if num_bytes >= max_bytes:
            break
        if len(text) >= MIN_BYTES and text not in documents:
            documents[text] = None
            num_bytes += len(text)
    return list(documents)


def fingerprint(corpus: Corpus) -> str:
    """A checksum of the corpus: equal exactly when two runs see the same text."""
    value = 0
    for channel in CHANNELS:
        for document in corpus[channel]:
            value = zlib.crc32(document, value)
    return f"{value:08x}"


def make_batch(corpus: Corpus, seed: int, step: int, batch_size: int, num_tokens: int) -> TensorDict:
    """Rows packed with pieces of documents; channels get equally many tokens to within one piece.

    Returns:
        A TensorDict of int64 [B, T]: `tokens` (bytes), `labels` (the next byte, masked at the end
        of a document), `document_ids` (numbered through the batch) and `channel` (of each token,
        its place in CHANNELS).
    """
    pieces, source = draw_pieces(corpus, seed, step, num_rows=batch_size, num_tokens=num_tokens)
    lengths = torch.tensor([len(piece) for piece in pieces])
    tokens = torch.from_numpy(np.concatenate(pieces)).long().view(batch_size, num_tokens)
    documents = torch.arange(len(pieces)).repeat_interleave(lengths).view_as(tokens)
    batch = {
        "tokens": tokens,
        "labels": vf.packing.next_token(tokens, documents, IGNORE_INDEX),
        "document_ids": documents,
        "channel": vf.packing.channel_ids(torch.tensor(source), document_ids=documents),
    }
    return TensorDict(batch, batch_size=[batch_size])


def draw_pieces(
    corpus: Corpus, seed: int, step: int, *, num_rows: int, num_tokens: int
) -> tuple[list[np.ndarray], list[int]]:
    """Pieces of documents that fill the rows one after the other, and the channel of each."""
    rng = np.random.default_rng([seed, step])
    pieces: list[np.ndarray] = []
    source: list[int] = []
    num_bytes = [0] * len(CHANNELS)
    for _ in range(num_rows):
        room = num_tokens
        while room > 0:
            channel = int(min(rng.permutation(len(CHANNELS)), key=num_bytes.__getitem__))
            piece = draw_piece(corpus[CHANNELS[channel]], rng, max_bytes=room)
            pieces.append(piece)
            source.append(channel)
            num_bytes[channel] += len(piece)
            room -= len(piece)
    return pieces, source


def draw_piece(documents: list[bytes], rng: np.random.Generator, *, max_bytes: int) -> np.ndarray:
    """A random piece, at most `max_bytes` long, of a random document."""
    document = documents[rng.integers(len(documents))]
    num_bytes = int(min(rng.integers(MIN_BYTES, MAX_BYTES), len(document), max_bytes))
    start = rng.integers(len(document) - num_bytes + 1)
    return np.frombuffer(document, np.uint8, num_bytes, start)
