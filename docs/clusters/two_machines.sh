#!/bin/sh
# Two machines in one: network namespaces of Linux, joined by a virtual cable. As root:
#     sh docs/clusters/two_machines.sh -m d2lpar.train_ddp --epochs 1
# What is given is started by torchrun, one rank on each. (Activate .venv first.)
set -e
trap 'ip netns pids one | xargs -r kill; ip netns del one; ip netns del two' EXIT
ip netns add one
ip netns add two
ip link add cable netns one type veth peer name cable netns two
for m in one:1 two:2; do
    ip -n "${m%:*}" address add "10.77.0.${m#*:}/24" dev cable
    ip -n "${m%:*}" link set cable up
    ip -n "${m%:*}" link set lo up
done
export GLOO_SOCKET_IFNAME=cable OMP_NUM_THREADS=1
run="python -m torch.distributed.run --nnodes=2 --nproc_per_node=1 --master_addr=10.77.0.1"
ip netns exec one $run --node_rank=0 "$@" &
ip netns exec two $run --node_rank=1 "$@"
wait $!
ip netns exec one ip -s link show cable | tail -4  # the bytes that crossed the cable
