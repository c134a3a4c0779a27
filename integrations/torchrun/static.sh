#!/usr/bin/env bash
# Starts a training on one of several machines. Run it on each of them, with the number of the machine:
#
#     NODE_RANK=0 MASTER_ADDR=machine0 ./static.sh train.py --option value      on machine0
#     NODE_RANK=1 MASTER_ADDR=machine0 ./static.sh train.py --option value      on machine1
#
# Without a script it starts examples/more/resumable_digits.py. If a process fails, all end; elastic.sh restarts them.
set -eu

: "${NODE_RANK:?set it to the number of this machine, from 0 to NNODES - 1}"
: "${MASTER_ADDR:?set it to the name or address of machine 0, as all machines reach it}"
MASTER_PORT=${MASTER_PORT:-29500}        # free on machine 0, and open to the others
NNODES=${NNODES:-2}                      # machines
NPROC_PER_NODE=${NPROC_PER_NODE:-8}      # processes on each: its GPUs
INTERFACE=${INTERFACE:-}                 # the network to use, as `ip addr` names it: eth0, bond0, ib0

if [ -n "$INTERFACE" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
if [ $# -eq 0 ]; then
    set -- "$(dirname "$0")/../../examples/more/resumable_digits.py" --accelerator gpu
fi
exec torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" --node-rank "$NODE_RANK" \
    --master-addr "$MASTER_ADDR" --master-port "$MASTER_PORT" "$@"
