"""Parts: the units that are built and what they are laid into. Packs with the gate before them, host library,
bindings, and the tree of a checkout or a wheel, with its ledger and tables."""
