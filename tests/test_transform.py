"""What a transform is."""

from __future__ import annotations

import copy
import functools
import inspect
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from tensordict import TensorDict
from torch import nn

import veofunc as vf
from veofunc.transform import (
    Transformed,
    find_model,
    merge_obs,
    module_calls,
    module_hooks,
    observing,
    own_attributes,
    read_obs,
)


def double(x: int, *, scale: int = 2) -> int:
    """Twice x."""
    return x * scale


def strategy(fn, **options):
    return Transformed("strategy", fn, fn, **options)


def observer(fn, name, value=1, **options):
    """An observing transform that writes a constant."""
    call = observing(fn, options.pop("has_aux", False))

    def observed(*args, **kwargs):
        out, obs = call(*args, **kwargs)
        return out, merge_obs(obs, name, TensorDict({"count": torch.tensor(value)}))

    return Transformed("observer", fn, observed, observes=name, **options)


compiled = functools.partial(torch.compile, backend="eager")


class Model(nn.Module):
    """A model's docstring."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)

    def forward(self, x):
        return self.inner(x)


class TestTransformed:
    def test_keeps_name_docstring_and_signature(self):
        fn = strategy(strategy(double))
        assert (fn.__name__, fn.__doc__) == ("double", "Twice x.")
        assert inspect.signature(fn) == inspect.signature(double)
        assert fn(3, scale=5) == 15

    def test_exposes_what_it_wraps(self):
        inner = strategy(double)
        outer = strategy(inner)
        assert outer.__wrapped__ is inner
        assert inner.__wrapped__ is double

    def test_takes_a_module_without_copying_its_state(self):
        model = Model()
        fn = strategy(model)
        assert fn.__wrapped__ is model
        assert (fn.__name__, fn.__doc__) == ("Model", "A model's docstring.")
        assert not hasattr(fn, "_parameters")

    def test_prints_as_what_was_composed(self):
        assert repr(observer(strategy(double), "a")) == "observer(strategy(double))"

    def test_works_as_a_method(self):
        class Trainer:
            factor = 3

            @strategy
            def loss(self, x):
                return self.factor * x

        assert Trainer().loss(2) == 6
        assert isinstance(Trainer.loss, Transformed)

    def test_attributes_stay_reachable_through_the_transforms_around_it(self):
        inner = strategy(double, exposes={"names": lambda: ("a", "b")})
        assert observer(strategy(inner), "x").names == ("a", "b")

    def test_attributes_stay_reachable_through_partial(self):
        inner = strategy(double, exposes={"names": lambda: ("a",)})
        assert strategy(functools.partial(inner, scale=3)).names == ("a",)

    def test_an_unknown_attribute_is_an_error_that_lists_the_known(self):
        fn = strategy(double, exposes={"names": lambda: ()})
        with pytest.raises(AttributeError, match=r"strategy\(double\) has no attribute 'nams'.* offer names"):
            fn.nams  # noqa: B018

    def test_is_not_copied_with_its_model_nor_pickled(self):
        fn = strategy(Model())
        assert copy.copy(fn) is fn
        with pytest.raises(TypeError, match=r"strategy\(Model\) cannot be copied.*transform the copy"):
            copy.deepcopy(fn)
        with pytest.raises(TypeError, match=r"strategy\(Model\) cannot be pickled"):
            pickle.dumps(fn)


class TestObserving:
    def test_observing_over_observing_merges(self):
        out, obs = observer(strategy(observer(double, "a", 1)), "b", 2)(4)
        assert out == 8
        assert obs.to_dict() == {"a": {"count": torch.tensor(1)}, "b": {"count": torch.tensor(2)}}

    @pytest.mark.parametrize("between", [functools.partial, strategy, compiled])
    def test_knows_its_own_through_wrappers(self, between):
        _, obs = observer(between(observer(double, "a")), "b")(4)
        assert sorted(obs.keys()) == ["a", "b"]

    def test_knows_its_own_as_a_method(self):
        class Trainer:
            def loss(self, x):
                return x

            loss = observer(loss, "a")

        _, obs = observer(Trainer().loss, "b")(4)
        assert sorted(obs.keys()) == ["a", "b"]

    @pytest.mark.parametrize("has_aux", [1, None, "no"])
    def test_has_aux_must_be_a_bool(self, has_aux):
        with pytest.raises(TypeError, match="has_aux must be True or False"):
            observer(double, "a", has_aux=has_aux)

    def test_is_not_fooled_by_copied_attributes(self):
        inner = observer(double, "a")

        @functools.wraps(inner)
        def only_out(x):
            return inner(x)[0]

        out, obs = observer(only_out, "a")(4)
        assert out == 8
        assert list(obs.keys()) == ["a"]

    def test_is_not_fooled_by_copied_attributes_of_a_compiled_one(self):
        inner = torch.compile(observer(double, "a"), backend="eager")

        @functools.wraps(inner)
        def only_out(x):
            return inner(x)[0]

        assert observer(only_out, "a")(4)[0] == 8

    def test_one_name_twice_is_an_error_when_the_transform_is_made(self):
        with pytest.raises(ValueError, match=r"obs\['a'\] is written twice"):
            observer(strategy(observer(double, "a")), "a")

    def test_has_aux_takes_the_users_pair(self):
        def pair(x):
            weight = torch.ones(2, requires_grad=True)
            return x, {"mine": weight * 2}

        out, obs = observer(pair, "a", has_aux=True)(1)
        assert out == 1
        assert sorted(obs.keys()) == ["a", "mine"]
        assert not obs["mine"].requires_grad

    def test_has_aux_over_an_observing_transform_says_what_is_known(self):
        _, obs = observer(observer(double, "a"), "b", has_aux=True)(4)
        assert sorted(obs.keys()) == ["a", "b"]

    def test_a_name_of_the_users_aux_that_clashes_is_an_error(self):
        with pytest.raises(ValueError, match=r"obs\['a'\] is written twice"):
            observer(lambda x: (x, {"a": torch.ones(1)}), "a", has_aux=True)(1)

    @pytest.mark.parametrize("returned", [3, (1, 2, 3), [1, {}]])
    def test_has_aux_without_a_pair_is_an_error(self, returned):
        with pytest.raises(TypeError, match=r"has_aux=True says that .* returns \(out, aux\)"):
            observer(lambda x: returned, "a", has_aux=True)(1)

    def test_aux_that_cannot_be_merged_is_an_error(self):
        with pytest.raises(TypeError, match=r"aux of .* must be a TensorDict or a mapping.* got Tensor"):
            observer(lambda x: (x, torch.ones(1)), "a", has_aux=True)(1)

    def test_fn_must_be_callable(self):
        with pytest.raises(TypeError, match=r"fn must be callable .*, got int"):
            observer(3, "a")


class TestReadObs:
    def test_gives_the_sums_of_one_transform_or_none_of_an_empty_window(self):
        sums = TensorDict({"count": torch.tensor(1)})
        assert read_obs(TensorDict({"a": sums}), "a", "observer")["count"] == 1
        assert read_obs(vf.Window().obs, "a", "observer") is None

    def test_sums_of_others_only_are_an_error(self):
        with pytest.raises(
            ValueError, match=r"obs has no 'a', only \['b'\]: wrap the function with observer"
        ):
            read_obs({"b": 1}, "a", "observer")

    @pytest.mark.parametrize("obs", [None, vf.Window(), (1, 2)])
    def test_what_is_no_obs_is_an_error(self, obs):
        with pytest.raises(TypeError, match=r"obs must be a TensorDict of sums \(of a window: window.obs\)"):
            vf.channel_metrics(obs, ("a",))


class TestFindModel:
    def test_through_every_wrapper(self):
        model = Model()

        @functools.wraps(model.forward)
        def wrapped(x):
            return model(x)

        for fn in (
            model,
            strategy(model),
            functools.partial(model),
            functools.partial(strategy(strategy(model))),
            model.forward,
            wrapped,
            compiled(model),
            strategy(compiled(strategy(model))),
            nn.DataParallel(model),
        ):
            assert find_model(fn) is model, fn

    def test_a_plain_function_has_none(self):
        assert find_model(double) is None
        assert find_model(strategy(double)) is None

    def test_a_transform_passes_on_the_model_it_was_given(self):
        model = Model()
        assert find_model(strategy(strategy(double, model=model))) is model

    def test_the_given_one_wins(self):
        model = Model()
        assert find_model(Model(), model) is model

    def test_model_must_be_a_module(self):
        with pytest.raises(TypeError, match=r"model must be a torch.nn.Module, got dict"):
            find_model(double, {})


class TestModuleHooks:
    @staticmethod
    def hooks(model):
        return sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())

    def test_run_around_the_forward(self):
        model, seen = Model(), []
        with module_hooks(
            model.modules(),
            before=lambda module, args, kwargs: seen.append(("before", type(module).__name__)),
            after=lambda module, out: seen.append(("after", type(module).__name__, tuple(out.shape))),
        ):
            model(torch.ones(1, 2))
        assert seen == [
            ("before", "Model"),
            ("before", "Linear"),
            ("after", "Linear", (1, 2)),
            ("after", "Model", (1, 2)),
        ]

    def test_another_thread_may_meet_a_hook_before_it_is_known_to_take_keywords(self):
        """PyTorch notes that only after it has added the hook, and calls it without them in between."""
        model, seen = nn.Linear(2, 2), []
        with module_hooks([model], before=lambda *args: seen.append(args)):
            (hook,) = model._forward_pre_hooks.values()
            with ThreadPoolExecutor(1) as pool:
                pool.submit(hook, model, (torch.ones(2),)).result()
        assert seen == []

    def test_are_gone_afterwards(self):
        model = Model()
        with module_hooks(model.modules(), after=lambda module, out: None):
            assert self.hooks(model) == 2
        assert self.hooks(model) == 0
        with pytest.raises(ZeroDivisionError), module_hooks(model.modules(), after=lambda module, out: 1 / 0):
            model(torch.ones(1, 2))
        assert self.hooks(model) == 0

    def test_leave_the_users_hooks_alone(self):
        model, mine = Model(), []
        model.inner.register_forward_hook(lambda *args: mine.append(1))
        with module_hooks(model.modules(), after=lambda module, out: None):
            model(torch.ones(1, 2))
        model(torch.ones(1, 2))
        assert mine == [1, 1]

    def test_are_gone_if_registering_one_fails(self):
        model = Model()
        with pytest.raises(AttributeError), module_hooks([model, "no module"], after=lambda *args: None):
            pass
        assert self.hooks(model) == 0

    def test_do_not_act_in_other_threads(self):
        model, seen = Model(), []
        with module_hooks(model.modules(), after=lambda module, out: seen.append(module)):
            other = threading.Thread(target=model, args=(torch.ones(1, 2),))
            other.start()
            other.join()
        assert seen == []

    def test_do_not_act_while_the_engine_recomputes(self):
        model, seen = Model(), []
        with module_hooks(model.modules(), after=lambda module, out: seen.append(module)):
            x = torch.ones(1, 2, requires_grad=True)
            torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).sum().backward()
        assert len(seen) == 2

    def test_are_given_the_module_asked_for_where_a_copy_runs(self):
        model, seen = Model(), []
        with module_hooks(
            model.modules(),
            before=lambda module, *_: seen.append(module),
            after=lambda module, out: seen.append(module),
        ):
            twin = object.__new__(nn.Linear)
            twin.__dict__.update(model.inner.__dict__)
            twin(torch.ones(1, 2))
        assert [module is model.inner for module in seen] == [True, True]


class TestModuleCalls:
    @staticmethod
    def add(number):
        return lambda module, forward, args, kwargs: forward(*args, **kwargs) + number

    def test_stand_in_for_the_forward_with_its_arguments(self):
        model, seen = Model(), []

        def around(module, forward, args, kwargs):
            seen.append((module, args, kwargs))
            return forward(*args, **kwargs) * 0

        x = torch.ones(1, 2)
        with module_calls([model.inner], around):
            assert (model(x) == 0).all()
            assert (model.inner.forward(input=x) == 0).all()
            assert inspect.signature(model.inner.forward) == inspect.signature(nn.Linear(2, 2).forward)
        assert seen[0][1][0] is x
        assert seen == [(model.inner, (x,), {}), (model.inner, (), {"input": x})]

    def test_are_gone_afterwards(self):
        model, x = Model(), torch.ones(1, 2)
        with module_calls(model.modules(), self.add(1)):
            assert "forward" in model.__dict__
        with pytest.raises(ZeroDivisionError), module_calls(model.modules(), lambda *args: 1 / 0):
            model(x)
        with pytest.raises(AttributeError), module_calls([model, "no module"], self.add(1)):
            pass
        assert all("forward" not in module.__dict__ for module in model.modules())

    def test_put_back_the_modules_own_attribute(self):
        model, x = Model(), torch.ones(1, 2)
        model.inner.forward = lambda x: x * 2
        own = model.inner.forward
        with module_calls([model.inner], self.add(1)):
            assert torch.equal(model(x), x * 3)
            assert own_attributes(model.inner)["forward"] is own
        assert model.inner.__dict__["forward"] is own

    def test_nest_with_the_innermost_first(self):
        model, x, order = Model(), torch.ones(1, 2), []

        def named(name):
            def around(module, forward, args, kwargs):
                order.append(name)
                return forward(*args, **kwargs)

            return around

        with module_calls([model], named("outer")):
            with module_calls([model], named("inner")):
                model(x)
            model(x)
        assert order == ["inner", "outer", "outer"]
        assert "forward" not in model.__dict__

    def test_do_not_act_in_other_threads_and_outlast_theirs(self):
        model, x = Model(), torch.ones(1, 2)
        began, ended = threading.Event(), threading.Event()
        expected = model(x)

        def other():
            with module_calls([model], self.add(5)):
                began.set()
                assert ended.wait(30)
                assert torch.equal(model(x), expected + 5)

        thread = threading.Thread(target=other)
        thread.start()
        assert began.wait(30)
        assert torch.equal(model(x), expected)
        with module_calls([model], self.add(1)):
            assert torch.equal(model(x), expected + 1)
        ended.set()
        thread.join()
        assert "forward" not in model.__dict__

    def test_own_attributes_are_those_without_them(self):
        model = Model()
        before = dict(model.__dict__)
        with module_calls([model], self.add(1)):
            assert own_attributes(model) == before
        assert own_attributes(model) == before
        assert own_attributes(model) is not model.__dict__
