"""Passes that published systems have, as a user of graphzero writes them: docs/examples_of_passes.md walks them."""
