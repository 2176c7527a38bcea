"""Makes the examples importable the way `python examples/train.py` does: as neighbours."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
