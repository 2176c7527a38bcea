"""Documents, channels and labels of packed rows against plain loops over tokens."""

import re

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings

import veofunc as vf
from tests import reference
from veofunc import packing

FEW = settings(max_examples=40, derandomize=True, database=None, deadline=None)


def positions_of(rows):
    """Position ids from (first position, length) of every document of every row."""
    return [[first + t for first, length in row for t in range(length)] for row in rows]


@st.composite
def packed_rows(draw):
    """Rows of documents that fill them, as position ids that show where each starts."""
    num_tokens = draw(st.integers(1, 8))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        row, left = [], num_tokens
        while left:
            length = draw(st.integers(1, left))
            first = draw(st.integers(0, 3))
            follows = row and first == row[-1][0] + row[-1][1]  # it would look like the same document
            row.append((0 if follows else first, length))
            left -= length
        rows.append(row)
    return rows


@st.composite
def documents(draw):
    """Any document ids of any rows, nobody's among them."""
    shape = draw(st.tuples(st.integers(1, 3), st.integers(1, 8)))
    row = st.lists(st.integers(-1, 3), min_size=shape[1], max_size=shape[1])
    return draw(st.lists(row, min_size=shape[0], max_size=shape[0]))


@FEW
@given(packed_rows())
def test_a_document_starts_where_a_position_does_not_follow(rows):
    positions = positions_of(rows)
    expected, number = [], 0
    for row in rows:
        expected.append([number + d for d, (_, length) in enumerate(row) for _ in range(length)])
        number += len(row)
    ids = packing.document_ids(torch.tensor(positions))
    assert ids.dtype == torch.int64
    assert ids.tolist() == expected == reference.document_ids(positions)


@FEW
@given(packed_rows())
def test_ids_by_position_follow_the_documents(rows):
    positions = positions_of(rows)
    num_documents = sum(map(len, rows))
    source = [(7 * d) % 5 - 1 for d in range(num_documents)]
    ids = packing.channel_ids(torch.tensor(source), position_ids=torch.tensor(positions))
    assert ids.dtype == torch.int64
    assert ids.tolist() == reference.channel_ids(source, reference.document_ids(positions))


@FEW
@given(packed_rows(), st.data())
def test_with_a_mask_what_is_padding_throughout_is_no_document(rows, data):
    positions = positions_of(rows)
    real = [[data.draw(st.booleans()) for _ in row] for row in rows]
    mask = [
        [is_real for (_, length), is_real in zip(row, flags, strict=True) for _ in range(length)]
        for row, flags in zip(rows, real, strict=True)
    ]
    source = [d + 10 for d in range(sum(map(sum, real)))]
    numbers = iter(source)
    expected = []
    for row, flags in zip(rows, real, strict=True):
        channels = [next(numbers) if is_real else -1 for is_real in flags]
        expected.append([c for c, (_, length) in zip(channels, row, strict=True) for _ in range(length)])
    for kind in (torch.bool, torch.int64):
        ids = packing.channel_ids(
            torch.tensor(source, dtype=torch.int64),
            position_ids=torch.tensor(positions),
            mask=torch.tensor(mask, dtype=kind),
        )
        assert ids.tolist() == expected


def test_masked_tokens_inside_a_document_are_nobody_s_and_keep_its_number():
    positions = torch.tensor([[0, 1, 2, 0, 1]])
    mask = torch.tensor([[0, 1, 0, 1, 0]])
    ids = packing.channel_ids(torch.tensor([7, 3]), position_ids=positions, mask=mask)
    assert ids.tolist() == [[-1, 7, -1, 3, -1]]


