"""The device tier's kernels on a CPU: their own source, compiled by g++ with a shim of the CUDA words they use."""
