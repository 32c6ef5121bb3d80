#!/bin/sh
# Two processes; without WORLD_SIZE, one for each GPU.
WORLD_SIZE=${WORLD_SIZE:-2} exec python -m apex.parallel.multiproc "$(dirname "$0")/distributed_data_parallel.py" "$@"