@FEW
@given(st.lists(st.integers(0, 4), max_size=5), st.integers(0, 3))
def test_ids_by_length_follow_the_documents_and_leave_the_tail_to_nobody(lengths, tail):
    cu_seqlens = [sum(lengths[:d]) for d in range(len(lengths) + 1)]
    source = [d + 10 for d in range(len(lengths))]
    num_tokens = sum(lengths) + tail
    expected = reference.channel_ids(source, [reference.documents_by_length(lengths, num_tokens)])[0]
    for dtype in (torch.int32, torch.int64):
        given_lengths = torch.tensor(cu_seqlens, dtype=dtype)
        alone = packing.channel_ids(torch.tensor(source).long(), cu_seqlens=given_lengths)
        assert alone.tolist() == expected[: sum(lengths)]
        mask = torch.ones(1, num_tokens)
        in_row = packing.channel_ids(torch.tensor(source).long(), cu_seqlens=given_lengths, mask=mask)
        assert in_row.tolist() == [expected]


def test_ids_by_length_are_nobody_s_on_padding_between_documents():
    mask = torch.tensor([1, 1, 0, 0, 1, 1])
    ids = packing.channel_ids(torch.tensor([7, 3]), cu_seqlens=torch.tensor([0, 4, 6]), mask=mask)
    assert ids.tolist() == [7, 7, -1, -1, 3, 3]


@FEW
@given(documents(), st.data())
def test_ids_by_document_are_the_channels_of_the_documents(rows, data):
    source = [5, 0, 9, 5]
    mask = [[data.draw(st.booleans()) for _ in row] for row in rows]
    ids = torch.tensor(rows)
    assert packing.channel_ids(torch.tensor(source), document_ids=ids).tolist() == (
        reference.channel_ids(source, rows)
    )
    masked = packing.channel_ids(torch.tensor(source), document_ids=ids, mask=torch.tensor(mask))
    assert masked.tolist() == reference.channel_ids(source, rows, mask)


@pytest.mark.parametrize(
    ("positions", "labels", "source", "expected"),
    [
        ([[0, 1, 0, 0]], [[5, -100, -100, -100]], [7], [[7, 7, -1, -1]]),  # a tail of pads at position 0
        ([[0, 1, 0, 1]], [[5, -100, -100, -100]], [7], [[7, 7, -1, -1]]),  # pads that count up
        ([[0, 0, 0, 1]], [[5, -100, 5, -100]], [7, 3], [[7, -1, 3, 3]]),  # a pad between documents
        ([[0, 0, 0]], [[-100, 5, -100]], [7, 3], [[7, 3, -1]]),  # of two without a label the last is surplus
        ([[0, 1, 0, 1]], [[5, -100, -100, -100]], [7, 3], [[7, 7, 3, 3]]),  # no surplus: a real document
        (
            [[0, 1, 0, 0], [0, 1, 2, 0]],
            [[5, -100, -100, -100], [5, 5, -100, -100]],
            [7, 3],
            [[7, 7, -1, -1], [3, 3, 3, -1]],
        ),
    ],
)
def test_without_a_mask_labels_tell_padding_from_documents(positions, labels, source, expected):
    ids = packing.channel_ids(
        torch.tensor(source), position_ids=torch.tensor(positions), labels=torch.tensor(labels)
    )
    assert ids.tolist() == expected


def test_the_label_that_does_not_count_is_an_option():
    ids = packing.channel_ids(
        torch.tensor([7]),
        position_ids=torch.tensor([0, 1, 0]),
        labels=torch.tensor([5, 0, 0]),
        ignore_index=0,
    )
    assert ids.tolist() == [7, 7, -1]


@FEW
@given(documents(), st.sampled_from([-100, -1, 0]))
def test_a_token_predicts_the_next_of_its_own_document(rows, ignore_index):
    tokens = [[10 * b + t + 1 for t in range(len(row))] for b, row in enumerate(rows)]
    labels = packing.next_token(torch.tensor(tokens), torch.tensor(rows), ignore_index)
    assert labels.dtype == torch.int64
    assert labels.tolist() == reference.next_token(tokens, rows, ignore_index)


def test_no_document_pays_for_its_neighbour_s_first_token():
    documents = torch.tensor([[0, 0, 0, 1, 1]])
    before = packing.next_token(torch.tensor([[1, 2, 3, 4, 5]]), documents)
    after = packing.next_token(torch.tensor([[1, 2, 3, 9, 5]]), documents)
    assert torch.equal(before[:, :3], after[:, :3])


