#!/usr/bin/env bash
# Starts one of several replicas that come and go. A replica is a torchrun of its own, here with all its ranks on this machine:
#
#     REPLICA=0 LIGHTHOUSE=machine0:29510 ./replica.sh train.py --option value
#
# The lighthouse, at which they meet, runs on one of the machines: `pipesync lighthouse --port 29510`. A replica of several
# machines: set PIPESYNC_LIGHTHOUSE and PIPESYNC_REPLICA, and start elastic.sh on each of its machines.
set -eu

: "${REPLICA:?set it to the number of this replica, from 0}"
: "${LIGHTHOUSE:?set it to HOST:PORT of pipesync lighthouse, as all machines reach it}"
NPROC_PER_NODE=${NPROC_PER_NODE:-8}      # processes of the replica: the GPUs of this machine
MAX_RESTARTS=${MAX_RESTARTS:-3}          # number of restarts before the replica fails
INTERFACE=${INTERFACE:-}                 # the network to use, as `ip addr` names it: eth0, bond0, ib0

if [ -n "$INTERFACE" ]; then
    export GLOO_SOCKET_IFNAME=$INTERFACE NCCL_SOCKET_IFNAME=$INTERFACE
fi
# Otherwise restarted processes find the addresses of dead ones, and cannot connect.
export TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1
export PIPESYNC_LIGHTHOUSE=$LIGHTHOUSE PIPESYNC_REPLICA=$REPLICA
exec torchrun --standalone --nproc-per-node "$NPROC_PER_NODE" --max-restarts "$MAX_RESTARTS" "$@"
