"""From SBPs to the program of one rank: boxes, the collectives that they become, and sizes of a rank."""
