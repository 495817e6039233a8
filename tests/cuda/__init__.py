"""The CUDA and NCCL path on machines without a GPU: what is queued where, in which order, and who waits for whom."""
