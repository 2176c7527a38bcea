"""Packed rows: which token belongs to which document and channel, and what each token predicts.

Host-side helpers for a data loader or collate function. Shapes are those of the tokens, usually [B, T].
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["channel_ids", "document_ids", "next_token"]


def channel_ids(
    source: Tensor,
    *,
    position_ids: Tensor | None = None,
    cu_seqlens: Tensor | None = None,
    document_ids: Tensor | None = None,
    mask: Tensor | None = None,
    labels: Tensor | None = None,
    ignore_index: int = -100,
) -> Tensor:
    """The channel of every token, from the channel of every document.

    Say where the documents are in one of three ways. Documents are numbered row by row, from left to
    right. Padding, and tokens of no document, get -1.

    Args:
        source: channel of each document, int [num_documents].
        position_ids: [B, T] or [T], of M-RoPE [3, B, T] or [4, B, T]; see `document_ids` for where a
            document starts.
        cu_seqlens: cumulative lengths, int [num_documents + 1], of tokens in one row. The ids have shape
            [cu_seqlens[-1]], or that of `mask` or `labels`: tokens past the last document are nobody's.
            Documents beyond the number of `source` must be padding, by `mask`, `labels` or their length, 0.
        document_ids: [B, T] or [T], each an index into `source`, or -1 for nobody.
        mask: 0 or False on padding, of the tokens' shape. With `position_ids`, what is padding throughout
            is not a document.
        labels: of the tokens' shape, for batches without a mask: if `position_ids` show more documents
            than `source` has, the surplus must be documents without a label, the last ones first. They
            are padding. A mask is safer: labels cannot tell padding from a document that has none.
        ignore_index: the label that does not count.

    Returns:
        int64 of the tokens' shape, -1 for nobody.

    Raises:
        ValueError: not exactly one of the three ways, or shapes or numbers of documents that disagree.
        TypeError: ids that are not integers.

    Example:
        >>> import torch, veofunc as vf
        >>> positions = torch.tensor([[0, 1, 2, 0, 1]])
        >>> vf.packing.channel_ids(torch.tensor([7, 3]), position_ids=positions)
        tensor([[7, 7, 7, 3, 3]])
    """
    ways = {"position_ids": position_ids, "cu_seqlens": cu_seqlens, "document_ids": document_ids}
    given = {name: value for name, value in ways.items() if value is not None}
    if len(given) != 1:
        raise ValueError(f"pass exactly one of {', '.join(ways)}, got {', '.join(given) or 'none'}")
    _check_integers(source=source, **given)
    if source.dim() != 1:
        raise ValueError(
            f"source must have shape [num_documents], one channel each, got {list(source.shape)}"
        )
    real = None if mask is None else mask.bool()
    labelled = None if labels is None else labels != ignore_index
    if position_ids is not None:
        documents, num_documents = _documents_by_position(position_ids, real, labelled, len(source))
    elif cu_seqlens is not None:
        documents, num_documents = _documents_by_length(cu_seqlens, real, labelled, len(source))
    else:
        documents = given["document_ids"].long()
        num_documents = max(_num_documents(documents), len(source))  # some may have no token here
        _check_shapes(documents, mask=real, labels=labelled)
    _check_count(num_documents, len(source))
    if real is not None:
        documents = torch.where(real, documents, -1)
    nobody = source.new_full((1,), -1, dtype=torch.int64)
    return torch.cat([source.long(), nobody])[documents.clamp(min=-1)]  # index -1 is the last


def document_ids(position_ids: Tensor) -> Tensor:
    """The document of every token, numbered row by row from 0.

    A document starts wherever a position does not follow its predecessor, and at the start of a row; so
    positions may start anywhere, and a row may begin inside a document.

    With M-RoPE positions of images and videos leap and repeat. There a document starts where the temporal
    position falls, or where all three are 0, and at the start of a row. Where there are positions of the
    text as well, these tell, as above.

    Args:
        position_ids: int [B, T] or [T]. Of M-RoPE int [3, B, T], temporal, height and width, or
            [4, B, T], those of the text first.

    Returns:
        int64 [B, T] or [T].

    Raises:
        ValueError: `position_ids` have another shape.
        TypeError: `position_ids` are not integers.

    Example:
        >>> import torch, veofunc as vf
        >>> vf.packing.document_ids(torch.tensor([[7, 8, 0, 1], [0, 1, 2, 3]]))
        tensor([[0, 0, 1, 1],
                [2, 2, 2, 2]])

    Source: M-RoPE of Qwen2-VL (https://arxiv.org/abs/2409.12191); Hugging Face puts the text's first.
    """
    _check_integers(position_ids=position_ids)
    shape = position_ids.shape
    if len(shape) not in (1, 2, 3) or (len(shape) == 3 and shape[0] not in (3, 4)):
        raise ValueError(
            "position_ids must have shape [T] or [B, T], or, of M-RoPE, [3, B, T] (temporal, height, width) "
            f"or [4, B, T] (text first), got {list(shape)}"
        )
    starts = torch.ones(shape[-2:], dtype=torch.bool, device=position_ids.device)
    if len(shape) == 3 and shape[0] == 3:
        temporal = position_ids[0]  # [B, T]
        starts[:, 1:] = (temporal[:, 1:] < temporal[:, :-1]) | (position_ids[:, :, 1:] == 0).all(0)
    else:
        text = position_ids[0] if len(shape) == 3 else position_ids
        starts[..., 1:] = text[..., 1:] != text[..., :-1] + 1
    return starts.reshape(-1).cumsum(0).view_as(starts) - 1


def next_token(tokens: Tensor, document_ids: Tensor, ignore_index: int = -100) -> Tensor:
    """Labels for next-token prediction: at each position the token that follows in the same document.

    The last token of a document, the last of a row, and tokens of no document predict nothing, so no
    document pays for its neighbour's first token.

    Args:
        tokens: int [B, T] or [T]; labels that are not shifted yet will do, ignored ones stay ignored.
        document_ids: int of the same shape, -1 for nobody. Ids from positions number padding, too: where a
            mask is 0 set them to -1, `document_ids.masked_fill(mask == 0, -1)`.
        ignore_index: the label for "predicts nothing".

    Returns:
        int64 of the same shape.

    Raises:
        ValueError: the shapes differ.
        TypeError: ids that are not integers.

    Example:
        >>> import torch, veofunc as vf
        >>> tokens, documents = torch.tensor([5, 6, 7, 8]), torch.tensor([0, 0, 1, 1])
        >>> vf.packing.next_token(tokens, documents)
        tensor([   6, -100,    8, -100])
    """
    _check_integers(tokens=tokens, document_ids=document_ids)
    _check_shape("document_ids", document_ids, tokens)
    labels = torch.full_like(tokens, ignore_index, dtype=torch.int64)
    here, following = document_ids[..., :-1], document_ids[..., 1:]
    labels[..., :-1] = torch.where((here == following) & (here >= 0), tokens[..., 1:].long(), ignore_index)
    return labels


def _documents_by_position(
    position_ids: Tensor, real: Tensor | None, labelled: Tensor | None, num_sources: int
) -> tuple[Tensor, int]:
    """The document of every token, and how many there are without those that are padding."""
    documents = document_ids(position_ids)
    num_documents = _num_documents(documents)
    _check_shapes(documents, mask=real, labels=labelled)
    if real is not None:
        documents, num_documents = _without_padding(documents, num_documents, real, 0)
    if labelled is not None:
        documents, num_documents = _without_padding(documents, num_documents, labelled, num_sources)
    return documents, num_documents


def _documents_by_length(
    cu_seqlens: Tensor, real: Tensor | None, labelled: Tensor | None, num_sources: int
) -> tuple[Tensor, int]:
    """As `_documents_by_position`."""
    if cu_seqlens.dim() != 1 or len(cu_seqlens) < 1 or cu_seqlens[0] != 0 or (cu_seqlens.diff() < 0).any():
        raise ValueError(
            f"cu_seqlens must be one-dimensional, start with 0 and never fall, got {cu_seqlens.tolist()}"
        )
    name, like = ("labels", labelled) if real is None else ("mask", real)
    if like is None:
        like = torch.ones(int(cu_seqlens[-1]), dtype=torch.bool, device=cu_seqlens.device)
    if like.numel() < int(cu_seqlens[-1]):
        raise ValueError(f"cu_seqlens count {int(cu_seqlens[-1])} tokens, {name} has {like.numel()}")
    positions = torch.arange(like.numel(), device=cu_seqlens.device)
    documents = torch.searchsorted(cu_seqlens[1:].contiguous(), positions, right=True)
    documents = torch.where(positions < cu_seqlens[-1], documents, -1).view(like.shape)
    _check_shapes(documents, mask=real, labels=labelled)
    num_documents = len(cu_seqlens) - 1
    for flag in (like, labelled):
        if flag is not None:
            documents, num_documents = _without_padding(documents, num_documents, flag, num_sources)
    return documents, num_documents


def _num_documents(documents: Tensor) -> int:
    return int(documents.max()) + 1 if documents.numel() else 0


def _without_padding(
    documents: Tensor, num_documents: int, flag: Tensor, num_sources: int
) -> tuple[Tensor, int]:
    """`documents` without those where `flag` is nowhere, the last ones first, until `num_sources` are left.

    Their tokens become -1, the others are numbered anew. Also how many there are then.
    """
    inside = documents >= 0
    counts = torch.zeros(num_documents, dtype=torch.int64, device=documents.device)
    blank = counts.index_add(0, documents[inside], flag[inside].long()) == 0  # [num_documents]
    surplus = max(num_documents - num_sources, 0)
    dropped = blank & (blank.flip(0).cumsum(0).flip(0) <= surplus)
    numbers = torch.where(dropped, -1, (~dropped).long().cumsum(0) - 1)
    nobody = numbers.new_full((1,), -1)
    return torch.cat([numbers, nobody])[documents], num_documents - int(dropped.sum())  # index -1 is the last


def _check_count(num_documents: int, num_sources: int) -> None:
    if num_documents != num_sources:
        raise ValueError(
            f"one source per document: found {num_documents} documents, got {num_sources} sources. "
            "Padding counts as a document unless mask= or labels= tells it apart"
        )


def _check_shapes(documents: Tensor, **tensors: Tensor | None) -> None:
    for name, tensor in tensors.items():
        if tensor is not None:
            _check_shape(name, tensor, documents)


def _check_shape(name: str, tensor: Tensor, tokens: Tensor) -> None:
    if tensor.shape != tokens.shape:
        raise ValueError(f"{name} must have the tokens' shape {list(tokens.shape)}, got {list(tensor.shape)}")


def _check_integers(**tensors: Tensor) -> None:
    for name, tensor in tensors.items():
        integers = isinstance(tensor, Tensor) and not tensor.is_floating_point()
        if not integers or tensor.dtype == torch.bool or tensor.is_complex():
            kind = tensor.dtype if isinstance(tensor, Tensor) else type(tensor).__name__
            raise TypeError(f"{name} must be an integer tensor, got {kind}")
