"""The whole release from one command: a plan of work units (plan), run on Dask (cluster), with what it costs
(costs), how far it is (progress), and what comes out of it (release)."""
