"""Loss per data source: `with_channel_loss` in `loss.py` first, then what it is made of.

- One call: `arguments.py` reads its batch, `tokens.py` knows the four routes to its token losses,
  `intercept.py` sees them inside of `F.cross_entropy`.
- `linear.py`: the loss that never holds all logits. `packing.py`, `channels.py`: ids, and names for them.
- `metrics.py` and `plot.py`: what to log.
"""
