"""Activation offload: `offload` first, then what it is made of.

- The public functions: `offload.py`, `plan.py` (with `dry.py`), `policies.py` (with `policy.py`).
- One call: `call.py` decides, `saved.py` has what autograd holds, `ledger.py` counts, `ahead.py` reads ahead,
  `layout.py` knows how tensors lie in memory.
- Recomputation: `tape.py` writes a block down, `recompute.py` replays it.
- `stores/`: host and disk. `compiled/`: inside `torch.compile`. `functional/`: under `torch.func`.
"""
