"""Everything to learn about the Triton kernels from eight minutes on one GPU.

`python tests/bench/gpu_day.py --out FILE.json`, or `python -m tests.bench.gpu_day` in the
repository's root where no installed package is called `tests`. Needs torch, Triton and numpy;
neither an installed ExpertMesh nor any other of its packages. `--read FILE.json` prints the table
of an earlier run.
"""

import os
import sys
from types import ModuleType

_HERE = os.path.dirname(os.path.abspath(__file__))
_ROOT = os.path.dirname(os.path.dirname(_HERE))

# As a script, this file's folder comes first on the path, and its neighbours have names of the
# standard library (http, profile).
sys.path[:] = [place for place in sys.path if os.path.abspath(place) != _HERE]
for place in (_ROOT, os.path.join(_ROOT, ".src")):
    if place not in sys.path:
        sys.path.insert(0, place)

# A folder without an __init__.py yields to any package of its name that happens to be installed.
if "tests" not in sys.modules:
    sys.modules["tests"] = ModuleType("tests")
    sys.modules["tests"].__path__ = [os.path.join(_ROOT, "tests")]

from tests.bench.gpu.main import main  # noqa: E402

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
