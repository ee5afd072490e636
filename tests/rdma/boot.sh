#!/bin/busybox sh
# The machine's first program: the host's files become its root, what is written on them goes to memory.
/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sys /sys
mount -t devtmpfs dev /dev
for module in /modules/*.ko; do insmod "$module"; done
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=loose,ro root /lower
mount -t tmpfs tmpfs /upper
mkdir /upper/data /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work root /new
for argument in $(cat /proc/cmdline); do
    case "$argument" in
        farspark=*) script="${argument#farspark=}" ;;
        modules=*) modules="${argument#modules=}" ;;
    esac
done
mkdir -p /new/proc /new/sys /new/dev
mount --move /proc /new/proc
mount --move /sys /new/sys
mount --move /dev /new/dev
exec switch_root /new /bin/sh "$script" "$modules"
