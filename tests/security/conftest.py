"""The tests of this folder run a whole queue, door and all."""

import sys
from pathlib import Path

# The doors and their clients are those of the door's own tests.
sys.path.append(str(Path(__file__).parents[1] / "api_stub"))
