"""Activation offload: `offload` first, then what it is made of.

- The public functions: `offload.py`, `plan.py` (with `dry.py`), `policies.py` (with `policy.py`).
- One call: `call.py` decides, `saved.py` has what autograd holds, `ledger.py` counts, `ahead.py` reads ahead,
  `layout.py` knows how tensors lie in memory.
- Recomputation: `tape.py` writes a block down, `recompute.py` replays it.
- Compiled code: `compiled.py`, `regions.py`, `partition.py`.
- `torch.func`: `functional.py`, with `pure.py`, `watch.py` and `levels.py`.
- Stores: `stores.py` says what one is. `host.py` stands on `ferry.py`, `lanes.py`, `arena.py`; `disk.py` on
  `traffic.py`, `buffers.py`, `diskfile.py`; both on `codec.py`, `space.py`, `monitor.py`, `malloc.py`.
"""
