"""Routers of every mixture-of-experts family of Hugging Face transformers: found, and counted right."""

import pytest
import torch

import veofunc as vf

pytest.importorskip(
    "transformers", reason="needs Hugging Face transformers: pip install -c constraints.txt -e '.[interop]'"
)
from tests.interop import moe_families as mf
from tests.interop import moe_models as mm
from tests.interop.moe_truth import expert_counts

pytestmark = pytest.mark.filterwarnings("ignore")  # theirs

FEW = ("qwen3_moe", "dbrx", "llama4", "switch_transformers", "jetmoe")  # of five patterns
FAMILIES = [pytest.param(f, marks=[] if f in FEW else pytest.mark.slow) for f in mm.moe_families()]
FEW_DENSE = ("llama", "gpt2", "t5", "big_bird", "vit")
DENSE = [pytest.param(f, marks=[] if f in FEW_DENSE else pytest.mark.slow) for f in mm.DENSE]


def built(family):
    try:
        return mm.moe_model(family)
    except mm.NotBuilt as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("family", FAMILIES)
def test_the_routers_of_the_blocks_are_found_and_no_others(family):
    case = built(family)
    if family in mf.WITHOUT_ROUTER:
        with pytest.raises(mf.Refused, match="no router"):
            mf.check_found(case)
        return
    try:
        mf.check_found(case)
    except mf.Refused:
        if family not in mf.MAY_REFUSE:
            raise


@pytest.mark.parametrize("mode", mf.MODES)
@pytest.mark.parametrize("family", [f for f in FAMILIES if f.values[0] not in mf.WITHOUT_ROUTER])
def test_counts_are_the_tokens_that_each_expert_has_worked_on_once(family, mode):
    case = built(family)
    try:
        mf.check_found(case)
        mf.check_counts(case, mode)
    except mf.CannotTrain as error:
        pytest.skip(f"without us, too: {error}")
    except mf.Refused:
        if family not in mf.MAY_REFUSE:
            raise


@pytest.mark.parametrize("family", DENSE)
def test_a_model_without_experts_has_no_router(family):
    case = mm.dense_model(family)
    with pytest.raises(ValueError, match="no router"):
        vf.find_routers(case.model, **case.inputs)


def test_the_truth_follows_the_router_it_does_not_look_at():
    """Qwen3's own top-k, by hand: so that a truth that is wrong everywhere alike is seen."""
    case = mm.moe_model("qwen3_moe")
    chosen = []
    for name, module in case.model.named_modules():
        if name.endswith("mlp.gate"):
            module.register_forward_hook(lambda module, args, out: chosen.append(out[-1].flatten().tolist()))
    with torch.no_grad():
        case.model(**case.inputs)
    by_hand = [[ids.count(expert) for expert in range(mm.EXPERTS)] for ids in chosen]
    truths = expert_counts(case.model.apply(lambda m: m._forward_hooks.clear()), case.inputs)
    assert [truth.counts for truth in truths] == by_hand
    assert len({tuple(truth.counts) for truth in truths}) == len(truths) > 1
