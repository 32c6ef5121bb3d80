"""The store: outputs of work units by the hash of what went in (`store`, `remote`), who runs the units (`engine`), and
what all of it is made of: files, their digests, archives of others. Standard library alone, but for a remote store."""

from build_matrix.store.store import DigestCache, Result, Store, WorkUnit

__all__ = ["DigestCache", "Result", "Store", "WorkUnit"]
