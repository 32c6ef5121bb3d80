"""What is served: the index and its server, the compatibility table and page, what `compat` and `which` answer."""
