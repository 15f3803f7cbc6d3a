"""The tools import each other by name, as scripts of one folder do."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[3] / "tools"))
