"""RDMA without a card: a virtual machine with a Soft-RoCE device, and what runs inside it."""
