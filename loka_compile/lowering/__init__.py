"""From a GEMM in the joint graph to a kernel: roles, selection, quantisers, kernel libraries, fusion."""
