"""One op in the place of several that compute the same."""
