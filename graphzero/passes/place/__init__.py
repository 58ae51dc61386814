"""Where values lie: from pins to an SBP for every value."""
