"""Measures on the GPU at hand what costs/ needs: every GEMM in every (provider, recipe), quantisation apart.

workload    which GEMMs and operands, most valuable first            (no torch)
records     the CSV file: header, appending, resuming                (no torch)
operands    tensors that cost nothing to make
arms        what is run and timed: baseline, kernels, quantisers
timing      CUDA-graph medians, arms interleaved, inputs past the L2
prepare     self-tests and compiling, in parallel processes
runner      puts them together under a time budget
command     ``loka bench``                                           (no torch until it runs)
"""
