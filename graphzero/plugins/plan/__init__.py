"""``graphzero plan``: what a step costs on ranks that are not there, at each ZeRO stage."""
