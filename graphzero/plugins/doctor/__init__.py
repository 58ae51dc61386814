"""``graphzero doctor``: whether ranks on this machine compute and send what a program says."""
