"""Says in one line what a machine lacks for the first build; silent when all is there.

Written so that an old Python gets as far as saying that it is too old.
"""

import importlib.util
import os
import shutil
import sys
import sysconfig


def lacks():
    """What is missing, in words."""
    missing = []
    if sys.version_info < (3, 10):
        missing.append(f"Python 3.10 or later (this is {sys.version.split()[0]}; name another with PYTHON=...)")
    if not (importlib.util.find_spec("venv") and importlib.util.find_spec("ensurepip")):
        missing.append("Python's venv module (on Debian and Ubuntu: the package python3-venv)")
    if not os.path.exists(os.path.join(sysconfig.get_path("include"), "Python.h")):
        missing.append("Python's headers (on Debian and Ubuntu: the package python3-dev)")
    for variable, names in (("CC", "cc gcc clang"), ("CXX", "c++ g++ clang++")):
        own = os.environ.get(variable, "").split()[:1]
        if not any(shutil.which(name) for name in (own or names.split())):
            missing.append(f"a {'C' if variable == 'CC' else 'C++'} compiler ({' or '.join(own or names.split())})")
    return missing


if __name__ == "__main__":
    found = lacks()
    if found:
        sys.exit("rcache: this machine lacks " + ", and ".join(found))
