"""What is asked for: the matrix, its archs and pins, the registry of extensions, their changelog, and what a checkout
is (`identity`)."""
