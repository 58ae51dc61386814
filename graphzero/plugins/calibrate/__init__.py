"""``graphzero calibrate``: measured numbers of a machine, its links and compute, for plans and ``config.set_links``."""
