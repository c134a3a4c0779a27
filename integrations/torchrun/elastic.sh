#!/usr/bin/env bash
# Starts a training on one of several machines, and restarts all processes if one fails. Run the same on each machine:
#
#     RDZV_ENDPOINT=machine0:29500 RDZV_ID=job7 ./elastic.sh train.py --option value
#
# Without a script it starts examples/more/resumable_digits.py. The script must resume from its last checkpoint, and all
# machines must see the same folder of checkpoints.
set -eu

: "${RDZV_ENDPOINT:?set it to HOST:PORT, where HOST is one of the machines, as all reach it, and PORT is free there}"
: "${RDZV_ID:?set it to a name of this run, the same on all machines}"
NNODES=${NNODES:-2}                      # machines
NPROC_PER_NODE=${NPROC_PER_NODE:-8}      # processes on each: its GPUs
MAX_RESTARTS=${MAX_RESTARTS:-3}          # number of restarts before the run fails
INTERFACE=${INTERFACE:-}                 # the network to use, as `ip addr` names it: eth0, bond0, ib0

if [ -n "$INTERFACE" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
if [ $# -eq 0 ]; then
    set -- "$(dirname "$0")/../../examples/more/resumable_digits.py" --accelerator gpu
fi
# Otherwise restarted processes find the addresses of dead ones, and cannot connect.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
exec torchrun --nnodes "$NNODES" --nproc-per-node "$NPROC_PER_NODE" --max-restarts "$MAX_RESTARTS" \
    --rdzv-backend c10d --rdzv-endpoint "$RDZV_ENDPOINT" --rdzv-id "$RDZV_ID" "$@"