def test_labels_that_are_ignored_already_stay_ignored():
    labels = packing.next_token(torch.tensor([-100, -100, 3, 4]), torch.zeros(4).long())
    assert labels.tolist() == [-100, 3, 4, -100]


@pytest.mark.parametrize("shape", [(0,), (1, 0), (1,), (3, 1)])
def test_rows_of_no_token_or_one_are_fine(shape):
    zeros = torch.zeros(shape).long()
    assert packing.document_ids(zeros).flatten().tolist() == list(range(zeros.numel()))
    assert packing.next_token(zeros, zeros).tolist() == torch.full(shape, -100).tolist()
    ids = packing.channel_ids(torch.arange(zeros.numel()), position_ids=zeros)
    assert ids.flatten().tolist() == list(range(zeros.numel()))


@pytest.mark.parametrize(
    ("cu_seqlens", "source", "padding", "expected"),
    [
        ([0, 2, 3, 5], [7, 3], {"mask": [1, 1, 1, 0, 0]}, [7, 7, 3, -1, -1]),
        ([0, 2, 3, 5], [7, 3], {"mask": [0, 0, 1, 1, 1]}, [-1, -1, 7, 3, 3]),
        ([0, 2, 3, 5], [7, 3], {"labels": [5, -100, -100, 5, -100]}, [7, 7, -1, 3, 3]),
        ([0, 2, 4], [7], {"labels": [5, 5, -100, -100, -100, -100]}, [7, 7, -1, -1, -1, -1]),
        ([0, 2, 4], [7, 3], {"labels": [5, 5, -100, -100, -100, -100]}, [7, 7, 3, 3, -1, -1]),  # no surplus
        ([0, 2, 4], [7], {"mask": [1, 1, 1, 1], "labels": [5, 5, -100, -100]}, [7, 7, -1, -1]),
        ([0, 2, 4, 4, 4], [7, 3], {}, [7, 7, 3, 3]),  # lengths padded to a fixed number
        ([0, 2, 2, 4], [7, 9, 3], {}, [7, 7, 3, 3]),  # an empty document has a source, too
    ],
)
def test_documents_by_length_that_are_padding_need_no_source(cu_seqlens, source, padding, expected):
    padding = {name: torch.tensor(values) for name, values in padding.items()}
    ids = packing.channel_ids(torch.tensor(source), cu_seqlens=torch.tensor(cu_seqlens), **padding)
    assert ids.tolist() == expected


PAD = -1  # as the channel of a piece


@st.composite
def pieces(draw, min_length=1):
    """Rows of pieces (channel or PAD, length, first position) that fill them.

    The first document of a row may begin anywhere: its beginning is in another row.
    """
    num_tokens = draw(st.integers(min_length, 10))
    rows = []
    for _ in range(draw(st.integers(1, 4))):
        row, left, first = [], num_tokens, draw(st.sampled_from([0, 0, 5]))
        while left:
            channel = draw(st.integers(PAD, 2)) if left >= min_length else PAD
            length = draw(st.integers(1 if channel == PAD else min_length, left))
            row.append((channel, length, 0 if channel == PAD else first))
            first = first if channel == PAD else 0
            left -= length
        rows.append(row)
    return rows


def slow_packing(rows):
    """Source of every document, and per token: real or not, channel, label; the label is 100 b + t."""
    source, real, channels, labels = [], [], [], []
    for b, row in enumerate(rows):
        tokens = []
        for channel, length, _ in row:
            source += [] if channel == PAD else [channel]
            for i in range(length):
                is_last = i == length - 1
                following = 100 * b + len(tokens) + 1
                tokens.append((channel != PAD, channel, -100 if channel == PAD or is_last else following))
        for column, values in zip((real, channels, labels), zip(*tokens, strict=True), strict=True):
            column.append(list(values))
    return torch.tensor(source, dtype=torch.int64), real, channels, labels


