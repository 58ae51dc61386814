"""Plans of programs whose activations wait on the host."""
