import enum
import json
from collections import Counter, OrderedDict, defaultdict, namedtuple

import numpy as np
import pytest
import torch

from veofunc.checkpoint.values import decode, encode, to_json

Point = namedtuple("Point", "x y")

EXACT = [
    None,
    True,
    3,
    1e-300,
    "a:b",
    [1, [2.5, "x"]],
    (),
    (1, (2, [3, (4,)])),
    {},
    {"a": {1: "a", "1": "b"}},
    {0: 1, 0.5: 2, None: 3, "None": 4},
    {True: 1, "true": 2},
    {float("inf"): float("-inf")},
    {-(2**70): 2**70},
    {"int:3": 1, 3: 2},
    {"str:int:3": 1, "int:3": 2, "": 3, ":": 4},
    {"tuple:": [1, 2]},
    {"Counter:": {"a": 1}},
    {"tensor:": ["float32", 1.0]},
    Counter({2: 1, 4: 2}),
    [Counter("abca"), (Counter(),)],
    OrderedDict([("b", 1), ("a", {2: (3,)})]),
    {3, 1, "a"},
    frozenset({(1, "a"), (2, None)}),
    b"\x00\xff",
    complex(0.1, -0.0),
    torch.Size([2, 0]),
    torch.bfloat16,
    torch.device("cuda:1"),
    np.float64(0.1),
    np.float32(0.1),
    np.uint64(2**64 - 1),
    np.bool_(True),
    np.complex64(1 + 2j),
    {"set:": [1], "numpy:": ["float32", 1.0]},
]


def same(one, other) -> bool:
    """Equal in value and type all the way down, dicts also in order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.shape == other.shape and one.tobytes() == other.tobytes()
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return one == other


@pytest.mark.parametrize("value", EXACT, ids=repr)
def test_a_value_comes_back_exactly_through_json(value):
    assert same(decode(json.loads(json.dumps(encode(value, "x")))), value)


@pytest.mark.parametrize(
    ("value", "encoded"),
    [
        ({"lr": 0.1, "params": ["a.b"]}, {"lr": 0.1, "params": ["a.b"]}),
        ({3: 1, "a:b": 2, None: 3}, {"int:3": 1, "str:a:b": 2, "NoneType:null": 3}),
        ((1, (2,)), {"tuple:": [1, {"tuple:": [2]}]}),
        (Counter({2: 1}), {"Counter:": {"int:2": 1}}),
        (torch.tensor(0.5), {"tensor:": ["float32", 0.5]}),
    ],
    ids=repr,
)
def test_what_is_json_stays_and_the_rest_is_tagged(value, encoded):
    assert same(encode(value, "x"), encoded)


@pytest.mark.parametrize(
    ("dtype", "number"),
    [
        (torch.float64, 0.1),
        (torch.float32, 1e-3),
        (torch.bfloat16, 0.1),
        (torch.float16, 0.1),
        (torch.float32, float("inf")),
        (torch.int64, -(2**63)),
        (torch.uint8, 255),
        (torch.bool, True),
    ],
    ids=str,
)
def test_a_tensor_of_no_dimensions_comes_back_in_value_and_dtype(dtype, number):
    value = torch.tensor(number, dtype=dtype)
    restored = decode(json.loads(json.dumps(encode([(value,)], "x"))))[0][0]
    assert restored.dtype == dtype
    assert torch.equal(restored, value)


def test_a_decoded_tensor_is_on_the_cpu_whatever_the_default_device_is():
    encoded = encode(torch.tensor(1.0), "x")
    with torch.device("meta"):
        assert decode(encoded).device.type == "cpu"


def test_what_is_encoded_and_decoded_is_a_copy():
    value = {"a": [1]}
    encoded = encode(value, "x")
    value["a"].append(2)
    decode(encoded)["a"].append(3)
    assert encoded == {"a": [1]}


WITH_TENSORS = [
    torch.ones(2, 3),
    {"a": [torch.tensor(0.1), {"b": (torch.zeros(0, dtype=torch.int8),)}], "c": 1},
    {"a.b": torch.ones(1), "a": {"b": torch.zeros(1)}},
    {3: torch.tensor([1j]), "3": torch.tensor([2j])},
    OrderedDict(weight=torch.ones(2, dtype=torch.bfloat16)),
    np.arange(6, dtype=np.uint32).reshape(3, 2)[::-1],
    [np.array(True), np.array([1 + 2j]), np.zeros((0, 2), dtype=np.float16)],
    {"n": None, "a": []},
]


@pytest.mark.parametrize("value", WITH_TENSORS, ids=str)
def test_tensors_are_kept_beside_the_json(value):
    tensors = {}
    encoded = json.loads(json.dumps(encode(value, "x", tensors)))
    restored = decode(encoded, tensors)
    assert same(restored, value)
    assert all(isinstance(tensor, torch.Tensor) for tensor in tensors.values())


def test_tensors_are_named_by_their_place_not_copied_and_decoded_as_copies():
    weight = torch.nn.Parameter(torch.ones(2))
    tensors = {}
    encoded = encode({"layers": [weight, weight]}, "x", tensors)
    assert encoded == {"layers": [{"tensor:": "layers.0"}, {"tensor:": "layers.1"}]}
    assert tensors["layers.0"].data_ptr() == weight.data_ptr()
    assert not tensors["layers.0"].requires_grad
    decode(encoded, tensors)["layers"][0].add_(1)
    assert weight.tolist() == [1, 1]


def test_a_set_is_encoded_in_one_order_whatever_the_hashes_are():
    assert encode({"b", "a", "c"}, "x") == {"set:": ["a", "b", "c"]}


class Color(enum.Enum):
    RED = 1


class Level(enum.IntEnum):
    LOW = 1


NEVER = [
    object(),
    Point(1, 2),
    defaultdict(int),
    {(1, 2): 3},
    Color.RED,
    Level.LOW,
    np.array(["a"]),
    np.array([1], dtype=">i4"),
    np.datetime64(1, "s"),
    np.array([object()]),
]


@pytest.mark.parametrize("value", NEVER, ids=lambda value: type(value).__name__)
def test_what_cannot_be_encoded_even_beside_tensors_is_named_by_its_path(value):
    with pytest.raises(TypeError, match=r"a\.b\.0\.c(\.\(1, 2\))? must be .* got "):
        encode([{"c": value}], "a.b", {})


@pytest.mark.parametrize(
    "value",
    [*NEVER, torch.ones(1), torch.tensor(1j), torch.ones((), device="meta"), np.ones(1)],
    ids=lambda value: type(value).__name__,
)
def test_what_cannot_be_encoded_is_named_by_its_path(value):
    with pytest.raises(TypeError, match=r"a\.b\.0\.c(\.\(1, 2\))? must be"):
        encode([{"c": value}], "a.b")


@pytest.mark.parametrize("value", [{1}, (1,), {1: 2}, 1j, b"x", object()], ids=repr)
def test_what_is_not_json_is_named_by_its_path(value):
    with pytest.raises(TypeError, match=r"a\.b\.0\.c must be a tensor, a TensorDict or JSON"):
        to_json([{"c": value}], "a.b")


def test_a_tensor_inside_json_is_told_where_tensors_go():
    with pytest.raises(TypeError, match=r"a\.0 is a tensor inside a list or dict; put it into a TensorDict"):
        to_json([torch.ones(1)], "a")
