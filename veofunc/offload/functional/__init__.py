"""`offload` under `torch.func`, block by block: `blockwise.py` first, then what it is made of.

`pure.py` runs a block as a function of its inputs, and `watch.py` sees what such a run could get wrong and
refuses it.
"""
