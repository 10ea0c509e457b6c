"""GEMMs with their neighbours in one kernel: the operators, their Inductor lowerings, and the passes that emit them."""