def text_positions(rows, numbering="zeros"):
    """Positions that count from the first of each piece; those of padding are numbered in some way."""
    return [
        [
            {"zeros": 0, "ones": 1, "count": i}[numbering] if channel == PAD else first + i
            for channel, length, first in row
            for i in range(length)
        ]
        for row in rows
    ]


def slow_sums(rows, losses):
    """Sum of losses and number of labels of channels 0 to 2."""
    loss_sum, token_count = [0.0] * 3, [0] * 3
    for row, row_losses in zip(rows, losses, strict=True):
        t = 0
        for channel, length, _ in row:
            for i in range(length):
                if channel != PAD and i < length - 1:
                    loss_sum[channel] += row_losses[t]
                    token_count[channel] += 1
                t += 1
    return loss_sum, token_count


MANY = settings(max_examples=60, derandomize=True, database=None, deadline=None)


@MANY
@given(pieces(), st.sampled_from(["zeros", "ones", "count"]), st.integers(0, 4))
def test_ids_labels_and_sums_of_padded_rows_equal_a_loop(rows, numbering, cut):
    source, real, channels, labels = slow_packing(rows)
    positions, mask = torch.tensor(text_positions(rows, numbering)), torch.tensor(real)
    ids = packing.channel_ids(source, position_ids=positions, mask=mask)
    assert ids.tolist() == channels
    tokens = torch.tensor([[100 * b + t for t in range(len(row))] for b, row in enumerate(channels)])
    documents = packing.document_ids(positions).masked_fill(~mask, -1)
    made = packing.next_token(tokens, documents)
    assert made.tolist() == labels
    losses = (tokens * 7 % 13).double()
    whole = vf.channel_sums(losses, made, ids, 3)
    loss_sum, token_count = slow_sums(rows, losses.tolist())
    assert (whole["loss_sum"].tolist(), whole["token_count"].tolist()) == (loss_sum, token_count)
    assert whole["unattributed_token_count"].item() == 0
    first = vf.channel_sums(losses[:cut], made[:cut], ids[:cut], 3)
    second = vf.channel_sums(losses[cut:], made[cut:], ids[cut:], 3)
    assert (first + second == whole).all()


@MANY
@given(pieces(min_length=2))
def test_ids_by_labels_alone_equal_a_loop(rows):
    """Every document has a label, and padding is told by having none."""
    source, _, channels, labels = slow_packing(rows)
    positions = torch.tensor(text_positions(rows))
    ids = packing.channel_ids(source, position_ids=positions, labels=torch.tensor(labels))
    assert ids.tolist() == channels


@MANY
@given(pieces(min_length=2), st.sampled_from(["mask", "labels"]))
def test_ids_by_length_equal_a_loop(rows, way):
    """The pieces of all rows one after the other, padding as documents of its own."""
    source, real, channels, labels = slow_packing(rows)
    lengths = [length for row in rows for _, length, _ in row]
    cu_seqlens = torch.tensor([sum(lengths[:d]) for d in range(len(lengths) + 1)])
    padding = {way: torch.tensor({"mask": real, "labels": labels}[way])}
    assert packing.channel_ids(source, cu_seqlens=cu_seqlens, **padding).tolist() == channels


def multimodal_positions(row, shapes):
    """Three positions of every token of a row: text counts, pictures of h x w tokens spread over a plane.

    After a picture text goes on behind the largest position. Padding is at 1, as Qwen's processor has it.
    """
    positions = []
    for channel, length, first in row:
        if channel == PAD:
            positions += [(1, 1, 1)] * length
            continue
        piece, following = [], first
        while len(piece) < length:
            height, width = next(shapes)
            is_text = height * width > length - len(piece)
            height, width = (1, 1) if is_text else (height, width)
            piece += [(following, following + h, following + w) for h in range(height) for w in range(width)]
            following += max(height, width)
        positions += piece
    return positions


