"""Updates of whole matrices, as Muon makes them, done for a stack of matrices, of which each rank computes a share."""
