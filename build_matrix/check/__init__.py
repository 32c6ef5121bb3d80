"""What is checked: lint, tests in rings and tiers with their receipts, what a release must pass, and whether a wheel is
what the sources make."""
