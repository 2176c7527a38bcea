import json
from collections import Counter, OrderedDict, defaultdict, namedtuple

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
]


def same(one, other) -> bool:
    """Equal in value and type all the way down, dicts also in order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return same(list(one.items()), list(other.items()))
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
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


@pytest.mark.parametrize(
    "value",
    [
        {1},
        1j,
        b"x",
        object(),
        torch.ones(1),
        torch.tensor(1j),
        torch.ones((), device="meta"),
        Point(1, 2),
        torch.Size([1]),
        OrderedDict(a=1),
        defaultdict(int),
        {(1, 2): 3},
    ],
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
