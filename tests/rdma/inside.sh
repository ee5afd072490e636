#!/bin/sh
# Inside the machine: make the RDMA device, run the command, leave its exit code, power off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LANG=C.UTF-8
modules="$1"
mount -t tmpfs tmpfs /tmp
mount -t tmpfs tmpfs /run
mkdir -p /dev/shm /dev/pts /run/results
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000 out /run/results
ulimit -l unlimited
# Where the kernel looks by itself for what a module needs.
mkdir -p /lib/modules
mount --bind "$modules/lib/modules" /lib/modules
for module in rdma_rxe rdma_ucm; do modprobe "$module"; done
ip link set lo up
# Two cards with an address and an RDMA device each. What goes from one address to the other would never leave this machine: the
# rules send it over the wire between the cards, where it can be cut.
for number in 1 2; do
    card="eth$((number - 1))"
    ip link set "$card" up
    ip address add "10.88.0.$number/24" dev "$card"
    for setting in accept_local=1 rp_filter=0 arp_ignore=1 arp_announce=2; do
        echo "${setting#*=}" > "/proc/sys/net/ipv4/conf/$card/${setting%=*}"
    done
    ip rule add pref 10 iif "$card" lookup local
    ip rule add pref 20 from "10.88.0.$number" to "10.88.0.$((3 - number))" lookup "10$number"
    ip route add "10.88.0.$((3 - number))" dev "$card" table "10$number"
    rdma link add "rxe$((number - 1))" type rxe netdev "$card"
done
echo 0 > /proc/sys/net/ipv4/conf/all/rp_filter
ip rule add pref 100 lookup local
ip rule del pref 0
sh /run/results/command
echo $? > /run/results/code
sync
busybox poweroff -f
