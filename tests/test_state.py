"""Resuming is exact: the steps after a restore are those of a run that was never stopped."""

import copy
from collections import Counter

import pytest
import torch
from tensordict import TensorDict
from torch import nn
from torch.optim import LBFGS, SGD, Adafactor, Adam, AdamW, Optimizer, SparseAdam
from torch.optim.lr_scheduler import (
    CosineAnnealingLR,
    LambdaLR,
    LinearLR,
    MultiStepLR,
    OneCycleLR,
    ReduceLROnPlateau,
    SequentialLR,
    StepLR,
)

from veofunc.channel.channels import Channels
from veofunc.checkpoint import async_checkpointer
from veofunc.state import load_train_state, train_state
from veofunc.window import Window


class Tied(nn.Module):
    """Dropout draws, a buffer counts, and one weight has two names."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.head = nn.Linear(6, 6, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x):
        return self.head(self.drop(self.norm(self.embed(x))))


def train(model, optimizer, scheduler, num_steps) -> list[float]:
    losses = []
    for _ in range(num_steps):
        loss = model(torch.randn(4, 6)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if isinstance(scheduler, ReduceLROnPlateau):
            scheduler.step(loss.item())
        else:
            scheduler.step()
        losses.append(loss.item())
    return losses


OPTIMIZERS = {
    "adamw foreach": lambda p: AdamW(p, lr=0.1, foreach=True),
    "adamw fused": lambda p: AdamW(p, lr=0.1, fused=True),
    "adamw tensor lr": lambda p: AdamW(p, lr=torch.tensor(0.1), betas=(torch.tensor(0.8), torch.tensor(0.9))),
    "adamw plain": lambda p: AdamW(p, lr=0.1, foreach=False, betas=(0.8, 0.9)),
    "adam amsgrad": lambda p: Adam(p, lr=0.1, amsgrad=True),
    "sgd momentum": lambda p: SGD(p, lr=0.1, momentum=0.9),
    "sgd": lambda p: SGD(p, lr=0.1),
    "adafactor": lambda p: Adafactor(p, lr=0.1),
}
SCHEDULERS = {
    "lambda": lambda o: LambdaLR(o, lambda step: 0.9**step),
    "step": lambda o: StepLR(o, step_size=2),
    "cosine": lambda o: CosineAnnealingLR(o, T_max=7),
    "multistep": lambda o: MultiStepLR(o, milestones=[2, 4, 4]),
    "onecycle": lambda o: OneCycleLR(o, max_lr=0.2, total_steps=20, cycle_momentum=False),
    "plateau": lambda o: ReduceLROnPlateau(o, patience=0),
    "sequential": lambda o: SequentialLR(o, [LinearLR(o), StepLR(o, 2)], milestones=[4]),
}


def make(optimizer, scheduler):
    model = Tied()
    optimizer = OPTIMIZERS[optimizer](model.parameters())
    return model, optimizer, SCHEDULERS[scheduler](optimizer)


@pytest.mark.parametrize(
    ("optimizer", "scheduler"),
    [(name, "lambda") for name in OPTIMIZERS]
    + [(name, scheduler) for name in ("adamw foreach", "adamw tensor lr") for scheduler in SCHEDULERS],
)
@pytest.mark.parametrize("num_before", [0, 3])
def test_resuming_from_disk_is_bit_equal(optimizer, scheduler, num_before, tmp_path):
    torch.manual_seed(0)
    model, opt, sched = make(optimizer, scheduler)
    train(model, opt, sched, num_before)
    with async_checkpointer(train_state(model, opt), tmp_path) as ckpt:
        ckpt.save(train_state(model, opt, scheduler=sched), num_before)
        expected = train(model, opt, sched, 5)
    other = make(optimizer, scheduler)
    torch.randn(3)
    restored = ckpt.restore(train_state(other[0], other[1], scheduler=other[2]))
    load_train_state(restored, other[0], other[1], scheduler=other[2])
    assert train(*other, 5) == expected
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, other[0].state_dict()[name]), name
    assert other[1].param_groups[0]["lr"] == opt.param_groups[0]["lr"]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_optimizer_state_keeps_the_dtype_in_which_it_was_saved(dtype):
    model = nn.Linear(2, 2).to(torch.bfloat16)
    optimizer = AdamW(model.parameters())
    model(torch.ones(1, 2, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for state in optimizer.state.values():
        state["exp_avg"] = torch.full_like(state["exp_avg"], 1 / 3, dtype=dtype)
    state = train_state(model, optimizer).clone()
    other = nn.Linear(2, 2).to(torch.bfloat16)
    loaded = AdamW(other.parameters())
    load_train_state(state, other, loaded)
    for mine, theirs in zip(loaded.state.values(), optimizer.state.values(), strict=True):
        assert mine["exp_avg"].dtype == dtype
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])
        assert mine["step"].dtype == torch.float32
        assert mine["step"].item() == 1
    assert loaded.param_groups[0]["betas"] == (0.9, 0.999)


def test_parameters_are_found_by_name_in_whatever_order_the_optimizer_has_them():
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    first = SGD([model.weight, model.bias], lr=1.0, momentum=0.9)
    second = SGD([other.bias, other.weight], lr=1.0, momentum=0.9)
    model(torch.ones(1, 2)).square().sum().backward()
    first.step()
    load_train_state(train_state(model, first), other, second)
    for name in ("weight", "bias"):
        expected = first.state[getattr(model, name)]["momentum_buffer"]
        assert torch.equal(second.state[getattr(other, name)]["momentum_buffer"], expected)


def test_the_state_aliases_the_model_and_changes_nothing():
    model = Tied()
    optimizer = AdamW(model.parameters())
    before = copy.deepcopy(model.state_dict())
    rng = torch.get_rng_state()
    state = train_state(model, optimizer)
    assert torch.equal(rng, torch.get_rng_state())
    assert not optimizer.state
    assert list(state["optimizer", "state"].keys()) == []
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert state["model"][name].data_ptr() == tensor.data_ptr()
        assert not state["model"][name].requires_grad


def test_tied_parameters_are_under_each_name_and_only_persistent_buffers_are_there():
    state = train_state(Tied())
    assert {"embed.weight", "head.weight", "norm.running_mean"} < set(state["model"].keys())
    assert "scratch" not in set(state["model"].keys())


def test_loading_aliases_nothing():
    model, other = Tied(), Tied()
    optimizer, second = SGD(model.parameters(), momentum=0.9), SGD(other.parameters(), momentum=0.9)
    model(torch.ones(2, 6)).sum().backward()
    optimizer.step()
    load_train_state(train_state(model, optimizer), other, second)
    mine = {t.data_ptr() for s in optimizer.state.values() for t in s.values()}
    assert mine.isdisjoint(t.data_ptr() for s in second.state.values() for t in s.values())
    assert model.embed.weight.data_ptr() != other.embed.weight.data_ptr()


def test_extras_read_back_as_what_they_were(tmp_path):
    obs = TensorDict({"channel": {"loss_sum": torch.ones(2)}})
    window = Window().add(obs, 3).add(obs, 4)
    extra = {"step": 4, "note": None, "config": {"a": [1, "b"]}, "ema": obs, "seen": torch.ones(())}
    state = train_state(nn.Linear(1, 1), window=window, empty=Window(), **extra)
    with async_checkpointer(train_state(nn.Linear(1, 1)), tmp_path) as ckpt:
        ckpt.save(state, 4)
    restored = ckpt.restore(train_state(nn.Linear(1, 1)))
    assert type(restored["step"]) is int
    assert (restored["step"], restored["note"], restored["config"]) == (4, None, extra["config"])
    assert torch.equal(restored["ema", "channel", "loss_sum"], torch.ones(2))
    again = Window(**restored["window"])
    assert (again.first_step, again.last_step, again.num_steps) == (3, 4, 2)
    assert again.add(obs, 5).obs["channel", "loss_sum"].tolist() == [3, 3]
    assert Window(**restored["empty"]).empty
    assert Window(**restored["empty"]).add(obs, 1).num_steps == 1


def test_channels_come_back_with_the_names_of_when_they_were_saved(tmp_path):
    model = nn.Linear(1, 1)
    channels = Channels(("code",), capacity=3)
    channels.id("prose")
    template = train_state(model, channels=Channels())
    with async_checkpointer(template, tmp_path) as ckpt:
        state = train_state(model, SGD(model.parameters()), channels=channels)
        channels.id("law")
        ckpt.save(state, 1)
    restored = Channels(**ckpt.restore(template)["channels"])
    assert restored == Channels(("code", "prose"), capacity=3)
    assert restored.id("new") == 2
    assert channels.names == ("code", "prose", "law")


def test_rng_is_left_alone_if_it_is_not_asked_for():
    model = nn.Linear(1, 1)
    state = train_state(model, rng=False)
    assert "rng" not in set(state.keys())
    expected = torch.get_rng_state()
    load_train_state(state, model)
    assert torch.equal(torch.get_rng_state(), expected)


def test_a_parameter_that_is_not_in_the_model_is_refused():
    with pytest.raises(ValueError, match=r"has others, of shapes \[\[7\]\]"):
        train_state(nn.Linear(1, 1), SGD([nn.Parameter(torch.ones(7))]))


@pytest.mark.parametrize(
    ("extra", "text"),
    [
        ({"odd": {1, 2}}, "odd must be a tensor"),
        ({"odd": {"a": [torch.ones(1)]}}, r"odd\.a\.0 is a tensor inside a list or dict"),
        ({"odd": nn.Linear(1, 1)}, "odd must be a tensor"),
    ],
)
def test_an_extra_that_cannot_be_saved_is_named(extra, text):
    with pytest.raises(TypeError, match=text):
        train_state(nn.Linear(1, 1), **extra)


def test_a_scheduler_whose_state_cannot_be_saved_is_named():
    model = nn.Linear(1, 1)
    scheduler = StepLR(SGD(model.parameters()), 2)
    scheduler.odd = [object()]
    with pytest.raises(TypeError, match=r"scheduler\.odd\.0 must be"):
        train_state(model, scheduler=scheduler)


def test_extra_state_of_a_module_that_is_no_tensor_is_named():
    class Counting(nn.Linear):
        def get_extra_state(self):
            return {"count": 1}

    with pytest.raises(TypeError, match=r"model\.0\._extra_state must be a tensor"):
        train_state(nn.Sequential(Counting(1, 1)))


def test_every_difference_is_listed_and_nothing_is_changed():
    model = nn.ModuleDict({"a": nn.Linear(2, 2), "b": nn.Linear(2, 2)})
    state = train_state(model, SGD(model["a"].parameters())).clone()
    state["rng", "python"].rename_key_("gauss", "odd")
    other = nn.ModuleDict({"a": nn.Linear(2, 3).double(), "c": nn.Linear(2, 2)})
    optimizer = AdamW([{"params": other["a"].parameters()}, {"params": other["c"].parameters()}])
    before, rng = copy.deepcopy(other.state_dict()), torch.get_rng_state()
    torch.manual_seed(1)
    seeded = torch.get_rng_state()
    with pytest.raises(ValueError, match="nothing was loaded") as caught:
        load_train_state(state, other, optimizer, scheduler=StepLR(optimizer, 2))
    for text in (
        "model.a.weight: must be torch.float64[3, 2], is torch.float32[2, 2]",
        "model.b.weight: unexpected",
        "model.c.bias: missing",
        "optimizer.param_groups: must be 2 groups, is 1",
        "optimizer.param_groups.0: missing option betas",
        "scheduler: missing",
        "rng.python.gauss: missing",
        "rng.python.odd: unexpected",
    ):
        assert text in str(caught.value)
    assert torch.equal(torch.get_rng_state(), seeded)
    assert not torch.equal(rng, seeded)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name])


def stepped(kind, model, **options):
    optimizer = kind(model.parameters(), **options)
    sum(parameter.square().sum() for parameter in model.parameters()).backward()
    optimizer.step()
    return optimizer


BREAKS = {  # what is done to the state of "weight", and what is said
    "another shape": (
        lambda s: s.set("exp_avg", torch.ones(5, 7)),
        r"exp_avg: must be \[2, 2\].*is \[5, 7\]",
    ),
    "another number": (lambda s: s.set("exp_avg", torch.ones(4)), r"exp_avg: must be \[2, 2\].*is \[4\]"),
    "a row of it": (lambda s: s.set("exp_avg", torch.ones(1, 2)), r"exp_avg: must be \[2, 2\].*is \[1, 2\]"),
    "a step with a shape": (lambda s: s.set("step", torch.ones(3)), r"step: must be .* or \[\], is \[3\]"),
    "one missing": (lambda s: s.pop("exp_avg_sq"), r"exp_avg_sq: missing, other parameters have it"),
}


@pytest.mark.parametrize(("change", "text"), BREAKS.values(), ids=BREAKS)
def test_optimizer_state_that_no_step_could_use_is_named_and_nothing_is_changed(change, text):
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    state = train_state(model, stepped(AdamW, model)).clone()
    change(state["optimizer", "state", "weight"])
    second = AdamW(other.parameters())
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(ValueError, match=rf"optimizer\.state\.weight\.{text}"):
        load_train_state(state, other, second)
    assert not second.state
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name])


TORCH_OPTIMIZERS = [
    kind
    for kind in vars(torch.optim).values()
    if isinstance(kind, type) and issubclass(kind, Optimizer) and kind not in (Optimizer, LBFGS, SparseAdam)
]


@pytest.mark.parametrize("kind", TORCH_OPTIMIZERS)
@pytest.mark.parametrize("shape", [(1, 1), (4, 1), (1, 3), (4, 3)], ids=str)
def test_the_state_of_every_optimizer_of_torch_is_loaded(kind, shape):
    def make():
        torch.manual_seed(0)
        parts = [torch.ones(shape), torch.rand(5, 6), torch.rand(4), torch.rand(1), torch.rand(2, 3, 4)]
        parts.append(torch.rand(()))
        return nn.ParameterList(parts[:2] if kind.__name__ == "Muon" else parts)  # it takes matrices only

    model, other = make(), make()
    optimizer, second = stepped(kind, model), kind(other.parameters())
    load_train_state(train_state(model, optimizer), other, second)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert optimizer.state[mine].keys() == second.state[theirs].keys()
        for key, value in optimizer.state[mine].items():
            assert torch.equal(value, second.state[theirs][key])


def test_the_state_of_sparse_adam_and_of_lbfgs_is_loaded():
    embedding, other = (nn.Embedding(3, 2, sparse=True) for _ in range(2))
    optimizer, second = SparseAdam(embedding.parameters()), SparseAdam(other.parameters())
    embedding(torch.tensor([1])).sum().backward()
    optimizer.step()
    load_train_state(train_state(embedding, optimizer), other, second)
    assert second.state[other.weight]["step"] == 1
    model, other = nn.Linear(2, 3), nn.Linear(2, 3)
    optimizer, second = LBFGS(model.parameters(), max_iter=1), LBFGS(other.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    optimizer.step(closure)  # a vector of all nine elements at the first parameter
    load_train_state(train_state(model, optimizer), other, second)
    assert torch.equal(second.state[other.weight]["d"], optimizer.state[model.weight]["d"])


class Sketch(SGD):
    """Keeps for each parameter what it likes."""

    def step(self, closure=None):
        for index, parameter in enumerate(self.param_groups[0]["params"]):
            self.state[parameter] = {f"sketch{i}": torch.ones(7, i + 1) for i in range(index + 1)}


def test_what_the_step_of_another_optimizer_keeps_is_not_judged():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    second = Sketch(other.parameters())
    load_train_state(train_state(model, stepped(Sketch, model)), other, second)
    assert second.state[other.bias].keys() == {"sketch0", "sketch1"}


def test_parameters_without_state_are_left_without():
    model, other = nn.Linear(2, 2), nn.Linear(2, 2)
    model.bias.requires_grad_(False)
    optimizer, second = AdamW(model.parameters()), AdamW(other.parameters())
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    load_train_state(train_state(model, optimizer), other, second)
    assert second.state.keys() == {other.weight}


@pytest.mark.parametrize("section", ["scheduler", "param_groups"])
def test_what_cannot_be_decoded_changes_nothing(section):
    model, other = nn.Linear(1, 1), nn.Linear(1, 1)
    optimizer, second = SGD(model.parameters()), SGD(other.parameters())
    state = train_state(model, optimizer, scheduler=StepLR(optimizer, 2))
    values = state["scheduler"] if section == "scheduler" else state["optimizer", "param_groups"][0]
    values["odd"] = {"tensor:": ["float7", 1]}
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(AttributeError, match="float7"):
        load_train_state(state, other, second, scheduler=StepLR(second, 2))
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, before[name])


def test_missing_sections_and_another_scheduler_are_named():
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters())
    with pytest.raises(ValueError, match="optimizer: missing"):
        load_train_state(train_state(model), model, optimizer)
    for part in ("state", "param_groups"):
        state = train_state(model, optimizer)
        del state["optimizer", part]
        with pytest.raises(ValueError, match=rf"optimizer\.{part}: missing"):
            load_train_state(state, model, optimizer)
    with pytest.raises(ValueError, match=r"model.weight: missing"):
        load_train_state(TensorDict(), model)
    state = train_state(model, optimizer, scheduler=StepLR(optimizer, 2))
    with pytest.raises(ValueError, match=r"scheduler\.T_max: missing[\s\S]*gamma: unexpected"):
        load_train_state(state, model, scheduler=CosineAnnealingLR(optimizer, 3))
    state["optimizer", "param_groups"][0]["params"] = ["weight", "other"]
    with pytest.raises(ValueError, match=r"param_groups.0: missing bias\n.*unexpected other"):
        load_train_state(state, model, optimizer)


def test_names_are_those_of_the_module_inside_torch_compile():
    model = nn.Linear(2, 1)
    compiled = torch.compile(model, backend="eager")
    state = train_state(compiled, torch.optim.SGD(compiled.parameters(), momentum=0.9))
    assert sorted(state["model"].keys()) == ["bias", "weight"]
    other = nn.Linear(2, 1)
    load_train_state(train_state(model), torch.compile(other, backend="eager"))
    assert torch.equal(other.weight, model.weight)


def lr_after(optimizer, scheduler, num_steps) -> list[float]:
    values = []
    for _ in range(num_steps):
        optimizer.step()
        scheduler.step()
        values.append(optimizer.param_groups[0]["lr"])
    return values


def test_a_scheduler_goes_on_with_the_schedule_that_was_saved_whatever_the_new_one_has(tmp_path):
    model = nn.Linear(1, 1)
    optimizer = SGD(model.parameters(), lr=1.0)
    scheduler = MultiStepLR(optimizer, [2, 4])
    with async_checkpointer(train_state(model), tmp_path) as ckpt:
        ckpt.save(train_state(model, optimizer, scheduler=scheduler), 0)
    second = SGD(model.parameters(), lr=1.0)
    other = MultiStepLR(second, [3])
    load_train_state(ckpt.restore(train_state(model)), model, second, scheduler=other)
    assert type(other.milestones) is Counter
    assert other.milestones == Counter({2: 1, 4: 1})
    assert lr_after(second, other, 5) == lr_after(optimizer, scheduler, 5)
    assert second.param_groups[0]["lr"] == pytest.approx(0.01)


def test_options_of_a_group_that_the_new_optimizer_lacks_come_back_as_they_were(tmp_path):
    model = nn.Linear(1, 1)
    options = {"a": {1: "a", "1": "b"}, "b": (1, (2, 3)), "c": Counter({2: 1}), "d:": {"tuple:": [1]}}
    optimizer = SGD([{"params": model.parameters(), **options}])
    with async_checkpointer(train_state(model), tmp_path) as ckpt:
        ckpt.save(train_state(model, optimizer), 0)
    other = SGD(model.parameters())
    load_train_state(ckpt.restore(train_state(model)), model, other)
    (group,) = other.param_groups
    assert {name: group[name] for name in options} == options
    assert type(group["c"]) is Counter


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_tensor_as_option_of_a_group_is_restored_in_value_and_dtype_and_not_aliased(dtype):
    model = nn.Linear(1, 1)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(1e-3, dtype=dtype))
    state = train_state(model, optimizer)
    optimizer.param_groups[0]["lr"].fill_(9)
    for lr in (torch.tensor(7.0), 7.0):
        other = AdamW(model.parameters(), lr=lr)
        load_train_state(state, model, other)
        restored = other.param_groups[0]["lr"]
        assert restored.dtype == dtype
        assert torch.equal(restored, torch.tensor(1e-3, dtype=dtype))


def test_a_tensor_option_goes_to_the_device_that_the_option_of_the_optimizer_has():
    model = nn.Linear(1, 1)
    options = {"one": torch.ones(()), "two": (torch.ones(()), 1, torch.ones(()))}
    state = train_state(model, SGD([{"params": model.parameters(), **options}]))
    far = torch.ones((), device="meta")
    other = SGD([{"params": model.parameters(), "one": far, "two": (far, far)}])
    load_train_state(state, model, other)
    (group,) = other.param_groups
    assert group["one"].device.type == "meta"
    assert [getattr(item, "device", item) for item in group["two"]] == [far.device, 1, torch.device("cpu")]


def test_an_optimizer_whose_state_is_no_tensors_is_named_with_a_way_out():
    model = nn.Linear(2, 1)
    optimizer = LBFGS(model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = model(torch.ones(1, 2)).square().sum()
        loss.backward()
        return loss

    train_state(model, optimizer)
    optimizer.step(closure)
    text = r"state\.weight\.\w+\.0 is a tensor inside a list.*LBFGS .* train_state without it"
    with pytest.raises(TypeError, match=text):
        train_state(model, optimizer)


def test_a_group_option_that_is_a_larger_tensor_is_named():
    model = nn.Linear(1, 1)
    optimizer = SGD([{"params": model.parameters(), "odd": torch.ones(2)}])
    with pytest.raises(TypeError, match=r"param_groups\.0\.odd must be .* got a tensor of shape \[2\]"):
        train_state(model, optimizer)


@pytest.mark.parametrize("optimizer", ["sgd", StepLR(SGD(nn.Linear(1, 1).parameters()), 1)], ids=type)
def test_what_is_no_optimizer_is_refused(optimizer):
    model = nn.Linear(1, 1)
    text = rf"optimizer must be a torch\.optim\.Optimizer, got {type(optimizer).__name__}"
    with pytest.raises(TypeError, match=text):
        train_state(model, optimizer)
    with pytest.raises(TypeError, match=text):
        load_train_state(train_state(model), model, optimizer)


def test_what_is_loaded_in_inference_mode_can_be_trained_on():
    model = nn.Linear(1, 6)
    optimizer = AdamW(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(1, 1)).sum().backward()
    optimizer.step()
    other = nn.Linear(1, 6)
    second = AdamW(other.parameters(), lr=torch.tensor(0.1))
    scheduler = LambdaLR(second, lambda step: 0.5)
    with torch.inference_mode():
        state = train_state(model, optimizer, scheduler=LambdaLR(optimizer, lambda step: 0.5))
        load_train_state(state, other, second, scheduler=scheduler)
    other(torch.ones(1, 1)).sum().backward()
    second.step()
    scheduler.step()
    for values in second.state.values():
        assert not any(value.is_inference() for value in values.values())