@MANY
@given(pieces(), st.data())
def test_multimodal_positions_give_the_ids_of_a_loop(rows, data):
    source, real, channels, _ = slow_packing(rows)
    shapes = iter(lambda: data.draw(st.tuples(st.integers(1, 2), st.integers(1, 3))), None)
    three = torch.tensor([multimodal_positions(row, shapes) for row in rows]).permute(2, 0, 1)  # [3, B, T]
    four = torch.cat([torch.tensor(text_positions(rows, "ones"))[None], three])
    for positions in (three, four):
        ids = packing.channel_ids(source, position_ids=positions, mask=torch.tensor(real))
        assert ids.tolist() == channels


def test_multimodal_documents_start_where_time_falls_or_all_are_zero():
    temporal = [[3, 3, 3, 5, 0, 1, 0, 0, 0, 2, 4, 1]]
    height = [[3, 3, 4, 5, 0, 1, 0, 0, 1, 2, 4, 1]]
    width = [[3, 4, 3, 5, 0, 1, 0, 1, 0, 2, 4, 1]]
    expected = [[0, 0, 0, 0, 1, 1, 2, 2, 2, 2, 2, 3]]
    three = torch.tensor([temporal, height, width])
    assert packing.document_ids(three).tolist() == expected
    assert packing.document_ids(three.expand(3, 2, 12)).tolist() == [*expected, [d + 4 for d in expected[0]]]
    text = torch.tensor([[[0, 1, 2, 0, 1, 2, 3, 4, 5, 6, 7, 8]]])
    assert packing.document_ids(torch.cat([text, three])).tolist() == [[0] * 3 + [1] * 9]


def test_three_rows_of_text_are_no_multimodal_positions():
    assert packing.document_ids(torch.tensor([[0, 1], [0, 1], [0, 0]])).tolist() == [[0, 0], [1, 1], [2, 3]]


@pytest.mark.parametrize("shape", [(), (1, 2, 5), (2, 2, 5), (5, 2, 5), (0, 2, 5), (3, 1, 2, 5)])
def test_positions_of_another_shape_are_refused_and_the_right_ones_named(shape):
    text = (
        r"position_ids must have shape \[T\] or \[B, T\], or, of M-RoPE, \[3, B, T\] \(temporal, height, "
        rf"width\) or \[4, B, T\] \(text first\), got {re.escape(str(list(shape)))}"
    )
    positions = torch.zeros(shape).long()
    for call in (packing.document_ids, lambda p: packing.channel_ids(torch.tensor([7]), position_ids=p)):
        with pytest.raises(ValueError, match=text):
            call(positions)


def test_arguments_stay_as_they_were():
    positions, tokens, source = torch.tensor([0, 1, 0]), torch.tensor([4, 5, 6]), torch.tensor([7, 3])
    packing.channel_ids(source, position_ids=positions, mask=torch.tensor([1, 1, 1]), labels=tokens)
    packing.next_token(tokens, packing.document_ids(positions))
    assert positions.tolist() == [0, 1, 0]
    assert tokens.tolist() == [4, 5, 6]
    assert source.tolist() == [7, 3]


POSITIONS = torch.tensor([[0, 1, 0, 1]])


