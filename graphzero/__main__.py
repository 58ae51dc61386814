"""``python -m graphzero`` and ``torchrun -m graphzero``: the command of ``cli``."""

import sys

from graphzero.cli import main

sys.exit(main())
