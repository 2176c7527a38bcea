"""The example's batches: real text, packed, the same at every start."""

import data
import pytest
import torch

TINY = {
    "python": [b"def f():\n    return 1\n" * 20],
    "cpp": [b"#include <torch/torch.h>\n" * 200, b"namespace c10 {}\n" * 3],
    "manual": [b"The with statement wraps the execution of a block. " * 30],
    "legal": [b"Permission is hereby granted, free of charge, to any" for _ in range(3)],
}


@pytest.fixture(scope="module")
def corpus():
    return data.load_corpus(max_bytes=100_000)


def test_every_channel_has_text_of_its_own_kind(corpus):
    assert tuple(corpus) == data.CHANNELS
    texts = {name: b"".join(documents).lower() for name, documents in corpus.items()}
    assert all(len(text) >= 50_000 for text in texts.values())
    for name, word in zip(data.CHANNELS, (b"def ", b"#include", b"python", b"copyright"), strict=True):
        counts = {other: text.count(word) / len(text) for other, text in texts.items()}
        assert counts[name] > 0
        assert word == b"python" or max(counts, key=counts.__getitem__) == name


def test_two_loads_give_the_same_documents_in_the_same_order(corpus):
    again = data.load_corpus(max_bytes=100_000)
    assert again == corpus
    assert data.fingerprint(again) == data.fingerprint(corpus)


def test_fingerprint_changes_with_one_byte():
    other = TINY | {"legal": [*TINY["legal"][:-1], TINY["legal"][-1][:-1] + b"?"]}
    assert data.fingerprint(other) != data.fingerprint(TINY)


def test_files_are_read_in_an_order_that_the_file_system_does_not_decide(tmp_path):
    paths = [tmp_path / f"{i}.txt" for i in range(9)]
    for i, path in enumerate(paths):
        path.write_bytes(b"%d" % i * 40)
    expected = data.read(paths, 10_000)
    assert data.read(reversed([*paths, tmp_path / "gone.txt"]), 10_000) == expected
    assert sorted(expected) == [path.read_bytes() for path in paths]


def test_take_stops_at_the_limit_and_leaves_out_short_and_repeated_texts():
    texts = [b"a" * 40, b"short", b"a" * 40, b"b" * 40, b"c" * 40]
    assert data.take(texts, 80) == [b"a" * 40, b"b" * 40]


def test_channel_without_documents_is_an_error_that_names_it(monkeypatch):
    monkeypatch.setattr(data, "cpp_headers", lambda: iter(()))
    with pytest.raises(ValueError, match="found none for cpp"):
        data.load_corpus(max_bytes=1_000)


@pytest.mark.parametrize("num_tokens", [1, 33, 256])
def test_batch_equals_a_loop_over_its_documents(num_tokens):
    batch = data.make_batch(TINY, seed=3, step=7, batch_size=4, num_tokens=num_tokens)
    assert {name: values.shape for name, values in batch.items()} == dict.fromkeys(
        ("tokens", "labels", "document_ids", "channel"), torch.Size([4, num_tokens])
    )
    documents = {}
    for row in range(4):
        ids = batch["document_ids"][row].tolist()
        for t, document in enumerate(ids):
            ends = t + 1 == num_tokens or ids[t + 1] != document
            expected = data.IGNORE_INDEX if ends else batch["tokens"][row, t + 1].item()
            assert batch["labels"][row, t].item() == expected
            documents.setdefault((row, document), []).append(
                (batch["tokens"][row, t].item(), batch["channel"][row, t].item())
            )
    assert len({document for _, document in documents}) == len(documents)  # none spans two rows
    for tokens in documents.values():
        text, (channel, *others) = bytes(byte for byte, _ in tokens), (c for _, c in tokens)
        assert set(others) <= {channel}
        assert any(text in document for document in TINY[data.CHANNELS[channel]])


def test_batch_depends_on_seed_and_step_only():
    def tokens(seed, step):
        return data.make_batch(TINY, seed, step, batch_size=2, num_tokens=64)["tokens"].tolist()

    assert tokens(0, 5) == tokens(0, 5)
    assert len({str(tokens(*key)) for key in ((0, 5), (0, 6), (1, 5), (5, 0))}) == 4


def test_every_channel_gets_its_share_also_one_with_a_single_short_document(corpus):
    small = dict(corpus) | {"legal": [b"All rights reserved, no warranties."]}
    for texts in (corpus, small):
        channel = data.make_batch(texts, seed=0, step=1, batch_size=16, num_tokens=256)["channel"]
        counts = channel.flatten().bincount(minlength=4)
        assert counts.max() - counts.min() <= 256  # at most the longest piece