@pytest.mark.parametrize(
    ("source", "ways", "message"),
    [
        ([7], {}, "pass exactly one of position_ids, cu_seqlens, document_ids, got none"),
        (
            [7, 3],
            {"position_ids": POSITIONS, "cu_seqlens": torch.tensor([0, 2, 4])},
            "pass exactly one of .* got position_ids, cu_seqlens",
        ),
        ([[7, 3]], {"position_ids": POSITIONS}, r"source must have shape \[num_documents\].*got \[1, 2\]"),
        ([7], {"position_ids": POSITIONS}, "found 2 documents, got 1 sources.*mask= or labels="),
        ([7, 3, 1], {"position_ids": POSITIONS}, "found 2 documents, got 3 sources"),
        ([7], {"cu_seqlens": torch.tensor([0, 2, 4])}, "found 2 documents, got 1 sources"),
        ([7, 3, 1], {"cu_seqlens": torch.tensor([0, 2, 4])}, "found 2 documents, got 3 sources"),
        ([7], {"document_ids": torch.tensor([0, 1])}, "found 2 documents, got 1 sources"),
        (
            [7],
            {"position_ids": POSITIONS, "labels": torch.tensor([[1, 1, 1, -100]])},
            "found 2 documents, got 1 sources",
        ),
        (
            [7, 3],
            {"position_ids": POSITIONS, "mask": torch.tensor([[1, 1, 0, 0]])},
            "found 1 documents, got 2 sources",
        ),
        (
            [7, 3],
            {"position_ids": POSITIONS, "mask": torch.tensor([1, 1, 1, 1])},
            r"mask must have the tokens' shape \[1, 4\], got \[4\]",
        ),
        (
            [7, 3],
            {"position_ids": POSITIONS, "labels": torch.tensor([1, 1, 1, 1])},
            r"labels must have the tokens' shape \[1, 4\], got \[4\]",
        ),
        (
            [7, 3],
            {"document_ids": torch.tensor([0, 1]), "mask": torch.tensor([1, 1, 1])},
            r"mask must have the tokens' shape \[2\], got \[3\]",
        ),
        (
            [7, 3],
            {"position_ids": torch.zeros(3, 1, 4).long(), "mask": torch.ones(3, 1, 4)},
            r"mask must have the tokens' shape \[1, 4\], got \[3, 1, 4\]",
        ),
        (
            [7],
            {"cu_seqlens": torch.tensor([0, 2, 4]), "labels": torch.tensor([-100, 1, 1, -100])},
            "found 2 documents, got 1 sources",
        ),
        (
            [7, 3],
            {"cu_seqlens": torch.tensor([0, 2, 4]), "labels": torch.ones(3)},
            "cu_seqlens count 4 tokens, labels has 3",
        ),
        (
            [7, 3],
            {"cu_seqlens": torch.tensor([0, 2, 4]), "mask": torch.ones(4), "labels": torch.ones(1, 4)},
            r"labels must have the tokens' shape \[4\], got \[1, 4\]",
        ),
        ([7, 3], {"cu_seqlens": torch.tensor([1, 2, 4])}, r"start with 0 and never fall, got \[1, 2, 4\]"),
        ([7, 3], {"cu_seqlens": torch.tensor([0, 4, 2])}, r"start with 0 and never fall, got \[0, 4, 2\]"),
        ([7, 3], {"cu_seqlens": torch.tensor([[0, 2, 4]])}, "cu_seqlens must be one-dimensional"),
        (
            [7, 3],
            {"cu_seqlens": torch.tensor([0, 2, 4]), "mask": torch.ones(3)},
            "cu_seqlens count 4 tokens, mask has 3",
        ),
    ],
)
def test_documents_that_do_not_fit_are_refused_with_both_counts(source, ways, message):
    with pytest.raises(ValueError, match=message):
        packing.channel_ids(torch.tensor(source), **ways)


@pytest.mark.parametrize(
    "bad", [torch.tensor([0.0, 1.0]), torch.tensor([True, False]), [0, 1], torch.ones(2) * 1j]
)
def test_what_is_no_integer_tensor_is_refused(bad):
    good = torch.tensor([0, 1])
    kind = "list" if isinstance(bad, list) else str(bad.dtype)
    calls = {
        "position_ids": lambda: packing.document_ids(bad),
        "source": lambda: packing.channel_ids(bad, position_ids=good),
        "cu_seqlens": lambda: packing.channel_ids(good, cu_seqlens=bad),
        "tokens": lambda: packing.next_token(bad, good),
        "document_ids": lambda: packing.next_token(good, bad),
    }
    for name, call in calls.items():
        with pytest.raises(TypeError, match=f"{name} must be an integer tensor, got {kind}"):
            call()


def test_document_ids_of_another_shape_than_the_tokens_are_refused():
    with pytest.raises(ValueError, match=r"document_ids must have the tokens' shape \[3\], got \[2\]"):
        packing.next_token(torch.tensor([1, 2, 3]), torch.tensor([0, 0]))
